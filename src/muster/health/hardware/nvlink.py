"""``nvidia-smi nvlink --status`` and ``--errorcounters``: links of each GPU, their speed, their errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from muster.catalog.devices import accelerator_of
from muster.health.verdicts import Finding, Verdict

#: Accelerator -> (links, GB/s of each, one direction) as ``nvidia-smi nvlink -s`` prints them. A100 and H100: outputs
#: in leptonai/gpud and ml-engineering (2026); B200: given by others, seen in no output.
_FULL = {
    "A100": (12, 25.0), "A100-80GB": (12, 25.0), "H100": (18, 26.562), "H200": (18, 26.562), "B200": (18, 53.125),
}  # fmt: skip
_GPU = re.compile(r"^GPU (\d{1,6}): (.+?)(?: \(UUID: ([^)]*)\))?\s*$")
_SPEED = re.compile(r"^\s+Link (\d{1,6}): (?:([\d.]{1,12}) GB/s|<?(inactive|[\w ]*)>?)\s*$")
_ERRORS = re.compile(r"^\s+Link (\d{1,6}): (Replay|Recovery|CRC)(?: Flit)? Errors?: (\d{1,18})\s*$")


@dataclass(kw_only=True)
class Links:
    """One GPU's links."""

    gpu: int
    name: str
    gb_s: dict[int, float] = field(default_factory=dict)
    """Link -> speed; 0: inactive."""
    errors: dict[tuple[int, str], int] = field(default_factory=dict)
    """(link, kind) -> count since the driver was loaded."""


@dataclass(frozen=True, kw_only=True)
class LinkReport:
    gpus: tuple[Links, ...]
    missing: str = ""


def is_nvlink(text: str) -> bool:
    lines = text.splitlines()
    return any(map(_GPU.match, lines)) and any(_SPEED.match(line) or _ERRORS.match(line) for line in lines)


def read_nvlink(text: str) -> LinkReport:
    """Never raises. It names no total, so one that is cut between two GPUs looks whole unless their links differ."""
    gpus: list[Links] = []
    for line in text.splitlines():
        if match := _GPU.match(line):
            gpus.append(Links(gpu=int(match[1]), name=match[2]))
        elif gpus and (match := _ERRORS.match(line)):
            gpus[-1].errors[int(match[1]), match[2]] = int(match[3])
        elif gpus and (match := _SPEED.match(line)):
            gpus[-1].gb_s[int(match[1])] = _speed(match[2])
    missing = ""
    if not text.endswith("\n") and not re.search(r"(GB/s|inactive>|Errors: \d+)\s*$", text):
        missing = "the last line is cut"
    elif len({len(one.gb_s) for one in gpus}) > 1 or len({len(one.errors) for one in gpus}) > 1:
        missing = "not every GPU shows as many links"
    elif not gpus:
        missing = "there is no GPU in it"
    elif short := next((one for one in gpus if not one.errors and len(one.gb_s) < _links(one.name)), None):
        missing = f"GPU {short.gpu} shows {len(short.gb_s)} of {_links(short.name)} links"
    return LinkReport(gpus=tuple(gpus), missing=missing)


def judge_links(report: LinkReport) -> list[Finding]:
    """Inactive and slow links; error counts are noted.

    One GPU alone needs no links, and PCIe cards have bridges of their own kind: those are compared with each other.
    """
    out: list[Finding] = []
    if report.missing:
        out.append(Finding("gpu.nvlink", Verdict.INCOMPLETE, f"nvidia-smi nvlink: {report.missing}"))
    shown = [one for one in report.gpus if one.gb_s]
    active = {one.gpu: sum(speed > 0 for speed in one.gb_s.values()) for one in shown}
    if len(shown) > 1 and not any(active.values()):
        message = f"no NVLink is active on any of {len(shown)} GPUs: the fabric is not up"
        command = "systemctl restart nvidia-fabricmanager"
        out.append(Finding(check="gpu.nvlink", verdict=Verdict.DRAIN, message=message, command=command))
    elif len(shown) > 1:
        out += [found for one in shown for found in _slow(one, active[one.gpu], max(active.values()))]
    for one in report.gpus:
        counted = {key: count for key, count in one.errors.items() if count}
        if counted:
            errors = ", ".join(f"link {link} {kind} {count}" for (link, kind), count in sorted(counted.items())[:4])
            message = f"GPU {one.gpu}: {sum(counted.values())} NVLink errors so far ({errors})"
            out.append(Finding(check="gpu.nvlink", verdict=Verdict.NOTE, gpu=one.gpu, message=message))
    if not out:
        total = sum(active.values())
        message = f"{total} NVLinks active on {len(report.gpus)} GPUs" if shown else "no NVLink errors"
        out.append(Finding(check="gpu.nvlink", verdict=Verdict.HEALTHY, message=message))
    return out


def _slow(one: Links, active: int, most: int) -> Iterator[Finding]:
    known = accelerator_of(one.name)
    links, gb_s = _FULL.get(known.name if known else "", (most, max(one.gb_s.values())))
    source = "the accelerator's row" if known and known.name in _FULL else "compared with this host's other GPUs"
    if active < links:
        message = f"GPU {one.gpu}: {active} of {links} NVLinks are active"
        off = ", ".join(f"Link {link}" for link, speed in one.gb_s.items() if not speed)
        yield Finding(
            check="gpu.nvlink", verdict=Verdict.REPLACE, gpu=one.gpu, message=message, value=str(active),
            expected=str(links), evidence=f"inactive: {off or 'not shown'}", source=source,
        )  # fmt: skip
    slow = {link: speed for link, speed in one.gb_s.items() if 0 < speed < 0.95 * gb_s}
    if slow:
        link, speed = min(slow.items(), key=lambda pair: pair[1])
        message = f"GPU {one.gpu}: link {link} runs at {speed:g} GB/s, and {gb_s:g} are possible"
        yield Finding(
            check="gpu.nvlink", verdict=Verdict.DRAIN, gpu=one.gpu, message=message, value=f"{speed:g}",
            expected=f"{gb_s:g}", source=source,
        )  # fmt: skip


def _links(name: str) -> int:
    """How many lines a GPU of this name has, inactive links included; 0: not known."""
    known = accelerator_of(name)
    return _FULL.get(known.name, (0, 0.0))[0] if known else 0


def _speed(text: str | None) -> float:
    try:
        return float(text or 0)
    except ValueError:  # several points
        return 0.0
