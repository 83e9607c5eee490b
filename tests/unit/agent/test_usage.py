"""What a host's steps use: real processes and this machine's own /proc, a machine of files, a played nvidia-smi."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from muster.agent.hardware import usage
from muster.agent.hardware.usage import UsageMeter, counters, used
from muster.core.event_details.hosts import HostUsage
from muster.transport.connections import ConnectionPool

DEV = """Inter-|   Receive                                                |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
    lo: 9999999 1 0 0 0 0 0 0 9999999 1 0 0 0 0 0 0
  eth0:{into} 10 0 0 0 0 0 0 {out} 10 0 0 0 0 0 0
  eth1: 1000 10 0 0 0 0 0 0 2000 10 0 0 0 0 0 0
"""


class Machine:
    """Files as the kernel has them, with counters that a test moves."""

    def __init__(self, folder):
        self.proc, self.ports, self.gpus = folder / "proc", folder / "infiniband", folder / "gpus"
        (self.proc / "net").mkdir(parents=True)
        (self.proc / "meminfo").write_text("MemTotal:  1000 kB\nMemFree: 100 kB\nMemAvailable:  400 kB\n")
        self.set()

    def set(self, *, busy=100, idle=100, into=0, out=0, words=None, pid=None, ticks=0):
        (self.proc / "stat").write_text(f"cpu  {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
        (self.proc / "net" / "dev").write_text(DEV.format(into=into, out=out))
        if words is not None:
            port = self.ports / "mlx5_0" / "ports" / "1" / "counters"
            port.mkdir(parents=True, exist_ok=True)
            (port / "port_rcv_data").write_text(f"{words}\n")
            (port / "port_xmit_data").write_text(f"{2 * words}\n")
        if pid is not None:
            (self.proc / str(pid)).mkdir(exist_ok=True)
            rest = " ".join(["S", "1", *["0"] * 9, str(ticks), str(ticks), *["0"] * 30])
            (self.proc / str(pid) / "stat").write_text(f"{pid} (python (x)) {rest}\n")


@pytest.fixture
def hub():
    found = ConnectionPool(token=b"t" * 32, on_gone=lambda *_: None)
    yield found
    found.shutdown()


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def worker(pid=7, *, step=-1, attempt=1):
    return SimpleNamespace(pid=pid, step=step, attempt=attempt)


def meter(hub, machine, workers, **more):
    told = []
    found = UsageMeter(
        hub=hub, living=lambda: workers, tell=told.append, hosts=lambda: 0, environ={}, every_s=0.0,
        proc=machine.proc, ports=machine.ports, gpus=machine.gpus, **more,
    )  # fmt: skip
    return found, told


def test_the_steps_between_two_moments_have_what_was_used_between_them(hub, machine):
    ranks = [worker(7), worker(8)]
    found, told = meter(hub, machine, ranks)
    for step in (1, 2, 3, 6):
        machine.set(busy=100 + 30 * step, idle=100 + 10 * step, into=1000 * step, out=500 * step, words=step)
        for pid in (7, 8):
            machine.set(
                busy=100 + 30 * step, idle=100 + 10 * step, into=1000 * step, out=500 * step, words=step,
                pid=pid, ticks=50 * step,
            )  # fmt: skip
        ranks[0].step = step
        found.watch()  # the other one is still in the step before: none has ended
        ranks[1].step = step
        found.watch()
    assert [(one.step, one.attempt, one.rank) for one in told] == [(2, 1, None), (5, 1, None)]
    first, second = (HostUsage.of(one.detail) for one in told)
    assert (first.steps, second.steps) == (1, 3)
    seconds = 2 * 2 * 50 / os.sysconf("SC_CLK_TCK")  # user and system, of two ranks
    assert (first.cpu_ns, second.cpu_ns) == (int(seconds * 1e9), int(3 * seconds * 1e9))
    assert first.busy == second.busy == 0.75
    assert (first.received_bytes, first.sent_bytes) == (1000 + 4, 500 + 8), "ports count words of four bytes"
    assert (first.memory_bytes, first.memory_total_bytes) == (600 * 1024, 1000 * 1024)
    assert first.interval_ns > 0 and first.gpu_busy == ()


def test_a_new_attempt_begins_anew_and_nothing_is_told_while_no_step_ends(hub, machine):
    ranks = [worker()]
    found, told = meter(hub, machine, ranks)
    for attempt, step in ((1, 1), (1, 2), (2, 1), (2, 1), (2, 2)):
        ranks[:] = [worker(step=step, attempt=attempt)]
        found.watch()
    assert told == [], "each attempt's first end of a step is where counting begins"
    ranks[:] = [worker(step=3, attempt=2)]
    found.watch()
    assert [(one.attempt, one.step, one.detail["steps"]) for one in told] == [(2, 2, 1)]
    ranks.clear()
    found.watch()
    assert len(told) == 1


def test_it_is_told_once_an_interval_and_of_many_hosts_more_rarely(hub, machine):
    ranks = [worker(step=1)]
    told = []
    found = UsageMeter(
        hub=hub, living=lambda: ranks, tell=told.append, hosts=lambda: 10_000, environ={}, every_s=0.0,
        proc=machine.proc, ports=machine.ports, gpus=machine.gpus,
    )  # fmt: skip
    for step in range(1, 50):
        ranks[0].step = step
        found.watch()
    assert told == [], "a thousand seconds have not gone by"


def test_what_cannot_be_read_is_left_out(hub, machine, tmp_path):
    nowhere = tmp_path / "nowhere"
    before = counters([7], proc=nowhere, ports=nowhere)
    detail = used(3, before, 5, counters([7], proc=nowhere, ports=nowhere))
    assert detail.keys() == {"steps", "interval_ns", "cpu_ns"} and detail["steps"] == 2
    machine.set(into=5000)
    before = counters([7], proc=machine.proc, ports=nowhere)
    machine.set(into=10)
    assert "received_bytes" not in used(3, before, 5, counters([7], proc=machine.proc, ports=nowhere))


def test_this_machine_answers_and_a_busy_child_is_seen():
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        before, end = counters([busy.pid]), time.monotonic() + 30
        detail = {"cpu_ns": 0}
        while detail["cpu_ns"] < 50_000_000 and time.monotonic() < end:
            time.sleep(0.05)
            detail = used(0, before, 1, counters([busy.pid]))
    finally:
        busy.kill()
        busy.wait()
    assert 50_000_000 <= detail["cpu_ns"] <= detail["interval_ns"] * 1.5
    assert 0 < detail["busy"] <= 1
    assert detail["received_bytes"] >= 0


SMI = """#!{python}
import sys, time
assert sys.argv[1:] == {arguments!r}, sys.argv
open({log!r}, "a").write("started\\n")
for line in {lines!r}:
    print(line, flush=True)
