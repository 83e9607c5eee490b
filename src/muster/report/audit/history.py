"""A run's recorded history: which lines of a damaged file count is ``core.event_log``'s rule, as for every reader; that
a chain holds, and what cites what, is looked up here a second time with the standard library alone.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from muster.core.event_log import EventReader
from muster.core.processes import open_plain, read_plain
from muster.core.typed_json import JsonObject

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
        spec = _spec(read_plain(run_dir / "resolved.json"))
    except OSError:
        log.problems.append("resolved.json is missing")
    except ValueError as error:
        log.problems.append(f"resolved.json is damaged: {error}")
    files: dict[str, list[Line]] = {}
    heads: dict[str, set[str]] = {}
    found: dict[str, list[str]] = {}
    reader = EventReader(run_dir / "events")
    for path in sorted((run_dir / "events").glob("*.jsonl")):
        said = len(reader.damaged)
        files[path.name] = [_line(line.held, path.name) for line in reader.read_lines(path)]
        found[path.name] = [str(damage) for damage in reader.damaged[said:]]
        checked, heads[path.name], breaks_at = _chain(path)
        log.checked += checked
        if breaks_at and not found[path.name]:
            found[path.name] = [f"{path.name}:{breaks_at}: the chain breaks here"]
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


def _spec(data: bytes) -> Line:
    """The resolved run file, whose second line is the checksum of all the others. Raises ValueError."""
    held = json.loads(data)
    if not isinstance(held, dict):
        raise ValueError("it is no object")
    named = held.pop("checksum", None)  # not there: an earlier version wrote it
    if named is not None:
        first, _, rest = data.split(b"\n", 2)
        found = hashlib.sha256(first + b"\n" + rest).hexdigest()
        if named != f"sha256:{found}":
            raise ValueError(f"its checksum is {named}, it holds sha256:{found}")
    return held


def _undo_clock_steps(files: Mapping[str, list[Line]]) -> None:
    """Undo what a stepped wall clock did to ``wall_ns``: a second or more off, by the writer's own monotonic clock.

    Supervisors first, in the order of their terms, which follow each other; then the hosts, by the offsets of their
    monotonic clocks that supervisors measured (docs/reference/events.md, ``clock.offset``).
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


def _chain(path: Path) -> tuple[int, set[str], int]:
    """(whole lines, what a next line may cite, number of the first that is not what the one after it cites; 0: none).

    A torn last line does not count.
    """
    try:
        with open_plain(path) as file:
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return 0, set(), 0
    hashes: set[str] = set()
    expected, breaks_at = "", 0
    for number, text in enumerate(lines, 1):
        cited, seq, run_id = _cited(text)
        if number == 1:
            expected = hashlib.sha256(f"muster:{run_id}:{path.name}".encode()).hexdigest()
            hashes.add(expected)
        if not breaks_at and (cited, seq) != (expected, number - 1):
            breaks_at = number
        expected = hashlib.sha256(text + b"\n").hexdigest()
        hashes.add(expected)
    return len(lines), hashes, breaks_at


def _cited(text: bytes) -> tuple[object, object, object]:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None, None, None
    return (line.get("prev"), line.get("seq"), line.get("run_id")) if isinstance(line, dict) else (None, None, None)


def _line(held: JsonObject, file: str) -> Line:
    return {"detail": {}, **held, "file": file}
