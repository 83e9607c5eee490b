"""What a probe's report means: findings on one host.

The first rule for speeds is relative: a GPU against the median of its host, all measured together (some 5 % between
sound GPUs is normal: Stas Bekman, ml-engineering, read 2026-11-22). Absolute floors come second. Equal inputs must give
equal bits on GPUs of one kind: one that differs computes wrongly.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import median

from muster.catalog.devices import accelerator_of
from muster.catalog.rows import table, typed
from muster.health.hardware.driver_errors import judge_kernel_log
from muster.health.hardware.error_table import OwnNumbers
from muster.health.hardware.gpu_judge import judge_gpus
from muster.health.hardware.infiniband import judge_counters, judge_ports, read_sysfs
from muster.health.hardware.kernel_log import read_kernel_log
from muster.health.hardware.nvlink import judge_links, read_nvlink
from muster.health.machine.report import Disk, KernelLines, MachineReport, Settings, Speed
from muster.health.verdicts import Finding, Verdict

#: Shares below the median from which a device is suspected, and is faulty.
SUSPECT, FAULTY = 0.10, 0.20
#: Older errors in the kernel log are of another job, or the GPU's own readings show them.
RECENT_S = 3600.0
_NO_NUMBERS = OwnNumbers()
#: Fewer devices have no median to speak of.
FEWEST = 3
#: A speed of this many devices says which one computes wrongly.
_MAJORITY = 3
_RELATIVE = "compared with the others of the host, ml-engineering, 2026-11-22"
_SPARE_OPEN_FILES = 4096
_SPARE_SHM = 1 << 30
_SLOW_DISK = 100e6
_GOOD_CLOCKS = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page")
_WORDS = {
    "matmul": "matrix multiplication", "to_device": "copies to it", "from_device": "copies from it",
    "memory_copy": "memory", "all_reduce": "all_reduce", "loopback": "loopback",
}  # fmt: skip


def judge_machine(
    report: MachineReport,
    *,
    gpus: int | None = None,
    ports: int | None = None,
    port_gbps: int | None = None,
    source: str = "",
    idle: bool = True,
    own: OwnNumbers = _NO_NUMBERS,
) -> list[Finding]:
    """Findings on one host, never empty. ``gpus``, ``ports``: what its machine's row says; None: not known.

    ``idle``: nothing of ours runs there, so processes on the GPUs are another user's. ``own``: Xid numbers that the
    run file judges. A report with a hole has an INCOMPLETE finding: it is never healthy.
    """
    found = [_incomplete("probe", text) for text in report.missing]
    found += [
        _incomplete(line.rung, f"{line.rung}: nothing was learned: {line.failed}")
        for line in report.lines
        if line.failed
    ]
    found += _gpus(report, gpus, source, idle)
    for line in report.lines:
        if line.ports is not None and (line.ports or ports):
            found += judge_ports(read_sysfs(line.ports), expected=ports, rate=port_gbps, source=source)
        if len(line.counters) == 2:
            found += judge_counters(*line.counters, seconds=line.apart_s, idle=idle)
        if line.nvlink:
            found += _links(line.nvlink, report)
        if line.kernel_log is not None:
            found += _kernel_log(line.kernel_log, report, own)
        elif line.rung == "kernel_log" and line.note:
            found.append(_unread(line.note))
        if line.disk is not None:
            found += _disk(line.disk)
    if report.settings is not None:
        found += _settings(report.settings, needs_locked=any(line.ports for line in report.lines))
    found += judge_speeds(report)
    return [replace(one, host=one.host or report.host) for one in found]


def _incomplete(check: str, message: str) -> Finding:
    return Finding(check=f"machine.{check}", verdict=Verdict.INCOMPLETE, message=message)


def _gpus(report: MachineReport, expected: int | None, source: str, idle: bool) -> Iterator[Finding]:
    on_bus = report.settings.nvidia_devices if report.settings else 0
    seen = report.gpus
    if seen is not None:
        yield from judge_gpus(seen, expected_count=expected, expected_source=source, idle=idle)
        count = len(seen.gpus)
        if not seen.missing and count < on_bus:
            yield Finding(
                check="gpu.count", verdict=Verdict.NOTE, value=str(count), expected=str(on_bus), source="/sys/bus/pci",
                message=f"the driver shows {count} of the {on_bus} GPUs on the PCI bus: a container may have a part",
            )  # fmt: skip
    elif any(line.rung == "gpus" and not line.failed for line in report.lines):
        if expected:
            yield Finding(
                check="gpu.count", verdict=Verdict.REPLACE, value="0", expected=str(expected), source=source,
                message=f"no GPU answers, and the machine's row says {expected}", command="nvidia-smi",
            )  # fmt: skip
        elif on_bus:  # in a container too that folder shows all GPUs of the machine
            yield Finding(
                check="gpu.count", verdict=Verdict.INCOMPLETE, value="0", expected=str(on_bus), source="/sys/bus/pci",
                message=f"no GPU answers and {on_bus} are on the PCI bus: no driver, or none given to this container",
                command="nvidia-smi",
            )  # fmt: skip
        else:
            measured = {line.rung for line in report.lines if not line.failed}
            looked = [word for name, word in _LOOKED.items() if name in measured]
            yield Finding("gpu.count", Verdict.HEALTHY, f"no GPU here: {', '.join(looked)} looked at", value="0")


_LOOKED = {"matmul": "processor", "settings": "memory and limits", "disk": "disk", "loopback": "loopback"}


def _links(text: str, report: MachineReport) -> list[Finding]:
    """NVLink of the GPUs that are ours."""
    read = read_nvlink(text)
    if report.own is not None and report.gpus is not None:
        ours = {gpu.index for gpu in report.gpus.gpus}
        read = replace(read, gpus=tuple(one for one in read.gpus if one.gpu in ours))
    return judge_links(read)


def _kernel_log(lines: KernelLines, report: MachineReport, own: OwnNumbers) -> list[Finding]:
    """Errors of the last hour. What asks for a reset counts no more once the driver itself asks for none."""
    log = read_kernel_log(lines.text)
    if report.own is not None:
        log = replace(log, faults=tuple(one for one in log.faults if one.device in (*report.own, "")))
    gpus = report.gpus.gpus if report.gpus else ()
    numbers = {gpu.address: gpu.index for gpu in gpus if gpu.index is not None}
    whole = report.gpus is not None and not report.gpus.missing  # then an old mismatch of versions is resolved
    messages = tuple(one for one in log.messages if not (whole and "API mismatch" in one.text))
    log = replace(log, lines=max(1, lines.lines), cut=False, messages=messages)
    found = judge_kernel_log(log, gpus=numbers, own=own, not_before_s=lines.now_s - RECENT_S)
    content = {gpu.index for gpu in gpus if gpu.recovery_action == "None"}
    found = [_over(one) if one.verdict is Verdict.RESET and one.gpu in content else one for one in found]
    # A disk or a link may be a neighbour's on the same machine, which takes no host from this run.
    return [replace(one, verdict=Verdict.NOTE) if one.check in _OTHERS and one.verdict.faulty else one for one in found]


_OTHERS = ("host.disk", "net.link")


def _over(found: Finding) -> Finding:
    text = f"{found.message}; the driver asks for nothing now"
    return replace(found, verdict=Verdict.NOTE, message=text, command="")


def _unread(why: str) -> Finding:
    text = f"the kernel log is not readable here ({why}): an Xid of the last hour is not seen"
    return Finding(check="gpu.xid", verdict=Verdict.NOTE, message=text)


def _disk(disk: Disk) -> Iterator[Finding]:
    free = f"{disk.free_bytes / 1e9:,.1f} GB free in {disk.folder}"
    speed = disk.write_bytes_per_s
    written = "" if speed is None else f", written and synced at {speed / 1e6:,.0f} MB/s"
    slow = speed is not None and speed < _SLOW_DISK
    small = disk.free_bytes < _SPARE_SHM
    verdict = Verdict.NOTE if slow or small else Verdict.HEALTHY
    text = f"{free}{written}" + (": saves will be slow" if slow else "") + (": hardly room to save" if small else "")
    yield Finding(check="machine.disk", verdict=verdict, message=text, value=f"{(speed or 0) / 1e6:.0f} MB/s")


def _settings(found: Settings, *, needs_locked: bool) -> Iterator[Finding]:
    """Settings cost no host: they are said, with what changes them."""

    def note(message: str, value: object, expected: str, command: str = "") -> Finding:
        return Finding(
            check="machine.limits", verdict=Verdict.NOTE, message=message, value=str(value), expected=expected,
            command=command,
        )  # fmt: skip

    if needs_locked and found.locked_bytes not in (None, -1):
        text = f"only {(found.locked_bytes or 0) >> 10} KiB may be locked in memory: RDMA needs more"
        yield note(text, found.locked_bytes, "unlimited", "ulimit -l unlimited")
    if found.open_files is not None and 0 <= found.open_files < _SPARE_OPEN_FILES:
        text = f"a process may open {found.open_files} files only"
        yield note(text, found.open_files, f">= {_SPARE_OPEN_FILES}", f"ulimit -n {_SPARE_OPEN_FILES}")
    if found.shm_free_bytes is not None and found.shm_free_bytes < _SPARE_SHM:
        text = f"{found.shm_free_bytes >> 20} MiB free in /dev/shm: snapshots and loaders need it"
        yield note(text, found.shm_free_bytes, ">= 1 GiB", "mount -o remount,size=50% /dev/shm")
    if found.clock_source and found.clock_source not in _GOOD_CLOCKS:
        yield note(f"slow clock source {found.clock_source}", found.clock_source, "tsc or kvm-clock")
    gib = f"{found.memory_available_bytes / 2**30:,.1f} of {found.memory_bytes / 2**30:,.1f} GiB of memory free"
    available = str(found.memory_available_bytes)
    yield Finding("machine.memory", Verdict.HEALTHY, f"{found.processors} processors, {gib}", value=available)


# ------------------------------------------------------------ speeds and bits


def judge_speeds(report: MachineReport) -> list[Finding]:
    """The figures of the loaded part: each kind's devices of one model against each other, then against the floors."""
    kinds: dict[tuple[str, str], list[Speed]] = defaultdict(list)
    names = {gpu.index: gpu.name for gpu in report.gpus.gpus} if report.gpus else {}
    found: list[Finding] = []
    for speed in report.speeds:
        if speed.failed:
            found.append(_failed(speed))
        else:
            kinds[speed.what, names.get(speed.gpu, "") if speed.gpu is not None else ""].append(speed)
    for (what, _), speeds in kinds.items():
        here = [*_slower(speeds), *_below_floor(report, speeds), *_other_bits(speeds)]
        found += here or [_sound(what, speeds)]
    return found


