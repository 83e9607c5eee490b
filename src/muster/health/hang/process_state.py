"""What the kernel says of a rank's process and of the group of processes (cgroup) whose limits hold for it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from muster.core.typed_json import Record, Unreadable

GONE = ""

_STATES = {
    "R": "runs",
    "S": "sleeps",
    "D": "waits for a device or a file system (cannot be interrupted)",
    "T": "is stopped (SIGSTOP or a freezer)",
    "t": "is stopped by a debugger",
    "Z": "has ended",
    "X": "has ended",
    "I": "sleeps",
    GONE: "is gone",
}


@dataclass(frozen=True, kw_only=True)
class ProcessState(Record):
    """One process."""

    state: str
    """The kernel's letter (R, S, D, T, t, Z, ...); empty: there is no such process."""
    wchan: str = ""
    """The kernel's function in which it waits; empty: none, or not to be read."""
    cpu_s: float = 0.0
    """Processor time that it has used."""

    @property
    def stopped(self) -> bool:
        return self.state in ("T", "t")

    @property
    def dead(self) -> bool:
        return self.state in (GONE, "Z", "X")

    @property
    def words(self) -> str:
        return _STATES.get(self.state, f"is in state {self.state}")


@dataclass(frozen=True, kw_only=True)
class CgroupState(Record):
    """Limits that held it up; None: not to be read here."""

    oom_kills: int | None = None
    throttled_s: float | None = None
    """How long its processes were kept from the processor, since the group began."""


def parse_stat(stat: str, wchan: str = "", ticks_per_s: int = 100) -> ProcessState:
    """``/proc/PID/stat``. Raises Unreadable."""
    fields = stat.rpartition(")")[2].split()
    if len(fields) < 13 or not re.fullmatch(r"[A-Za-z]", fields[0]) or not (fields[11] + fields[12]).isdigit():
        raise Unreadable(f"no /proc/PID/stat, or it is cut: {stat.strip()[:60]!r}")
    cpu_s = (int(fields[11]) + int(fields[12])) / ticks_per_s
    return ProcessState(state=fields[0], wchan="" if wchan == "0" else wchan, cpu_s=cpu_s)


def parse_status(status: str) -> ProcessState:
    """``/proc/PID/status``, where ``stat`` was not captured. Raises Unreadable."""
    found = re.search(r"^State:\s+([A-Za-z])\b", status, re.MULTILINE)
    if found is None:
        raise Unreadable("no /proc/PID/status, or it is cut: it has no line State")
    return ProcessState(state=found[1])


def parse_cgroup(memory_events: str = "", cpu_stat: str = "") -> CgroupState:
    """``memory.events`` (version 1: ``memory.oom_control``) and ``cpu.stat``, in either version's form."""
    memory, cpu = _pairs(memory_events), _pairs(cpu_stat)
    microseconds, nanoseconds = cpu.get("throttled_usec"), cpu.get("throttled_time")
    throttled_s = None
    if microseconds is not None:
        throttled_s = microseconds / 1e6
    elif nanoseconds is not None:
        throttled_s = nanoseconds / 1e9
    return CgroupState(oom_kills=memory.get("oom_kill"), throttled_s=throttled_s)


def _pairs(captured: str) -> dict[str, int]:
    rows = (line.split() for line in captured.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit()}
