"""``nvidia-smi -q`` and ``nvidia-smi --query-gpu=... --format=csv`` as readings.

Old and new names both occur: clocks had "throttle reasons" and now have "event reasons"; errors in caches were one
count (SRAM Uncorrectable) and are two (parity and SEC-DED); before A100 they were "Double Bit". Names from outputs of
drivers 535 to 595.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from muster.health.hardware.kernel_log import pci_address
from muster.health.hardware.readings import ClockReason, GpuReading, GpuReport

_HEADER = re.compile(r"^=+ *NVSMI LOG *=+\s*$", re.MULTILINE)
_GPU = re.compile(r"^GPU ([0-9A-Fa-f]{8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])\s*$")
_PAIR = re.compile(r"^( *)(\S.*?)\s*:(?: (.*))?$")
_NO_HANDLE = re.compile(r"Unable to determine the device handle for (?:GPU|gpu) ?([0-9A-Fa-f:.]*)")
_LOST = re.compile(r"\[?(?:ERR!|Unknown Error|GPU is lost|GPU requires reset)\]?", re.IGNORECASE)
_MIB = 1 << 20
#: What a whole report's last line looks like where a shell cut the line end off.
_WHOLE_LINE = re.compile(r": None$|: .* MiB$")

Fields = Mapping[str, str]


def is_query(text: str) -> bool:
    """Whether ``text`` is the output of ``nvidia-smi -q``."""
    return _HEADER.search(text) is not None


def read_query(text: str) -> GpuReport:
    """``nvidia-smi -q``. Never raises; what is missing at its end, or in a GPU's block, is said in ``missing``."""
    head, blocks = _blocks(text)
    readings = tuple(_reading(address, fields, number) for number, (address, fields) in enumerate(blocks))
    count = _number(head.get("Attached GPUs", ""))
    return GpuReport(
        gpus=readings, source="nvidia-smi -q", driver=head.get("Driver Version", ""), count=count,
        unreachable=tuple(match[1].rstrip(":.") or "of unknown address" for match in _NO_HANDLE.finditer(text)),
        missing=_missing(text, count, [fields for _, fields in blocks]),
    )  # fmt: skip


def _blocks(text: str) -> tuple[dict[str, str], list[tuple[str, dict[str, str]]]]:
    """(fields before the first GPU, (address, fields) of each GPU). A field's key is its path: ``ECC Mode/Current``."""
    head: dict[str, str] = {}
    blocks: list[tuple[str, dict[str, str]]] = []
    fields, path = head, list[tuple[int, str]]()
    repeated: Counter[tuple[int, str]] = Counter()
    for line in text.splitlines():
        if match := _GPU.match(line):
            fields, path = {}, []
            blocks.append((match[1], fields))
            continue
        if not line.strip() or _NO_HANDLE.search(line):
            continue
        pair = _PAIR.match(line)
        indent = len(line) - len(line.lstrip())
        while path and path[-1][0] >= indent:
            path.pop()
        key = pair[2] if pair else line.strip()
        path.append((indent, key))
        name = "/".join(part for _, part in path)
        if name in fields:  # one of several processes
            repeated[len(blocks), name] += 1
            name = f"{name}#{repeated[len(blocks), name]}"
        fields[name] = (pair[3] or "").strip() if pair else ""
    return head, blocks


def _missing(text: str, count: int | None, blocks: list[dict[str, str]]) -> str:
    if count is None:
        return "the report does not say how many GPUs there are"
    if len(blocks) < count:
        return f"the report says {count} GPUs and shows {len(blocks)}"
    if not text.endswith("\n") and not _WHOLE_LINE.search(text):
        return "the last line is cut"
    for number, fields in enumerate(blocks):
        if "Processes" not in fields:
            return f"the block of GPU {number} has no end, or only parts were asked for"
        lacking = _stable(blocks[0]) - fields.keys()
        if lacking and fields.get("Product Name") == blocks[0].get("Product Name"):
            return f"the block of GPU {number} lacks {sorted(lacking)[0]}"
    return ""


def _stable(fields: Fields) -> set[str]:
    return {name for name in fields if not name.startswith("Processes")}


