"""A run's recorded history, read a second time: own parsing, own chain check, the standard library alone.

For ``report.audit.invariants``; everything else reads events through ``core.event_log``.
"""

from __future__ import annotations

import hashlib
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

    def of(self, *kinds: str) -> list[Line]:
        return [line for line in self.lines if line["kind"] in kinds]


def load(run_dir: Path, log: Finding) -> History:
    """Read every event file, following its chain; what breaks it goes to ``log``."""
    spec: Mapping[str, Any] = {}
    try:
        spec = json.loads((run_dir / "resolved.json").read_text())
    except (OSError, ValueError):
        log.problems.append("resolved.json is missing or not JSON")
    files: dict[str, list[Line]] = {}
    heads: dict[str, set[str]] = {}
    for path in sorted((run_dir / "events").glob("*.jsonl")):
        files[path.name], heads[path.name] = _chain(path, log)
    log.expect(bool(files), f"no events in {run_dir / 'events'}")
    _undo_clock_steps(files)
    lines = [line for file_lines in files.values() for line in file_lines]
    lines.sort(key=lambda line: line["wall_ns"])
    history = History(run_dir=run_dir, spec=spec, files=files, lines=lines)
    for line in history.of("log.hash_heads", "supervisor.started"):
        for name, head in (line.get("detail", {}).get("heads") or {}).items():
            log.expect(head in heads.get(name, set()), f"a cited head of {name} is not in that file: cut or changed")
    return history


def _undo_clock_steps(files: Mapping[str, list[Line]]) -> None:
    """Undo what a stepped wall clock did to ``wall_ns``: a second or more off, by the writer's own monotonic clock.

    Supervisors first, in the order of their terms, which follow each other; then the hosts, by the offsets of their
    monotonic clocks that supervisors measured (docs/events.md, ``clock.offset``).
    """
    measured: dict[str, list[int]] = {}
    ended = None
    supervisors = sorted((name for name in files if name.startswith("supervisor.")), key=lambda name: (len(name), name))
    for name in supervisors:
        for part in _by_process(files[name]):
            ahead = part[0]["wall_ns"] - part[0]["mono_ns"]
            if ended is not None and part[0]["wall_ns"] < ended - BACK_NS:
                ahead = ended - part[0]["mono_ns"]
            _by_monotonic(part, ahead)
            ended = part[-1]["wall_ns"]
            for line in part:
                if line["kind"] == "clock.offset":
                    measured.setdefault(line["host"], []).append(ahead + int(line["detail"]["offset_ns"]))
    for name in files.keys() - set(supervisors):
        for part in _by_process(files[name]):
            ahead = part[0]["wall_ns"] - part[0]["mono_ns"]
            nearest = min(measured.get(part[0]["host"], [ahead]), key=lambda offset: abs(offset - ahead))
            _by_monotonic(part, nearest if abs(nearest - ahead) >= STEP_NS else ahead)


def _by_process(lines: list[Line]) -> list[list[Line]]:
    """The file's lines by the process that wrote them: a machine may have been booted between two."""
    begins = [n for n, line in enumerate(lines) if n == 0 or line["kind"] in ("agent.started", "supervisor.started")]
    return [lines[a:b] for a, b in zip(begins, [*begins[1:], len(lines)], strict=True)]


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


def _chain(path: Path, log: Finding) -> tuple[list[Line], set[str]]:
    """(events, hash of every line) up to the first break; a torn last line does not count."""
    data = path.read_bytes()
    result: list[Line] = []
    hashes: set[str] = set()
    expected = None
    for number, raw in enumerate(data[: data.rfind(b"\n") + 1].splitlines(keepends=True), 1):
        try:
            line = json.loads(raw)
            if not isinstance(line, dict):
                raise ValueError("no object")
            run_id, prev, seq = str(line["run_id"]), line["prev"], line["seq"]
            _ = (line["kind"], line["wall_ns"], line["mono_ns"], line["attempt"], line["host"])
        except (ValueError, KeyError) as error:
            log.expect(False, f"{path.name}:{number}: not an event ({error})")
            break
        if expected is None:
            expected = hashlib.sha256(f"muster:{run_id}:{path.name}".encode()).hexdigest()
            hashes.add(expected)
        log.expect(prev == expected and seq == number - 1, f"{path.name}:{number}: the chain breaks here")
        if log.problems and log.problems[-1].startswith(f"{path.name}:"):
            break
        expected = hashlib.sha256(raw).hexdigest()
        hashes.add(expected)
        line["file"] = path.name
        result.append(line)
    return result, hashes