time.sleep(600)
"""


def played(tmp_path, monkeypatch, lines):
    tool, log = tmp_path / "nvidia-smi", tmp_path / "log"
    tool.write_text(SMI.format(python=sys.executable, arguments=list(usage.ASK_GPUS), log=str(log), lines=lines))
    tool.chmod(0o755)
    monkeypatch.setattr(usage, "program", lambda name: str(tool) if name == "nvidia-smi" else None)
    return log


def until(hub, happened):
    end = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < end
        hub.run_once(0.05)


def test_gpus_are_asked_by_one_tool_which_leaves_before_they_are_reset(hub, machine, tmp_path, monkeypatch):
    for address in ("0000:19:00.0", "0000:3b:00.0"):
        (machine.gpus / address).mkdir(parents=True)
    log = played(tmp_path, monkeypatch, [
        "00000000:3B:00.0, 50, 2", "00000000:19:00.0, 100, 1", "00000000:3B:00.0, 100, 3",
        "00000000:19:00.0, [N/A], [N/A]", "Unable to determine the device handle for GPU0000:9B:00.0: Unknown Error",
    ])  # fmt: skip
    ranks = [worker(step=1)]
    found, told = meter(hub, machine, ranks)
    found.watch()
    ranks[0].step = 2
    found.watch()  # the tool starts
    tool = found._tool
    until(hub, lambda: len(tool.busy.get("0000:3b:00.0", ())) == 2)
    ranks[0].step = 3
    found.watch()
    detail = HostUsage.of(told[-1].detail)
    assert detail.gpu_busy == (1.0, 0.75) and detail.gpu_memory_bytes == (1 << 20, 3 << 20)
    found.release()
    until(hub, lambda: tool.child.returncode is not None)
    ranks[0].step = 4
    found.watch()
    assert HostUsage.of(told[-1].detail).gpu_busy == ()
    assert log.read_text() == "started\n", "once an attempt"


def test_no_driver_no_tool(hub, machine, monkeypatch):
    monkeypatch.setattr(usage, "program", lambda name: pytest.fail("nothing is looked for"))
    ranks = [worker(step=1)]
    found, told = meter(hub, machine, ranks)
    for step in (1, 2, 3):
        ranks[0].step = step
        found.watch()
    assert len(told) == 1


def test_a_tool_that_ends_is_not_started_again_in_its_attempt(hub, machine, tmp_path, monkeypatch):
    (machine.gpus / "0000:19:00.0").mkdir(parents=True)
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho x >> {tmp_path}/log\nexit 9\n")
    tool.chmod(0o755)
    monkeypatch.setattr(usage, "program", lambda name: str(tool))
    ranks = [worker(step=1)]
    found, told = meter(hub, machine, ranks)
    for step in range(1, 6):
        ranks[0].step = step
        found.watch()
        if found._tool is not None:
            until(hub, lambda: found._tool is None)
    assert (tmp_path / "log").read_text() == "x\n" and len(told) == 3
