"""Every form in which a kernel log shows the GPU driver's errors."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.health.hardware.driver_errors import judge_kernel_log
from muster.health.hardware.kernel_log import Clock, Family, in_text, pci_address, read_kernel_log
from muster.health.verdicts import Verdict, worst

FALLEN = "NVRM: Xid (PCI:0000:9b:00): 79, pid=4711, name=python, GPU has fallen off the bus."
AT = datetime(2026, 2, 23, 16, 24, 18, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("prefix", "time_s", "clock"),
    [
        ("4,1234,5140900123,-;", 5140.900123, Clock.BOOT),
        ("3,99,17,-,caller=T812;", 17e-6, Clock.BOOT),
        ("[ 5140.900123] ", 5140.900123, Clock.BOOT),
        ("<4>[    1.500000] ", 1.5, Clock.BOOT),
        ("kern  :warn  : [   12.500000] ", 12.5, Clock.BOOT),
        ("[   12.500000] node-1 kernel: ", 12.5, Clock.BOOT),
        ("[Mon Feb 23 16:24:18 2026] ", AT, Clock.LOCAL),
        ("2026-02-23T16:24:18,500000+00:00 ", AT + 0.5, Clock.WALL),
        ("2026-02-23T17:24:18+0100 node-1 kernel: ", AT, Clock.WALL),
        ("2026-02-23T16:24:18.250000+00:00 node-1 kernel: ", AT + 0.25, Clock.WALL),
        ("2026-02-23 16:24:18 ", AT, Clock.LOCAL),
        ("Feb 23 16:24:18 node-1 kernel: [  12.5] ", 12.5, Clock.BOOT),
        ("", None, Clock.BOOT),
        ("2026-02-23T16:24:18Z node-1 ", AT, Clock.WALL),
        ("Feb 23 16:24:18 node-1 kernel: message repeated 3 times: [ ", 67710258.0, Clock.LOCAL),
    ],
)
def test_every_prefix_of_a_line(prefix, time_s, clock):
    (fault,) = read_kernel_log(prefix + FALLEN + "\n").faults
    assert (fault.number, fault.device, fault.pid, fault.process) == (79, "0000:9b:00.0", 4711, "python")
    assert fault.clock is clock and fault.time_s == pytest.approx(time_s)


def test_a_line_without_a_year_can_be_compared_with_its_neighbours_alone():
    first, second = read_kernel_log(
        f"Feb 28 23:59:58 a kernel: {FALLEN}\nMar  1 00:00:01.5 a kernel: {FALLEN}\n"
    ).faults
    assert first.clock is Clock.LOCAL and second.time_s - first.time_s == pytest.approx(86400 + 3.5)


@pytest.mark.parametrize(
    ("line", "number", "device"),
    [
        ("NVRM: Xid (0000:03:00): 14, Channel 00000001", 14, "0000:03:00.0"),
        ("NVRM: Xid (PCI:0009:01:00): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 01 (0x021425c6)", 149, "0009:01:00.0"),
        ("NVRM: Xid (PCI:0000:c1:00): 149 NETIR_LINK_EVT", 149, "0000:c1:00.0"),
        ("NVRM: Xid (PCI:0000:66:00): 43, pid='<unknown>', name=<unknown>, Ch 10", 43, "0000:66:00.0"),
        ("NVRM: GPU 0000:01:00.0: GPU has fallen off the bus.", 79, "0000:01:00.0"),
        ("NVRM: The NVIDIA GPU 0000:93:00.0 (PCI ID: 10de:2330) has fallen off the bus and is not responding", 79,
         "0000:93:00.0"),
        ("NVRM: Xid 154, GPU recovery action changed from 0x0 (None) to 0x2 (OS Reboot)", 154, ""),
    ],
)  # fmt: skip
def test_forms_of_an_xid(line, number, device):
    (fault,) = read_kernel_log(f"[ 1.0] {line}\n").faults
    assert (fault.family, fault.number, fault.device) == (Family.XID, number, device)


def test_fallen_off_the_bus_over_several_lines_names_its_gpu():
    text = (
        "[ 1.0] NVRM: The NVIDIA GPU 0000:93:00.0\n[ 1.0] NVRM: (PCI ID: 10de:2330) installed in this system has\n"
        "[ 1.0] NVRM: fallen off the bus and is not responding to commands.\n"
    )
    (fault,) = read_kernel_log(text).faults
    assert (fault.number, fault.device) == (79, "0000:93:00.0")


def test_a_switchs_line_says_whether_it_is_fatal():
    bad = "[ 1.0] nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 20034, Fatal, Link 48 LTSSM Fault Up\n"
    mild = "[ 1.0] nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress PRIV error (First)\n"
    first, second = read_kernel_log(bad + mild).faults
    assert (first.family, first.number, first.fatal) == (Family.SXID, 20034, True)
    assert (second.number, second.fatal, second.device) == (12028, False, "0000:05:00.0")


@pytest.mark.parametrize(
    "line",
    [
        "systemd[1]: said: NVRM: Xid (PCI:0000:9b:00): 79, a quotation",
        "python: no column Xid",
        "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  535.161.08",
        "nvidia: module license 'NVIDIA' taints kernel.",
    ],
)
def test_what_only_mentions_an_xid_is_none(line):
    log = read_kernel_log(f"[ 1.0] {line}\n")
    assert not log.faults and not log.unread


def test_a_number_that_cannot_be_read_is_said():
    for line in ("NVRM: Xid (PCI:0000:66:00): abc, pid=7", "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): garbled, Fatal"):
        found = judge_kernel_log(read_kernel_log(f"[ 1.0] {line}\n"))
        assert worst(found) is Verdict.INCOMPLETE and found[0].evidence.endswith(line)


def test_addresses():
    assert pci_address("00000000:9B:00.0") == pci_address("0000:9b:00") == "0000:9b:00.0"
    assert pci_address("00010000:9B:00.1") == "10000:9b:00.1"
    assert pci_address("N/A") == pci_address("9b:00.0") == ""


def test_only_a_number_with_its_gpu_counts_in_free_text():
    assert not in_text("transaction Xid 79, and xid: 31")
    (fault,) = in_text("RuntimeError: see dmesg: NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.")
    assert (fault.number, fault.device) == (79, "0000:3b:00.0")


LOG = "".join(
    f"[{second}.000000] {line}\n"
    for second, line in enumerate(
        ["Linux version 6.8.0 (gcc)", "usb 1-1: new device", "NVRM: Xid (PCI:0000:9b:00): 119, pid=7, name=x, Timeout",
         "nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 20034, Fatal, Link 48 LTSSM Fault Up", FALLEN]
    )
)  # fmt: skip


@given(st.integers(0, len(LOG)))
def test_a_log_that_is_cut_inside_a_line_is_never_healthy(end):
    text = LOG[:end]
    verdict = worst(judge_kernel_log(read_kernel_log(text)))
    assert verdict is not Verdict.HEALTHY or text.endswith("\n")


@pytest.mark.parametrize("number", ["119", "1"])
def test_a_number_that_is_cut_is_not_taken_for_another(number):
    """119, cut after its first digits, would be 11: an error of the program."""
    log = read_kernel_log(f"[ 1.0] NVRM: Xid (PCI:0000:9b:00): {number}")
    assert not log.faults and worst(judge_kernel_log(log)) is Verdict.INCOMPLETE


@given(st.text(), st.sampled_from(["", "[ 1.0] NVRM: Xid (PCI:0000:9b:00): ", "4,1,1,-;NVRM: ", "Feb 31 25:61:61 a "]))
def test_no_text_raises(text, before):
    judge_kernel_log(read_kernel_log(before + text))
    judge_kernel_log(read_kernel_log(before + text + "\n"))
    in_text(before + text)
