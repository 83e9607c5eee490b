"""``python -m muster.tasks.text2sql.judge``: runs models' SQL for one process, within limits, one JSON line each way.

It can be ended at any moment: it holds nothing but open databases. Memory and processor time are limited by the
kernel, so that a query cannot outlive its caller either; wall-clock time is the caller's to limit (`judge_process`),
which is sent each stage (`Begun`).
"""

from __future__ import annotations

import math
import resource
import signal
import sqlite3
import sys
import time
from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, Literal

from muster.core.errors import MusterError
from muster.core.typed_json import Count, Record, Seconds, decode, encode
from muster.tasks.text2sql import generator
from muster.tasks.text2sql.databases import Marks, marks, open_database
from muster.tasks.text2sql.sql_execution import GOLD_TIMEOUT_S, Outcome, compare, run_query

#: Address space of the whole process, of which Python takes 0.2 GiB.
MEMORY_BYTES = 2**30
#: Opening a database: a copy of one with a log takes as long as the disk.
OPEN_LIMIT_S = 600.0
#: Databases kept open for the next question.
_KEPT = 16
#: Sent to every process of a terminal or a job (Slurm's notice may be a SIGUSR1). They are for the caller, whose end is
#: stdin's.
_FOR_THE_CALLER = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True, kw_only=True)
class Ask(Record):
    """Judge a query, or (``predicted`` None) say whether the gold ones can be used."""

    golds: tuple[str, ...]
    predicted: str | None = None
    timeout_s: Seconds = GOLD_TIMEOUT_S
    path: str | None = None
    """A SQLite file; None: that of the generated example (level, seed, index)."""
    generated: tuple[Count, Count, Count] | None = None


@dataclass(frozen=True, kw_only=True)
class Usable(Record):
    """Why a gold query cannot be used; None: it runs and returns rows."""

    problem: str | None


@dataclass(frozen=True, kw_only=True)
class Verdict(Record):
    """An `Outcome`, as it travels."""

    correct: bool
    reason: str | None = None
    rows: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Failure(Record):
    """The database cannot be used, or a gold query does not run any more."""

    error: str
    hint: str | None
    exit_code: Count


@dataclass(frozen=True, kw_only=True)
class Begun(Record):
    """What begins now, and how long it may take. Nothing is said of the first query of an open database: its limit is
    the question's, from the question on."""

    stage: Literal["start", "opening", "predicted", "gold"]
    limit_s: Seconds


@dataclass(frozen=True, kw_only=True)
class Said(Record):
    """One line: a stage, or the answer."""

    begun: Begun | None = None
    verdict: Verdict | None = None
    usable: tuple[Usable, ...] | None = None
    """One for each of ``golds``."""
    failure: Failure | None = None


def main() -> None:
    """Answers until stdin ends."""
    for number in _FOR_THE_CALLER:
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    memory = _within(resource.RLIMIT_AS, MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    out = sys.stdout.buffer
    _say(out, Said(begun=Begun(stage="start", limit_s=0.0)))
    databases = _Databases()
    for line in sys.stdin.buffer:
        _say(out, _answer(decode(Ask, line), databases, out))


def _answer(ask: Ask, databases: _Databases, out: BinaryIO) -> Said:
    stages = _Stages(ask, out)
    try:
        connection = databases.get(ask, stages)
        if ask.predicted is None:
            return Said(usable=tuple(_usable(gold, connection, ask.timeout_s, stages) for gold in ask.golds))
        outcome = compare(ask.predicted, ask.golds, connection, ask.timeout_s, begins=stages.query)
    except MemoryError:
        outcome = Outcome(correct=False, reason="memory")
    except MusterError as error:
        return Said(failure=Failure(error=str(error), hint=error.hint, exit_code=error.exit_code))
    return Said(verdict=Verdict(correct=outcome.correct, reason=outcome.reason, rows=outcome.rows))


def _usable(gold: str, connection: sqlite3.Connection, timeout_s: float, stages: _Stages) -> Usable:
    stages.query(timeout_s)
    result = run_query(gold, connection, timeout_s=timeout_s)
    if result.problem is not None:
        return Usable(problem=f"{result.problem}: {result.message}" if result.message else result.problem)
    return Usable(problem=None if result.rows else "no rows")


class _Stages:
    """Tells the caller what one question has come to, and the kernel how long it may take."""

    def __init__(self, ask: Ask, out: BinaryIO) -> None:
        self._out = out
        self._next: Literal["predicted", "gold"] = "gold" if ask.predicted is None else "predicted"
        self._is_known = True

    def opening(self) -> None:
        _say(self._out, Said(begun=Begun(stage="opening", limit_s=OPEN_LIMIT_S)))
        self._is_known = False

    def query(self, limit_s: float) -> None:
        """A query begins. If the caller is gone and cannot end it, the kernel will, by SIGXCPU.

        Under a hard limit (``ulimit -t``) that comes earlier it is SIGKILL: the caller asks a new child, with all of
        the time.
        """
        _, most = resource.getrlimit(resource.RLIMIT_CPU)
        cpu_s = math.ceil(time.process_time()) + math.ceil(limit_s) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (_within(resource.RLIMIT_CPU, cpu_s), most))
        if not self._is_known:
            _say(self._out, Said(begun=Begun(stage=self._next, limit_s=limit_s)))
        self._next, self._is_known = "gold", False


def _within(kind: int, wanted: int) -> int:
    """``wanted``, or the hard limit where that is lower."""
    _, most = resource.getrlimit(kind)
    return wanted if most == resource.RLIM_INFINITY else min(wanted, most)


def _say(out: BinaryIO, said: Said) -> None:
    out.write(encode(said) + b"\n")
    out.flush()


class _Databases:
    """The last few databases, open; one that has changed is reopened."""

    def __init__(self) -> None:
        self._files: OrderedDict[str, tuple[Marks, sqlite3.Connection]] = OrderedDict()

    def get(self, ask: Ask, stages: _Stages) -> sqlite3.Connection:
        """Raises MusterError, as ``open_database``."""
        if ask.path is None:
            assert ask.generated is not None
            stages.opening()
            return _generated(*ask.generated)
        found = self._files.pop(ask.path, None)
        now = marks(Path(ask.path))
        if found is not None and found[0] != now:
            found[1].close()
            found = None
        if found is None:
            stages.opening()
            found = now, _in_memory_only(open_database(Path(ask.path)))
        self._files[ask.path] = found
        while len(self._files) > _KEPT:
            self._files.popitem(last=False)[1][1].close()
        return found[1]


@lru_cache(maxsize=_KEPT)
def _generated(level: int, seed: int, index: int) -> sqlite3.Connection:
    return _in_memory_only(generator.build_database(generator.example(level, seed, index, heldout=True)))


def _in_memory_only(connection: sqlite3.Connection) -> sqlite3.Connection:
    """A query's sorting and grouping never fill a disk: they count in the limit of memory."""
    connection.execute("PRAGMA temp_store = MEMORY")
    return connection


if __name__ == "__main__":
    main()
