"""The folder in memory is deleted under a run, as a desktop's logout does, and then a rank dies: the run goes on."""

import shutil

import pytest
from cluster import LiveRun, spec_of

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

STEPS = {"training.steps": 100}


def resumed(run):
    """(step, tier) that each attempt but the first one started from."""
    return [
        (event.detail["resume_step"], event.detail.get("tier", "none"))
        for event in run.events("attempt.started")
        if event.attempt > 1
    ]


def lose_memory(run, host="host-0"):
    shutil.rmtree(run.memory(host))


def test_one_host_goes_on_from_the_disk_and_later_from_memory_again(tmp_path, reference):
    with LiveRun(tmp_path, spec_of(**STEPS, **{"checkpoint.every_steps": 5})) as run:
        run.start()
        run.wait_until(lambda: run.events("checkpoint.committed"), "a checkpoint")
        lose_memory(run)
        run.kill_rank(1)  # before there is a new snapshot, or just after
        run.wait_until(lambda: run.events("incident.resolved"), "recovery")
        assert len(run.events("memory.lost")) == 1, run.story()
        lose_memory(run)
        run.wait_until(lambda: len(run.events("memory.lost")) == 2, "the loss")
        # The rank makes its ring once the folder is there; some steps are at hand by then.
        before = run.step()
        run.wait_until(lambda: any(e.step > before and "snapshot_step" in e.detail for e in run.events("step")), "one")
        run.kill_rank(0)
        assert run.wait() == 0, run.story()
        assert run.recoveries() == ["restart"] * 2, run.story()
        assert resumed(run)[1][1] == "memory" and resumed(run)[1][0] >= before, run.story()
        assert (run.final_hash(), run.losses()) == reference(1, 2, **STEPS)[:2]


def test_of_two_hosts_the_other_one_holds_the_copies(tmp_path, reference):
    spec = spec_of(**STEPS, **{"resources.hosts": 2, "resources.ranks_per_host": 1})
    with LiveRun(tmp_path, spec) as run:
        run.start()
        run.wait_until(lambda: any("peer_step" in event.detail for event in run.events("step")), "copies")
        lose_memory(run)
        run.kill_rank(0)
        run.wait_until(lambda: run.events("incident.resolved"), "recovery")
        copied = run.step()
        run.wait_until(lambda: any(e.detail.get("peer_step", 0) > copied for e in run.events("step")), "new copies")
        run.kill_rank(1)
        assert run.wait() == 0, run.story()
        assert run.recoveries() == ["restart"] * 2, run.story()
        assert [tier for _, tier in resumed(run)] == ["memory", "memory"], run.story()
        assert (run.final_hash(), run.losses()) == reference(2, 1, **STEPS)[:2]


def test_a_deleted_agent_socket_keeps_no_standby_away(tmp_path, reference):
    with LiveRun(tmp_path, spec_of(**STEPS)) as run:
        run.start()
        run.wait_for_step(10)
        for blow in range(3):  # there is one standby for each rank: the later blows need new ones
            (run.memory() / "agent.sock").unlink()
            run.kill_rank(blow % 2)
            run.wait_until(lambda blow=blow: len(run.events("incident.resolved")) > blow, "recovery", 40)
        assert run.wait() == 0, run.story()
        assert run.recoveries() == ["restart"] * 3, run.story()
        assert run.final_hash() == reference(1, 2, **STEPS)[0]
