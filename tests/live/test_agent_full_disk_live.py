"""An agent is killed while the disk of the run's folder is full, and then a rank: nobody waits for ever, with room or
without."""

import os

import pytest
from cluster import LiveRun, spec_of

from muster.protocol.client import AskStatus

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

CHANGES = {"training.steps": 200, "resources.hosts": 2, "resources.ranks_per_host": 1}


def agents(run):
    """Host -> pid of its agent as it recorded itself while there was room."""
    return {event.host: event.detail["pid"] for event in run.events("agent.started")}


def test_an_agent_and_a_rank_are_lost_while_the_disk_is_full(disk, reference):
    with LiveRun(disk.folder / "run", spec_of(**CHANGES, **{"checkpoint.every_steps": 5})) as run:
        run.start()
        run.wait_until(lambda: run.events("checkpoint.committed"), "a checkpoint")
        ranks = run.ranks()
        while not disk.fill():
            pass
        os.kill(agents(run)["host-0"], 9)
        os.kill(ranks[1][0], 9)
        run.wait_until(lambda: disk.fill() and run.tell(AskStatus()).attempt >= 2, "another attempt")
        begun = run.tell(AskStatus()).step
        run.wait_until(lambda: run.tell(AskStatus()).step > begun, "a step of it, without any room")
        disk.free()
        assert run.wait() == 0, run.story()
        assert run.final_hash() == reference(2, 1, **CHANGES)[0]
