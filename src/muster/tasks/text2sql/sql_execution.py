"""Predicted SQL, run safely: read-only, bounded in time, rows and memory, and compared with the gold query.

Queries are written by a model: they may loop, write, attach files or build gigabyte strings. An authorizer
allows reading and pure functions only; a progress handler stops a query at its time limit; SQLite's own limits
bound strings and statements. A query that is stopped counts as wrong.
"""

from __future__ import annotations

import re
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from muster.core.errors import UsageError

MAX_ROWS = 10_000
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
Database = sqlite3.Connection | str | Path


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one query returned, or why it was stopped."""

    rows: tuple[tuple[Value, ...], ...] = ()
    problem: Literal["timeout", "forbidden", "too many rows", "error"] | None = None
    message: str | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The verdict on one predicted query."""

    correct: bool
    reason: str | None = None
    """Why it is wrong: ``rows differ``, ``timeout``, ``forbidden``, ``too many rows``, ``error: ...``."""
    rows: tuple[tuple[Value, ...], ...] = ()
    """What the predicted query returned (first few)."""

    @property
    def timed_out(self) -> bool:
        return self.reason == "timeout"


def run_query(sql: str, database: Database, *, timeout_s: float = 2.0) -> Result:
    """Run one reading statement. Never raises for what the statement does; the database is never changed.

    ``database`` is an open connection (left open) or a file, opened read-only.

    Raises:
        UsageError: the database file cannot be opened.
    """
    with _opened(database) as connection, _guarded(connection, time.monotonic() + timeout_s) as guard:
        try:
            cursor = connection.execute(sql)
            if cursor.description is None:
                return Result(problem="error", message="not a query")
            rows = cursor.fetchmany(MAX_ROWS + 1)
        except (sqlite3.Error, sqlite3.Warning, ValueError, UnicodeError, MemoryError) as error:
            if guard.late:
                return Result(problem="timeout", message=f"stopped after {timeout_s:g} s")
            if guard.forbidden:
                return Result(problem="forbidden", message=guard.forbidden)
            return Result(problem="error", message=str(error))
        if len(rows) > MAX_ROWS:
            return Result(problem="too many rows", message=f"more than {MAX_ROWS} rows")
    return Result(rows=tuple(tuple(_plain(value) for value in row) for row in rows))


def compare(predicted_sql: str, gold_sql: str, database: Database, timeout_s: float = 2.0) -> Outcome:
    """Whether both queries return the same rows: as multisets, or in order where gold orders at its top level.

    Raises:
        UsageError: the database cannot be opened, or the gold query itself does not run.
    """
    with _opened(database) as connection:
        gold = run_query(gold_sql, connection, timeout_s=max(timeout_s, 5.0))
        if gold.problem == "timeout":  # a machine under load, or a huge database: no reason to end a training run
            return Outcome(correct=False, reason="gold query timed out")
        if gold.problem:
            raise UsageError(f"gold query does not run: {gold.message}: {gold_sql}", hint="fix or remove this row")
        result = run_query(predicted_sql, connection, timeout_s=timeout_s)
    if result.problem:
        reason = f"error: {result.message}" if result.problem == "error" else result.problem
        return Outcome(correct=False, reason=reason)
    same = same_rows(result.rows, gold.rows, ordered=orders_its_result(gold_sql))
    return Outcome(correct=same, reason=None if same else "rows differ", rows=result.rows[:10])


def match(predicted_sql: str, gold_sql: str) -> Outcome:
    """Whether both queries are the same text after normalising: for data without its tables."""
    same = normalise(predicted_sql) == normalise(gold_sql)
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


@contextmanager
def _opened(database: Database) -> Iterator[sqlite3.Connection]:
    if isinstance(database, sqlite3.Connection):
        yield database
        return
    path = Path(database)
    if not path.is_file():
        raise UsageError(f"database {str(path)!r} does not exist", hint="give `database` the path of a SQLite file")
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
        connection.text_factory = lambda data: data.decode("utf-8", "replace")
        try:
            connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
            yield connection
        except sqlite3.DatabaseError as error:
            raise UsageError(f"{str(path)!r} is not a SQLite database: {error}") from error


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
