"""A run's recorded history, read a second time: own parsing, own chain check, the standard library alone.

For ``report.audit.invariants``; everything else reads events through ``core.event_log``.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Machines keep their clocks closer together than this; a clock that is off by more was stepped.
STEP_NS = 1_000_000_000
#: A supervisor that begins this long before its predecessor's last event has a clock that was set back. (One that
#: lost the lease may act for a while: I3 reports that.)
BACK_NS = 300 * STEP_NS

#: Kind of the event that names a broken file: what follows of it is in another one.
DAMAGED = "log.damaged"
#: By which ranks share a model: layouts are equal when all of them are. An axis that is not named is 1.
AXES = ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep")

Line = dict[str, Any]
LayoutHistory = tuple[tuple[int, str], ...]
"""(first step, layout) of each range of steps that computed a state, in order."""


@dataclass
class Finding:
    """What was checked for one invariant, and what breaks it."""

    checked: int = 0
    """Facts that were looked at; 0: this history carries none."""
    problems: list[str] = field(default_factory=list)

    def expect(self, holds: bool, problem: str) -> None:
        self.checked += 1
        if not holds:
            self.problems.append(problem)


@dataclass
class History:
    """One run's folder, read."""

    run_dir: Path
    spec: Mapping[str, Any]
    files: dict[str, list[Line]]
    """File name -> lines, in the file's order."""
    lines: list[Line]
    """All of them by wall time, with stepped clocks corrected."""
    damaged: frozenset[str] = frozenset()
    """Files that are broken where their writer itself said so (``log.damaged``): read as far as they are whole."""

    @property
    def incomplete(self) -> set[int]:
        """Attempts of which lines may be missing, because a host's file is damaged."""
        return {_number(name) for name in self.damaged if not name.startswith("supervisor.")}

    @property
    def supervisor_damaged(self) -> bool:
        """Whether lines of a supervisor may be missing."""
        return any(name.startswith("supervisor.") for name in self.damaged)

    def of(self, *kinds: str) -> list[Line]:
        return [line for line in self.lines if line["kind"] in kinds]


def load(run_dir: Path, log: Finding) -> History:
    """Read every event file, following its chain; what breaks it goes to ``log``."""
    spec: Mapping[str, Any] = {}
    try:
        spec = json.loads((run_dir / "resolved.json").read_text())
    except (OSError, ValueError):
        log.problems.append("resolved.json is missing or not JSON")
    spec = spec if isinstance(spec, dict) else {}
    files: dict[str, list[Line]] = {}
    heads: dict[str, set[str]] = {}
    found: dict[str, list[str]] = {}
    for path in sorted((run_dir / "events").glob("*.jsonl")):
        files[path.name], heads[path.name], found[path.name] = _chain(path, log)
    log.expect(bool(files), f"no events in {run_dir / 'events'}")
    named = {str(line["detail"].get("file")) for lines in files.values() for line in lines if line["kind"] == DAMAGED}
    for name, problems in found.items():
        log.problems += problems if name not in named else []
    _undo_clock_steps(files)
    lines = [line for file_lines in files.values() for line in file_lines]
    lines.sort(key=lambda line: line["wall_ns"])
    damaged = frozenset(name for name in named if name not in files or found[name])
    history = History(run_dir=run_dir, spec=spec, files=files, lines=lines, damaged=damaged)
    for line in history.of("log.hash_heads", "supervisor.started"):
        cited = line["detail"].get("heads")
        for name, head in cited.items() if isinstance(cited, dict) else ():
            whole = name in named or (isinstance(head, str) and head in heads.get(name, set()))
            log.expect(whole, f"a cited head of {name} is not in that file: cut or changed")
    return history


def _undo_clock_steps(files: Mapping[str, list[Line]]) -> None:
    """Undo what a stepped wall clock did to ``wall_ns``: a second or more off, by the writer's own monotonic clock.

    Supervisors first, in the order of their terms, which follow each other; then the hosts, by the offsets of their
    monotonic clocks that supervisors measured (docs/events.md, ``clock.offset``).
    """
    measured: dict[str, list[int]] = {}
    ended = None
    supervisors = sorted(
        (name for name in files if name.startswith("supervisor.")), key=lambda name: (_number(name), name)
    )
    for name in supervisors:
        for part in _by_process(files[name]):
            ahead = part[0]["wall_ns"] - part[0]["mono_ns"]
            if ended is not None and part[0]["wall_ns"] < ended - BACK_NS:
                ahead = ended - part[0]["mono_ns"]
            _by_monotonic(part, ahead)
            ended = part[-1]["wall_ns"]
            for line in part:
                offset_ns = line["detail"].get("offset_ns")
                if line["kind"] == "clock.offset" and isinstance(offset_ns, int):
                    measured.setdefault(line["host"], []).append(ahead + offset_ns)
    for name in files.keys() - set(supervisors):
        for part in _by_process(files[name]):
            ahead = part[0]["wall_ns"] - part[0]["mono_ns"]
            nearest = min(measured.get(part[0]["host"], [ahead]), key=lambda offset: abs(offset - ahead))
            _by_monotonic(part, nearest if abs(nearest - ahead) >= STEP_NS else ahead)


