"""The kernel log in the agent's loop: real descriptors, records as /dev/kmsg gives them, one a read."""

import os
import shutil
import socket
import sys
import time
from types import SimpleNamespace

import pytest

from muster.agent import kernel_log_follower
from muster.agent.kernel_log_follower import KernelLogFollower
from muster.agent.supervisor_link import SupervisorLink
from muster.config.spec import Check
from muster.health.hardware.own_gpus import own_gpus
from muster.health.verdicts import Verdict
from muster.protocol.to_supervisor import HostFault, HostReady
from muster.transport.connections import ConnectionPool

GPUS = ("0000:19:00.0", "0000:3b:00.0", "0000:9b:00.0")


class Host:
    """A follower with its loop. ``say`` puts a record into a stand-in for /dev/kmsg that keeps records apart."""

    def __init__(self, tmp_path, *, gpus=GPUS, check=None, living=(), environ=None, ranks=1, **sources):
        folder = tmp_path / "gpus"
        folder.mkdir()
        for address in gpus:
            (folder / address).mkdir()
        self.hub = ConnectionPool(token="0" * 32, on_accept=lambda peer: None, on_gone=lambda peer, why: None)
        self.sent, self.notes, self.resets = [], [], 0
        self.follower = KernelLogFollower(
            identity=SimpleNamespace(host="host-1", environ=environ or {}), hub=self.hub,
            log=SimpleNamespace(note=self.notes.append),
            spec=lambda: SimpleNamespace(check=check or Check(), resources=SimpleNamespace(ranks_per_host=ranks)),
            living=lambda: living, send=self.sent.append,
            resets=lambda: self.resets, gpus=folder, **sources,
        )  # fmt: skip

    def until(self, happened, limit_s=20.0):
        end = time.monotonic() + limit_s
        while not happened():
            assert time.monotonic() < end
            self.hub.run_once(0.2)

    def close(self):
        self.follower.shutdown()
        self.hub.shutdown()


@pytest.fixture
def on_host(tmp_path):
    made = []

    def make(**more):
        made.append(Host(tmp_path, **more))
        return made[-1]

    yield make
    for host in made:
        host.close()


@pytest.fixture
def kmsg():
    """(path that opens the reader's end, a function that writes a record into it)."""
    reader, writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    reader.setblocking(False)
    number = iter(range(1000, 9999))

    def say(message, *, second=100.0, prefix=4):
        writer.send(f"{prefix},{next(number)},{int(second * 1e6)},-;{message}\n SUBSYSTEM=pci\n".encode())

    yield reader, say
    reader.close()
    writer.close()


def following(on_host, kmsg, monkeypatch, **more):
    """A socket cannot be opened by a path, so ``os.open`` of this one path answers with it."""
    reader, say = kmsg
    real = os.open

    def open_it(path, flags, *rest):
        assert path != "the kernel's log" or flags & os.O_NONBLOCK
        return os.dup(reader.fileno()) if path == "the kernel's log" else real(path, flags, *rest)

    monkeypatch.setattr(os, "open", open_it)
    host = on_host(kmsg="the kernel's log", **more)
    host.follower.start()
    return host, say


def test_a_fault_is_told_with_the_gpus_that_a_reset_may_repair(on_host, kmsg, monkeypatch):
    host, say = following(on_host, kmsg, monkeypatch)
    say("usb 1-1: new device")
    say("NVRM: Xid (PCI:0000:3b:00): 119, pid=7, name=python, Timeout after 6s of waiting for RPC response")
    host.until(lambda: host.sent)
    (fault,) = host.sent
    assert isinstance(fault, HostFault) and (fault.verdict, fault.resettable) == ("reset", (1,))
    assert "Xid 119 on GPU 1 (0000:3b:00.0)" in fault.evidence


def test_a_burst_is_told_once_and_again_only_when_it_gets_graver(on_host, kmsg, monkeypatch):
    host, say = following(on_host, kmsg, monkeypatch)
    for number in ("48, DBE", "45, Ch 1", "45, Ch 2", "63, Row"):
        say(f"NVRM: Xid (PCI:0000:19:00): {number}")
    say("NVRM: Xid (PCI:0000:9b:00): 64, remapping failed")
    host.until(lambda: len(host.sent) == 2)
    assert [fault.verdict for fault in host.sent] == ["reset", "replace"] and host.sent[1].resettable == ()
    say("NVRM: Xid (PCI:0000:9b:00): 64, again", second=110.0)
    say("NVRM: Xid (PCI:0000:9b:00): 13, of a later burst", second=900.0)
    host.until(lambda: host.notes)
    assert len(host.sent) == 2


@pytest.mark.parametrize("number", [48, 95, 140])
def test_an_error_of_memory_says_which_step_came_before_it(on_host, kmsg, monkeypatch, number):
    ranks = [SimpleNamespace(pid=9, rank=rank, attempt=2, step=step) for rank, step in ((0, 41), (1, 40))]
    former = SimpleNamespace(pid=8, rank=2, attempt=1, step=12)
    host, say = following(on_host, kmsg, monkeypatch, living=[*ranks, former, SimpleNamespace(pid=7, rank=3, step=-1)])
    say("NVRM: Xid (PCI:0000:19:00): 119, not of its memory")
    say(f"NVRM: Xid (PCI:0000:19:00): {number}, DBE")
    host.until(lambda: len(host.sent) == 2)
    other, fault = host.sent
    assert other.sound_step is None and (fault.sound_step, fault.attempt) == (39, 2), "rank 1 computes step 40"
    say("NVRM: Xid (PCI:0000:19:00): 48, again")
    say("NVRM: Xid (PCI:0000:9b:00): 64, remapping failed")
    host.until(lambda: len(host.sent) == 3)


def test_an_error_of_memory_before_any_step_names_none(on_host, kmsg, monkeypatch):
    host, say = following(on_host, kmsg, monkeypatch)
    say("NVRM: Xid (PCI:0000:19:00): 48, DBE")
    host.until(lambda: host.sent)
    assert host.sent[0].sound_step is None


def test_the_programs_own_error_is_a_note_that_names_the_rank_and_no_fault(on_host, kmsg, monkeypatch):
    own = os.stat("/proc/self/ns/pid").st_ino
    monkeypatch.setattr("muster.agent.kernel_log_follower._FIRST_PID_NAMESPACE", own)
    ranks = [SimpleNamespace(pid=4711, rank=5), SimpleNamespace(pid=4712, rank=6)]
    host, say = following(on_host, kmsg, monkeypatch, living=ranks)
    say("NVRM: Xid (PCI:0000:3b:00): 31, pid=4712, name=python, MMU Fault")
    host.until(lambda: host.notes)
    assert not host.sent
    assert "host-1: rank 6: Xid 31 on GPU 1" in host.notes[0] and "the program's own" in host.notes[0]


def test_in_a_container_no_rank_is_guessed_from_a_number_of_the_host(on_host, kmsg, monkeypatch):
    monkeypatch.setattr("muster.agent.kernel_log_follower._FIRST_PID_NAMESPACE", 1)
    host, say = following(on_host, kmsg, monkeypatch, living=[SimpleNamespace(pid=4712, rank=6)])
    say("NVRM: Xid (PCI:0000:3b:00): 31, pid=4712, name=python, MMU Fault")
    host.until(lambda: host.notes)
    assert "rank" not in host.notes[0]


def test_what_a_program_writes_into_the_log_is_no_evidence(on_host, kmsg, monkeypatch):
    """User facility: the level has 8 added. Anybody with the right to write there could cost a host."""
    host, say = following(on_host, kmsg, monkeypatch)
    say("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", prefix=12)
    say("NVRM: Xid (PCI:0000:3b:00): 92, high rate")
    host.until(lambda: host.notes)
    assert not host.sent and len(host.notes) == 1 and "Xid 92" in host.notes[0]


def test_the_run_file_has_the_last_word(on_host, kmsg, monkeypatch):
    host, say = following(on_host, kmsg, monkeypatch, check=Check(xid_ignore=[119], xid_fatal=[13]))
    say("NVRM: Xid (PCI:0000:3b:00): 119, Timeout")
    say("NVRM: Xid (PCI:0000:3b:00): 13, Graphics Exception", second=900.0)
    host.until(lambda: host.sent)
    assert [fault.verdict for fault in host.sent] == ["replace"] and "Xid 119" in host.notes[0]


