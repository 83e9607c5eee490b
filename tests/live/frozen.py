"""A run whose ranks all stand still, for tests that damage what they hold."""

import signal
import time

import psutil

from muster.checkpoint_format.snapshot_ring import Ring, file_name


def freeze(run):
    """Stop both ranks of a run on one host when they hold the same two versions; rank 1's ring.

    Which versions they hold is a race, and one to restore needs all ranks: rank 0 may stop before it has copied a step
    (about one time in ten), rank 1 while it copies. Then they go on, and are stopped again.
    """
    for _ in range(40):
        step = run.step()
        run.kill_rank(0, signal.SIGSTOP)
        time.sleep(0.2)  # its peer comes to wait for it
        run.kill_rank(1, signal.SIGSTOP)
        run.wait_until(lambda: all(stopped(pid) for pid, _ in run.ranks().values()), "both ranks stopped")
        other, ring = (Ring.open(path, writable=True) for path in (own_ring(run, rank) for rank in (0, 1)))
        held = ring.versions()
        if len(held) == 2 and all(other.find(version.step, version.attempt) for version in held):
            return ring
        for rank in (1, 0):
            run.kill_rank(rank, signal.SIGCONT)
        run.wait_for_step(step + 1)
    raise AssertionError(f"never the same two versions: {run.story()}")


def own_ring(run, rank):
    return run.memory() / file_name("own", "r1s2t1p1c1e1", rank)


def stopped(pid):
    """A signal is sent before it is obeyed."""
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED
