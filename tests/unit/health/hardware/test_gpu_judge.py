"""nvidia-smi, in old and new words, and what its fields mean; the same judge for values from NVML."""

from dataclasses import fields, replace

import pytest
from hardware_captures import SMI_4090, SMI_H100, capture
from hypothesis import given, settings
from hypothesis import strategies as st
from smi_sample import NEW, OLD, report, with_value

from muster.health.hardware.gpu_judge import _RULES, judge_gpus
from muster.health.hardware.nvidia_smi import is_csv, is_query, read_csv, read_query
from muster.health.hardware.readings import ClockReason, GpuReading, GpuReport
from muster.health.verdicts import Verdict, worst


def verdict_of(text, **more):
    return worst(judge_gpus(read_query(text), **more))


@pytest.mark.parametrize("driver", [OLD, NEW])
def test_a_whole_report_without_faults_is_healthy(driver):
    (found,) = judge_gpus(read_query(report(driver)))
    assert found.verdict is Verdict.HEALTHY and found.message.startswith("2 x NVIDIA H100 80GB HBM3, driver")
    assert is_query(report(driver))


@pytest.mark.parametrize("driver", [OLD, NEW])
@pytest.mark.parametrize(
    ("name", "value", "verdict"),
    [
        ("Volatile: DRAM Uncorrectable", "1", "reset"),
        ("Volatile: DRAM Correctable", "99", "healthy"),
        ("SRAM Threshold Exceeded", "Yes", "replace"),
        ("Remapped Rows: Pending", "Yes", "reset"),
        ("Remapping Failure Occurred", "Yes", "replace"),
        ("Bank Remap Availability Histogram: Low", "3 bank(s)", "drain"),
        ("Bank Remap Availability Histogram: None", "1 bank(s)", "replace"),
        ("Pending Page Blacklist", "Yes", "reset"),
        ("Single Bit ECC", "11", "drain"),
        ("SW Power Cap", "Active", "healthy"),
        ("HW Slowdown", "Active", "drain"),
        ("HW Thermal Slowdown", "Active", "drain"),
        ("HW Power Brake Slowdown", "Active", "drain"),
        ("SW Thermal Slowdown", "Active", "note"),
        ("GPU T.Limit Temp", "3 C", "note"),
        ("Link Width: Current", "8x", "drain"),
        ("PCIe Generation: Current", "1", "healthy"),
        ("Persistence Mode", "Disabled", "note"),
        ("MIG Mode: Current", "Enabled", "drain"),
        ("Compute Mode", "Exclusive_Process", "drain"),
        ("Fabric: State", "In Progress", "drain"),
        ("Fabric: Status", "Insufficient Resources", "drain"),
        ("Fabric: State", "N/A", "healthy"),
        ("Power Draw", "[GPU is lost]", "reset"),
        ("GPU UUID", "ERR!", "reset"),
        ("Fan Speed", "[Unknown Error]", "reset"),
        ("Addressing Mode", "[Unknown Error]", "note"),
    ],
)
def test_fields(driver, name, value, verdict):
    found = judge_gpus(read_query(with_value(report(driver), name, value, gpu=1)))
    assert worst(found) == verdict
    if verdict != "healthy":
        assert {one.gpu for one in found} == {1}, "the other GPU is not named"
        assert all(one.value and one.expected and one.source and one.evidence for one in found)


def test_cache_errors_in_old_and_new_words():
    assert verdict_of(with_value(report(OLD), "Volatile: SRAM Uncorrectable", "1")) is Verdict.RESET
    assert verdict_of(with_value(report(NEW), "Volatile: SRAM Uncorrectable SEC-DED", "1")) is Verdict.RESET
    assert verdict_of(with_value(report(OLD), "Aggregate: SRAM Uncorrectable", "4")) is Verdict.HEALTHY
    assert verdict_of(with_value(report(OLD), "Aggregate: SRAM Uncorrectable", "5")) is Verdict.REPLACE
    one = with_value(report(NEW), "Aggregate: SRAM Uncorrectable Parity", "3")
    assert verdict_of(with_value(one, "Aggregate: SRAM Uncorrectable SEC-DED", "2")) is Verdict.REPLACE


@pytest.mark.parametrize(
    ("action", "verdict"), [("Reset", "reset"), ("Reboot", "replace"), ("Drain P2P", "drain"), ("??", "drain")]
)
def test_the_drivers_own_word(action, verdict):
    assert verdict_of(with_value(report(NEW), "GPU Recovery Action", action)) == verdict