def test_nvlink_through_the_switch_needs_all_gpus_reset(on_host, kmsg, monkeypatch):
    host, say = following(on_host, kmsg, monkeypatch)
    say("nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 20034, Fatal, Link 48 LTSSM Fault Up")
    host.until(lambda: host.sent)
    assert (host.sent[0].verdict, host.sent[0].resettable) == ("reset", (0, 1, 2))


def test_a_log_that_ends_is_said_once(on_host, kmsg, monkeypatch):
    host, _ = following(on_host, kmsg, monkeypatch)
    kmsg[0].shutdown(socket.SHUT_RDWR)
    host.until(lambda: host.notes)
    for _ in range(3):
        host.hub.run_once(0.01)
    (note,) = host.notes
    assert "kernel log not readable" in note and "Xid" in note


def test_dmesg_where_the_log_itself_cannot_be_opened(on_host, tmp_path):
    script = tmp_path / "lines.py"
    script.write_text(
        "import sys, time\n"
        "print('[ 9.5] NVRM: Xid (PCI:0000:3b:00): 79, GPU has', end='', flush=True)\n"
        "time.sleep(0.1)\nprint(' fallen off the bus.', flush=True)\nsys.stdin.read()\ntime.sleep(60)\n"
    )
    host = on_host(kmsg=str(tmp_path / "missing"), follow=(sys.executable, str(script)))
    host.follower.start()
    host.until(lambda: host.sent)
    assert host.sent[0].verdict == "replace" and not host.notes


@pytest.mark.parametrize("follow", [("no-such-dmesg",), (sys.executable, "-c", "raise SystemExit(1)")])
def test_where_nothing_can_be_read_that_is_said(on_host, tmp_path, follow):
    host = on_host(kmsg=str(tmp_path / "missing"), follow=follow)
    host.follower.start()
    host.until(lambda: host.notes)
    (note,) = host.notes
    assert note.startswith("host-1: kernel log not readable") and "missing: No such file" in note


def test_without_the_driver_nothing_is_opened(on_host, tmp_path):
    host = on_host(gpus=(), kmsg=str(tmp_path / "missing"), follow=("no-such-dmesg",))
    host.follower.start()
    host.hub.run_once(0.05)
    assert not host.notes and not host.sent


def test_the_kernels_real_log_wakes_the_loop_and_begins_at_its_end(on_host):
    """A record of our own, as root: it reaches the loop, and is no evidence, for a program wrote it."""
    try:
        writer = os.open("/dev/kmsg", os.O_WRONLY)
    except OSError as error:
        pytest.skip(f"/dev/kmsg cannot be written: {error.strerror}")
    host, lines = on_host(), []
    try:
        real = host.follower._on_line
        host.follower._on_line = lambda line: (lines.append(line), real(line))
        host.follower.start()
        assert not host.notes
        mark = f"muster test {os.getpid()}.{time.monotonic_ns()}"
        os.write(writer, f"NVRM: Xid (PCI:0000:3b:00): 79, {mark}\n".encode())  # without \n it stays open for more
        host.until(lambda: any(mark in line for line in lines))
    finally:
        os.close(writer)
    assert len(lines) < 1000, "the log's past is not read"
    assert not host.sent and not host.notes


def test_the_options_of_dmesg_exist():
    if shutil.which("dmesg") is None:
        pytest.skip("no dmesg here")
    import subprocess

    shown = subprocess.run(["dmesg", "--help"], capture_output=True, text=True, check=False).stdout
    if "--follow-new" not in shown:
        pytest.skip("this dmesg is older than util-linux 2.37")
    assert all(option in shown for option in ("--kernel", "--nopager", "--color"))


def test_the_same_again_after_our_own_reset_is_another_burst_and_asks_for_more(on_host, kmsg, monkeypatch):
    host, say = following(on_host, kmsg, monkeypatch)
    say("NVRM: Xid (PCI:0000:3b:00): 119, Timeout")
    host.until(lambda: host.sent)
    assert host.follower.standing() == host.sent[0]
    host.resets += 1
    assert host.follower.standing() is None, "a reset has followed"
    say("NVRM: Xid (PCI:0000:3b:00): 119, Timeout", second=200.0)
    host.until(lambda: len(host.sent) == 2)
    assert [fault.verdict for fault in host.sent] == ["reset", "replace"]


