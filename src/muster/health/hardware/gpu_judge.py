"""What readings of GPUs mean: one table of rules, each with its source; the same for NVML and for ``nvidia-smi``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from muster.health.hardware.driver_errors import recovery_action
from muster.health.hardware.readings import ClockReason, GpuReading, GpuReport
from muster.health.verdicts import Finding, Verdict

_SMI = "nvidia-smi(1), NVIDIA GPU memory error management"
_GPUD = "leptonai/gpud at 4a8de33, 2026-08"
_GCM = "facebookresearch/gcm at 1b7bde9, 2025-12"
_FABRIC = "nvidia-smi(1), Fabric; NVIDIA Fabric Manager user guide"
#: A lifetime count of uncorrectable cache errors from which the GPU counts as defective: Stas Bekman, ml-engineering
#: (accelerators, nvidia debug, read 2026-11-22).
SRAM_DEFECTIVE = 5
#: More retired pages than this: drain (gcm check_nvidia_smi, default).
RETIRED_PAGES = 10
#: Degrees below the slowdown temperature from which it is said.
NEAR_SLOWDOWN_C = 5
#: What the driver itself takes; with more and no process shown, another container holds the GPU.
DRIVER_BYTES = 1 << 30
#: Fields that every GPU has: without one of them the driver has lost the GPU. Others are shown and ignored.
_VITAL = ("uuid", "power", "fan", "temp", "pci", "bus", "memory", "clocks", "pstate", "performance")
#: The driver's library and module differ, the driver does not answer, or no GPU does: in what people send. A machine
#: that is looked at may have the tool and no GPU.
_REFUSED = re.compile(r"version mismatch|couldn't communicate|No devices were found")


@dataclass(frozen=True)
class _Rule:
    """``value`` of a reading, or a reading's field: None, False or 0 where the GPU is as it should be. ``{v}`` in the
    texts stands for it."""

    check: str
    verdict: Verdict
    value: str | Callable[[GpuReading], object]
    what: str
    expected: str = "No"
    source: str = _SMI
    command: str = ""
    """``{i}`` stands for the GPU's number."""


def _reason(gpu: GpuReading, reason: ClockReason) -> bool:
    return bool((gpu.clock_reasons or ClockReason(0)) & reason)


def _slowdown(gpu: GpuReading) -> bool:
    """By its hardware, and neither for heat nor for power."""
    explained = _reason(gpu, ClockReason.HW_THERMAL) or _reason(gpu, ClockReason.HW_POWER_BRAKE)
    return _reason(gpu, ClockReason.HW_SLOWDOWN) and not explained


def _asked(gpu: GpuReading, verdict: Verdict) -> str:
    """An action that is not known drains."""
    asks = recovery_action(gpu.recovery_action) if gpu.recovery_action else Verdict.HEALTHY
    return gpu.recovery_action if (asks or Verdict.DRAIN) is verdict else ""


def _fabric(gpu: GpuReading) -> str:
    ready = gpu.fabric_state in ("", "Completed") and gpu.fabric_status in ("", "Success")
    return "" if ready else f"{gpu.fabric_state}/{gpu.fabric_status}"


def _content(gpu: GpuReading) -> bool:
    """The driver asks for nothing."""
    return not gpu.recovery_action or recovery_action(gpu.recovery_action) is Verdict.HEALTHY


