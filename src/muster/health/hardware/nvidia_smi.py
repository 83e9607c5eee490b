"""What ``nvidia-smi`` prints, as readings: ``-q``, ``-q -x``, ``--query-gpu=... --format=csv``, and its table.

Each form becomes fields of one GPU, name -> value; one table (``_FIELDS``) says which names mean which reading. A name
is the path of sections in small letters (``ecc_mode/current``), as XML has it. Old and new names both occur: clocks had
"throttle reasons" and now have "event reasons"; errors in caches were one count (SRAM Uncorrectable) and are two
(parity and SEC-DED); before A100 they were "Double Bit". Names from outputs of drivers 470 to 595.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from xml.etree import ElementTree

from muster.health.hardware.kernel_log import pci_address
from muster.health.hardware.readings import ClockReason, GpuReading, GpuReport

_HEADER = re.compile(r"^=+ *NVSMI LOG *=+\s*$", re.MULTILINE)
_XML = re.compile(r"<nvidia_smi_log>.*?(</nvidia_smi_log>|\Z)", re.DOTALL)
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
    count = _number(head.get("attached_gpus", ""))
    missing = _missing(text, count, blocks)
    return _report("nvidia-smi -q", text, blocks, driver=head.get("driver_version", ""), count=count, missing=missing)


def _report(
    source: str, text: str, gpus: Sequence[Fields], *, driver: str, count: int | None, missing: str
) -> GpuReport:
    return GpuReport(
        gpus=tuple(_reading(fields, number) for number, fields in enumerate(gpus)),
        source=source,
        driver=driver,
        unreachable=tuple(match[1].rstrip(":.") or "of unknown address" for match in _NO_HANDLE.finditer(text)),
        count=count,
        missing=missing,
    )


def is_xml(text: str) -> bool:
    return _XML.search(text) is not None


def read_xml(text: str) -> GpuReport:
    """``nvidia-smi -q -x``. Never raises. No entity is expanded: one that declares any is not read."""
    found, missing = _XML.search(text), ""
    root = ElementTree.Element("nvidia_smi_log")
    if found is None or not found[1]:
        missing = "the report has no end"
    elif "<!ENTITY" in text:
        missing = "the report declares entities"
    else:
        try:
            root = ElementTree.fromstring(found[0])
        except ElementTree.ParseError as error:
            missing = f"the report is damaged: {error}"
    gpus = [_flat(gpu) | {"pci_bus_id": gpu.get("id", "")} for gpu in root.findall("gpu")]
    count = _number(root.findtext("attached_gpus", ""))
    if not missing and (count is None or len(gpus) < count):
        missing = f"the report says {count} GPUs and shows {len(gpus)}"
    driver = root.findtext("driver_version", "")
    return _report("nvidia-smi -q -x", text, gpus, driver=driver, count=count, missing=missing)


def _flat(element: ElementTree.Element, path: str = "") -> dict[str, str]:
    fields: dict[str, str] = {}
    for child in element:
        name = f"{path}{child.tag}"
        name = f"{name}#{sum(one.startswith(name) for one in fields)}" if name in fields else name
        fields |= _flat(child, f"{name}/") if len(child) else {name: (child.text or "").strip()}
    return fields


def _blocks(text: str) -> tuple[dict[str, str], list[dict[str, str]]]:
    """(fields before the first GPU, fields of each GPU). A field's key is its path: ``ecc_mode/current``."""
    head: dict[str, str] = {}
    blocks: list[dict[str, str]] = []
    fields, path = head, list[tuple[int, str]]()
    repeated: Counter[tuple[int, str]] = Counter()
    for line in text.splitlines():
        if match := _GPU.match(line):
            fields, path = {"pci_bus_id": match[1]}, []
            blocks.append(fields)
            continue
        if not line.strip() or _NO_HANDLE.search(line):
            continue
        pair = _PAIR.match(line)
        indent = len(line) - len(line.lstrip())
        while path and path[-1][0] >= indent:
            path.pop()
        key = _key(pair[2] if pair else line)
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
        if "processes" not in fields:
            return f"the block of GPU {number} has no end, or only parts were asked for"
        lacking = _stable(blocks[0]) - fields.keys()
        if lacking and fields.get("product_name") == blocks[0].get("product_name"):
            return f"the block of GPU {number} lacks {sorted(lacking)[0]}"
    return ""


def _stable(fields: Fields) -> set[str]:
    return {name for name in fields if not name.startswith("processes")}


def _key(name: str) -> str:
    return re.sub(r"\W+", "_", name.strip().lower()).strip("_")


def _yes(value: str) -> bool | None:
    return {"yes": True, "no": False, "enabled": True, "disabled": False, "on": True, "off": False}.get(value.lower())


def _text_value(value: str) -> str:
    return "" if value in ("N/A", "[N/A]", "[Not Supported]") or _LOST.fullmatch(value) else value