def test_reset_required_counts_where_the_driver_still_says_it():
    assert verdict_of(with_value(report(OLD), "Reset Required", "Yes")) is Verdict.RESET
    assert verdict_of(with_value(report(OLD), "Drain and Reset Recommended", "Yes")) is Verdict.DRAIN


def test_heat_that_has_lowered_the_clocks_near_the_limit_drains():
    warm = with_value(report(), "SW Thermal Slowdown", "Active")
    assert verdict_of(with_value(warm, "GPU T.Limit Temp", "2 C")) is Verdict.DRAIN


def test_power_brakes_on_all_gpus_are_the_racks():
    one = with_value(report(), "HW Power Brake Slowdown", "Active", gpu=0)
    assert "rack" not in judge_gpus(read_query(one))[0].message
    both = judge_gpus(read_query(with_value(one, "HW Power Brake Slowdown", "Active", gpu=1)))
    assert all("all 2 GPUs" in found.message and "rack" in found.message for found in both)


def test_a_missing_gpu_is_said_before_anything_else_is_tried():
    found = judge_gpus(read_query(report(gpus=7)), expected_count=8, expected_source="the machine's row")
    assert worst(found) is Verdict.REPLACE and "7 GPUs, and there should be 8" in found[0].message
    assert worst(judge_gpus(read_query(report(gpus=8)), expected_count=8)) is Verdict.HEALTHY


def test_a_gpu_without_a_handle_is_missing():
    text = report() + "Unable to determine the device handle for GPU 0000:3B:00.0: Unknown Error\n"
    found = judge_gpus(read_query(text))
    assert worst(found) is Verdict.REPLACE and "0000:3B:00.0" in found[0].message


def test_processes_of_others_are_named_before_a_run():
    lines = "    Processes\n        Process ID               : 58130\n            Name                 : python\n"
    text = report(gpus=1).replace("    Processes                             : None\n", lines)
    assert verdict_of(text) is Verdict.HEALTHY
    (found,) = judge_gpus(read_query(text), idle=True)
    assert found.verdict is Verdict.NOTE and "process 58130 (python)" in found.message
    (found,) = judge_gpus(read_query(with_value(report(gpus=1), "Used", "20322 MiB")), idle=True)
    assert "a process that is not shown" in found.message


def test_only_parts_of_a_report_are_incomplete():
    text = report(gpus=1).replace("    Processes                             : None\n", "")
    assert verdict_of(text) is Verdict.INCOMPLETE


WHOLE = {driver: report(driver, gpus=3) for driver in (OLD, NEW)}


@settings(max_examples=150)
@given(st.sampled_from([OLD, NEW]), st.data())
def test_a_report_that_is_cut_is_never_healthy(driver, data):
    text = WHOLE[driver]
    end = data.draw(st.integers(0, len(text) - len(" None\n\n")))
    assert verdict_of(text[:end]) is not Verdict.HEALTHY


@settings(max_examples=150)
@given(st.data())
def test_a_report_that_lacks_a_piece_is_never_healthy(data):
    """A page that was lost in the middle: from inside one GPU's block to inside a later one's."""
    text = WHOLE[NEW]
    blocks = [text.index("GPU 00000000:19"), text.index("GPU 00000000:1A"), text.index("GPU 00000000:1B")]
    start = data.draw(st.integers(blocks[0], blocks[1] - 1))
    end = data.draw(st.integers(blocks[1] + 25, blocks[2]))
    assert verdict_of(text[:start] + text[end:]) is not Verdict.HEALTHY


@given(st.text(), st.integers(0, 4000))
def test_no_text_raises(text, at):
    judge_gpus(read_query(text))
    judge_gpus(read_query(WHOLE[NEW][:at] + text + WHOLE[NEW][at:]), idle=True)
    judge_gpus(read_csv(text))
    judge_gpus(read_csv(CSV[: at % len(CSV)] + text + CSV[at % len(CSV) :]))
    is_csv(text)


CSV = (
    "index, count, name, uuid, pci.bus_id, driver_version, ecc.errors.uncorrected.volatile.total, "
    "clocks_throttle_reasons.active, pcie.link.width.current, pcie.link.width.max, memory.used [MiB]\n"
    "0, 2, NVIDIA H100 80GB HBM3, GPU-0, 00000000:19:00.0, 535.161.08, 0, 0x0000000000000001, 16, 16, 551 MiB\n"
    "1, 2, NVIDIA H100 80GB HBM3, GPU-1, 00000000:3B:00.0, 535.161.08, 0, 0x0000000000000004, 16, 16, 551 MiB\n"
)