def test_a_thousand_lines_of_one_burst_are_told_once_and_judged_once(on_host, kmsg, monkeypatch):
    judged = []
    real = kernel_log_follower.judge_burst
    monkeypatch.setattr(kernel_log_follower, "judge_burst", lambda *given: (judged.append(given), real(*given))[1])
    host, say = following(on_host, kmsg, monkeypatch)
    for number in range(1000):
        say(f"NVRM: Xid (PCI:0000:3b:00): 119, Timeout {number}", second=100.0 + number)
        host.hub.run_once(0.0)
    say("NVRM: Xid (PCI:0000:3b:00): 92, the last", second=5000.0)
    host.until(lambda: host.notes)
    assert len(host.sent) == 1 and len(judged) == 2


def test_what_was_told_to_nobody_is_told_to_the_supervisor_that_is_found(on_host, kmsg, monkeypatch, tmp_path):
    host, say = following(on_host, kmsg, monkeypatch)
    link = SupervisorLink(
        hub=host.hub, identity=SimpleNamespace(run_dir=tmp_path, host="host-1"), hello=lambda: HostReady(),
        on_message=lambda message: None, on_refused=lambda line: None,
    )  # fmt: skip
    link.fault, host.follower._send = host.follower.standing, link.send
    say("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.")
    host.until(lambda: host.follower.standing() is not None)
    told = []
    monkeypatch.setattr(link, "find_address", lambda: ("127.0.0.1", 1))
    monkeypatch.setattr(host.hub, "connect", lambda *at, **more: SimpleNamespace(expect=lambda *given: None))
    monkeypatch.setattr(host.hub, "send", lambda peer, message: told.append(message))
    assert link.connect()
    (_, fault) = told
    assert isinstance(fault, HostFault) and fault.verdict == "replace" and fault == host.follower.standing()


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


def test_a_gpu_of_another_job_costs_this_host_nothing_and_is_not_reset(on_host, kmsg, monkeypatch, tmp_path):
    real = KernelLogFollower.start
    monkeypatch.setattr(KernelLogFollower, "start", lambda self: (informed(tmp_path), real(self))[1])
    host, say = following(on_host, kmsg, monkeypatch, environ={"CUDA_VISIBLE_DEVICES": "0,1"})
    for _ in range(2):
        say("NVRM: Xid (PCI:0000:9b:00): 79, GPU has fallen off the bus.")
    say("NVRM: Xid (PCI:0000:3b:00): 119, Timeout")
    say("nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 20034, Fatal, Link 48 LTSSM Fault Up", second=900.0)
    host.until(lambda: len(host.sent) == 2)
    (note,) = host.notes
    assert "Xid 79 on GPU 2" in note and "does not use" in note
    assert [(fault.verdict, fault.resettable) for fault in host.sent] == [("reset", (1,)), ("reset", ())]


def test_what_was_read_since_a_ranks_last_step_of_its_own_gpu(on_host, kmsg, monkeypatch):
    host, say = following(on_host, kmsg, monkeypatch, ranks=3)
    say("NVRM: Xid (PCI:0000:19:00): 31, MMU fault of an earlier step")
    host.until(lambda: host.notes)
    step_s = time.monotonic()
    say("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus", second=110.0)
    host.until(lambda: host.sent)
    assert host.follower.since(0, step_s) == () == host.follower.since(1, time.monotonic())
    (found,) = host.follower.since(1, step_s)
    assert (found.verdict, found.gpu, found.host) == (Verdict.REPLACE, 1, "host-1")
    (found,) = host.follower.since(0, 0.0)
    assert "Xid 31" in found.message and found.verdict is Verdict.APP


def test_where_ranks_and_gpus_are_not_one_to_one_any_error_of_the_host_is_told(on_host, kmsg, monkeypatch):
    host, say = following(on_host, kmsg, monkeypatch, ranks=2)
    say("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus")
    host.until(lambda: host.sent)
    assert [one.gpu for one in host.follower.since(0, 0.0)] == [1]
