"""The probe as a process: a stub of NVIDIA's library built here, a replayed ``nvidia-smi``, and this machine's CPU.

The stub stands for a driver; no GPU has been seen by these tests.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.captures import smi_xml

from muster.health.hardware.readings import ClockReason, GpuReading, GpuReport
from muster.health.machine.judge import judge_machine
from muster.health.machine.report import MachineReport, ProbeLine, Speed, of_own_gpus, read_probe
from muster.health.verdicts import Verdict, exit_code, worst
from muster.probe import passive
from muster.probe.main import LIMITS_S
from muster.probe.measurements import Output, run_in_turn, run_together
from muster.probe.programs import command, output_of

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def stub(tmp_path_factory):
    """A folder with libnvidia-ml.so.1."""
    pytest.importorskip("pynvml")
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    folder = tmp_path_factory.mktemp("nvml")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", HERE / "nvml_stub.c"], check=True)
    return folder


def probe(*, full=False, folder="", **variables):
    env = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    output, code = output_of(command(full=full, folder=folder), limit_s=120, env=env)
    assert code == 0
    return read_probe(output, host="here")


def of_gpus(report):
    """Findings on GPUs; the machine itself, which is not the tests' to judge, left out. No GPU is on this bus."""
    return [one for one in judge_machine(report, gpus=8) if one.check.startswith("gpu")]


def test_eight_sound_gpus(stub):
    report = probe(LD_LIBRARY_PATH=stub)
    gpus = report.gpus
    assert gpus is not None and (gpus.source, gpus.driver, gpus.count, gpus.missing) == ("NVML", "580.65.06", 8, "")
    assert gpus.gpus[2].address == "0000:2b:00.0" and gpus.gpus[2].clock_reasons == ClockReason.IDLE
    assert gpus.gpus[2].ecc_uncorrected == 0 and gpus.gpus[2].recovery_action == "None"
    assert gpus.gpus[2].slowdown_c is None, "a function that the driver has not is not known"
    assert worst(of_gpus(report)) is Verdict.HEALTHY


@pytest.mark.parametrize(
    ("state", "check", "verdict"),
    [
        ("pending", "gpu.rows", Verdict.RESET),
        ("failed", "gpu.rows", Verdict.REPLACE),
        ("ecc", "gpu.ecc", Verdict.RESET),
        ("brake", "gpu.power", Verdict.DRAIN),
        ("hot", "gpu.heat", Verdict.DRAIN),
        ("narrow", "gpu.pcie", Verdict.DRAIN),
        ("mig", "gpu.mig", Verdict.DRAIN),
        ("exclusive", "gpu.compute_mode", Verdict.DRAIN),
        ("lost", "gpu.lost", Verdict.RESET),
        ("reboot", "gpu.recovery", Verdict.REPLACE),
    ],
)
def test_one_gpu_with_a_fault(stub, state, check, verdict):
    found = [one for one in of_gpus(probe(LD_LIBRARY_PATH=stub, MUSTER_STUB=f"{state}:6 ")) if one.verdict.faulty]
    assert [(one.check, one.gpu, one.verdict) for one in found] == [(check, 6, verdict)]


def test_a_gpu_without_a_handle_is_missing(stub):
    found = of_gpus(probe(LD_LIBRARY_PATH=stub, MUSTER_STUB="gone:3 "))
    assert worst(found) is Verdict.REPLACE and any("GPU 3" in one.message + one.evidence for one in found)


@pytest.fixture
def tool(tmp_path):
    """Puts an ``nvidia-smi`` on the PATH."""

    def make(script):
        path = tmp_path / "nvidia-smi"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return f"{tmp_path}:{os.environ['PATH']}"

    return make


