"""Reports of the probe, whole and torn, and what is concluded from them."""

import shlex
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.core.typed_json import encode
from muster.health.hardware.readings import GpuReading, GpuReport
from muster.health.machine.fleet import commands, compare_hosts
from muster.health.machine.judge import floor_of, judge_machine, judge_speeds
from muster.health.machine.report import Disk, MachineReport, ProbeLine, Settings, Speed, is_probe, read_probe
from muster.health.verdicts import Finding, Verdict, exit_code, worst

SETTINGS = Settings(
    processors=208, memory_bytes=10**12, memory_available_bytes=9 * 10**11, shm_free_bytes=10**11, open_files=65536,
    locked_bytes=-1, clock_source="tsc", nvidia_devices=8,
)  # fmt: skip
GPUS = tuple(GpuReading(index=index, name="NVIDIA H100 80GB HBM3", vbios="96.00.61") for index in range(8))


def speeds(what="matmul", value=700.0, unit="TFLOP/s", **odd):
    """Eight GPUs alike; ``gpu3=...``: that one's value."""
    return tuple(
        Speed(what=what, device=f"GPU {gpu}", gpu=gpu, value=odd.get(f"gpu{gpu}", value), unit=unit, bits="aa")
        for gpu in range(8)
    )


def output(*, gpus=GPUS, driver="580.1", measured=(), settings=SETTINGS, disk=None) -> bytes:
    lines = [
        ProbeLine(rung="gpus", gpus=GpuReport(gpus=gpus, source="NVML", driver=driver, count=len(gpus))),
        ProbeLine(rung="settings", settings=settings),
        ProbeLine(rung="ports", ports={}),
        ProbeLine(rung="disk", disk=disk or Disk(folder="/scratch", free_bytes=10**12, write_bytes_per_s=2e9)),
        ProbeLine(rung="matmul", speeds=tuple(measured) or speeds()),
    ]
    begin = ProbeLine(rung="begin", plan=tuple(line.rung for line in lines))
    return b"".join(encode(line) + b"\n" for line in (begin, *lines, ProbeLine(rung="end")))


def judged(data: bytes, **expected):
    return judge_machine(read_probe(data, host="node-1"), **expected)


def grave(found):
    return [one for one in found if one.verdict not in (Verdict.HEALTHY, Verdict.NOTE)]


def test_a_sound_machine_is_healthy():
    found = judged(output(), gpus=8, source="a3-highgpu-8g")
    assert worst(found) is Verdict.HEALTHY and exit_code(found) == 0
    assert {one.host for one in found} == {"node-1"}
    assert is_probe(output())


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_torn_report_is_never_healthy(data):
    whole = output()
    torn = whole[: data.draw(st.integers(0, len(whole) - 2))]
    assert exit_code(judged(torn)) == 1
    found = judged(torn)
    assert all(one.verdict is Verdict.INCOMPLETE for one in grave(found)), "what is missing is no fault"


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_bytes_in_the_middle_raise_nothing(data):
    whole = bytearray(output())
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at : at + data.draw(st.integers(0, 40))] = data.draw(st.binary(max_size=20))
    assert judged(bytes(whole))


def test_a_rung_without_an_answer_is_incomplete():
    data = output().replace(encode(ProbeLine(rung="ports", ports={})), encode(ProbeLine(rung="ports", failed="hung")))
    assert [one.message for one in grave(judged(data))] == ["ports: nothing was learned: hung"]


@pytest.mark.parametrize(
    ("value", "verdict"),
    [(700, Verdict.HEALTHY), (665, Verdict.HEALTHY), (625, Verdict.NOTE), (555, Verdict.DRAIN), (0, Verdict.DRAIN)],
)
def test_a_slow_gpu_is_held_against_the_hosts_median(value, verdict):
    """Another GPU than the catalogue's: no floor, so the median alone decides."""
    gpus = tuple(replace(gpu, name="NVIDIA X1") for gpu in GPUS)
    found = [one for one in judged(output(gpus=gpus, measured=speeds(gpu3=value))) if one.check == "gpu.matmul"]
    assert [one.verdict for one in found] == [verdict]
    assert found[0].gpu == (3 if verdict is not Verdict.HEALTHY else 0) or verdict is Verdict.HEALTHY


def test_all_slow_together_are_below_the_floor():
    found = grave(judged(output(measured=speeds(value=600))))
    assert len(found) == 8 and {one.verdict for one in found} == {Verdict.DRAIN}
    assert "675" in found[0].expected and "2026" in found[0].source


def test_a_figure_at_the_floor_is_not_below_it():
    floor = floor_of("NVIDIA H100 80GB HBM3")
    assert floor is not None and not grave(judged(output(measured=speeds(value=floor.matmul_tflops))))
    assert floor_of("NVIDIA H100 PCIe") is None, "another card than the row's"


def test_the_gpu_with_other_bits_is_replaced():
    measured = [replace(one, bits="bb") if one.gpu == 5 else one for one in speeds()]
    (found,) = grave(judged(output(measured=measured)))
    assert (found.check, found.gpu, found.verdict) == ("gpu.bits", 5, Verdict.REPLACE)


def test_two_gpus_that_differ_name_neither():
    measured = [replace(one, bits=f"b{one.gpu}") for one in speeds()[:2]]
    (found,) = grave(judged(output(measured=measured)))
    assert (found.check, found.gpu, found.verdict) == ("gpu.bits", None, Verdict.DRAIN)