_ACTION, _ASKS = "GPU Recovery Action, driver 570", "the driver asks for: {v}"
_RULES = (
    _Rule("gpu.ecc", Verdict.RESET, "ecc_uncorrected",
          "{v} uncorrectable memory errors since the driver was loaded", "0"),
    _Rule("gpu.sram", Verdict.REPLACE, "sram_threshold_exceeded",
          "the threshold of uncorrectable cache errors is exceeded"),
    _Rule("gpu.sram", Verdict.REPLACE, lambda gpu: not gpu.sram_threshold_exceeded
          and (gpu.sram_uncorrected_aggregate or 0) >= SRAM_DEFECTIVE and gpu.sram_uncorrected_aggregate,
          "{v} uncorrectable cache errors over its life", f"< {SRAM_DEFECTIVE}", "ml-engineering, read 2026-11-22"),
    _Rule("gpu.memory", Verdict.REPLACE, "unrepairable", "its memory cannot be repaired"),
    _Rule("gpu.memory", Verdict.RESET, "repair_pending", "a repair waits for a reset"),
    _Rule("gpu.pages", Verdict.RESET, "retired_pages_pending", "a page's retirement waits for a reset"),
    _Rule("gpu.pages", Verdict.DRAIN, lambda gpu: (gpu.retired_pages or 0) > RETIRED_PAGES and gpu.retired_pages,
          "{v} retired pages", f"<= {RETIRED_PAGES}", _GCM),
    _Rule("gpu.rows", Verdict.REPLACE, "remap_failed", "a memory row could not be remapped"),
    _Rule("gpu.rows", Verdict.RESET, "remap_pending", "a remapped memory row waits for a reset"),
    _Rule("gpu.rows", Verdict.REPLACE, lambda gpu: gpu.remap_banks.get("none"),
          "{v} memory banks have no spare rows left", "0"),
    _Rule("gpu.rows", Verdict.DRAIN, lambda gpu: not gpu.remap_banks.get("none") and gpu.remap_banks.get("low"),
          "{v} memory banks have few spare rows left", "0"),
    _Rule("gpu.recovery", Verdict.RESET, lambda gpu: _asked(gpu, Verdict.RESET), _ASKS, "None", _ACTION),
    _Rule("gpu.recovery", Verdict.DRAIN, lambda gpu: _asked(gpu, Verdict.DRAIN), _ASKS, "None", _ACTION),
    _Rule("gpu.recovery", Verdict.REPLACE, lambda gpu: _asked(gpu, Verdict.REPLACE), _ASKS, "None", _ACTION),
    _Rule("gpu.recovery", Verdict.RESET, lambda gpu: _content(gpu) and gpu.reset_required,
          "the driver asks for a reset"),
    _Rule("gpu.recovery", Verdict.DRAIN, lambda gpu: _content(gpu) and not gpu.reset_required and gpu.drain_recommended,
          "the driver recommends to drain it"),
    _Rule("gpu.power", Verdict.DRAIN, lambda gpu: _reason(gpu, ClockReason.HW_POWER_BRAKE),
          "slowed down by the power brake", "not active", _GPUD),
    _Rule("gpu.heat", Verdict.DRAIN, lambda gpu: _reason(gpu, ClockReason.HW_THERMAL), "slowed down by heat{d}",
          "not active", _GPUD),
    _Rule("gpu.clocks", Verdict.DRAIN, _slowdown, "slowed down by its hardware", "not active", _GPUD),
    _Rule("gpu.pcie", Verdict.DRAIN, lambda gpu: (gpu.pcie_width or 99) < (gpu.pcie_width_max or 0)
          and f"{gpu.pcie_width} of {gpu.pcie_width_max}", "PCIe link of {v} lanes", "all"),
    _Rule("gpu.persistence", Verdict.NOTE, lambda gpu: gpu.persistence is False,
          "persistence mode is off: each start takes seconds longer", "Enabled", command="nvidia-smi -pm 1{i}"),
    _Rule("gpu.mig", Verdict.DRAIN, "mig",
          "it is cut into instances (MIG), which training cannot use together", "Disabled",
          command="nvidia-smi -mig 0{i}"),
    _Rule("gpu.compute_mode", Verdict.DRAIN, lambda gpu: gpu.compute_mode != "Default" and gpu.compute_mode,
          "compute mode {v}: warm standbys cannot share the GPU", "Default", command="nvidia-smi -c DEFAULT{i}"),
    # Without it, CUDA answers error 802, "system not yet initialized".
    _Rule("gpu.fabric", Verdict.DRAIN, _fabric, "it has not joined the NVLink fabric ({v})", "Completed/Success",
          _FABRIC, "systemctl restart nvidia-fabricmanager"),
)  # fmt: skip


def judge_gpus(
    report: GpuReport, *, expected_count: int | None = None, expected_source: str = "", idle: bool = False
) -> list[Finding]:
    """Findings on every GPU and on the report; a HEALTHY one alone where nothing was found.

    ``idle``: nothing of ours runs yet, so processes on the GPUs are another's.
    """
    findings = [found for gpu in report.gpus for found in _judge(gpu)]
    if idle:
        findings += [found for gpu in report.gpus for found in _in_use(gpu)]
    findings = [_of_all(found, report) for found in findings]
    findings += _count(report, expected_count, expected_source)
    if not findings:
        names = ", ".join(sorted({gpu.name for gpu in report.gpus if gpu.name})) or "GPU"
        text = f"{len(report.gpus)} x {names}" + (f", driver {report.driver}" if report.driver else "")
        value = str(len(report.gpus))
        findings = [Finding(check="gpu", verdict=Verdict.HEALTHY, message=f"{text}: nothing found", value=value)]
    return findings


def _judge(gpu: GpuReading) -> Iterator[Finding]:
    for name in gpu.lost_fields:
        verdict = Verdict.RESET if any(part in name.lower() for part in _VITAL) else Verdict.NOTE
        yield _found(
            gpu,
            _Rule("gpu.lost", verdict, bool, f"the driver cannot read {name.replace('_', ' ')}", "a value"),
            "error",
        )
    for rule in _RULES:
        if value := getattr(gpu, rule.value) if isinstance(rule.value, str) else rule.value(gpu):
            yield _found(gpu, rule, value)
    yield from _heat(gpu)


