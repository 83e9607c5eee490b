"""What ``muster.probe`` writes of GPUs, as its own types encode it."""

from muster.core.typed_json import encode
from muster.health.hardware.readings import ClockReason, GpuReading, GpuReport
from muster.health.machine.report import BEGIN, END, ProbeLine


def gpu(index, *, clock_reasons=0x1, **more):
    address = f"0000:{16 * index + 11:02x}:00.0"
    reasons = ClockReason(clock_reasons)
    return GpuReading(index=index, address=address, name="NVIDIA H100 80GB HBM3", clock_reasons=reasons, **more)


SOUND = tuple(gpu(index) for index in range(8))


def output(*gpus):
    """Whole. The GPUs given stand in the places of sound ones; with none of them at all, a machine without GPUs."""
    by_index = {one.index: one for one in (*SOUND, *gpus)} if gpus else {}
    report = GpuReport(gpus=tuple(by_index.values()), source="NVML", driver="580.65.06", count=len(by_index))
    lines = (
        ProbeLine(rung=BEGIN, plan=("gpus",)), ProbeLine(rung="gpus", gpus=report if gpus else None),
        ProbeLine(rung=END),
    )  # fmt: skip
    return "".join(encode(line).decode() + "\n" for line in lines)
