"""The fault menu: every entry can be asked for, says what it needs, and expects something that can fail."""

import pytest
from fakes.told import Told

from muster.app.drill import drill
from muster.chaos import catalog
from muster.chaos.catalog import MENU
from muster.chaos.network import Network
from muster.cli.main import run
from muster.config.spec import RunSpec
from muster.core.errors import UsageError
from muster.core.incidents import KINDS
from muster.core.types import Action, JobRequest, TaskSpec


def spec_of(**resources):
    return RunSpec.model_validate(
        {"name": "d", "model": {"config": {}}, "data": {"sources": [{"type": "random"}]}, "resources": resources}
    )


@pytest.mark.parametrize("fault", MENU.values(), ids=list(MENU))
def test_an_entry_speaks_the_words_of_incidents_and_actions(fault):
    assert set(fault.noticed) <= set(KINDS.names())
    assert {action for way in fault.done for action in way} <= {action.value for action in Action}
    assert fault.done, "some way must be the right one"
    assert fault.text and fault.text[0] != " "


#: Of the reference list: what the menu must be able to do to a run of one's own.
WANTED = {*range(1, 13), *range(14, 20), *range(22, 25), 28, *range(31, 34), *range(37, 42), 44}


def test_the_menu_covers_the_list():
    found = {number for fault in MENU.values() for number in fault.numbers}
    assert found >= WANTED, f"no entry for {sorted(WANTED - found)}"
    assert found <= set(range(1, 46))


def test_an_entry_that_ends_the_run_says_how_and_one_that_goes_on_says_what_heals_it():
    for fault in MENU.values():
        stops = {way[-1:] == ("stop",) for way in fault.done}
        assert len(stops) == 1, f"{fault.name} cannot both stop and go on"
        if stops == {True}:
            assert fault.exit_code is not None and not fault.recover


def test_a_fault_asks_only_for_what_the_file_lacks():
    fault = MENU["host-kill"]
    assert fault.overrides(spec_of()) == ["resources.hosts=2", "resources.spare_hosts=1"]
    assert fault.overrides(spec_of(hosts=3, spare_hosts=1)) == []
    assert MENU["rank-kill"].overrides(spec_of(hosts=2, spare_hosts=1)) == ["resources.spare_hosts=0"]
    assert "resources.min_hosts=1" in MENU["host-kill-no-spare"].overrides(spec_of(hosts=2))
    assert "checkpoint.every_steps=5" in MENU["checkpoint-corrupt"].overrides(spec_of())
    assert "recovery.step_timeout_s=10" in MENU["rank-gil"].overrides(spec_of())
    assert "recovery.heartbeat_timeout_s=2.5" in MENU["link-flap"].overrides(spec_of())


def test_a_wrong_name_gets_a_near_one():
    with pytest.raises(UsageError) as caught:
        catalog.find("rank-kil")
    assert "rank-kill" in caught.value.hint


def test_a_network_that_can_be_broken_leaves_nothing_behind(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 0)
    shell = Told()
    network = Network(names=["host-0", "host-1"], shell=shell, tag="t", subnet="10.78.1")
    network.up()
    made = {line.split()[3] for line in shell.said if line.startswith("ip netns add")}
    network.cut("host-1")
    assert shell.said[-1] == "ip link set tv1 down"
    network.split(["host-1"])
    network.join(["host-1"])
    network.down()
    assert made == {line.split()[3] for line in shell.said if line.startswith("ip netns del")} == {"t0", "t1"}
    assert shell.said.count("ip link del tb2") == 2 and "ip link del tbr" in shell.said


def test_each_host_of_the_job_gets_its_namespace():
    agent = TaskSpec(name="agent", argv=("python", "--host", "host-{index}"), count=2)
    job = JobRequest(run_id="r", backend="local", run_dir="/r", tasks=(TaskSpec(name="supervisor", argv=("s",)), agent))
    placed = Network(names=["host-0", "host-1"], shell=Told(), tag="t", subnet="10.78.1").place(job)
    assert placed.tasks[0].env == {"MUSTER_BIND": "10.78.1.1"}
    inside = ("nsenter", "--net=/run/netns/t1", "python", "--host", "host-1", "--bind", "10.78.1.12")
    assert placed.tasks[2].argv == inside and placed.tasks[2].count == 1
    assert len({task.name for task in placed.tasks}) == 3


def test_without_root_or_iproute2_it_says_so(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(UsageError, match="root"):
        Network(names=["host-0"], shell=Told()).up()
    monkeypatch.setattr("os.geteuid", lambda: 0)
    with pytest.raises(UsageError, match="not permitted"):
        Network(names=["host-0"], shell=Told(fails=["netns add"])).up()


def test_a_fault_of_the_loop_is_refused_where_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    (tmp_path / "script.py").write_text("")
    (tmp_path / "run.yaml").write_text(f"name: own\ncommand: [{tmp_path}/script.py]\nresources: {{device: cpu}}\n")
    with pytest.raises(UsageError, match="inside Muster's training loop"):
        drill(str(tmp_path / "run.yaml"), fault="rank-gil")
    assert not (tmp_path / "home").exists(), "nothing was started"


def test_the_command_lists_and_refuses(capsys):
    assert run(["drill", "--list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in MENU)
    assert run(["drill", "--fault", "rank-kill"]) == 2
    assert run(["drill", "nowhere.yaml", "--fault", "meteor"]) == 2
    assert "meteor" in capsys.readouterr().err


def test_a_second_ctrl_c_leaves_nothing_of_the_drills_run_behind(monkeypatch):
    import os
    import signal
    from types import SimpleNamespace

    from muster.app import drill as module

    told, ended = [], []

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    def down(run_id):
        os.kill(os.getpid(), signal.SIGINT)  # and a third one
        ended.append(run_id)

    monkeypatch.setattr(module.stop, "stop", interrupted)
    monkeypatch.setattr(module.stop, "down", down)
    before = signal.getsignal(signal.SIGINT)
    module._end(SimpleNamespace(run=SimpleNamespace(run_id="d-1")), told.append)
    assert ended == ["d-1"] and "ending its processes" in told
    assert signal.getsignal(signal.SIGINT) is before


def test_what_ends_a_rank_at_any_moment_may_take_a_step_along():
    """One that dies before its snapshot counts does (recovery.md, "The step that is redone"): no failed drill.

    The others fail in a step that is not applied.
    """
    exact = {name for name, fault in MENU.items() if fault.redone == 0 and any(fault.done)}
    assert exact == {"exception-always", "not-finite-always"}
