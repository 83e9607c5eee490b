"""A rank whose processor is slower than the others': a quota of its control group, of which no code of the run knows.

Root, and a cpu controller (cgroup v1). All ranks are before other programs of the machine (cpu.shares): a rank that
gets no processor for seconds because of them is slow, and would rightly be named. What that does not keep from them is
the processors' caches and clock (or a hypervisor's share), which makes one rank slower by more than a tenth.
"""

import contextlib
import os
import time
from pathlib import Path

from cluster import LiveRun, spec_of

CPU = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 20_000
#: Steps that a healthy run takes before it is judged, and within which a slow rank is named.
HEALTHY_STEPS, WITHIN = 45, 30


def usable():
    return os.access(CPU / "cpu.cfs_quota_us", os.W_OK)


#: Of all processors: what other programs may take. They are given some time to end.
OTHERS, PATIENCE_S = 0.25, 60.0


def busy_s(pids=()):
    """Processor time of the machine so far, without that of ``pids``."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    found = sum(ticks) - ticks[3] - ticks[4]  # idle, waiting for a disk
    for pid in pids:
        with contextlib.suppress(OSError):
            found -= sum(int(word) for word in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13])
    return found / os.sysconf("SC_CLK_TCK")


def beside(pids=()):
    """A function: the share of the processors that others than ``pids`` have taken since now."""
    begin, begin_s = busy_s(pids), time.monotonic()
    return lambda: (busy_s(pids) - begin) / (time.monotonic() - begin_s) / os.cpu_count()


def quiet():
    """Wait until other programs take ``OTHERS`` at most, ``PATIENCE_S`` long; what they took last."""
    end = time.monotonic() + PATIENCE_S
    while True:
        share = beside()
        time.sleep(2)
        if (taken := share()) <= OTHERS or time.monotonic() > end:
            return taken


@contextlib.contextmanager
def alone(run):
    """Each rank in a control group of its own, which other programs take hardly any time from: rank -> its folder."""
    with contextlib.ExitStack() as stack:
        yield {rank: stack.enter_context(group_of(pid)) for rank, (pid, _) in run.ranks().items()}


@contextlib.contextmanager
def group_of(pid):
    group = CPU / f"muster-rank-{os.getpid()}-{pid}"
    group.mkdir()
    try:
        (group / "cpu.shares").write_text(str(1024 * 64))
        (group / "cgroup.procs").write_text(str(pid))
        yield group
    finally:
        for left in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):  # it has ended
                (CPU / "cgroup.procs").write_text(left)
        group.rmdir()


def limit(group, share):
    """All threads of the group together get ``share`` of one processor."""
    (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
    (group / "cpu.cfs_quota_us").write_text(str(int(PERIOD_US * share)))


def run_of(place):
    """Two hosts of one rank, whose step takes a tenth of a second or so."""
    of = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
    changes = {f"model.config.{name}": size for name, size in of.items()}
    sizes = {"training.steps": 100_000, "training.sequence_length": 256, "training.global_batch_size": 4}
    return LiveRun(place, spec_of(**changes, **sizes, **{"resources.hosts": 2, "resources.ranks_per_host": 1}))


def named(run):
    return run.events("straggler.named")


def told(run):
    return [(event.rank, event.host, event.step, dict(event.detail)) for event in named(run)]


def budget_error(run):
    """How much of rank 0's steps the parts leave unexplained, as a share."""
    steps = [event.detail for event in run.events("step") if "comm_ns" in event.detail][5:]
    parts = ("compute_ns", "comm_ns", "data_wait_ns", "host_gap_ns", "stall_ns")
    whole = sum(detail["step_ns"] for detail in steps)
    return abs(whole - sum(detail[part] for detail in steps for part in parts)) / whole


def slowed(run, groups, share, *, within):
    """The second rank has ``share`` of a processor from here on; the steps until it is named."""
    limit(groups[1], share)
    begin = run.step()
    found = (1, run.ranks()[1][1], "host")
    run.wait_until(lambda: found in blamed(run) or run.step() > begin + within + 1, "a name", 180)
    assert found in blamed(run), f"not within {within} steps: {told(run)}\n{run.story()}"
    return blamed(run)[found] - begin


def blamed(run):
    """(rank, host, cause) -> step."""
    return {(event.rank, event.host, event.detail["cause"]): event.step for event in named(run)}