#: Texts of CUDA and cuBLAS for a device that fails in a known good kernel (cudaGetErrorString).
_BROKEN = re.compile(
    r"uncorrectable|unspecified launch failure|hardware stack error|illegal (memory access|instruction|address)"
    r"|misaligned address|fallen off the bus|GPU is lost|contained error"
    r"|CUBLAS_STATUS_(INTERNAL_ERROR|EXECUTION_FAILED)",
    re.IGNORECASE,
)


def _failed(speed: Speed) -> Finding:
    """A device's own errors count against it; memory that others hold, a wrong build or a busy device do not."""
    broken = speed.gpu is not None and _BROKEN.search(speed.failed)
    verdict = Verdict.DRAIN if broken else Verdict.INCOMPLETE
    text = f"{speed.device}: {_WORDS.get(speed.what, speed.what)} failed: {speed.failed}"
    return Finding(check=f"gpu.{speed.what}", verdict=verdict, message=text, gpu=speed.gpu, evidence=speed.failed)


def _slower(speeds: Sequence[Speed]) -> Iterator[Finding]:
    if len(speeds) < FEWEST:
        return
    middle = median(speed.value for speed in speeds)
    for speed in speeds:
        lack = 1 - speed.value / middle if middle > 0 else 0.0
        if lack > SUSPECT:
            verdict = Verdict.DRAIN if lack > FAULTY else Verdict.NOTE
            text = f"{speed.device}: {_WORDS.get(speed.what, speed.what)} {lack:.0%} slower than the host's median"
            yield _of(speed, verdict, text, f"> {middle * (1 - SUSPECT):,.1f} {speed.unit}", _RELATIVE)