def test_csv():
    read = read_csv(CSV)
    assert is_csv(CSV) and read.count == 2 and read.driver == "535.161.08" and not read.missing
    assert read.gpus[1].address == "0000:3b:00.0" and read.gpus[1].clock_reasons is ClockReason.SW_POWER_CAP
    assert read.gpus[0].memory_used_bytes == 551 << 20
    assert worst(judge_gpus(read)) is Verdict.HEALTHY


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ("GPU-1, 00000000:3B:00.0, 535.161.08, 0", "GPU-1, 00000000:3B:00.0, 535.161.08, 2", "reset"),
        ("0x0000000000000004", "0x0000000000000048", "drain"),
        ("clocks_throttle_reasons.active", "clocks_event_reasons.active", "healthy"),
        ("16, 16, 551 MiB\n1", "8, 16, 551 MiB\n1", "drain"),
        ("GPU-1, ", "[GPU is lost], ", "reset"),
        (", count", ", counted", "incomplete"),
    ],
)
def test_csv_fields(old, new, verdict):
    assert old in CSV
    assert worst(judge_gpus(read_csv(CSV.replace(old, new)))) == verdict


def test_csv_of_remapped_rows():
    text = "gpu_bus_id, remapped_rows.failure, remapped_rows.pending\n00000000:19:00.0, No, Yes\n"
    assert is_csv(text) and worst(judge_gpus(read_csv(text), expected_count=1)) is Verdict.RESET


@given(st.integers(0, len(CSV) - 1))
def test_csv_that_is_cut_is_never_healthy(end):
    assert worst(judge_gpus(read_csv(CSV[:end]))) is not Verdict.HEALTHY


def test_csv_that_is_cut_between_two_gpus_needs_their_number():
    first = CSV[: CSV.index("\n1,") + 1]
    assert worst(judge_gpus(read_csv(first))) is Verdict.INCOMPLETE
    assert worst(judge_gpus(read_csv(first.replace("0, 2,", "0, 1,")))) is Verdict.HEALTHY


def test_one_judge_for_text_and_nvml():
    """What NVML's values say, the text of the same state says as well."""
    gpu = GpuReading(
        index=0, address="0000:19:00.0", name="NVIDIA H100 80GB HBM3", remap_pending=True, persistence=True
    )
    nvml = GpuReport(gpus=(gpu, replace(gpu, index=1, remap_pending=False)), source="NVML", count=2)
    from_text = judge_gpus(read_query(with_value(report(), "Remapped Rows: Pending", "Yes")))
    assert [(one.check, one.verdict, one.gpu, one.message) for one in judge_gpus(nvml)] == [
        (one.check, one.verdict, one.gpu, one.message) for one in from_text
    ]


def test_nothing_read_is_not_healthy():
    assert worst(judge_gpus(GpuReport(gpus=(), source="NVML", count=0))) is Verdict.INCOMPLETE


# ---------------------------------------------------------------- real captures


def test_recorded_consumer_gpus_are_healthy_and_in_use():
    read = read_query(capture(SMI_4090))
    assert not read.missing and len(read.gpus) == read.count == 8 and read.driver == "535.154.05"
    assert worst(judge_gpus(read, expected_count=8)) is Verdict.HEALTHY
    used = judge_gpus(read, idle=True)
    assert {found.check for found in used} == {"gpu.in_use"} and used[0].value == "58130"


def test_recorded_h100s_all_stand_under_the_power_brake():
    read = read_query(capture(SMI_H100))
    assert not read.missing and read.gpus[0].remap_banks["max"] == 2560 and read.gpus[0].ecc_uncorrected == 0
    found = judge_gpus(read)
    assert len(found) == 8 and {one.verdict for one in found} == {Verdict.DRAIN}
    assert all("rack" in one.message for one in found)


@pytest.mark.parametrize("name", [SMI_4090, SMI_H100])
def test_recorded_reports_that_are_cut(name):
    text = capture(name)
    last = text.rindex("Processes")
    for end in [*range(0, last, 397), last - 1, last + 3]:
        assert verdict_of(text[:end]) is not Verdict.HEALTHY, end


def test_a_rule_names_a_field_that_readings_have():
    known = {one.name for one in fields(GpuReading)}
    named = {rule.value for rule in _RULES if isinstance(rule.value, str)}
    assert named and named <= known