def _reading(address: str, fields: Fields, number: int) -> GpuReading:
    sram = "ECC Errors/Aggregate/SRAM Uncorrectable"
    banks = "Remapped Rows/Bank Remap Availability Histogram"
    link = "PCI/GPU Link Info"
    margin = _number(_first(fields, "Temperature/GPU T.Limit Temp"))
    return GpuReading(
        index=number, address=pci_address(address), name=fields.get("Product Name", ""),
        uuid=fields.get("GPU UUID", ""), serial=fields.get("Serial Number", ""), vbios=fields.get("VBIOS Version", ""),
        lost_fields=tuple(name for name, value in fields.items() if _LOST.fullmatch(value)),
        ecc_uncorrected=_total(fields, "ECC Errors/Volatile", ("Uncorrectable", "Double Bit/Total")),
        ecc_corrected=_total(fields, "ECC Errors/Volatile", (" Correctable", "Single Bit/Total")),
        sram_uncorrected_aggregate=_sum(fields, sram, f"{sram} Parity", f"{sram} SEC-DED"),
        sram_threshold_exceeded=_yes(_first(fields, "ECC Errors/Aggregate/SRAM Threshold Exceeded")),
        remap_pending=_yes(_first(fields, "Remapped Rows/Pending")),
        remap_failed=_yes(_first(fields, "Remapped Rows/Remapping Failure Occurred")),
        remap_banks={
            name.lower(): found
            for name in ("Max", "High", "Partial", "Low", "None")
            if (found := _number(_first(fields, f"{banks}/{name}"))) is not None
        },
        retired_pages=_sum(fields, *(f"Retired Pages/{kind} Bit ECC" for kind in ("Single", "Double"))),
        retired_pages_pending=_yes(
            _first(fields, "Retired Pages/Pending Page Blacklist", "Retired Pages/Pending Page Retirement")
        ),
        repair_pending=_any(fields, "Channel Repair Pending", "TPC Repair Pending"),
        unrepairable=_any(fields, "Unrepairable Memory"),
        clock_reasons=_clock_reasons(fields),
        temperature_c=_number(_first(fields, "Temperature/GPU Current Temp")),
        slowdown_c=None if margin is not None else _number(_first(fields, "Temperature/GPU Slowdown Temp")),
        margin_c=margin,
        pcie_generation=_number(_first(fields, f"{link}/PCIe Generation/Current")),
        pcie_generation_max=_number(_first(fields, f"{link}/PCIe Generation/Max")),
        pcie_width=_number(_first(fields, f"{link}/Link Width/Current")),
        pcie_width_max=_number(_first(fields, f"{link}/Link Width/Max")),
        recovery_action=_told(_first(fields, "GPU Recovery Action")),
        reset_required=_yes(_first(fields, "GPU Reset Status/Reset Required")),
        drain_recommended=_yes(_first(fields, "GPU Reset Status/Drain and Reset Recommended")),
        persistence=_enabled(_first(fields, "Persistence Mode")),
        mig=_enabled(_first(fields, "MIG Mode/Current")),
        compute_mode=_told(_first(fields, "Compute Mode")),
        fabric_state=_told(_first(fields, "Fabric/State")), fabric_status=_told(_first(fields, "Fabric/Status")),
        memory_used_bytes=_bytes(_first(fields, "FB Memory Usage/Used")),
        processes=_processes(fields),
    )  # fmt: skip


def _clock_reasons(fields: Fields) -> ClockReason | None:
    named = {
        "Idle": ClockReason.IDLE, "Applications Clocks Setting": ClockReason.APPLICATION_CLOCKS,
        "SW Power Cap": ClockReason.SW_POWER_CAP, "HW Slowdown": ClockReason.HW_SLOWDOWN,
        "HW Slowdown/HW Thermal Slowdown": ClockReason.HW_THERMAL,
        "HW Slowdown/HW Power Brake Slowdown": ClockReason.HW_POWER_BRAKE, "Sync Boost": ClockReason.SYNC_BOOST,
        "SW Thermal Slowdown": ClockReason.SW_THERMAL, "Display Clock Setting": ClockReason.DISPLAY_CLOCKS,
    }  # fmt: skip
    reasons, told = ClockReason(0), False
    for section in ("Clocks Event Reasons", "Clocks Throttle Reasons"):
        for name, reason in named.items():
            value = fields.get(f"{section}/{name}", "")
            told |= value in ("Active", "Not Active")
            reasons |= reason if value == "Active" else ClockReason(0)
    return reasons if told else None


