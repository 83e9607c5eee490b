"""Predicted SQL, run read-only and compared with gold queries; a query that is stopped counts as wrong.

Queries are written by a model: they may loop, write, attach files or build gigabyte strings. An authorizer allows
reading and pure functions only, a result is bounded in rows and bytes, and SQLite's own limits bound strings and
statements. A progress handler stops a query at its time limit, but not within one slow function, and memory has no
limit here: models' queries run in a process that has one and can be ended (`judge`).
"""

from __future__ import annotations

import re
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from muster.core.errors import UsageError

MAX_ROWS = 10_000
#: Of one result: text and blobs by their length, other values as eight.
MAX_BYTES = 16 * 2**20
#: A gold query may take longer than a model's: a machine under load is no reason to leave a question out.
GOLD_TIMEOUT_S = 5.0
#: What an outcome shows of a result: rows, columns, characters of a cell.
SHOWN_ROWS, SHOWN_COLUMNS, SHOWN_CHARACTERS = 10, 50, 200
#: Virtual-machine instructions between two looks at the clock: about 0.1 ms.
_INSTRUCTIONS_PER_LOOK = 10_000
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 1_000_000,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 20_000,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 100,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 20,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1_000,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 1,
}
_READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
_FORBIDDEN_FUNCTIONS = {"load_extension", "readfile", "writefile", "edit", "fts3_tokenizer", "randomblob", "zeroblob"}