def _below_floor(report: MachineReport, speeds: Sequence[Speed]) -> Iterator[Finding]:
    names = {gpu.index: gpu.name for gpu in report.gpus.gpus} if report.gpus else {}
    for speed in speeds:
        floor = floor_of(names.get(speed.gpu, "")) if speed.gpu is not None else None
        least = floor.of(speed.what) if floor else None
        if floor is not None and least is not None and speed.value < least:
            text = f"{speed.device}: {_WORDS.get(speed.what, speed.what)} at {speed.value:,.1f} {speed.unit}"
            expected = f">= {least:,.0f} {speed.unit} for {floor.name}"
            yield _of(speed, Verdict.DRAIN, f"{text}, the floor is {least:,.0f}", expected, floor.source)


def _other_bits(speeds: Sequence[Speed]) -> Iterator[Finding]:
    digests = Counter(speed.bits for speed in speeds if speed.bits)
    if len(digests) < 2:
        return
    (common, most), *_ = digests.most_common()
    if most < _MAJORITY or 2 * most <= digests.total():
        devices = ", ".join(speed.device for speed in speeds if speed.bits)
        text = f"{devices} give different results of the same matrix product: at least one computes wrongly"
        yield Finding(check="gpu.bits", verdict=Verdict.DRAIN, message=text, expected="equal bits")
        return
    for speed in speeds:
        if speed.bits and speed.bits != common:
            text = f"{speed.device} computes wrongly: another result than {most} others for the same matrix product"
            yield replace(_of(speed, Verdict.REPLACE, text, common, "equal input, equal kernel"), check="gpu.bits")