def _number(value: str) -> int | None:
    """The whole number that ``value`` begins with (``16x``, ``41 C``, ``-2 C``); None: there is none."""
    match = re.match(r"-?\d{1,18}(?!\d)", value)
    return int(match[0]) if match else None


def _bytes(value: str) -> int | None:
    number = _number(value)
    return None if number is None else number * _MIB


def _sum(fields: Fields, *names: str) -> int | None:
    values = [number for name in names if (number := _number(fields.get(name, ""))) is not None]
    return sum(values) if values else None


def _total(fields: Fields, endings: tuple[str, str, str]) -> int | None:
    """The sum of the volatile counts whose names hold the first ending, or are the second or third."""
    wanted = (f"{_ECC}/{endings[1]}", endings[2])
    return _sum(fields, *(name for name in fields if name in wanted or (name.startswith(_ECC) and endings[0] in name)))


def _any(fields: Fields, *endings: str) -> bool | None:
    answers = [_yes(value) for name, value in fields.items() if name.rpartition("/")[2] in endings]
    known = [one for one in answers if one is not None]
    return any(known) if known else None


_ECC, _RETIRED = "ecc_errors/volatile", "retired_pages"
#: Reading -> (how the value is read, its names in any of the forms).
_FIELDS: Mapping[str, tuple[Callable[[str], object], tuple[str, ...]]] = {
    "address": (pci_address, ("pci_bus_id", "gpu_bus_id")), "name": (str, ("product_name", "name", "gpu_name")),
    "uuid": (str, ("gpu_uuid", "uuid")),
    "vbios": (str, ("vbios_version",)),
    "sram_threshold_exceeded": (_yes, ("ecc_errors/aggregate/sram_threshold_exceeded",)),
    "remap_pending": (_yes, ("remapped_rows/pending", "remapped_rows/remapped_row_pending", "remapped_rows_pending")),
    "remap_failed": (_yes, ("remapped_rows/remapping_failure_occurred", "remapped_rows/remapped_row_failure",
                            "remapped_rows_failure")),
    "retired_pages_pending": (_yes, tuple(
        f"{_RETIRED}{name}" for name in ("/pending_page_blacklist", "/pending_page_retirement", "/pending_blacklist",
                                         "/pending_retirement", "_pending"))),
    "temperature_c": (_number, ("temperature/gpu_current_temp", "temperature/gpu_temp", "temperature_gpu")),
    "margin_c": (_number, ("temperature/gpu_t_limit_temp", "temperature/gpu_temp_tlimit", "temperature_gpu_tlimit")),
    "slowdown_c": (_number, ("temperature/gpu_slowdown_temp", "temperature/gpu_temp_slow_threshold")),
    "pcie_width": (_number, ("pci/gpu_link_info/link_width/current", "pcie_link_width_current",
                             "pci/pci_gpu_link_info/link_widths/current_link_width")),
    "pcie_width_max": (_number, ("pci/gpu_link_info/link_width/max", "pcie_link_width_max",
                                 "pci/pci_gpu_link_info/link_widths/max_link_width")),
    "recovery_action": (_text_value, ("gpu_recovery_action",)),
    "reset_required": (_yes, ("gpu_reset_status/reset_required", "reset_status_reset_required")),
    "drain_recommended": (_yes, ("gpu_reset_status/drain_and_reset_recommended",
                                 "reset_status_drain_and_reset_recommended")),
    "persistence": (_yes, ("persistence_mode",)),
    "mig": (_yes, ("mig_mode/current", "mig_mode/current_mig", "mig_mode_current")),
    "compute_mode": (_text_value, ("compute_mode",)),
    "fabric_state": (_text_value, ("fabric/state", "fabric_state")),
    "fabric_status": (_text_value, ("fabric/status", "fabric_status")),
    "memory_used_bytes": (_bytes, ("fb_memory_usage/used", "memory_used")),
}  # fmt: skip
_REASONS = {
    "idle": ClockReason.IDLE, "gpu_idle": ClockReason.IDLE,
    "applications_clocks_setting": ClockReason.APPLICATION_CLOCKS, "sw_power_cap": ClockReason.SW_POWER_CAP,
    "hw_slowdown": ClockReason.HW_SLOWDOWN,
    "hw_thermal_slowdown": ClockReason.HW_THERMAL, "hw_power_brake_slowdown": ClockReason.HW_POWER_BRAKE,
    "sync_boost": ClockReason.SYNC_BOOST, "sw_thermal_slowdown": ClockReason.SW_THERMAL,
    "display_clock_setting": ClockReason.DISPLAY_CLOCKS, "display_clocks_setting": ClockReason.DISPLAY_CLOCKS,
}  # fmt: skip