Value = str | bytes | int | float | None
Stopped = Literal["timeout", "forbidden", "too many rows", "too many bytes", "memory", "error"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one query returned, or why it was stopped."""

    rows: tuple[tuple[Value, ...], ...] = ()
    problem: Stopped | None = None
    message: str | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The verdict on one predicted query."""

    correct: bool
    reason: str | None = None
    """Why it is wrong: ``rows differ``, ``timeout``, ``memory``, ``too many bytes``, ..., ``error: ...``."""
    rows: tuple[tuple[str, ...], ...] = ()
    """What the predicted query returned, to show: the first few rows, long cells cut."""

    @property
    def timed_out(self) -> bool:
        return self.reason == "timeout"


def run_query(sql: str, database: sqlite3.Connection, *, timeout_s: float = 2.0) -> Result:
    """Run one reading statement. Never raises for what the statement does; the database is never changed."""
    rows: list[tuple[Value, ...]] = []
    size = 0
    with _guarded(database, time.monotonic() + timeout_s) as guard:
        try:
            cursor = database.execute(sql)
            if cursor.description is None:
                return Result(problem="error", message="not a query")
            for row in cursor:
                rows.append(tuple(map(_plain, row)))
                size += sum(len(value) if isinstance(value, str | bytes) else 8 for value in row)
                if len(rows) > MAX_ROWS:
                    return Result(problem="too many rows", message=f"more than {MAX_ROWS} rows")
                if size > MAX_BYTES:
                    return Result(problem="too many bytes", message=f"more than {MAX_BYTES} bytes")
        except MemoryError:
            return Result(problem="memory", message="more memory than a query may take")
        except (sqlite3.Error, sqlite3.Warning, ValueError, UnicodeError) as error:
            if guard.late:
                return Result(problem="timeout", message=f"stopped after {timeout_s:g} s")
            if guard.forbidden:
                return Result(problem="forbidden", message=guard.forbidden)
            return Result(problem="error", message=str(error)[:1000])
    return Result(rows=tuple(rows))


def compare(
    predicted_sql: str,
    golds: Sequence[str],
    database: sqlite3.Connection,
    timeout_s: float = 2.0,
    *,
    begins: Callable[[float], None] = lambda limit_s: None,
) -> Outcome:
    """Whether a query returns the rows of one of ``golds``: as multisets, or in order where gold orders at its top
    level. ``begins`` is called before each query with the seconds that it may take.

    Raises:
        UsageError: a gold query does not run.
    """
    begins(timeout_s)
    result = run_query(predicted_sql, database, timeout_s=timeout_s)
    if result.problem:
        return Outcome(correct=False, reason=_reason(result))
    shown = tuple(
        tuple(str(value)[:SHOWN_CHARACTERS] for value in row[:SHOWN_COLUMNS]) for row in result.rows[:SHOWN_ROWS]
    )
    stopped = None
    for gold_sql in golds:
        limit_s = max(timeout_s, GOLD_TIMEOUT_S)
        begins(limit_s)
        gold = run_query(gold_sql, database, timeout_s=limit_s)
        if gold.problem in ("error", "forbidden"):
            raise UsageError(f"gold query does not run: {gold.message}: {gold_sql}", hint="fix or remove this row")
        if gold.problem:  # a machine under load, or a huge database: no reason to end a training run
            stopped = f"gold query: {gold.problem}"
        elif same_rows(result.rows, gold.rows, ordered=orders_its_result(gold_sql)):
            return Outcome(correct=True, rows=shown)
    return Outcome(correct=False, reason=stopped or "rows differ", rows=shown)


def _reason(result: Result) -> str | None:
    return f"error: {result.message}" if result.problem == "error" else result.problem


def match(predicted_sql: str, golds: Sequence[str]) -> Outcome:
    """Whether a query is the same text as one of ``golds`` after normalising: for data without its tables."""
    predicted = normalise(predicted_sql)
    same = any(predicted == normalise(gold_sql) for gold_sql in golds)
    return Outcome(correct=same, reason=None if same else "query differs")


def same_rows(result: Sequence[tuple[Value, ...]], gold: Sequence[tuple[Value, ...]], *, ordered: bool) -> bool:
    """Rows compared after rounding floats to nine digits; 2 and 2.0 are the same, 2 and '2' are not."""
    return list(result) == list(gold) if ordered else Counter(result) == Counter(gold)


def orders_its_result(sql: str) -> bool:
    """Whether ORDER BY is at the top level (not in a subquery, a window, a string or a quoted name)."""
    depth = 0
    tokens: list[str] = []
    for token in _tokens(sql):
        if token == "(":
            depth += 1
        elif token == ")":
            depth -= 1
        elif depth == 0:
            tokens.append(token.upper())
    return any(first == "ORDER" and second == "BY" for first, second in pairwise(tokens))


def normalise(sql: str) -> tuple[str, ...]:
    """Tokens of a query in a comparable form: names, keywords and string values in one case, quotes of names gone,
    one spelling of unequal, no closing semicolon. Values compare case-insensitively, as WikiSQL's scorer does."""
    result = []
    for token in _tokens(sql):
        if token[0] == "'":
            result.append(token.lower())
        elif token[0] in '"`[':
            result.append(token[1:-1].lower())
        else:
            result.append({"!=": "<>", "==": "="}.get(token, token.lower()))
    while result and result[-1] == ";":
        result.pop()
    return tuple(result)


_TOKEN = re.compile(
    r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`|\[[^\]]*\]|--[^\n]*|/\*.*?\*/|\d+(?:\.\d+)?|\w+|<>|!=|<=|>=|==|\|\||\S""",
    re.DOTALL,
)


def _tokens(sql: str) -> list[str]:
    return [token for token in _TOKEN.findall(sql) if not token.startswith(("--", "/*"))]


def _plain(value: Value) -> Value:
    """One comparable value. Floats keep nine significant digits: sums in another order may differ in the last."""
    if isinstance(value, float):
        rounded = float(f"{value:.9g}")
        return int(rounded) if rounded.is_integer() else rounded
    return value


@dataclass
class _Guard:
    """What stopped a query."""

    late: bool = False
    forbidden: str | None = None


@contextmanager
def _guarded(connection: sqlite3.Connection, deadline: float) -> Iterator[_Guard]:
    """Authorizer, clock and limits for the length of one query; taken off again afterwards."""
    guard = _Guard()

    def authorize(action: int, first: str | None, second: str | None, *_: object) -> int:
        if action in _READING and not (
            action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in _FORBIDDEN_FUNCTIONS
        ):
            return sqlite3.SQLITE_OK
        guard.forbidden = f"not allowed: {second if action == sqlite3.SQLITE_FUNCTION else 'anything but reading'}"
        return sqlite3.SQLITE_DENY

    def look() -> int:
        guard.late = time.monotonic() > deadline
        return int(guard.late)

    before = {limit: connection.setlimit(limit, value) for limit, value in _LIMITS.items()}
    connection.set_authorizer(authorize)
    connection.set_progress_handler(look, _INSTRUCTIONS_PER_LOOK)
    try:
        yield guard
    finally:
        connection.set_progress_handler(None, 0)
        connection.set_authorizer(None)
        for limit, value in before.items():
            connection.setlimit(limit, value)
