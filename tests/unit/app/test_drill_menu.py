"""The fault menu: every entry can be asked for, says what it needs, and expects something that can fail."""

import pytest

from muster.app import faults
from muster.app.faults import MENU
from muster.cli.main import run
from muster.core.errors import UsageError
from muster.core.nouns import Action, IncidentKind
from muster.core.spec import RunSpec


def spec_of(**resources):
    return RunSpec.model_validate(
        {"name": "d", "model": {"config": {}}, "data": {"sources": [{"type": "random"}]}, "resources": resources}
    )


@pytest.mark.parametrize("fault", MENU.values(), ids=list(MENU))
def test_an_entry_speaks_the_words_of_incidents_and_actions(fault):
    assert set(fault.noticed) <= {kind.value for kind in IncidentKind}
    assert {action for way in fault.done for action in way} <= {action.value for action in Action}
    assert fault.done, "some way must be the right one"
    assert fault.what and fault.what[0] != " "


def test_a_fault_asks_only_for_what_the_file_lacks():
    fault = MENU["host-kill"]
    assert fault.overrides(spec_of()) == ["resources.hosts=2", "resources.spare_hosts=1"]
    assert fault.overrides(spec_of(hosts=3, spare_hosts=1)) == []
    assert MENU["rank-kill"].overrides(spec_of(hosts=2, spare_hosts=1)) == ["resources.spare_hosts=0"]
    assert "resources.min_hosts=1" in MENU["host-kill-no-spare"].overrides(spec_of(hosts=2))
    assert "checkpoint.every_steps=5" in MENU["checkpoint-rot"].overrides(spec_of())


def test_a_wrong_name_gets_a_near_one():
    with pytest.raises(UsageError) as caught:
        faults.find("rank-kil")
    assert "rank-kill" in caught.value.hint


def test_the_command_lists_and_refuses(capsys):
    assert run(["drill", "--list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in MENU)
    assert run(["drill", "--fault", "rank-kill"]) == 2
    assert run(["drill", "nowhere.yaml", "--fault", "meteor"]) == 2
    assert "meteor" in capsys.readouterr().err
