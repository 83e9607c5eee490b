"""What Xids mean: five classes, bursts, repetition, and whose word wins."""

import csv
import io

import pytest
from hardware_captures import CATALOGUE, XID_119, capture

from muster.health.hardware.driver_errors import judge_bursts, judge_kernel_log, recovery_action
from muster.health.hardware.error_table import OwnNumbers, error_rows
from muster.health.hardware.kernel_log import Family, read_kernel_log
from muster.health.verdicts import Verdict, worst

A, B = "0000:3b:00", "0000:9b:00"
GPUS = {"0000:3b:00.0": 0, "0000:9b:00.0": 4}
TO = "GPU recovery action changed from 0x0 (None) to"


def log(*lines):
    """Lines of (second, GPU, number and text), or whole messages with their second."""
    texts = (
        f"[{line[0]}.000000] " + (line[1] if len(line) == 2 else f"NVRM: Xid (PCI:{line[1]}): {line[2]}")
        for line in lines
    )
    return read_kernel_log("".join(text + "\n" for text in texts))


def verdicts(*lines, **own):
    return [burst.verdict for burst in judge_bursts(log(*lines).faults, OwnNumbers(**own))]


@pytest.mark.parametrize(
    ("number", "verdict"),
    [(13, "app"), (31, "app"), (43, "app"), (45, "note"), (92, "note"), (63, "note"), (48, "reset"), (94, "reset"),
     (95, "reset"), (119, "reset"), (74, "reset"), (64, "replace"), (79, "replace"), (61, "drain"), (9999, "drain")],
)  # fmt: skip
def test_numbers_alone(number, verdict):
    assert verdicts((1, A, f"{number}, pid=7, name=python, text")) == [verdict]


def test_an_unknown_number_is_named():
    (found,) = judge_kernel_log(log((1, A, "9999, what is this")), gpus=GPUS)
    assert found.verdict is Verdict.DRAIN and "unknown Xid" in found.message and "9999" in found.message
    assert found.gpu == 0 and "9999" in found.evidence


def test_a_double_bit_error_and_what_follows_from_it_are_one_incident():
    (burst,) = judge_bursts(log((1, A, "45, Ch 1"), (2, A, "48, DBE"), (3, A, "45, Ch 2"), (4, A, "43, Ch 3")).faults)
    assert burst.verdict is Verdict.RESET and burst.decisive.fault.number == 48 and burst.resettable(GPUS) == (0,)


def test_symptoms_alone_never_decide():
    assert verdicts(*[(second, A, f"45, pid={second}, Ch 1") for second in range(0, 4000, 400)]) == ["note"] * 10
    assert verdicts((1, A, "43, Ch"), (900, A, "43, Ch")) == ["app", "app"]


def test_three_minutes_of_silence_end_a_burst():
    assert len(verdicts((0, A, "31, x"), (180, B, "31, x"), (360, A, "31, x"))) == 1
    assert len(verdicts((0, A, "31, x"), (181, B, "31, x"))) == 2


def reset(second, gpu=A):
    return second, f"nvidia {gpu}.0: reset done"


def test_the_same_again_after_a_reset_and_within_a_day_is_graver():
    assert verdicts((0, A, "119, x"), reset(200), (400, A, "119, x")) == ["reset", "replace"]
    assert verdicts((0, A, "48, x"), (200, "NVRM: loading NVIDIA UNIX x86_64"), (400, A, "48, x")) == ["reset", "drain"]
    assert verdicts((0, A, "94, x"), reset(200), (400, A, "94, x")) == ["reset", "drain"]
    assert verdicts((0, A, "119, x"), reset(200, B), (400, A, "119, x")) == ["reset", "reset"], "another GPU was reset"
    assert verdicts((0, A, "119, x"), reset(200), (400, B, "119, x")) == ["reset", "reset"], "another GPU"
    assert verdicts((0, A, "119, x"), reset(200), (90000, A, "119, x")) == ["reset", "reset"], "another day"