@pytest.mark.parametrize(
    ("words", "verdict"),
    [
        ("CUDA error: uncorrectable ECC error encountered", Verdict.DRAIN),
        ("CUDA error: unspecified launch failure", Verdict.DRAIN),
        ("CUDA out of memory.", Verdict.INCOMPLETE),
        ("CUDA error: no kernel image is available for execution on the device", Verdict.INCOMPLETE),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", Verdict.INCOMPLETE),
    ],
)
def test_a_gpu_that_fails_while_it_computes(words, verdict):
    measured = [replace(one, failed=words) if one.gpu == 2 else one for one in speeds()]
    (found,) = grave(judged(output(measured=measured)))
    assert (found.gpu, found.verdict) == (2, verdict)


@pytest.mark.parametrize(("expected", "on_bus"), [(8, 8), (8, 7)])
def test_seven_of_eight_gpus(expected, on_bus):
    found = judged(output(gpus=GPUS[:7], settings=replace(SETTINGS, nvidia_devices=on_bus)), gpus=expected)
    (one,) = grave(found)
    assert one.verdict is Verdict.REPLACE and "7" in one.message


def test_a_container_with_a_part_of_the_gpus_is_sound():
    """Its ``/sys`` shows the whole machine's bus."""
    found = judged(output(gpus=GPUS[:2], measured=[one for one in speeds() if one.gpu is None or one.gpu < 2]))
    assert not grave(found) and any("2 of the 8" in one.message for one in found)


def test_no_gpu_and_none_expected():
    line = ProbeLine(rung="gpus", gpus=GpuReport(gpus=GPUS, source="NVML", driver="580.1", count=8))
    without = output(settings=replace(SETTINGS, nvidia_devices=0)).replace(encode(line), encode(ProbeLine(rung="gpus")))
    found = judged(without)
    assert not grave(found) and any(one.message.startswith("no GPU here: processor") for one in found)
    assert worst(judged(without, gpus=8)) is Verdict.REPLACE, "the machine's row has eight"


def test_devices_on_the_bus_without_a_driver():
    line = ProbeLine(rung="gpus", gpus=GpuReport(gpus=GPUS, source="NVML", driver="580.1", count=8))
    without = output().replace(encode(line), encode(ProbeLine(rung="gpus")))
    assert worst(judged(without)) is Verdict.INCOMPLETE, "perhaps a container that was given none"
    assert worst(judged(without, gpus=8)) is Verdict.REPLACE


def test_settings_and_disks_cost_no_host():
    poor = replace(SETTINGS, open_files=256, locked_bytes=65536, clock_source="hpet", shm_free_bytes=64 << 20)
    found = judged(output(settings=poor, disk=Disk(folder="/", free_bytes=1, write_bytes_per_s=1e6)))
    assert not grave(found) and len([one for one in found if one.verdict is Verdict.NOTE]) == 4


def test_the_odd_host_is_named():
    reports = [read_probe(output(driver="580.1" if host != 2 else "570.9"), host=f"node-{host}") for host in range(4)]
    (found,) = compare_hosts(reports)
    assert (found.host, found.value, found.expected) == ("node-2", "570.9", "580.1")


def test_a_slow_host_among_others():
    reports = [
        read_probe(output(measured=speeds(value=900 if host else 700)), host=f"node-{host}") for host in range(4)
    ]
    (found,) = compare_hosts(reports)
    assert (found.host, found.verdict) == ("node-0", Verdict.DRAIN)


def test_two_hosts_that_differ_name_nobody():
    reports = [read_probe(output(driver=f"58{host}.1"), host=f"node-{host}") for host in range(2)]
    (found,) = compare_hosts(reports)
    assert found.host == "" and found.verdict is Verdict.NOTE


BROKEN = Finding(check="gpu.bits", verdict=Verdict.REPLACE, host="node-1", message="GPU 5 computes 'wrongly'; rm -rf /")


def test_commands_by_back_end():
    assert commands([BROKEN], backend="local") == {}
    words = shlex.split(commands([BROKEN], backend="slurm")["node-1"])
    assert words[:4] == ["scontrol", "update", "nodename=node-1", "state=drain"]
    assert words[4] == f"reason=muster: {BROKEN.message}" and len(words) == 5
    assert commands([BROKEN], backend="gke") == {"node-1": "kubectl cordon node-1"}
    assert commands([replace(BROKEN, verdict=Verdict.NOTE)], backend="slurm") == {}


def test_google_takes_reports_of_reserved_hosts_alone():
    text = commands([BROKEN], backend="gke", reserved=True, zone="us-central1-a")["node-1"]
    assert "report-host-as-faulty node-1 --zone us-central1-a" in text and "SILENT_DATA_CORRUPTION" in text
    assert shlex.split(text)[-1].endswith(f"description=muster: {BROKEN.message}")


def test_gpus_of_different_models_are_not_measured_against_each_other():
    pair = {0: "NVIDIA RTX A2000", 1: "NVIDIA RTX A2000", 2: "NVIDIA RTX A2000", 3: "NVIDIA RTX 6000"}
    gpus = tuple(GpuReading(index=index, name=name) for index, name in pair.items())
    measured = [
        Speed(what="matmul", device=f"GPU {index}", gpu=index, value=30.0 if index < 3 else 300.0, bits=name[-4:])
        for index, name in pair.items()
    ]
    lines = (
        ProbeLine(rung="gpus", gpus=GpuReport(gpus=gpus, source="NVML")),
        ProbeLine(rung="m", speeds=tuple(measured)),
    )
    found = judge_speeds(MachineReport(host="here", lines=lines))
    assert {one.verdict for one in found} == {Verdict.HEALTHY} and len(found) == 2
