"""What a host's steps use: real processes and this machine's own /proc, a machine of files, a played nvidia-smi."""

import os
import subprocess
import sys
import time

import pytest
from fakes.host import VirtualHost, spec_of

from muster.agent.evidence.assemble import counters
from muster.agent.hardware.usage import ASK_GPUS, EVERY_S, TOOL, used
from muster.agent.values.actions import ReadCounters, StopProgram
from muster.agent.values.events import CountersRead, HardwareListed, ProgramEnded, ProgramLine, SupervisorMessage
from muster.core import processes
from muster.core.event_details.hosts import HostUsage
from muster.protocol.to_agent import EndAttempt

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
def machine(tmp_path):
    return Machine(tmp_path)


class Host(VirtualHost):
    """Its ranks step at moments far enough apart."""

    def __init__(self, machine, *, gpus=(), hosts=1):
        super().__init__(spec=spec_of(resources={"device": "cpu", "ranks_per_host": 1, "hosts": hosts}))
        self.give(HardwareListed({address: n for n, address in enumerate(gpus)}, None, False, True))
        self.answers[ReadCounters] = lambda action: [
            CountersRead(
                action.step, action.attempt, counters(action.pids, proc=machine.proc, ports=machine.ports),
                processes.host_memory(machine.proc / "meminfo"),
            )
        ]  # fmt: skip

    def at(self, *steps, attempt=1, after_s=2 * EVERY_S):
        """Ranks are in these steps."""
        self.state.ranks.table.clear()
        for number, step in enumerate(steps):
            self.rank(7 + number, number, attempt, peer=7 + number, step=step)
        self.tick(after_s)

    @property
    def told(self):
        return [
            action.event for action in self.done if hasattr(action, "event") and action.event.kind == HostUsage.kind
        ]


def test_the_steps_between_two_moments_have_what_was_used_between_them(machine):
    host = Host(machine)
    for step in (1, 2, 3, 6):
        for pid in (7, 8):
            machine.set(
                busy=100 + 30 * step, idle=100 + 10 * step, into=1000 * step, out=500 * step, words=step,
                pid=pid, ticks=50 * step,
            )  # fmt: skip
        host.at(step, {1: -1, 6: 3}.get(step, step - 1))  # the other one is still in the step before: none has ended
        host.at(step, step)
    assert [(one.step, one.attempt, one.rank) for one in host.told] == [(2, 1, None), (5, 1, None)]
    first, second = (HostUsage.of(one.detail) for one in host.told)
    assert (first.steps, second.steps) == (1, 3)
    seconds = 2 * 2 * 50 / os.sysconf("SC_CLK_TCK")  # user and system, of two ranks
    assert (first.cpu_ns, second.cpu_ns) == (int(seconds * 1e9), int(3 * seconds * 1e9))
    assert first.busy == second.busy == 0.75
    assert (first.received_bytes, first.sent_bytes) == (1000 + 4, 500 + 8), "ports count words of four bytes"
    assert (first.memory_bytes, first.memory_total_bytes) == (600 * 1024, 1000 * 1024)
    assert first.interval_ns > 0 and first.gpu_busy == ()


def test_a_new_attempt_begins_anew_and_nothing_is_told_while_no_step_ends(machine):
    host = Host(machine)
    for attempt, step in ((1, 1), (1, 2), (2, 1), (2, 1), (2, 2)):
        host.at(step, attempt=attempt)
    assert host.told == [], "each attempt's first end of a step is where counting begins"
    host.at(3, attempt=2)
    assert [(one.attempt, one.step, one.detail["steps"]) for one in host.told] == [(2, 2, 1)]
    host.at()
    assert len(host.told) == 1


def test_it_is_told_once_an_interval_and_of_many_hosts_more_rarely(machine):
    host = Host(machine, hosts=10_000)
    for step in range(1, 50):
        host.at(step)
    assert host.told == [], "a thousand seconds have not gone by"


def test_what_cannot_be_read_is_left_out(machine, tmp_path):
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


def test_gpus_are_asked_by_one_tool_which_leaves_before_they_are_reset(machine):
    host = Host(machine, gpus=("0000:19:00.0", "0000:3b:00.0"))
    host.at(1)
    host.at(2)  # the tool starts
    (program,) = host.started(TOOL)
    assert program.argv == (TOOL, *ASK_GPUS)
    for line in (
        b"00000000:3B:00.0, 50, 2", b"00000000:19:00.0, 100, 1", b"00000000:3B:00.0, 100, 3",
        b"00000000:19:00.0, [N/A], [N/A]", b"Unable to determine the device handle for GPU0000:9B:00.0: Unknown Error",
    ):  # fmt: skip
        host.give(ProgramLine(TOOL, line))
    host.at(3)
    detail = HostUsage.of(host.told[-1].detail)
    assert detail.gpu_busy == (1.0, 0.75) and detail.gpu_memory_bytes == (1 << 20, 3 << 20)
    host.give(SupervisorMessage(EndAttempt(attempt=0, why="i", reset=(0,))))
    assert StopProgram(TOOL, leave=True) in host.done
    host.at(4)
    assert HostUsage.of(host.told[-1].detail).gpu_busy == () and len(host.started(TOOL)) == 1, "once an attempt"


def test_no_driver_no_tool(machine):
    host = Host(machine)
    for step in (1, 2, 3):
        host.at(step)
    assert len(host.told) == 1 and not host.started(TOOL)


def test_a_tool_that_ends_is_not_started_again_in_its_attempt(machine):
    host = Host(machine, gpus=("0000:19:00.0",))
    for step in range(1, 6):
        host.at(step)
        host.give(ProgramEnded(TOOL, 9))
    assert len(host.started(TOOL)) == 1 and len(host.told) == 3