def _reading(fields: Fields, number: int) -> GpuReading:
    """One GPU, from any of the forms. A form that gives no number is in the order of numbers."""
    read = {}
    for reading, (convert, names) in _FIELDS.items():
        value = next((fields[name] for name in names if name in fields), None)
        if value is not None:
            read[reading] = convert(value)
    if read.get("margin_c") is not None:
        read["slowdown_c"] = None
    index = _number(fields.get("index", ""))
    sram = "ecc_errors/aggregate/sram_uncorrectable"
    return GpuReading(
        index=number if index is None else index,
        lost_fields=tuple(name for name, value in fields.items() if _LOST.fullmatch(value)),
        ecc_uncorrected=_total(fields, ("uncorrectable", "double_bit/total", "ecc_errors_uncorrected_volatile_total")),
        ecc_corrected=_total(fields, ("_correctable", "single_bit/total", "ecc_errors_corrected_volatile_total")),
        sram_uncorrected_aggregate=_sum(fields, sram, f"{sram}_parity", f"{sram}_sec_ded", f"{sram}_secded",
                                        "ecc_errors_uncorrected_aggregate_sram"),
        remap_banks={
            level: found for level in ("max", "high", "partial", "low", "none")
            if (found := _sum(fields, f"remapped_rows/bank_remap_availability_histogram/{level}",
                              f"remapped_rows/row_remapper_histogram/row_remapper_histogram_{level}")) is not None
        },
        retired_pages=_sum(
            fields, f"{_RETIRED}/single_bit_ecc", f"{_RETIRED}/double_bit_ecc", f"{_RETIRED}_single_bit_ecc_count",
            f"{_RETIRED}/multiple_single_bit_retirement/retired_count", f"{_RETIRED}_double_bit_count",
            f"{_RETIRED}/double_bit_retirement/retired_count",
        ),
        repair_pending=_any(fields, "channel_repair_pending", "tpc_repair_pending"),
        unrepairable=_any(fields, "unrepairable_memory"),
        clock_reasons=_clock_reasons(fields), processes=_processes(fields), **read,  # type: ignore[arg-type]
    )  # fmt: skip


def _clock_reasons(fields: Fields) -> ClockReason | None:
    reasons, given = ClockReason(0), False
    for name, value in fields.items():
        match = re.match(
            r"clocks_(?:event|throttle)_reasons(?:/|_)(?:hw_slowdown/)?(?:clocks_(?:event|throttle)_reason_)?", name
        )
        reason = _REASONS.get(name[match.end() :]) if match else None
        if reason is not None and value in ("Active", "Not Active"):
            given, reasons = True, reasons | reason if value == "Active" else reasons
        elif match and name.endswith("reasons_active") and re.fullmatch(r"0x[0-9a-fA-F]{1,16}", value):
            given, reasons = True, reasons | ClockReason(int(value, 16) & 0x1FF)
    return reasons if given else None


def _processes(fields: Fields) -> tuple[tuple[int, str], ...]:
    pids = [
        _number(value) for name, value in fields.items() if re.fullmatch(r"processes/process_i\w+(#\d+)?(/pid)?", name)
    ]
    names = [value for name, value in fields.items() if re.match(r"processes/.*/(?:process_)?name(#\d+)?$", name)]
    names += [""] * len(pids)
    return tuple((pid, name) for pid, name in zip(pids, names, strict=False) if pid is not None)


# ---------------------------------------------------------------- the table, and what it says in place of one

_VERSIONS = re.compile(r"^\| NVIDIA-SMI\s+\S+\s+(?:Driver|KMD) Version: (\S+)", re.MULTILINE)
_FIRST = re.compile(
    r"^\|\s*(?P<index>\d{1,4})\s+(?P<name>\S.*?)\s+(?P<persistence_mode>On|Off|N/A|ERR!)\s*"
    r"\|\s*(?P<pci_bus_id>[0-9A-Fa-f]{4,8}:\S+)\s+\S+\s*\|\s*(?P<ecc_errors_uncorrected_volatile_total>\S.*?)\s*\|"
)
_SECOND = re.compile(
    r"^\|\s*(?P<fan>\S+)\s+(?P<temperature_gpu>\S+)\s+(?P<pstate>\S+)\s+(?P<power>\S.*?)\s*/\s*\S+\s*"
    r"\|\s*(?P<memory_used>\S+)\s*/\s*\S+\s*\|\s*\S+\s+(?P<compute_mode>\S.*?)\s*\|"
)
_INSTANCE = re.compile(r"^\|\s+(\d+)\s+\S+\s+\S+\s+\d+\s+\|.*\|\s*\d+\s+(\d+)\s*\|")
_USE = re.compile(r"^\|\s+\d+\s+(?:\S+\s+\S+\s+)?(\d+)\s+[CGM+]+\s+(\S+)\s+.*\|$")
_REFUSED = re.compile(
    r"^.*(?:NVIDIA-SMI has failed|Failed to initialize NVML|No devices were found|couldn't communicate with).*",
    re.MULTILINE,
)


