"""The kernel log: records as /dev/kmsg gives them, one a read, and what their errors mean for the host."""

import os
import shutil
import socket
import subprocess
import time

import pytest
from fakes.host import VirtualHost, spec_of

from muster.agent.hardware import kernel_lines
from muster.agent.hardware.kernel_lines import DMESG, FOLLOW
from muster.agent.hardware.kernel_log import KernelLog, list_hardware
from muster.agent.values import kernel_faults
from muster.agent.values.actions import OpenKernelLog
from muster.agent.values.events import (
    HardwareListed,
    KernelLine,
    KernelLogLost,
    ProgramEnded,
    ProgramLine,
)
from muster.health.hardware.own_gpus import own_gpus
from muster.health.verdicts import Verdict
from muster.protocol.to_supervisor import HostFault, StartFailed
from muster.transport.connections import ConnectionPool

GPUS = ("0000:19:00.0", "0000:3b:00.0", "0000:9b:00.0")


class Host(VirtualHost):
    """A host with these GPUs whose kernel log is read."""

    def __init__(self, *, gpus=GPUS, check=None, environ=None, ranks=1, own=None, all_pids=True):
        spec = spec_of(check=check or {}, resources={"device": "cuda", "ranks_per_host": ranks})
        super().__init__(spec=spec, environ=environ)
        self.supervised()
        numbers = {address: number for number, address in enumerate(gpus)}
        self.give(HardwareListed(numbers, own, False, all_pids))
        self.second = 0

    def say(self, message, *, second=100.0, prefix=4):
        self.second += 1
        self.give(KernelLine(f"{prefix},{1000 + self.second},{int(second * 1e6)},-;{message}"))

    @property
    def faults(self):
        return self.of(HostFault)

    @property
    def standing(self):
        return self.state.hardware.faults.standing

    def since(self, rank, since_s):
        return kernel_lines.findings_since(self.state, rank, since_s)


@pytest.fixture
def host():
    return Host()


def test_a_fault_is_told_with_the_gpus_that_a_reset_may_repair(host):
    host.say("usb 1-1: new device")
    host.say("NVRM: Xid (PCI:0000:3b:00): 119, pid=7, name=python, Timeout after 6s of waiting for RPC response")
    (fault,) = host.faults
    assert isinstance(fault, HostFault) and (fault.verdict, fault.resettable) == ("reset", (1,))
    assert "Xid 119 on GPU 1 (0000:3b:00.0)" in fault.evidence


def test_a_burst_is_told_once_and_again_only_when_it_gets_graver(host):
    for number in ("48, DBE", "45, Ch 1", "45, Ch 2", "63, Row"):
        host.say(f"NVRM: Xid (PCI:0000:19:00): {number}")
    host.say("NVRM: Xid (PCI:0000:9b:00): 64, remapping failed")
    assert [fault.verdict for fault in host.faults] == ["reset", "replace"] and host.faults[1].resettable == ()
    host.say("NVRM: Xid (PCI:0000:9b:00): 64, again", second=110.0)
    host.say("NVRM: Xid (PCI:0000:9b:00): 13, of a later burst", second=900.0)
    assert len(host.faults) == 2


def test_an_error_of_memory_before_any_step_names_none(host):
    host.say("NVRM: Xid (PCI:0000:19:00): 48, DBE")
    assert host.faults[0].sound_step is None


def test_what_a_program_writes_into_the_log_is_no_evidence(host):
    """User facility: the level has 8 added. Anybody with the right to write there could cost a host."""
    host.say("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", prefix=12)
    host.say("NVRM: Xid (PCI:0000:3b:00): 92, high rate")
    assert not host.faults and len(host.notes) == 1 and "Xid 92" in host.notes[0]


def test_nvlink_through_the_switch_needs_all_gpus_reset(host):
    host.say("nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 20034, Fatal, Link 48 LTSSM Fault Up")
    assert (host.faults[0].verdict, host.faults[0].resettable) == ("reset", (0, 1, 2))


def test_the_options_of_dmesg_exist():
    if shutil.which("dmesg") is None:
        pytest.skip("no dmesg here")

    shown = subprocess.run(["dmesg", "--help"], capture_output=True, text=True, check=False).stdout
    if "--follow-new" not in shown:
        pytest.skip("this dmesg is older than util-linux 2.37")
    assert all(option in shown for option in ("--kernel", "--nopager", "--color"))


def informed(tmp_path, *, models=("H100",)):
    """The driver's files for ``GPUS``; its minor numbers are in another order."""
    for number, address in enumerate(GPUS):
        model = models[number % len(models)]
        text = f"Model: \t\t {model}\nGPU UUID: \t GPU-{number}aa-bb\nDevice Minor: \t {2 - number}\n"
        (tmp_path / "gpus" / address / "information").write_text(text)


