"""What the probe saw of one host: its output, JSON lines, as one value. A line that is missing is said to be.

The first line is the plan, then comes a line for each measurement as it ends, then the end. So missing lines show
that a probe was killed or its output cut.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from muster.core.typed_json import Count, Name, Record, Seconds, Unreadable, decode
from muster.health.hardware.readings import GpuReport

BEGIN, END = "begin", "end"


@dataclass(frozen=True, kw_only=True)
class Settings(Record):
    """What the machine and its limits are. None: not known here."""

    processors: Count
    memory_bytes: Count
    memory_available_bytes: Count
    shm_free_bytes: Count | None = None
    open_files: int | None = None
    """The limit; -1: none."""
    locked_bytes: int | None = None
    """Memory that may be locked (RDMA needs it); -1: no limit."""
    clock_source: str = ""
    nvidia_devices: Count = 0
    """GPUs of NVIDIA on the PCI bus, counted without the driver."""


@dataclass(frozen=True, kw_only=True)
class Disk(Record):
    """A folder written to, and synced."""

    folder: str
    free_bytes: Count
    write_bytes_per_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class KernelLines(Record):
    """What the kernel log says of the driver."""

    source: Name
    lines: Count
    """Of the whole log."""
    text: str = ""
    """The driver's lines."""
    now_s: Seconds
    """The log's clock when it was read."""


@dataclass(frozen=True, kw_only=True)
class Speed(Record):
    """One figure of one device."""

    what: Name
    """``matmul``, ``to_device``, ``from_device``, ``memory_copy``, ``all_reduce``, ``loopback``."""
    device: Name
    gpu: int | None = None
    """None: the processor, or all GPUs together."""
    value: float = 0.0
    unit: str = ""
    bits: str = ""
    """Digest of the result of a fixed input, where there is one."""
    failed: str = ""
    """What went wrong on this device; empty: nothing."""


@dataclass(frozen=True, kw_only=True)
class ProbeLine(Record):
    """One line of the probe's output."""

    rung: Name
    seconds: Seconds = 0.0
    failed: str = ""
    """Why nothing was learned; empty: something was."""
    plan: tuple[str, ...] = ()
    gpus: GpuReport | None = None
    settings: Settings | None = None
    ports: Mapping[str, str] | None = None
    """Files of ``/sys/class/infiniband``, by path."""
    counters: tuple[Mapping[str, str], ...] = ()
    """Two readings of the ports' counters of errors, by path, ``apart_s`` apart; nothing where there are none."""
    apart_s: Seconds = 0.0
    disk: Disk | None = None
    nvlink: str | None = None
    """``nvidia-smi nvlink --status``; empty: these GPUs have none."""
    kernel_log: KernelLines | None = None
    speeds: tuple[Speed, ...] = ()
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class MachineReport:
    """All that one probe said."""

    host: str
    lines: tuple[ProbeLine, ...]
    """Of its measurements, in order."""
    own: Collection[str] | None = None
    """PCI addresses of the GPUs that are ours; None: all."""
    missing: tuple[str, ...] = ()
    """What was to be there and is not, in words; nothing: the report is whole."""

    @property
    def settings(self) -> Settings | None:
        return next((line.settings for line in self.lines if line.settings), None)

    @property
    def gpus(self) -> GpuReport | None:
        return next((line.gpus for line in self.lines if line.gpus), None)

    @property
    def speeds(self) -> tuple[Speed, ...]:
        return tuple(speed for line in self.lines for speed in line.speeds)


def read_probe(output: bytes, *, host: str) -> MachineReport:
    """The probe's output, whole or cut anywhere. Never raises."""
    lines: list[ProbeLine] = []
    missing: list[str] = []
    for number, raw in enumerate(output.split(b"\n"), 1):
        if not raw.strip():
            continue
        try:
            lines.append(decode(ProbeLine, raw))
        except Unreadable as error:
            missing.append(f"line {number} of the probe cannot be read: {error}")
    plan = next((line.plan for line in lines if line.rung == BEGIN), None)
    measured = {line.rung: line for line in lines if line.rung not in (BEGIN, END)}
    if plan is None:
        missing.append("the probe's output has no beginning")
    missing += [f"{name}: the probe ended before it" for name in plan or () if name not in measured]
    if all(line.rung != END for line in lines):
        missing.append("the probe's output has no end")
    return MachineReport(host=host, lines=tuple(measured.values()), missing=tuple(missing))


def of_own_gpus(report: MachineReport, own: Collection[str] | None) -> MachineReport:
    """Without the GPUs that others use. ``own``: PCI addresses; None: all are ours."""
    if own is None or report.gpus is None:
        return replace(report, own=own)
    kept = tuple(gpu for gpu in report.gpus.gpus if gpu.address in own)
    gpus = replace(report.gpus, gpus=kept, count=None if report.gpus.count is None else len(own), unreachable=())
    lines = tuple(replace(line, gpus=gpus) if line.gpus else line for line in report.lines)
    return replace(report, lines=lines, own=own)


def is_probe(content: bytes) -> bool:
    """Whether this is a probe's output, as ``muster check --raw`` writes it."""
    first = content.lstrip().split(b"\n", 1)[0]
    return first.startswith(b'{"rung":"begin"')
