"""What readings of GPUs mean. Rules by field, each with its source; one judge for NVML and for ``nvidia-smi``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from muster.health.hardware.driver_errors import recovery_action
from muster.health.hardware.readings import ClockReason, GpuReading, GpuReport
from muster.health.verdicts import Finding, Verdict

_FIELDS = "nvidia-smi(1), NVIDIA GPU memory error management"
_GPUD = "leptonai/gpud at 4a8de33, 2026-08"
_GCM = "facebookresearch/gcm at 1b7bde9, 2025-12"
#: A lifetime count of uncorrectable cache errors from which the GPU counts as defective: Stas Bekman, ml-engineering
#: (accelerators, nvidia debug, read 2026-11-22).
SRAM_DEFECTIVE = 5
#: More retired pages than this: drain (gcm check_nvidia_smi, default).
RETIRED_PAGES = 10
#: Degrees below the slowdown temperature from which it is said.
NEAR_SLOWDOWN_C = 5
#: What the driver itself takes; with more and no process shown, somebody else's container holds the GPU.
DRIVER_BYTES = 1 << 30
#: Fields that every GPU has: without one of them the driver has lost the GPU. Others are shown and ignored.
_VITAL = ("uuid", "power", "fan", "temp", "pci", "bus", "memory", "clocks", "performance state", "pstate")


def judge_gpus(
    report: GpuReport,
    *,
    host: str = "",
    expected_count: int | None = None,
    expected_source: str = "",
    under_load: bool = False,
    idle: bool = False,
) -> list[Finding]:
    """Findings on every GPU and on the report; a HEALTHY one alone where nothing was found.

    ``under_load``: the GPUs compute, so a slow PCIe generation means something (it drops when they idle). ``idle``:
    nothing of ours runs yet, so processes on the GPUs are somebody else's.
    """
    rules = [_lost, _memory, _rows, _recovery, _clocks, _pcie, _settings, _fabric]
    findings = [found for gpu in report.gpus for rule in rules for found in rule(gpu)]
    if under_load:
        findings += [found for gpu in report.gpus for found in _pcie_generation(gpu)]
    if idle:
        findings += [found for gpu in report.gpus for found in _in_use(gpu)]
    findings = [_of_all(found, report) for found in findings]
    findings += _count(report, expected_count, expected_source)
    if not findings:
        names = ", ".join(sorted({gpu.name for gpu in report.gpus if gpu.name})) or "GPU"
        text = f"{len(report.gpus)} x {names}" + (f", driver {report.driver}" if report.driver else "")
        value = str(len(report.gpus))
        findings = [Finding(check="gpu", verdict=Verdict.HEALTHY, message=f"{text}: nothing found", value=value)]
    return [_at(found, host) for found in findings]


def _at(found: Finding, host: str) -> Finding:
    return replace(found, host=host) if host else found


def _of_all(found: Finding, report: GpuReport) -> Finding:
    """Power brakes on every GPU are the rack's power, not a GPU's."""
    braked = [gpu for gpu in report.gpus if gpu.clock_reasons and ClockReason.HW_POWER_BRAKE & gpu.clock_reasons]
    if found.check == "gpu.power" and len(report.gpus) > 1 and len(braked) == len(report.gpus):
        return replace(found, message=f"{found.message}; so on all {len(braked)} GPUs: the rack's power supply")
    return found


def _count(report: GpuReport, expected: int | None, source: str) -> Iterator[Finding]:
    for name in report.unreachable:
        yield Finding(
            check="gpu.count", verdict=Verdict.REPLACE, message=f"the driver has no handle for GPU {name}",
            evidence=f"Unable to determine the device handle for GPU {name}", source=_FIELDS,
        )  # fmt: skip
    there = len(report.gpus)
    if report.missing:
        message = f"{report.source}: {report.missing}"
        yield Finding(check="gpu.report", verdict=Verdict.INCOMPLETE, message=message, value=str(there))
    elif expected is not None and there != expected:
        verdict = Verdict.REPLACE if there < expected else Verdict.NOTE
        message = f"{there} GPUs, and there should be {expected}"
        yield Finding(
            check="gpu.count", verdict=verdict, message=message, value=str(there), expected=str(expected), source=source
        )
    elif expected is None and report.count is None:
        message = f"{report.source} does not say how many GPUs there should be: ask for the column count, too"
        yield Finding(check="gpu.report", verdict=Verdict.INCOMPLETE, message=message, value=str(there))
    elif not there:
        yield Finding(check="gpu.count", verdict=Verdict.INCOMPLETE, message="no GPU in the report", value="0")


def _found(
    gpu: GpuReading, check: str, verdict: Verdict, what: str, value: object, expected: str, source: str = _FIELDS,
    command: str = "",
) -> Finding:  # fmt: skip
    name = f"GPU {gpu.index}" if gpu.index is not None else f"GPU {gpu.address or gpu.uuid}"
    if verdict is Verdict.RESET and not command and gpu.index is not None:
        command = f"nvidia-smi --gpu-reset -i {gpu.index}"
    return Finding(
        check=check, verdict=verdict, message=f"{name}: {what}", gpu=gpu.index, value=str(value), expected=expected,
        evidence=f"{gpu.address or gpu.uuid}: {value}", source=source, command=command,
    )  # fmt: skip


def _lost(gpu: GpuReading) -> Iterator[Finding]:
    for name in gpu.lost_fields:
        vital = any(part in name.lower() for part in _VITAL)
        verdict = Verdict.RESET if vital else Verdict.NOTE
        yield _found(
            gpu, "gpu.lost", verdict, f"the driver cannot read {name}", "error", "a value", "check of nvidia-smi"
        )


def _memory(gpu: GpuReading) -> Iterator[Finding]:
    if gpu.ecc_uncorrected:
        what = f"{gpu.ecc_uncorrected} uncorrectable memory errors since the driver was loaded"
        yield _found(gpu, "gpu.ecc", Verdict.RESET, what, gpu.ecc_uncorrected, "0")
    if gpu.sram_threshold_exceeded:
        what = "the threshold of uncorrectable cache errors is exceeded"
        yield _found(gpu, "gpu.sram", Verdict.REPLACE, what, "Yes", "No")
    elif (gpu.sram_uncorrected_aggregate or 0) >= SRAM_DEFECTIVE:
        what = f"{gpu.sram_uncorrected_aggregate} uncorrectable cache errors over its life"
        source = "ml-engineering, read 2026-11-22"
        yield _found(
            gpu, "gpu.sram", Verdict.REPLACE, what, gpu.sram_uncorrected_aggregate, f"< {SRAM_DEFECTIVE}", source
        )
    if gpu.unrepairable:
        yield _found(gpu, "gpu.memory", Verdict.REPLACE, "its memory cannot be repaired", "Yes", "No")
    if gpu.repair_pending:
        yield _found(gpu, "gpu.memory", Verdict.RESET, "a repair waits for a reset", "Yes", "No")
    if gpu.retired_pages_pending:
        yield _found(gpu, "gpu.pages", Verdict.RESET, "a page's retirement waits for a reset", "Yes", "No")
    if (gpu.retired_pages or 0) > RETIRED_PAGES:
        what = f"{gpu.retired_pages} retired pages"
        yield _found(gpu, "gpu.pages", Verdict.DRAIN, what, gpu.retired_pages, f"<= {RETIRED_PAGES}", _GCM)


def _rows(gpu: GpuReading) -> Iterator[Finding]:
    if gpu.remap_failed:
        yield _found(gpu, "gpu.rows", Verdict.REPLACE, "a memory row could not be remapped", "Yes", "No")
    if gpu.remap_pending:
        yield _found(gpu, "gpu.rows", Verdict.RESET, "a remapped memory row waits for a reset", "Yes", "No")
    for level, verdict in (("none", Verdict.REPLACE), ("low", Verdict.DRAIN)):
        if gpu.remap_banks.get(level):
            what = f"{gpu.remap_banks[level]} memory banks have {'no' if level == 'none' else 'few'} spare rows left"
            yield _found(gpu, "gpu.rows", verdict, what, gpu.remap_banks[level], "0")
            return


def _recovery(gpu: GpuReading) -> Iterator[Finding]:
    action = recovery_action(gpu.recovery_action) if gpu.recovery_action else Verdict.HEALTHY
    if action is None:
        action = Verdict.DRAIN
    if action is not Verdict.HEALTHY:
        what = f"the driver asks for: {gpu.recovery_action}"
        yield _found(gpu, "gpu.recovery", action, what, gpu.recovery_action, "None", "GPU Recovery Action, driver 570")
    elif gpu.reset_required:
        yield _found(gpu, "gpu.recovery", Verdict.RESET, "the driver asks for a reset", "Yes", "No")
    elif gpu.drain_recommended:
        yield _found(gpu, "gpu.recovery", Verdict.DRAIN, "the driver recommends to drain it", "Yes", "No")


def _clocks(gpu: GpuReading) -> Iterator[Finding]:
    reasons = gpu.clock_reasons or ClockReason(0)
    if reasons & ClockReason.HW_POWER_BRAKE:
        what = "slowed down by the power brake"
        yield _found(gpu, "gpu.power", Verdict.DRAIN, what, "HW Power Brake", "not active", _GPUD)
    if reasons & ClockReason.HW_THERMAL:
        what = f"slowed down by heat{_degrees(gpu)}"
        yield _found(gpu, "gpu.heat", Verdict.DRAIN, what, "HW Thermal", "not active", _GPUD)
    elif reasons & ClockReason.HW_SLOWDOWN and not reasons & ClockReason.HW_POWER_BRAKE:
        what = "slowed down by its hardware"
        yield _found(gpu, "gpu.clocks", Verdict.DRAIN, what, "HW Slowdown", "not active", _GPUD)
    near = gpu.margin_c is not None and gpu.margin_c <= NEAR_SLOWDOWN_C
    if gpu.temperature_c is not None and gpu.slowdown_c is not None:
        near |= gpu.temperature_c >= gpu.slowdown_c - NEAR_SLOWDOWN_C
    warm = bool(reasons & ClockReason.SW_THERMAL)
    if (near or warm) and not reasons & ClockReason.HW_THERMAL:
        what = (
            f"clocks lowered because of heat{_degrees(gpu)}"
            if warm
            else f"near its slowdown temperature{_degrees(gpu)}"
        )
        limit = (
            f"< {gpu.slowdown_c - NEAR_SLOWDOWN_C} C" if gpu.slowdown_c is not None else f"> {NEAR_SLOWDOWN_C} C left"
        )
        yield _found(
            gpu, "gpu.heat", Verdict.DRAIN if near and warm else Verdict.NOTE, what, gpu.temperature_c, limit, _GPUD
        )


def _degrees(gpu: GpuReading) -> str:
    return "" if gpu.temperature_c is None else f" ({gpu.temperature_c} C)"


def _pcie(gpu: GpuReading) -> Iterator[Finding]:
    if gpu.pcie_width and gpu.pcie_width_max and gpu.pcie_width < gpu.pcie_width_max:
        what = f"PCIe link of {gpu.pcie_width} lanes, and {gpu.pcie_width_max} are possible"
        yield _found(gpu, "gpu.pcie", Verdict.DRAIN, what, gpu.pcie_width, str(gpu.pcie_width_max))


def _pcie_generation(gpu: GpuReading) -> Iterator[Finding]:
    if gpu.pcie_generation and gpu.pcie_generation_max and gpu.pcie_generation < gpu.pcie_generation_max:
        what = f"PCIe generation {gpu.pcie_generation} under load, and {gpu.pcie_generation_max} is possible"
        yield _found(gpu, "gpu.pcie", Verdict.DRAIN, what, gpu.pcie_generation, str(gpu.pcie_generation_max))


def _settings(gpu: GpuReading) -> Iterator[Finding]:
    which = f" -i {gpu.index}" if gpu.index is not None else ""
    if gpu.persistence is False:
        command = f"nvidia-smi -pm 1{which}"
        what = "persistence mode is off: each start takes seconds longer"
        yield _found(gpu, "gpu.persistence", Verdict.NOTE, what, "Disabled", "Enabled", command=command)
    if gpu.mig:
        what, command = (
            "it is cut into instances (MIG), which training cannot use together",
            f"nvidia-smi -mig 0{which}",
        )
        yield _found(gpu, "gpu.mig", Verdict.DRAIN, what, "Enabled", "Disabled", command=command)
    if gpu.compute_mode and gpu.compute_mode != "Default":
        what = f"compute mode {gpu.compute_mode}: warm standbys cannot share the GPU"
        command = f"nvidia-smi -c DEFAULT{which}"
        yield _found(gpu, "gpu.compute_mode", Verdict.DRAIN, what, gpu.compute_mode, "Default", command=command)


def _fabric(gpu: GpuReading) -> Iterator[Finding]:
    """Of GPUs behind NVSwitch. Without it, CUDA answers error 802, "system not yet initialized"."""
    ready = gpu.fabric_state in ("", "Completed") and gpu.fabric_status in ("", "Success")
    if not ready:
        value = f"{gpu.fabric_state}/{gpu.fabric_status}"
        what = f"it has not joined the NVLink fabric ({value})"
        source = "nvidia-smi(1), Fabric; NVIDIA Fabric Manager user guide"
        command = "systemctl restart nvidia-fabricmanager"
        yield _found(gpu, "gpu.fabric", Verdict.DRAIN, what, value, "Completed/Success", source, command)


def _in_use(gpu: GpuReading) -> Iterator[Finding]:
    for pid, name in gpu.processes:
        what = f"process {pid}{' (' + name + ')' if name else ''} uses it"
        yield _found(gpu, "gpu.in_use", Verdict.NOTE, what, pid, "none", command=f"ps -fp {pid}")
    if not gpu.processes and (gpu.memory_used_bytes or 0) > DRIVER_BYTES:
        used = f"{(gpu.memory_used_bytes or 0) / (1 << 30):.1f} GiB"
        what = f"{used} of its memory are in use, by a process that is not shown"
        yield _found(gpu, "gpu.in_use", Verdict.NOTE, what, used, "< 1 GiB")