def _processes(fields: Fields) -> tuple[tuple[int, str], ...]:
    pids = [_number(value) for name, value in fields.items() if re.fullmatch(r"Processes/Process ID(#\d+)?", name)]
    names = [value for name, value in fields.items() if re.fullmatch(r"Processes/Process ID/Name(#\d+)?", name)]
    names += [""] * len(pids)
    return tuple((pid, name) for pid, name in zip(pids, names, strict=False) if pid is not None)


# ---------------------------------------------------------------- CSV


def is_csv(text: str) -> bool:
    """Whether ``text`` is the output of ``nvidia-smi --query-gpu=... --format=csv`` with its header."""
    names = {_column(cell) for cell in text.split("\n", 1)[0].split(",")}
    return bool({"index", "uuid", "pci.bus_id", "gpu_bus_id", "name"} & names) and len(names & _CSV_NAMES) >= 2


def read_csv(text: str) -> GpuReport:
    """``--query-gpu`` and ``--query-remapped-rows`` with a header line, with or without units. Never raises.

    Only a column ``count`` says how many GPUs there are.
    """
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    names = [_column(cell) for cell in rows[0]] if rows else []
    unreachable = tuple(match[1].rstrip(":.") or "of unknown address" for match in _NO_HANDLE.finditer(text))
    told = [row for row in rows[1:] if not _NO_HANDLE.search(",".join(row))]
    gpus = [dict(zip(names, row, strict=False)) for row in told]
    count = _number(gpus[0].get("count", "")) if gpus else None
    missing = ""
    if not text.endswith("\n"):
        missing = "the last line is cut"
    elif any(len(row) != len(names) for row in told):
        missing = "a row has fewer values than the header"
    elif not gpus:
        missing = "there is a header and no row"
    elif count is not None and len(gpus) < count:
        missing = f"the report says {count} GPUs and shows {len(gpus)}"
    return GpuReport(
        gpus=tuple(_csv_reading(fields, number) for number, fields in enumerate(gpus)), source="nvidia-smi --query-gpu",
        driver=gpus[0].get("driver_version", "") if gpus else "", count=count, unreachable=unreachable, missing=missing,
    )  # fmt: skip


def _csv_reading(fields: Fields, number: int) -> GpuReading:
    index = _number(fields.get("index", ""))
    corrected, uncorrected = (f"ecc.errors.{kind}.volatile.total" for kind in ("corrected", "uncorrected"))
    return GpuReading(
        index=number if index is None else index,
        address=pci_address(_first(fields, "pci.bus_id", "gpu_bus_id")), name=_first(fields, "name", "gpu_name"),
        uuid=_first(fields, "uuid", "gpu_uuid"), serial=_first(fields, "serial", "gpu_serial"),
        vbios=fields.get("vbios_version", ""),
        lost_fields=tuple(name for name, value in fields.items() if _LOST.fullmatch(value)),
        ecc_uncorrected=_number(fields.get(uncorrected, "")), ecc_corrected=_number(fields.get(corrected, "")),
        sram_uncorrected_aggregate=_number(fields.get("ecc.errors.uncorrected.aggregate.sram", "")),
        remap_pending=_yes(fields.get("remapped_rows.pending", "")),
        remap_failed=_yes(fields.get("remapped_rows.failure", "")),
        retired_pages_pending=_yes(fields.get("retired_pages.pending", "")),
        retired_pages=_sum(fields, "retired_pages.single_bit_ecc.count", "retired_pages.double_bit.count"),
        clock_reasons=_csv_clock_reasons(fields), temperature_c=_number(fields.get("temperature.gpu", "")),
        margin_c=_number(fields.get("temperature.gpu.tlimit", "")),
        pcie_generation=_number(fields.get("pcie.link.gen.current", "")),
        pcie_generation_max=_number(fields.get("pcie.link.gen.max", "")),
        pcie_width=_number(fields.get("pcie.link.width.current", "")),
        pcie_width_max=_number(fields.get("pcie.link.width.max", "")),
        recovery_action=_told(fields.get("gpu_recovery_action", "")),
        reset_required=_yes(fields.get("reset_status.reset_required", "")),
        drain_recommended=_yes(fields.get("reset_status.drain_and_reset_recommended", "")),
        persistence=_enabled(fields.get("persistence_mode", "")), mig=_enabled(fields.get("mig.mode.current", "")),
        compute_mode=_told(fields.get("compute_mode", "")), fabric_state=_told(fields.get("fabric.state", "")),
        fabric_status=_told(fields.get("fabric.status", "")), memory_used_bytes=_bytes(fields.get("memory.used", "")),
    )  # fmt: skip