def test_without_the_library_the_tool_is_asked(tool):
    where = tool(f"[ \"$*\" = '-q -x' ] || exit 2\ncat <<'END'\n{smi_xml().rstrip()}\nEND")
    gpus = probe(PATH=where).gpus
    assert gpus is not None and gpus.source == "nvidia-smi -q -x" and len(gpus.gpus) == 2 and not gpus.missing


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.'; exit 9", "has failed"),
        ("exit 1", "no end"),
        ("sleep 60", "no end"),
    ],
)
def test_a_tool_that_fails_is_never_healthy(tool, script, words):
    begun = time.monotonic()
    found = of_gpus(probe(PATH=tool(script)))
    assert exit_code(found) == 1 and any(words in one.message for one in found)
    assert time.monotonic() - begun < 30


def test_this_machine(tmp_path):
    """A real run on the processor: every rung says something, and nothing is left behind."""
    report = probe(full=True, folder=tmp_path)
    assert not report.missing and not [line for line in report.lines if line.failed]
    assert {speed.what for speed in report.speeds} >= {"matmul", "all_reduce", "loopback"}
    assert all(speed.value > 0 for speed in report.speeds)
    assert len({speed.bits for speed in report.speeds if speed.what == "matmul"}) == 1, "the same product twice"
    assert not list(tmp_path.iterdir())
    assert exit_code(judge_machine(report)) == 0


def test_a_folder_that_is_not_there_is_incomplete(tmp_path):
    (line,) = [line for line in probe(folder=tmp_path / "none").lines if line.rung == "disk"]
    assert "No such file" in line.failed


# ------------------------------------------------------------ limits


def collect():
    parts = []
    return parts, Output(parts.append)


def lines_of(parts):
    return {line["rung"]: line for line in map(json.loads, parts)}


@pytest.fixture
def hang():
    """A rung that ends with the test: one that was given up goes on, and may have an end of its own later."""
    over, threads = threading.Event(), []

    def rung():
        threads.append(threading.current_thread())
        over.wait(60)
        return ProbeLine(rung="hangs", note="too late")

    yield rung
    over.set()
    for thread in threads:
        thread.join(10)


def test_a_rung_that_hangs_does_not_hold_up_the_others(hang):
    parts, output = collect()
    output.begin(("hangs", "works"))
    rungs = {"hangs": hang, "works": lambda: ProbeLine(rung="works", note="yes")}
    begun = time.monotonic()
    run_together(rungs, output, limit_s=0.5)
    output.end()
    assert time.monotonic() - begun < 10
    found = lines_of(parts)
    assert found["works"]["note"] == "yes" and "did not end within 0.5 s" in found["hangs"]["failed"]


def test_after_one_that_hung_the_rest_is_not_tried(hang):
    parts, output = collect()
    output.begin(("hangs", "next"))
    tried = []
    run_in_turn({"hangs": (hang, 0.3), "next": (lambda: tried.append(1), 0.3)}, output)
    assert not tried and lines_of(parts)["next"]["failed"] == "not tried: hangs did not end"


def test_a_rung_that_raises_says_why():
    parts, output = collect()
    output.begin(("raises",))
    run_together({"raises": lambda: {}["key"]}, output, limit_s=5)
    assert lines_of(parts)["raises"]["failed"] == "KeyError: 'key'"


def test_a_program_that_says_too_little_too_late():
    output, code = output_of(["sh", "-c", "echo first; sleep 60"], limit_s=1)
    assert (output, code) == (b"first\n", None)


def test_nothing_is_loaded_where_nobody_could_say_who_uses_the_gpus(tool):
    report = probe(full=True, PATH=tool("sleep 60"))
    loaded = [line for line in report.lines if line.rung in LIMITS_S]
    assert loaded and all("not tried: it is not known whether" in line.failed for line in loaded)
    assert not report.speeds


