"""One digit in the header of a snapshot ring, then a killed rank: never other weights."""

import os
import signal
import time

import pytest
from chaos import Judged
from cluster import spec_of
from frozen import own_ring

from muster.checkpoint_format.snapshot_ring import Ring

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]


def test_a_moved_tensor_is_not_restored(tmp_path, reference):
    """``byte_offset`` of the last tensor becomes that of the first: the bytes are whole, under another name.

    The final state is that of a run without faults.
    """
    with Judged(tmp_path, spec_of(**{"checkpoint.every_steps": 4, "recovery.heartbeat_timeout_s": 30.0})) as run:
        run.start()
        run.wait_for_step(8)
        pids = [pid for pid, _ in run.ranks().values()]
        run.kill_rank(0, signal.SIGSTOP)  # its peer comes to wait for it
        time.sleep(0.3)
        run.kill_rank(1, signal.SIGSTOP)
        ring = Ring.open(own_ring(run, 1), writable=True)
        first, last = ring.shard_header().tensors[0], ring.shard_header().tensors[-1]
        old = b",%d]" % last.byte_offset
        at = ring.mapped.find(old)
        ring.mapped[at : at + len(old)] = b",%*d]" % (len(old) - 2, first.byte_offset)
        assert Ring.open(ring.path).header != ring.header
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        run.ended()
        assert run.events("snapshot.rejected"), run.story()
        assert run.final_hash() == reference(1, 2)[0]
