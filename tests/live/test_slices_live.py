"""The world shrinks and grows: ranks fetch from other hosts' memory what they need of the state, verified."""

import signal
import time

import pytest
from cluster import LiveRun, spec_of

from muster.checkpoint_format.snapshot_ring import Ring, file_name

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]

KEY = "r1s3t1p1c1e1"
#: 17 MB of state: a third of each large tensor is several blocks.
WORLD = {
    "resources.hosts": 3,
    "resources.min_hosts": 2,
    "resources.ranks_per_host": 1,
    "model.config.hidden_size": 256,
    "model.config.intermediate_size": 512,
    "training.global_batch_size": 6,
    "training.sequence_length": 16,
    "training.steps": 2000,
    "checkpoint.every_steps": 5,
    "recovery.heartbeat_timeout_s": 30.0,
}


def test_slices_of_a_lost_hosts_state_are_verified_and_a_joining_host_fetches_its_own(tmp_path):
    """host-1 is lost; the copies of its state in host-2's memory have changed where host-0 needs them: the checkpoint
    is taken. Then host-1 comes back, and fetches a third of the state from the others' memory."""
    with LiveRun(tmp_path, spec_of(**WORLD)) as run:
        run.start()
        run.wait_until(lambda: run.events("checkpoint.committed"), "a checkpoint on the disk")
        for rank in (0, 1, 2):
            run.kill_rank(rank, signal.SIGSTOP)
        time.sleep(2.0)  # copies under way arrive
        held = Ring.open(run.memory("host-2") / file_name("peer", KEY, 1), writable=True)
        shard, first, rotten = held.slot_bytes, held.shard_header().tensors[0], held.versions()
        for version in rotten:
            held.slot(version.slot)[first.byte_offset + 1000] ^= 0x10
        run.signal_host("host-1")
        run.wait_until(lambda: len(restored(run, tier="disk")) == 2, "the two that remain, from the disk", 90)
        starts = [event.detail.get("resume_step") for event in run.events("attempt.started")]
        assert starts[1] == rotten[0].step, run.story()
        assert f"step {rotten[0].step} of attempt 1 of rank 1 does not match its checksum" in run.story()
        assert run.recoveries()[0] == "shrink", run.story()
        run.start_agent("host-1")
        run.wait_until(lambda: any(event.host == "host-1" for event in restored(run)), "the growth", 90)
        (joined,) = [event for event in restored(run) if event.host == "host-1"]
        print(f"host-1 fetched {joined.detail}, a shard of three has {shard}")
        assert joined.detail["tier"] != "disk" and run.recoveries()[-1] == "grow", run.story()
        # Both others hold half of the state: whole shards would be three times its third. Blocks are rounded up.
        assert 0.9 * shard < joined.detail["fetched_bytes"] < 2 * shard, run.story()


def restored(run, tier=None):
    return [event for event in run.events("checkpoint.restored") if tier in (None, event.detail["tier"])]