def test_an_interrupt_ends_the_program_too(tmp_path):
    """Ctrl-C reaches the caller alone: the program has a session of its own."""
    told = tmp_path / "pid"
    caller = subprocess.Popen(
        [
            sys.executable, "-c", "import sys; from muster.probe.programs import output_of\n"
            "output_of(['sh', '-c', 'echo $$ > ' + sys.argv[1] + '.new; mv ' + sys.argv[1] + '.new ' + sys.argv[1]"
            " + '; exec sleep 600'], limit_s=300)", str(told),
        ],
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_until(told.exists)
        pid = int(told.read_text())
        caller.send_signal(signal.SIGINT)
        caller.wait(30)
        wait_until(lambda: not os.path.exists(f"/proc/{pid}"))
    finally:
        caller.kill()
        caller.wait()


def wait_until(happened, limit_s=30.0):
    end = time.monotonic() + limit_s
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_gpu_that_hangs_is_named_and_the_others_keep_their_speeds(monkeypatch):
    compute = pytest.importorskip("muster.probe.compute")
    monkeypatch.setattr(compute, "_TOGETHER_S", 1.0)
    monkeypatch.setattr(compute, "_HUNG", set())
    released = threading.Event()

    def work(gpu):
        if gpu == 1:
            released.wait(60)
        return Speed(what="matmul", device=f"GPU {gpu}", gpu=gpu, value=7.0)

    try:
        found = compute._on_all(range(3), "matmul", work)
    finally:
        released.set()
    assert [speed.value for speed in found] == [7.0, 0.0, 7.0]
    assert found[1].device == "GPU 1" and "did not end within 1 s" in found[1].failed
    monkeypatch.setattr(compute.torch.cuda, "device_count", lambda: 3)
    assert list(compute._gpus()) == [0, 2], "what follows leaves it alone"


RECORDS = (
    "6,1,1000000,-;Linux version 6.1\n",
    "4,2,2800000000,-;NVRM: Xid (PCI:0000:0b:00): 79, pid=1, GPU has fallen off the bus.\n",
    "4,3,9940000000,-;NVRM: Xid (PCI:0000:1b:00): 48, pid=9, name=python, DBE\n SUBSYSTEM=pci\n",
)


@pytest.fixture
def kernel_log(monkeypatch):
    """Reads records from a stand-in for /dev/kmsg, which gives one a read, then no more."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ends[0].setblocking(False)
    real = os.open
    monkeypatch.setattr(
        os, "open", lambda path, *rest: os.dup(ends[0].fileno()) if path == "the kernel's" else real(path, *rest)
    )

    def read(records):
        for record in records:
            ends[1].send(record.encode())
        line = passive.kernel_log(1.0, kmsg="the kernel's")
        assert line.kernel_log is not None and line.kernel_log.lines == len(records)
        return replace(line, kernel_log=replace(line.kernel_log, now_s=10_000.0))

    yield read
    for end in ends:
        end.close()


def kernel_findings(line, *, action=None, own=None):
    found = [line]
    if action is not None:
        gpus = tuple(
            GpuReading(index=index, address=f"0000:{16 * index + 11:02x}:00.0", recovery_action=action)
            for index in range(8)
        )
        found.append(ProbeLine(rung="gpus", gpus=GpuReport(gpus=gpus, source="NVML", count=8)))
    report = of_own_gpus(MachineReport(host="here", lines=tuple(found)), own)
    return [one for one in judge_machine(report) if one.check == "gpu.xid"]


def test_the_kernel_logs_last_hour_counts(kernel_log):
    (found,) = kernel_findings(kernel_log(RECORDS))
    assert found.verdict is Verdict.RESET and "Xid 48" in found.message


def test_what_asked_for_a_reset_is_over_once_the_driver_asks_for_none(kernel_log):
    line = kernel_log(RECORDS)
    (over,) = kernel_findings(line, action="None")
    assert over.verdict is Verdict.NOTE and "the driver asks for nothing now" in over.message and over.gpu == 1
    (still,) = kernel_findings(line, action="Reset")
    assert still.verdict is Verdict.RESET


def test_a_kernel_log_without_errors_is_healthy_and_others_gpus_are_not_ours(kernel_log):
    (sound,) = kernel_findings(kernel_log(RECORDS[:1]))
    assert sound.verdict is Verdict.HEALTHY
    found = kernel_findings(kernel_log(RECORDS), action="Reset", own=("0000:0b:00.0",))
    assert [one.verdict for one in found] == [Verdict.HEALTHY]


def test_a_kernel_log_that_nobody_may_read_is_said_to_be_unread(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    line = passive.kernel_log(1.0, kmsg=str(tmp_path / "nothing"))
    (found,) = [one for one in judge_machine(MachineReport(host="h", lines=(line,))) if one.check == "gpu.xid"]
    assert found.verdict is Verdict.NOTE and "not readable" in found.message


LINKS = "GPU {0}: NVIDIA H100 80GB HBM3 (UUID: GPU-{0})\n"


def nvlink(inactive=None):
    lines = []
    for number in range(8):
        lines.append(LINKS.format(number))
        lines += [
            f"\t Link {link}: <inactive>\n" if (number, link) == inactive else f"\t Link {link}: 26.562 GB/s\n"
            for link in range(18)
        ]
    return "".join(lines)


def test_links_and_kernel_log_are_looked_at_where_there_is_a_driver(stub, tool, tmp_path):
    text = nvlink(inactive=(3, 7)).rstrip("\n")
    path = tool(f"cat <<'END'\n{text}\nEND")
    env = {**os.environ, "PATH": path, "LD_LIBRARY_PATH": str(stub)}
    output, code = output_of([*command(full=False), "--driver", str(tmp_path)], limit_s=60, env=env)
    report = read_probe(output, host="here")
    assert code == 0 and {"links", "kernel_log"} <= {line.rung for line in report.lines}
    found = [one for one in judge_machine(report, gpus=8) if one.check == "gpu.nvlink"]
    assert [(one.gpu, one.verdict) for one in found] == [(3, Verdict.REPLACE)]
    ours = of_own_gpus(report, ("0000:0b:00.0", "0000:1b:00.0"))
    others = [one for one in judge_machine(ours, gpus=2) if one.check == "gpu.nvlink"]
    assert [one.verdict for one in others] == [Verdict.HEALTHY]


@pytest.mark.parametrize(
    ("script", "failed"), [("exit 3", "code 3"), ("echo 'GPU 0: NVIDIA L4 (UUID: x)'; exit 1", "")]
)
def test_a_tool_that_fails_says_nothing_of_links(tool, monkeypatch, script, failed):
    monkeypatch.setenv("PATH", tool(script))
    line = passive.links(10.0)
    assert failed in line.failed and bool(line.failed) == bool(failed) and not line.nvlink


def test_a_ports_counters_are_read_twice(tmp_path):
    """Files as the kernel shows them; the link goes down between the two readings."""
    port = tmp_path / "mlx5_0" / "ports" / "1"
    (port / "counters").mkdir(parents=True)
    (tmp_path / "mlx5_0" / "hca_type").write_text("MT4129\n")
    for name, text in {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)"}.items():
        (port / name).write_text(text + "\n")
    (port / "link_layer").write_text("InfiniBand\n")
    (port / "counters" / "link_downed").write_text("2\n")
    (port / "counters" / "port_xmit_data").write_text("1\n")
    flap = threading.Timer(0.1, lambda: (port / "counters" / "link_downed").write_text("3\n"))
    flap.start()
    line = passive.ports(tmp_path, apart_s=0.4)
    flap.join()
    assert [list(one.values()) for one in line.counters] == [["2"], ["3"]] and line.apart_s >= 0.4

    # The judge knows files by their place in /sys/class.
    def placed(files):
        return {path.replace(str(tmp_path), "/sys/class/infiniband"): text for path, text in files.items()}

    before, after = line.counters
    line = replace(line, ports=placed(line.ports), counters=(placed(before), placed(after)))
    found = judge_machine(MachineReport(host="a", lines=(line,)))
    assert [one.message.split(" in ")[0] for one in found if one.check == "net.counters"] == [
        "port mlx5_0/1 lost its link 1 time"
    ]
    assert passive.ports(tmp_path / "none").counters == ()