@pytest.mark.parametrize(
    ("environ", "models", "own"),
    [
        ({}, ("H100",), None),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ("H100",), {1}),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ("H100", "A2000"), None),  # the fastest comes first
        ({"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, ("H100", "A2000"), {1}),
        ({"CUDA_VISIBLE_DEVICES": "GPU-0aa,GPU-2aa-bb"}, ("H100",), {0, 2}),
        ({"CUDA_VISIBLE_DEVICES": "MIG-7"}, ("H100",), None),
        ({"CUDA_VISIBLE_DEVICES": "0", "SLURM_JOB_ID": "7"}, ("H100",), None),  # of the job's part, or of the machine
        ({"CUDA_VISIBLE_DEVICES": "0", "SLURM_JOB_ID": "7", "SLURM_STEP_GPUS": "1"}, ("H100",), {1}),
        ({"SLURM_STEP_GPUS": "0"}, ("H100",), None),  # minor number or place: they differ here
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, ("H100",), None),
        ({"NVIDIA_VISIBLE_DEVICES": "0,1"}, ("H100",), {0, 1}),
    ],
)
def test_which_gpus_are_ours(tmp_path, environ, models, own):
    for address in GPUS:
        (tmp_path / "gpus" / address).mkdir(parents=True)
    informed(tmp_path, models=models)
    assert own_gpus(tmp_path / "gpus", environ) == (None if own is None else {GPUS[number] for number in own})


@pytest.mark.parametrize("number", [48, 95, 140])
def test_an_error_of_memory_says_which_step_came_before_it(host, number):
    for rank, step in ((0, 41), (1, 40)):
        host.rank(10 + rank, rank, 2, peer=10 + rank, step=step)
    host.rank(8, 2, 1, peer=8, step=12)
    host.rank(7, 3, 2, peer=7)
    host.say("NVRM: Xid (PCI:0000:19:00): 119, not of its memory")
    host.say(f"NVRM: Xid (PCI:0000:19:00): {number}, DBE")
    other, fault = host.faults
    assert other.sound_step is None and (fault.sound_step, fault.attempt) == (39, 2), "rank 1 computes step 40"
    host.say("NVRM: Xid (PCI:0000:19:00): 48, again")
    host.say("NVRM: Xid (PCI:0000:9b:00): 64, remapping failed")
    assert len(host.faults) == 3


@pytest.mark.parametrize("all_pids", [True, False])
def test_the_programs_own_error_is_a_note_that_names_the_rank_and_no_fault(all_pids):
    """In a container no rank is guessed from a number of the host."""
    host = Host(all_pids=all_pids)
    host.rank(4711, 5, peer=1)
    host.rank(4712, 6, peer=2)
    host.say("NVRM: Xid (PCI:0000:3b:00): 31, pid=4712, name=python, MMU Fault")
    assert not host.faults and "the program's own" in host.notes[0]
    assert ("host-0: rank 6: Xid 31 on GPU 1" in host.notes[0]) == all_pids == ("rank" in host.notes[0])


def test_the_run_file_has_the_last_word():
    host = Host(check={"xid_ignore": [119], "xid_fatal": [13]})
    host.say("NVRM: Xid (PCI:0000:3b:00): 119, Timeout")
    host.say("NVRM: Xid (PCI:0000:3b:00): 13, Graphics Exception", second=900.0)
    assert [fault.verdict for fault in host.faults] == ["replace"] and "Xid 119" in host.notes[0]


def test_the_same_again_after_our_own_reset_is_another_burst_and_asks_for_more(host):
    host.say("NVRM: Xid (PCI:0000:3b:00): 119, Timeout")
    assert host.standing == host.faults[0]
    host.state.reset.gpus = (1,)
    host.give(ProgramEnded("gpu-reset", 0, b"done"))
    assert host.standing is None, "a reset has followed"
    host.say("NVRM: Xid (PCI:0000:3b:00): 119, Timeout", second=200.0)
    assert [fault.verdict for fault in host.faults] == ["reset", "replace"]


def test_a_thousand_lines_of_one_burst_are_told_once_and_judged_once(host, monkeypatch):
    judged = []
    real = kernel_faults.judge_burst
    monkeypatch.setattr(kernel_faults, "judge_burst", lambda *given: (judged.append(given), real(*given))[1])
    for number in range(1000):
        host.say(f"NVRM: Xid (PCI:0000:3b:00): 119, Timeout {number}", second=100.0 + number)
    host.say("NVRM: Xid (PCI:0000:3b:00): 92, the last", second=5000.0)
    assert len(host.faults) == 1 and len(judged) == 2 and host.notes


def test_a_gpu_of_another_job_costs_this_host_nothing_and_is_not_reset():
    host = Host(own=frozenset(GPUS[:2]))
    for _ in range(2):
        host.say("NVRM: Xid (PCI:0000:9b:00): 79, GPU has fallen off the bus.")
    host.say("NVRM: Xid (PCI:0000:3b:00): 119, Timeout")
    host.say("nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 20034, Fatal, Link 48 LTSSM Fault Up", second=900.0)
    (note,) = host.notes
    assert "Xid 79 on GPU 2" in note and "does not use" in note
    assert [(fault.verdict, fault.resettable) for fault in host.faults] == [("reset", (1,)), ("reset", ())]