def is_table(text: str) -> bool:
    if _VERSIONS.search(text):
        return True
    return bool(_REFUSED.search(text) or _NO_HANDLE.search(text)) and not (
        is_query(text) or is_xml(text) or is_csv(text)
    )


def read_table(text: str) -> GpuReport:
    """``nvidia-smi`` alone. Never raises. The list of processes ends it; it names no total."""
    gpus: list[dict[str, str]] = []
    for line in text.splitlines():
        if match := _FIRST.match(line):
            gpus.append(match.groupdict())
        elif gpus and "pstate" not in gpus[-1] and (match := _SECOND.match(line)):
            gpus[-1] |= match.groupdict()
            gpus[-1]["compute_mode"] = gpus[-1]["compute_mode"].replace("E. ", "Exclusive_")
        elif gpus and "pstate" not in gpus[-1] and re.match(r"^\|.*(?:ERR!|is lost)", line):
            gpus[-1]["pstate"] = "ERR!"
        elif gpus and "mig_mode_current" not in gpus[-1] and re.match(r"^\|\s+\|\s+\|\s*\S+\s*\|$", line):
            gpus[-1]["mig_mode_current"] = line.rstrip("| \r").rpartition("|")[2].strip(" *")
        elif (match := _INSTANCE.match(line)) and match[
            2
        ] != "0":  # errors of an instance: the GPU's own cell says "On"
            for one in (one for one in gpus if one["index"] == match[1]):
                one["ecc_errors_uncorrected_volatile_total"] = match[2]
        elif gpus and (match := _USE.match(line)):
            gpus[0][f"processes/process_id#{match[1]}"] = match[1]
    refused, version = _REFUSED.search(text), _VERSIONS.search(text)
    missing = ""
    if refused and not gpus:
        missing = refused[0].strip()
    elif version and not re.search(r"^\| Processes:.*(?:\n\|.*)+\n\+-+", text, re.MULTILINE):
        missing = "the table has no end"
    elif any("pstate" not in one for one in gpus):
        missing = "a GPU's lines cannot be read"
    driver = version[1] if version else ""
    return _report("nvidia-smi", text, gpus, driver=driver, count=len(gpus), missing=missing)


# ---------------------------------------------------------------- CSV


def is_csv(text: str) -> bool:
    """Whether a line of it is the header of ``nvidia-smi --query-gpu=... --format=csv``."""
    return bool(_csv_rows(text))


def _csv_rows(text: str) -> list[list[str]]:
    """The header and the lines below it that have commas."""
    lines = text.splitlines()
    for place, line in enumerate(lines):
        names = {_column(cell) for cell in line.split(",")} if "," in line else set()
        if {"index", "uuid", "pci_bus_id", "gpu_bus_id", "name"} & names and len(names & _CSV_NAMES) >= 2:
            ended = next((at for at in range(place, len(lines)) if "," not in lines[at]), len(lines))
            return [[cell.strip() for cell in one.split(",")] for one in lines[place:ended]]
    return []


def read_csv(text: str) -> GpuReport:
    """``--query-gpu`` and ``--query-remapped-rows`` with a header line, with or without units. Never raises.

    Only a column ``count`` says how many GPUs there are.
    """
    rows = _csv_rows(text)
    names = [_column(cell) for cell in rows[0]] if rows else []
    answered = [row for row in rows[1:] if not _NO_HANDLE.search(",".join(row))]
    gpus = [dict(zip(names, row, strict=False)) for row in answered]
    count = _number(gpus[0].get("count", "")) if gpus else None
    missing = ""
    if not text.endswith("\n"):
        missing = "the last line is cut"
    elif any(len(row) != len(names) for row in answered):
        missing = "a row has fewer values than the header"
    elif not gpus:
        missing = "there is a header and no row"
    elif count is not None and len(gpus) < count:
        missing = f"the report says {count} GPUs and shows {len(gpus)}"
    driver = gpus[0].get("driver_version", "") if gpus else ""
    return _report("nvidia-smi --query-gpu", text, gpus, driver=driver, count=count, missing=missing)


_CSV_NAMES = {name for _, names in _FIELDS.values() for name in names} | {
    "index", "driver_version", "count", "serial", "memory_total", "utilization_gpu", "power_draw",
    "ecc_errors_uncorrected_volatile_total", "ecc_errors_corrected_volatile_total", "clocks_event_reasons_active",
    "clocks_throttle_reasons_active", "clocks_event_reasons_hw_slowdown", "clocks_throttle_reasons_hw_slowdown",
}  # fmt: skip


def _column(cell: str) -> str:
    """``memory.used [MiB]`` -> ``memory_used``."""
    return _key(cell.partition("[")[0])
