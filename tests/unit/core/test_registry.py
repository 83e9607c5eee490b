"""Families: what ships, what another package adds by an entry point, and what is not there."""

import pytest

from muster.core.errors import UsageError
from muster.core.registry import Registry

SHIPPED = {"ordered": "collections:OrderedDict", "broken": "collections:Nothing"}


def family() -> Registry[type]:
    return Registry(family="mapping", group="muster.test_mappings", shipped=SHIPPED)


def test_a_shipped_member_is_imported_when_it_is_asked_for():
    assert family().get("ordered").__name__ == "OrderedDict"


def test_another_package_adds_a_member_by_an_entry_point(tmp_path, monkeypatch):
    added = tmp_path / "extra-1.0.dist-info"
    added.mkdir()
    (added / "METADATA").write_text("Metadata-Version: 2.1\nName: extra\nVersion: 1.0\n")
    (added / "entry_points.txt").write_text("[muster.test_mappings]\ncounter = collections:Counter\n")
    monkeypatch.syspath_prepend(tmp_path)
    table = family()
    assert table.names() == ["ordered", "broken", "counter"]
    assert table.get("counter").__name__ == "Counter"


@pytest.mark.parametrize(("name", "says"), [("missing", "no mapping 'missing'"), ("broken", "cannot be loaded")])
def test_what_is_not_there_is_said_with_what_is(name, says):
    with pytest.raises(UsageError, match=says):
        family().get(name)