def _by_process(lines: list[Line]) -> list[list[Line]]:
    """The file's lines by the process that wrote them: a machine may have been booted between two."""
    begins = [n for n, line in enumerate(lines) if n == 0 or line["kind"] in ("agent.started", "supervisor.started")]
    return [lines[a:b] for a, b in itertools.pairwise([*begins, len(lines)])]


def _number(name: str) -> int:
    """``host-0.part2.3.jsonl`` -> 3, the attempt or term."""
    number = name.split(".")[-2]
    return int(number) if number.isascii() and number.isdigit() and len(number) < 19 else 0


def _by_monotonic(lines: list[Line], ahead: int) -> None:
    for line in lines:
        if abs(line["wall_ns"] - line["mono_ns"] - ahead) >= STEP_NS:
            line["wall_ns"] = line["mono_ns"] + ahead


def layout_histories(history: History) -> dict[int, LayoutHistory]:
    """Attempt -> the layouts that computed the states which its steps built on.

    Two results of one step have the same bits where their layout histories are the same, in a deterministic run. An
    attempt that no supervisor began (plain processes, torchrun) has the run file's layout.
    """
    in_run_file = history.spec.get("parallelism", {})
    layouts = {int(line["attempt"]): line["detail"].get("layout") or {} for line in history.of("attempt.started")}
    first: dict[int, int] = {}
    for line in history.of("step"):
        attempt, step = int(line["attempt"]), int(line["step"])
        first[attempt] = min(step, first.get(attempt, step))
    result: dict[int, LayoutHistory] = {}
    layout_history: LayoutHistory = ()
    for attempt in sorted(first):
        layout = json.dumps([layouts.get(attempt, in_run_file).get(axis, 1) for axis in AXES])
        layout_history = up_to(layout_history, first[attempt] - 1)
        if not layout_history or layout_history[-1][1] != layout:
            layout_history = (*layout_history, (first[attempt] if layout_history else 0, layout))
        result[attempt] = layout_history
    return result


def up_to(layout_history: LayoutHistory, step: int) -> LayoutHistory:
    """The part of a layout history that led to ``step``."""
    return tuple(segment for segment in layout_history if segment[0] <= step)


def _chain(path: Path, log: Finding) -> tuple[list[Line], set[str], list[str]]:
    """(events, hash of every line, what breaks the chain); a torn last line does not count.

    A line that the next one does not cite was changed, and is none of the events.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        return [], set(), [f"{path.name} cannot be read: {error.strerror}"]
    result: list[Line] = []
    hashes: set[str] = set()
    problems: list[str] = []
    expected, count = None, 0
    for number, text in enumerate(data.split(b"\n")[:-1], 1):
        raw = text + b"\n"
        log.checked += 1
        try:
            line = _line(raw)
        except (ValueError, KeyError, RecursionError) as error:
            problems.append(f"{path.name}:{number}: not an event ({error})")
            continue
        if expected is None:
            expected = hashlib.sha256(f"muster:{line['run_id']}:{path.name}".encode()).hexdigest()
            hashes.add(expected)
        if line["prev"] != expected or line["seq"] != count:
            problems.append(f"{path.name}:{number}: the chain breaks here")
            if result and result[-1]["seq"] == line["seq"] - 1 and number > 1 and line["prev"] not in hashes:
                result.pop()
        expected, count = hashlib.sha256(raw).hexdigest(), line["seq"] + 1
        hashes.add(expected)
        line["file"] = path.name
        result.append(line)
    return result, hashes, problems


def _line(raw: bytes) -> Line:
    """One event. Raises ValueError, KeyError, RecursionError where it is none."""
    line = json.loads(raw)
    if not isinstance(line, dict):
        raise ValueError("no object")
    line.setdefault("detail", {})
    for names, kind in (("run_id prev kind host", str), ("seq wall_ns mono_ns attempt", int), ("detail", dict)):
        for name in names.split():
            if type(line[name]) is not kind:
                raise ValueError(f"{name} is {str(line[name])[:40]!r}")
    for name in ("step", "rank"):
        if type(line.get(name)) not in (int, type(None)):
            raise ValueError(f"{name} is {str(line[name])[:40]!r}")
    if max(abs(line[name]) for name in ("seq", "wall_ns", "mono_ns", "attempt")) > 1 << 63:
        raise ValueError("a number is out of range")
    return line