def _found(gpu: GpuReading, rule: _Rule, value: object) -> Finding:
    name = f"GPU {gpu.index}" if gpu.index is not None else f"GPU {gpu.address or gpu.uuid}"
    degrees = "" if gpu.temperature_c is None else f" ({gpu.temperature_c} C)"
    which = f" -i {gpu.index}" if gpu.index is not None else ""
    command = rule.command.replace("{i}", which)
    if rule.verdict is Verdict.RESET and which:
        command = f"nvidia-smi --gpu-reset{which}"
    shown = "Yes" if value is True else str(value)
    return Finding(
        check=rule.check, verdict=rule.verdict, gpu=gpu.index, value=shown, expected=rule.expected, source=rule.source,
        message=f"{name}: {rule.what.replace('{v}', shown).replace('{d}', degrees)}", command=command,
        evidence=f"{gpu.address or gpu.uuid}: {shown}",
    )  # fmt: skip


def _heat(gpu: GpuReading) -> Iterator[Finding]:
    """Near the slowdown temperature, or slowed down by the driver for it; both together drain."""
    near = gpu.margin_c is not None and gpu.margin_c <= NEAR_SLOWDOWN_C
    if gpu.temperature_c is not None and gpu.slowdown_c is not None:
        near |= gpu.temperature_c >= gpu.slowdown_c - NEAR_SLOWDOWN_C
    warm = _reason(gpu, ClockReason.SW_THERMAL)
    if (near or warm) and not _reason(gpu, ClockReason.HW_THERMAL):
        what = "clocks lowered because of heat{d}" if warm else "near its slowdown temperature{d}"
        limit = (
            f"< {gpu.slowdown_c - NEAR_SLOWDOWN_C} C" if gpu.slowdown_c is not None else f"> {NEAR_SLOWDOWN_C} C left"
        )
        verdict = Verdict.DRAIN if near and warm else Verdict.NOTE
        yield _found(gpu, _Rule("gpu.heat", verdict, bool, what, limit, _GPUD), gpu.temperature_c)


def _in_use(gpu: GpuReading) -> Iterator[Finding]:
    for pid, name in gpu.processes:
        what = f"process {pid}{' (' + name + ')' if name else ''} uses it"
        yield _found(gpu, _Rule("gpu.in_use", Verdict.NOTE, bool, what, "none", command=f"ps -fp {pid}"), pid)
    if not gpu.processes and (gpu.memory_used_bytes or 0) > DRIVER_BYTES:
        used = f"{(gpu.memory_used_bytes or 0) / (1 << 30):.1f} GiB"
        what = f"{used} of its memory are in use, by a process that is not shown"
        yield _found(gpu, _Rule("gpu.in_use", Verdict.NOTE, bool, what, "< 1 GiB"), used)


def _of_all(found: Finding, report: GpuReport) -> Finding:
    """Power brakes on every GPU are the rack's power, not a GPU's."""
    count = len(report.gpus)
    if (
        found.check == "gpu.power"
        and count > 1
        and all(_reason(gpu, ClockReason.HW_POWER_BRAKE) for gpu in report.gpus)
    ):
        return replace(found, message=f"{found.message}; so on all {count} GPUs: the rack's power supply")
    return found


def _count(report: GpuReport, expected: int | None, source: str) -> Iterator[Finding]:
    there = str(len(report.gpus))
    for name in report.unreachable:
        yield Finding(
            check="gpu.count",
            verdict=Verdict.REPLACE,
            message=f"the driver has no handle for GPU {name}",
            source=_SMI,
            evidence=f"Unable to determine the device handle for GPU {name}",
        )
    check, verdict = "gpu.report", Verdict.INCOMPLETE
    if report.missing:
        refused = _REFUSED.search(report.missing) if report.source == "nvidia-smi" else None
        check, verdict = ("gpu.driver", Verdict.DRAIN) if refused else (check, verdict)
        message = f"{report.source}: {report.missing}" + ("; restart the host" if refused else "")
    elif expected is not None and there != str(expected):
        check, verdict = "gpu.count", Verdict.REPLACE if len(report.gpus) < expected else Verdict.NOTE
        message = f"{there} GPUs, and there should be {expected}"
    elif expected is None and report.count is None:
        message = f"{report.source} does not say how many GPUs there should be: ask for the column count, too"
    elif not report.gpus:
        check, message = "gpu.count", "no GPU in the report"
    else:
        return
    wanted = str(expected) if check == "gpu.count" and expected is not None else ""
    yield Finding(
        check=check, verdict=verdict, message=message, value=there, expected=wanted, source=source if wanted else ""
    )
