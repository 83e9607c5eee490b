"""With replicas (``dp_replicate``) a loss in one of them leaves the processes of the others alone."""

import json
import os
import signal

import pytest
from chaos import Judged, References
from cluster import LiveRun, spec_of

from muster.report.audit.invariants import broken, check

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return References(tmp_path_factory)


def replicated(replicas, **changes):
    return {"parallelism.dp_replicate": replicas, "training.steps": 100, **changes}


def pids_of(run, ranks):
    """For each rank, the processes that ever ran it, in order of the attempts."""
    return {rank: [event.detail["pid"] for event in run.events("rank.started") if event.rank == rank] for rank in ranks}


def kept(run):
    return [event.detail.get("kept", []) for event in run.events("attempt.started")]


def inject(run, fault, rank):
    """Have a rank inject a fault into itself, at its next step."""
    (run.dir / "inject_fault.tmp").write_text(json.dumps({"fault": fault, "rank": rank}))
    os.replace(run.dir / "inject_fault.tmp", run.dir / "inject_fault.json")
    done = run.dir / f"inject_fault.{fault}.done"
    run.wait_until(lambda: done.exists() and done.read_text(), fault)
    return int(done.read_text())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_lost_rank_leaves_the_other_replica_alone(tmp_path, reference, number):
    """A stopped peer's collectives never raise: the survivor is freed by its own agent.

    The limit of silence is the usual one. A shorter one would also be the hosts', and a test of how fast a busy
    machine lets a keeper beat.
    """
    with Judged(tmp_path, spec_of(**replicated(2))) as run:
        run.start()
        run.wait_for_step(10)
        run.kill_rank(1, number)
        run.ended()
        assert run.recoveries() == ["restart"] and kept(run) == [[], [0]], run.story()
        found = pids_of(run, (0, 1))
        assert len(set(found[0])) == 1 and len(set(found[1])) == 2, "rank 0 kept its process, rank 1 has a new one"
        assert [event.detail["redone_steps"] <= 1 for event in run.events("incident.resolved")] == [True], run.story()
        assert (run.final_hash(), run.losses()) == reference(1, 2, **replicated(2))[:2]


def test_either_replica_can_be_the_one_that_is_lost_again_and_again(tmp_path, reference):
    with Judged(tmp_path, spec_of(**replicated(2))) as run:
        run.start()
        for blow, (step, rank) in enumerate(((8, 0), (25, 1), (45, 0), (65, 0))):
            run.wait_for_step(step)
            run.wait_until(lambda blow=blow: len(run.events("incident.resolved")) == blow, "recovery")
            run.kill_rank(rank)
        run.ended()
        assert kept(run) == [[], [1], [0], [1], [1]], run.story()
        assert (run.final_hash(), run.losses()) == reference(1, 2, **replicated(2))[:2]


def test_sharded_replicas_are_kept_whole(tmp_path, reference):
    """2 x 2: a rank's own replica shares its sharded groups and is replaced, the other one continues."""
    changes = replicated(2, **{"resources.hosts": 2, "resources.spare_hosts": 1, "training.steps": 80})
    with Judged(tmp_path, spec_of(**changes)) as run:
        run.start()
        run.wait_for_spare()
        run.wait_for_step(8)
        run.kill_rank(3)
        run.wait_until(lambda: len(run.events("incident.resolved")) == 1, "recovery")
        run.wait_for_step(run.step() + 10)
        run.signal_host(run.ranks()[0][1])
        run.ended()
        assert run.recoveries() == ["restart", "swap"] and kept(run) == [[], [0, 1], [2, 3]], run.story()
        changes.pop("resources.spare_hosts")
        assert run.final_hash() == reference(2, 2, **{k: v for k, v in changes.items() if k != "resources.hosts"})[0]


def test_ranks_in_the_middle_of_a_long_step_keep_their_processes(tmp_path, monkeypatch):
    """2 x 2, steps of 5 s: the living replica needs longer to pause than ranks with short steps are given."""
    monkeypatch.setenv("MUSTER_DRILL", "1")
    changes = replicated(2, **{"resources.ranks_per_host": 4, "training.steps": 40})
    with Judged(tmp_path, spec_of(**changes)) as run:
        run.start()
        run.wait_for_step(3)
        slow = inject(run, "slow", 0)
        run.wait_for_step(slow)  # so long is known to be what a step takes; the next one has begun
        run.kill_rank(3)
        run.ended()
        assert kept(run) == [[], [0, 1]], run.story()
        found = pids_of(run, range(4))
        assert [len(set(found[rank])) for rank in range(4)] == [1, 1, 2, 2], run.story()
        assert run.step() == 40 and all(event.detail["redone_steps"] <= 1 for event in run.events("incident.resolved"))


def test_a_bit_that_flips_in_one_replica_is_told(tmp_path, monkeypatch):
    """Nothing fails, the loss keeps falling: the two replicas have diverged."""
    monkeypatch.setenv("MUSTER_DRILL", "1")
    changes = replicated(2, **{"training.steps": 80, "training.state_hash_every_steps": 1})
    with LiveRun(tmp_path, spec_of(**changes)) as run:
        run.start()
        run.wait_for_step(5)
        flipped = inject(run, "flip", 1)
        assert run.wait() == 0, run.story()
        steps = {event.step: event.detail for event in run.events("step")}
        apart = [step for step, detail in steps.items() if "replica_hashes" in detail]
        assert flipped > 5 and apart == list(range(flipped, 81)), run.story()
        assert len(set(steps[flipped]["replica_hashes"])) == 2
        (note,) = [event for event in run.events("run.message") if "replica_hashes" in event.detail]
        assert note.step == flipped and "the replicas do not hold one state" in note.detail["text"]
        (problem,) = broken(check(run.dir))
        assert problem.startswith(f"I1: attempt 1: after step {flipped} ") and "replicas hold two states" in problem


def test_without_a_spare_the_living_replica_goes_on_alone_and_is_joined_again(tmp_path, reference):
    exact = {"training.exact": True, "parallelism.dp_replicate": 2, "parallelism.dp_shard": 1, "training.steps": 250}
    changes = {"resources.hosts": 2, "resources.min_hosts": 1, "resources.ranks_per_host": 1, **exact}
    with Judged(tmp_path, spec_of(**changes)) as run:
        run.start()
        run.wait_for_step(10)
        run.signal_host("host-0")
        run.wait_until(lambda: len(run.events("incident.resolved")) == 1, "recovery")
        run.start_agent("host-0")
        run.ended()
        assert run.recoveries() == ["shrink", "grow"], run.story()
        assert [event.detail["world_size"] for event in run.events("attempt.started")] == [2, 1, 2]
        living = {event.detail["pid"] for event in run.events("rank.started") if event.host == "host-1"}
        assert len(living) == 1, run.story()
        whole = {"training.exact": True, "training.steps": 250}
        assert (run.final_hash(), run.losses()) == reference(1, 2, **whole)[:2], "as two ranks of one replica"