def _of(speed: Speed, verdict: Verdict, message: str, expected: str, source: str) -> Finding:
    where = "gpu" if speed.gpu is not None else "machine"
    return Finding(
        check=f"{where}.{speed.what}", verdict=verdict, message=message, gpu=speed.gpu, expected=expected,
        value=f"{speed.value:,.1f} {speed.unit}", source=source,
    )  # fmt: skip


def _sound(what: str, speeds: Sequence[Speed]) -> Finding:
    slowest, fastest = min(speed.value for speed in speeds), max(speed.value for speed in speeds)
    unit = speeds[0].unit
    span = f"{slowest:,.1f}" if len(speeds) == 1 else f"{slowest:,.1f} to {fastest:,.1f}"
    equal = ", equal results" if any(speed.bits for speed in speeds) and len(speeds) > 1 else ""
    where = "gpu" if speeds[0].gpu is not None else "machine"
    text = f"{_WORDS.get(what, what)}: {span} {unit} ({speeds[0].device}{' and others' * (len(speeds) > 1)}){equal}"
    return Finding(check=f"{where}.{what}", verdict=Verdict.HEALTHY, message=text, value=f"{slowest:.1f} {unit}")


# ---------------- the least that a sound GPU does, from ``catalog/health/floors.yaml``


@dataclass(frozen=True, kw_only=True)
class Floor:
    """One accelerator's. None: no figure is known. ``source`` names where they are from, with the table's date."""

    name: str
    source: str
    matmul_tflops: float | None = None
    memory_gb_s: float | None = None
    to_device_gb_s: float | None = None

    def of(self, what: str) -> float | None:
        """The floor of a figure that the probe measured, in its unit."""
        return {
            "matmul": self.matmul_tflops,
            "memory_copy": self.memory_gb_s,
            "to_device": self.to_device_gb_s,
            "from_device": self.to_device_gb_s,
        }.get(what)


def floor_of(device_name: str) -> Floor | None:
    """Of a driver's name of a GPU; None for one that the catalogue has no floor for."""
    row = accelerator_of(device_name)
    return _floors().get(row.name) if row else None


@cache
def _floors() -> dict[str, Floor]:
    found = table("floors.yaml", "health")
    rows = {name: {**row, "source": f"{row['source']}, {found['date']}"} for name, row in found["floors"].items()}
    return typed(Floor, rows)