def test_until_something_is_reset_the_same_error_is_one_incident():
    five = log(*[(second, A, f"119, pid={second}, Timeout") for second in (0, 5, 10, 15, 360)])
    (found,) = judge_kernel_log(five, gpus=GPUS)
    assert found.verdict is Verdict.RESET and "Xid 119 on GPU 0" in found.message and "5 times" in found.message
    assert "(5 processes)" in found.message and found.command == "nvidia-smi --gpu-reset -i 0"
    both = judge_kernel_log(log((0, A, "119, x"), (400, B, "119, x"), (800, A, "119, x")), gpus=GPUS)
    assert [(one.gpu, one.verdict) for one in both] == [(0, "reset"), (4, "reset")]


def test_however_many_errors_of_programs_are_one_line():
    """Of many bursts, with what follows from them."""
    lines = [
        (n * 40 + n // 50 * 600, (A, B)[n // 4 % 2], f"{(13, 31, 43, 45)[n % 4]}, pid={n % 7}, x") for n in range(629)
    ]
    (found,) = judge_kernel_log(log(*lines, (90_000, A, "45, pid=1, x")), gpus=GPUS)
    assert found.verdict is Verdict.APP and "Xid 13 on 2 GPUs, 158 times" in found.message
    assert "(7 processes)" in found.message and "Xid 31 x157" in found.message and "Xid 45 x158" in found.message


def test_the_programs_errors_never_get_graver_however_often():
    for number in (13, 31):
        assert verdicts(*[(second, A, f"{number}, x") for second in range(0, 8000, 400)]) == ["app"] * 20


def test_an_engines_error_that_comes_again_on_one_gpu_alone_is_the_gpus():
    assert verdicts((0, A, "32, x"), (400, A, "32, x")) == ["app", "reset"]
    assert verdicts((0, A, "32, x"), (1, B, "32, x"), (400, A, "32, x")) == ["app", "app"]


def test_the_drivers_own_word_overrides_the_table():
    assert verdicts((0, A, "31, x"), (1, A, f"154, {TO} 0x1 (GPU Reset Required)")) == ["reset"]
    assert verdicts((0, A, "119, x"), (1, A, f"154, {TO} 0x2 (Node Reboot Required)")) == ["replace"]
    assert verdicts((0, A, "79, x"), (1, A, f"154, {TO} 0x1 (GPU Reset Required)")) == ["reset"]
    assert verdicts(
        (0, A, "119, x"), (1, A, "154, GPU recovery action changed from 0x1 (GPU Reset) to 0x0 (None)")
    ) == ["note"]
    assert verdicts((0, A, "119, x"), (1, B, f"154, {TO} 0x0 (None)")) == ["reset"], "of that GPU alone"
    assert verdicts((0, A, f"154, {TO} 0x77 (Dance)")) == ["drain"]
    asks, done = (
        f"154, {TO} 0x1 (GPU Reset Required)",
        "154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)",
    )
    assert verdicts((0, A, asks), (999, A, asks)) == ["reset", "reset"], "nothing was reset"
    assert verdicts((0, A, asks), (400, A, done), (999, A, asks)) == ["reset", "note", "replace"]


@pytest.mark.parametrize(
    ("text", "verdict"),
    [("0x0 (None)", "healthy"), ("None", "healthy"), ("0x1 (GPU Reset Required)", "reset"), ("Reset", "reset"),
     ("GPU_RESET", "reset"), ("0x1 (PF FLR)", "reset"), ("0x2 (OS Reboot)", "replace"), ("NODE_REBOOT", "replace"),
     ("0x3 (Drain P2P)", "drain"), ("DRAIN_AND_RESET", "drain"), ("N/A", None), ("", None)],
)  # fmt: skip
def test_recovery_actions_by_all_their_names(text, verdict):
    assert recovery_action(text) == verdict


def test_nvlinks_of_the_fifth_generation_say_whether_they_are_fatal():
    mild = "145, RLW_SRC_TRACK Nonfatal XC0 i0 Link 03 (0x01)"
    bad = "149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 01 (0x021425c6)"
    assert verdicts((0, A, mild)) == ["note"] and verdicts((0, A, mild), (400, A, mild)) == ["note", "note"]
    (burst,) = judge_bursts(log((0, A, bad)).faults)
    assert burst.verdict is Verdict.RESET and burst.resettable(GPUS) == (0, 4), "through the switch: all GPUs"
    assert verdicts((0, A, bad), reset(200), (400, A, bad)) == ["reset", "replace"]


@pytest.mark.parametrize(
    ("line", "verdict"),
    [("20034, Fatal, Link 48 LTSSM Fault Up", "reset"), ("12028, Non-fatal, Link 32 egress PRIV error", "note"),
     ("23001, Fatal, Link 12 ingress", "replace"), ("77777, Fatal, new", "reset"), ("77777, Non-fatal, new", "note"),
     ("77777, new", "drain"), ("11012, Link 3", "note"), ("11012, Fatal, Link 3", "reset")],
)  # fmt: skip
def test_switches(line, verdict):
    (burst,) = judge_bursts(log((1, f"nvidia-nvswitch0: SXid (PCI:0000:06:00.0): {line}")).faults)
    assert burst.verdict == verdict
    assert burst.resettable(GPUS) == ((0, 4) if verdict == "reset" else ())


def test_a_context_switch_timeout_beside_the_programs_error_is_the_programs():
    assert verdicts((0, A, "109, x")) == ["reset"]
    assert verdicts((0, A, "31, x"), (1, A, "109, x")) == ["app"]


def test_the_run_file_adds_and_ignores_numbers_and_says_so():
    assert verdicts((0, A, "119, x"), ignore=frozenset({119})) == ["note"]
    assert verdicts((0, A, "31, x"), fatal=frozenset({31})) == ["replace"]
    told = (0, A, "31, x"), (1, A, f"154, {TO} 0x0 (None)")
    assert verdicts(*told, fatal=frozenset({31})) == ["replace"]
    (found,) = judge_kernel_log(log((0, A, "119, x")), own=OwnNumbers(ignore=frozenset({119})))
    assert found.source == "check.xid_ignore"


def test_what_was_before_the_run_or_an_earlier_boot_is_not_held_against_a_host():
    old = log((5, A, "79, x"), (300, A, "31, x"))
    assert worst(judge_kernel_log(old)) is Verdict.REPLACE
    assert worst(judge_kernel_log(old, not_before_s=100.0)) is Verdict.APP
    rebooted = read_kernel_log(f"[9.0] NVRM: Xid (PCI:{A}): 79, x\n[0.0] Linux version 6.8.0\n[1.0] usb 1-1\n")
    (found,) = judge_kernel_log(rebooted)
    assert found.verdict is Verdict.HEALTHY and "no Xid in 3 lines" in found.message


def test_library_and_module_of_different_versions():
    text = "[1.0] NVRM: API mismatch: the client has the version 570.1, but\n"
    (found,) = judge_kernel_log(read_kernel_log(text))
    assert found.verdict is Verdict.DRAIN and "restart the host" in found.message


def test_the_recorded_timeouts_of_a_system_processor():
    """Four lines of one GPU, then one more after 181 s; nothing was reset between, so it is one incident."""
    (found,) = judge_kernel_log(read_kernel_log(capture(XID_119)), gpus=GPUS)
    assert found.verdict is Verdict.RESET and found.gpu == 4 and "5 times" in found.message
    assert found.command == "nvidia-smi --gpu-reset -i 4" and "pid=2024380" in found.evidence


def test_the_table_contradicts_nvidias_catalogue_nowhere_it_says_reset_or_restart():
    """What NVIDIA answers with a restart of the program is never a reset here at first sight, unless others say so."""
    rows = {int(row["xid"]): row for row in csv.DictReader(io.StringIO(capture(CATALOGUE)))}
    table = error_rows(Family.XID)
    graver = {94}  # contained, but the next program on that page meets it: NVIDIA's memory guide
    for number, row in rows.items():
        if row["immediate_resolution"] == "RESTART_APP" and number not in graver:
            assert table[number].verdict is Verdict.APP, number
        if row["immediate_resolution"] == "RESET_GPU":
            assert table[number].verdict.faulty, number
        if row["immediate_resolution"] in ("RESTART_BM", "RESTART_VM"):
            assert table[number].verdict is Verdict.REPLACE, number


def test_each_number_has_one_row():
    for family in Family:
        rows = set(error_rows(family).values())
        assert sum(len(row.numbers) for row in rows) == len(error_rows(family))
        assert all(row.source and row.what for row in rows)
