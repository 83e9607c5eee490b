"""What a kernel log says of a host besides Xids: kills for memory, crashes, disks, links, panics."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from muster.catalog.rows import table, typed
from muster.health.hardware.kernel_log import Clock, KernelLog, KernelMessage, looks_stamped, read_kernel_log
from muster.health.verdicts import Finding, Verdict

#: Losses of one link from which it flaps (leptonai/gpud, infiniband, at 4a8de33).
FLAPS = 3
#: A driver reports its link down when it loads: until this time after the machine's start, that is no loss.
BOOT_S = 300.0
_DRIVER = re.compile(r"NVRM: |nvidia-nvswitch\d*: |Linux version \d")
_PORT = re.compile(r"\b[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.\d|\b(?:eth|en|ib|bond|mlx|hsn|rdma|net)\w*\d")
_LINK = re.compile(
    r"(?!ata\d|NVRM|nvidia|pci)(?P<port>\S.{0,90}?)[:,]? +(?:NIC |physical )?"
    r"(?:link (?:is |status (?:definitely )?)?(?P<state>up|down|active)\b|(?P<carrier>lost|gained) carrier)",
    re.IGNORECASE,
)
_RDMA = re.compile(r"\bmlx\d|\bib\d|\binfiniband|\bbnxt|\birdma|\bhfi", re.IGNORECASE)
_LIBRARIES = {
    "libnccl": "NCCL_DEBUG=INFO and another version of NCCL; on one host alone, again: muster check there",
    "libcuda": "driver and CUDA versions; on one host alone, again: muster check there",
}


@dataclass(frozen=True, kw_only=True)
class EventRow:
    """A kind of line; the fields are explained at the head of ``catalog/health/kernel.yaml``."""

    name: str
    has: str
    pattern: str
    check: str
    what: str
    verdict: Verdict = Verdict.NOTE
    source: str = "Linux"
    command: str = ""
    once: bool = False
    panic: bool = False


@cache
def _rows() -> tuple[tuple[EventRow, re.Pattern[str]], ...]:
    rows = typed(EventRow, table("kernel.yaml", "health")["events"])
    return tuple((row, re.compile(row.pattern)) for row in rows.values())


def is_kernel_log(text: str) -> bool:
    """Whether it holds lines of a kernel log: the driver's, a start, a known event, or mostly lines that begin so."""
    return looks_stamped(text) or any(
        _DRIVER.match(one.text) or _event(one) or _link(one) for one in read_kernel_log(text).messages
    )


def judge_events(log: KernelLog, not_before_s: float | None = None) -> list[Finding]:
    """A finding for each thing that happened in the log's last boot, and for a panic that ended an earlier one."""
    found: dict[tuple[str, str], list[KernelMessage]] = {}
    rows: dict[tuple[str, str], tuple[EventRow, Mapping[str, str]]] = {}
    recent = [
        one for one in log.messages if None in (not_before_s, one.time_s) or (one.time_s or 0) >= (not_before_s or 0)
    ]
    for message in recent:
        event = _event(message)
        if event is not None and (message.boot == log.boots - 1 or event[0].panic):
            row, groups = event
            key = (row.name, "") if row.panic else (row.check, row.what.format_map(groups))
            found.setdefault(key, []).append(message)
            rows.setdefault(key, event)
    names = {row.name for row, _ in rows.values()}
    covered = {"oom_begun": names & {"oom_kill", "oom_killed"}, "read_only": names & {"filesystem"}}
    out = [_finding(*event, found[key], log) for key, event in rows.items() if not covered.get(event[0].name)]
    return out + _flaps([one for one in recent if one.boot == log.boots - 1])


def _event(message: KernelMessage) -> tuple[EventRow, Mapping[str, str]] | None:
    lowered = message.text.lower()
    for row, pattern in _rows():
        if row.has.lower() in lowered and (match := pattern.search(message.text)):
            named = {
                name.rstrip("0123456789"): " ".join(value.split()) for name, value in match.groupdict().items() if value
            }
            groups = (
                dict.fromkeys((name.rstrip("0123456789") for name in pattern.groupindex), "that is not named") | named
            )
            return row, {**groups, "where": _where(named)}
    return None


def _where(groups: Mapping[str, str]) -> str:
    """`` in libnccl.so.2, at its offset 0x69996``: what a debugger (addr2line) takes."""
    if not groups.get("library"):
        return ""
    offset = (
        int(groups.get("ip") or "0", 16) - int(groups.get("base") or "0", 16) + int(groups.get("offset") or "0", 16)
    )
    return f" in {groups['library']}" + (f", at its offset {offset:#x}" if groups.get("base") and offset >= 0 else "")


def _finding(row: EventRow, groups: Mapping[str, str], lines: Sequence[KernelMessage], log: KernelLog) -> Finding:
    verdict, text = row.verdict, row.what.format_map(groups)
    if len(lines) > 1 and not row.once:
        text += f", {len(lines)} times"
    if all(one.boot != log.boots - 1 for one in lines):
        verdict, text = Verdict.NOTE, f"{text}, before the machine's last start"
    library = next((advice for name, advice in _LIBRARIES.items() if groups.get("library", "").startswith(name)), "")
    return Finding(
        check=row.check, verdict=verdict, message=text, evidence=lines[0].line, value=str(len(lines)),
        expected="none" if verdict.faulty else "", source=row.source if verdict.faulty else "",
        command=library or row.command.format_map(groups),
    )  # fmt: skip


def _link(message: KernelMessage) -> tuple[str, bool] | None:
    """(the port, whether it is up), of a line of a network driver."""
    match = _LINK.match(message.text)
    if match is None or not _PORT.search(match["port"]):
        return None
    return match["port"], (match["state"] or match["carrier"]).lower() in ("up", "active", "gained")


def _flaps(messages: Iterable[KernelMessage]) -> list[Finding]:
    """Links that were lost. A driver that loads reports its link down first, which is no loss."""
    losses: dict[str, list[KernelMessage]] = {}
    up: dict[str, bool] = {}
    booted = False
    for message in messages:
        booted |= message.text.startswith("Linux version")
        if link := _link(message):
            early = booted or (message.clock is Clock.BOOT and (message.time_s or BOOT_S) < BOOT_S)
            if not link[1] and (link[0] in up or not early):
                losses.setdefault(link[0], []).append(message)
            if link[1] or link[0] in up:
                up[link[0]] = link[1]
    out = []
    for port, lines in losses.items():
        gone = "" if up.get(port, True) else ", and has not come back"  # one that was never seen up was not in use
        grave = len(lines) >= FLAPS or (gone and _RDMA.search(port))
        times = "once" if len(lines) == 1 else f"{len(lines)} times"
        out.append(
            Finding(
                check="net.link", verdict=Verdict.DRAIN if grave else Verdict.NOTE, value=str(len(lines)),
                message=f"the link of {port} was lost {times}{gone}", evidence=lines[0].line, expected="none",
                source=f"gpud: {FLAPS} losses are a flap", command="the cable, its transceiver, the switch's port",
            )
        )  # fmt: skip
    return out