def _csv_clock_reasons(fields: Fields) -> ClockReason | None:
    reasons, told = ClockReason(0), False
    for old in ("clocks_event_reasons", "clocks_throttle_reasons"):
        mask = fields.get(f"{old}.active", "")
        if re.fullmatch(r"0x[0-9a-fA-F]{1,16}", mask):
            reasons, told = reasons | ClockReason(int(mask, 16) & 0x1FF), True
        for name, reason in _CSV_REASONS.items():
            value = fields.get(f"{old}.{name}", "")
            told |= value in ("Active", "Not Active")
            reasons |= reason if value == "Active" else ClockReason(0)
    return reasons if told else None


_CSV_REASONS = {
    "gpu_idle": ClockReason.IDLE, "applications_clocks_setting": ClockReason.APPLICATION_CLOCKS,
    "sw_power_cap": ClockReason.SW_POWER_CAP, "hw_slowdown": ClockReason.HW_SLOWDOWN,
    "hw_thermal_slowdown": ClockReason.HW_THERMAL, "hw_power_brake_slowdown": ClockReason.HW_POWER_BRAKE,
    "sw_thermal_slowdown": ClockReason.SW_THERMAL, "sync_boost": ClockReason.SYNC_BOOST,
}  # fmt: skip
_CSV_NAMES = {
    "index", "uuid", "gpu_uuid", "name", "gpu_name", "pci.bus_id", "gpu_bus_id", "driver_version", "count", "serial",
    "vbios_version", "temperature.gpu", "memory.used", "memory.total", "persistence_mode", "mig.mode.current",
    "pcie.link.width.current", "pcie.link.gen.current", "remapped_rows.pending", "remapped_rows.failure",
    "ecc.errors.uncorrected.volatile.total", "ecc.errors.corrected.volatile.total", "gpu_recovery_action",
    "clocks_event_reasons.active", "clocks_throttle_reasons.active", "fabric.state", "compute_mode",
    "clocks_event_reasons.hw_slowdown", "clocks_throttle_reasons.hw_slowdown", "utilization.gpu", "power.draw",
}  # fmt: skip


def _column(cell: str) -> str:
    """``memory.used [MiB]`` -> ``memory.used``."""
    return cell.partition("[")[0].strip()


# ---------------------------------------------------------------- values


def _first(fields: Fields, *names: str) -> str:
    return next((fields[name] for name in names if name in fields), "")


def _told(value: str) -> str:
    return "" if value in ("N/A", "[N/A]", "[Not Supported]") or _LOST.fullmatch(value) else value


def _number(value: str) -> int | None:
    """The whole number that ``value`` begins with (``16x``, ``41 C``, ``-2 C``); None: there is none."""
    match = re.match(r"-?\d{1,18}(?!\d)", value)
    return int(match[0]) if match else None


def _bytes(value: str) -> int | None:
    number = _number(value)
    return None if number is None else number * _MIB


def _yes(value: str) -> bool | None:
    return {"yes": True, "no": False}.get(value.lower())


def _enabled(value: str) -> bool | None:
    return {"enabled": True, "disabled": False}.get(value.lower())


def _sum(fields: Fields, *names: str) -> int | None:
    values = [number for name in names if (number := _number(fields.get(name, ""))) is not None]
    return sum(values) if values else None


def _total(fields: Fields, section: str, endings: tuple[str, str]) -> int | None:
    """The sum of the section's counts whose names hold the first ending (or are the second)."""
    names = [
        name
        for name in fields
        if name.startswith(section + "/") and (endings[0] in name or name == f"{section}/{endings[1]}")
    ]
    return _sum(fields, *names)


def _any(fields: Fields, *endings: str) -> bool | None:
    told = [_yes(value) for name, value in fields.items() if name.rpartition("/")[2] in endings]
    known = [one for one in told if one is not None]
    return any(known) if known else None