def test_what_was_read_since_a_ranks_last_step_of_its_own_gpu():
    host = Host(ranks=3)
    host.say("NVRM: Xid (PCI:0000:19:00): 31, MMU fault of an earlier step")
    host.now_s += 1
    step_s = host.now_s
    host.say("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus", second=110.0)
    assert host.since(0, step_s) == () == host.since(1, step_s + 1)
    (found,) = host.since(1, step_s)
    assert (found.verdict, found.gpu, found.host) == (Verdict.REPLACE, 1, "host-0")
    (found,) = host.since(0, 0.0)
    assert "Xid 31" in found.message and found.verdict is Verdict.APP


def test_where_ranks_and_gpus_are_not_one_to_one_any_error_of_the_host_is_told():
    host = Host(ranks=2)
    host.say("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus")
    assert [one.gpu for one in host.since(0, 0.0)] == [1]


# ---------------------------------------------------------------- where lines come from


def test_dmesg_where_the_log_itself_cannot_be_opened(host):
    host.give(KernelLogLost("/dev/kmsg: Operation not permitted"))
    (program,) = host.started(DMESG)
    assert program.argv == FOLLOW and not host.notes
    host.give(ProgramLine(DMESG, b"[ 9.5] NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."))
    assert host.faults[0].verdict == "replace" and not host.notes


@pytest.mark.parametrize("how", ["no dmesg", "it ends", "the log itself ends"])
def test_where_nothing_can_be_read_that_is_said(host, how):
    if how == "no dmesg":
        host.refused[DMESG] = StartFailed(reason="No such file or directory")
    host.give(KernelLogLost("/dev/kmsg: No such file", once_open=how == "the log itself ends"))
    if how == "it ends":
        host.give(ProgramEnded(DMESG, None))
    (note,) = host.notes
    assert note.startswith("host-0: kernel log not readable (/dev/kmsg: No such file")
    assert note.endswith("so an Xid of a GPU is not seen")


def test_without_the_driver_nothing_is_opened():
    assert not Host(gpus=()).did(OpenKernelLog)
    assert Host().did(OpenKernelLog)


@pytest.fixture
def kmsg(monkeypatch):
    """(what reads it, its pool, a function that writes a record). A socket cannot be opened by a path, so ``os.open``
    of this one path answers with it."""
    reader, writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    reader.setblocking(False)

    def open_it(path, flags, *rest, real=os.open):
        assert path != "the kernel's log" or flags & os.O_NONBLOCK
        return os.dup(reader.fileno()) if path == "the kernel's log" else real(path, flags, *rest)

    monkeypatch.setattr(os, "open", open_it)
    pool = ConnectionPool(token=b"t" * 32)
    log = KernelLog(pool, "the kernel's log")
    assert list(log.open()) == []
    yield log, pool, writer
    log.close()
    pool.shutdown()
    reader.close()
    writer.close()


def read(log, pool, timeout_s=5.0):
    return [event for ready in pool.poll(timeout_s) for event in log.read() if ready.token is log]


def test_one_record_a_read_without_its_details(kmsg):
    log, pool, writer = kmsg
    for number in range(3):
        writer.send(f"4,{number},100,-;line {number}\n SUBSYSTEM=pci\n".encode())
    assert read(log, pool) == [KernelLine(f"4,{number},100,-;line {number}") for number in range(3)]
    writer.close()
    assert read(log, pool) == [KernelLogLost("the kernel's log ended", once_open=True)]
    assert read(log, pool, 0.05) == []


def test_a_log_that_is_not_there_is_lost(tmp_path):
    pool = ConnectionPool(token=b"t" * 32)
    (lost,) = KernelLog(pool, str(tmp_path / "missing")).open()
    assert lost.reason.endswith("missing: No such file or directory") and not lost.once_open
    pool.shutdown()


def test_the_kernels_real_log_wakes_the_loop_and_begins_at_its_end(host):
    """A record of our own, as root: it reaches the loop, and is no evidence, for a program wrote it."""
    try:
        writer = os.open("/dev/kmsg", os.O_WRONLY)
    except OSError as error:
        pytest.skip(f"/dev/kmsg cannot be written: {error.strerror}")
    pool, lines = ConnectionPool(token=b"t" * 32), []
    log = KernelLog(pool)
    assert list(log.open()) == []
    try:
        mark = f"muster test {os.getpid()}.{time.monotonic_ns()}"
        os.write(writer, f"NVRM: Xid (PCI:0000:3b:00): 79, {mark}\n".encode())  # without \n it stays open for more
        end = time.monotonic() + 20
        while not any(mark in line.text for line in lines) and time.monotonic() < end:
            lines += read(log, pool, 0.2)
    finally:
        os.close(writer)
        log.close()
        pool.shutdown()
    assert 0 < len(lines) < 1000, "the log's past is not read"
    host.give(*lines)
    assert not host.faults and not host.notes


def test_the_gpus_are_numbered_in_the_order_of_their_addresses(tmp_path):
    for address in reversed(GPUS):
        (tmp_path / address).mkdir()
    assert list_hardware({}, tmp_path).gpus == {address: number for number, address in enumerate(GPUS)}
    assert list_hardware({}, tmp_path / "none").gpus == {}
