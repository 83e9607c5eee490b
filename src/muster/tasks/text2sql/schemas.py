"""Schemas with rows: tables drawn from known words, split so that a held-out table never occurs in training.

A table's word set (its name and its own columns) falls into one of ``BUCKETS`` hash buckets; bucket 0 is
held out. Training draws only from the others, so the two sets are disjoint by construction for every seed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Literal

BUCKETS = 8

Value = int | str
Row = tuple[Value, ...]


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column. ``key`` is the table's own number, ``reference`` another table's."""

    name: str
    kind: Literal["key", "reference", "number", "text"]


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table and its rows; the first text column, where there is one, names each row uniquely."""

    name: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...] = field(default=(), repr=False)
    parent: str | None = None
    """The table that this one's reference column points to."""

    def named(self, kind: str) -> list[str]:
        """Column names of one kind, in schema order."""
        return [column.name for column in self.columns if column.kind == kind]

    def values(self, column: str) -> list[Value]:
        """One column, row by row."""
        place = [other.name for other in self.columns].index(column)
        return [row[place] for row in self.rows]

    @property
    def own_columns(self) -> list[str]:
        """Columns that hold facts: no keys."""
        return [column.name for column in self.columns if column.kind in ("number", "text")]

    @property
    def names(self) -> frozenset[str]:
        """What identifies the table for the split."""
        return frozenset([self.name, *self.own_columns])


def is_heldout(names: Iterable[str]) -> bool:
    """Whether a table of these words belongs to the held-out set. Order does not matter."""
    digest = hashlib.sha256(" ".join(sorted(names)).encode()).digest()
    return digest[0] % BUCKETS == 0


def single_table(rng: Random, *, heldout: bool, numbers: int, texts: int) -> tuple[Table, ...]:
    """One table without keys, its columns in random order, with 8 to 14 rows."""
    name, columns = _draw_words(rng, heldout, numbers, texts, set())
    return (_fill(rng, Table(name=name, columns=tuple(columns)), rows=rng.randint(8, 14), parent_rows=0),)


def linked_tables(rng: Random, *, heldout: bool, count: int) -> tuple[Table, ...]:
    """``count`` tables in a chain, each referring to the one before it: parent first, then child."""
    used: set[str] = set()
    tables: list[Table] = []
    for place in range(count):
        name, columns = _draw_words(rng, heldout, rng.randint(1, 2), rng.randint(1, 2), used)
        parent = tables[-1] if tables else None
        keys = [Column(name="id", kind="key")]
        if parent:
            keys.append(Column(name=f"{parent.name}_id", kind="reference"))
        table = Table(name=name, columns=(*keys, *columns), parent=parent.name if parent else None)
        rows = rng.randint(5, 8) + 5 * place
        tables.append(_fill(rng, table, rows=rows, parent_rows=len(parent.rows) if parent else 0))
    return tuple(tables)


def _draw_words(rng: Random, heldout: bool, numbers: int, texts: int, used: set[str]) -> tuple[str, list[Column]]:
    """A name and columns from words not in ``used`` (which grows), on the asked side of the split."""
    while True:
        name = rng.choice(TABLES)
        chosen = [Column(name=word, kind="number") for word in rng.sample(NUMBER_COLUMNS, numbers)]
        chosen += [Column(name=word, kind="text") for word in rng.sample(TEXT_COLUMNS, texts)]
        names = {name, *(column.name for column in chosen)}
        if names & used or is_heldout(names) is not heldout:
            continue
        used |= names
        rng.shuffle(chosen)
        return name, chosen


def _fill(rng: Random, table: Table, *, rows: int, parent_rows: int) -> Table:
    """Rows whose numbers are distinct within a column (1 to 99) and whose first text column is distinct too.

    One parent stays without children, so that questions about absence have an answer.
    """
    label = next(iter(table.named("text")), None)
    columns: list[list[Value]] = []
    for column in table.columns:
        if column.kind == "key":
            columns.append(list(range(1, rows + 1)))
        elif column.kind == "reference":
            childless = rng.randint(1, parent_rows)
            parents = [key for key in range(1, parent_rows + 1) if key != childless]
            columns.append([rng.choice(parents) for _ in range(rows)])
        elif column.kind == "number":
            columns.append(list(rng.sample(range(1, 100), rows)))
        elif column.name == label:
            columns.append(list(rng.sample(VALUES, rows)))
        else:
            few = rng.sample(VALUES, rng.randint(3, 4))
            columns.append([rng.choice(few) for _ in range(rows)])
    return Table(name=table.name, columns=table.columns, rows=tuple(zip(*columns, strict=True)), parent=table.parent)


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A filter on one table: its words, its SQL, and which rows it keeps."""

    text: str
    sql: str
    keeps: Callable[[Row], bool]

    def count(self, table: Table) -> int:
        return sum(1 for row in table.rows if self.keeps(row))


# ----------------
# The words the text-to-SQL generator builds schemas from: 40 tables, 48 number and 32 text columns, 48 values
# All are plain lower-case words, so that a word-level vocabulary of a few hundred tokens holds every one. No word
# is in two lists, and none is an SQL keyword.


_TABLES = """
shop farm hotel school museum library bridge station airport stadium theater clinic factory harbor garden
bakery market club team player singer author painter pilot driver doctor lawyer student teacher employee
customer supplier product film song book train ship aircraft festival
"""

_NUMBER_COLUMNS = """
price stock age height weight salary budget score rank capacity length width depth speed distance duration
population area rooms floors seats pages votes goals points wins losses visitors members tickets sales profit
cost tax rating level power volume debt bonus orders branches awards tracks stops crew staff years
"""

_TEXT_COLUMNS = """
name city country color style genre status title region street brand material language nationality
category season owner manager sponsor label origin theme position currency district climate size shape
grade mood format religion
"""

_VALUES = """
red blue green white black amber oslo paris rome cairo lima tokyo anna boris clara david emma felix
north south east west alpha beta gamma delta gold silver iron wood glass stone rock jazz folk opera
open closed active retired spring summer autumn winter small medium large huge
"""

TABLES = tuple(_TABLES.split())
NUMBER_COLUMNS = tuple(_NUMBER_COLUMNS.split())
TEXT_COLUMNS = tuple(_TEXT_COLUMNS.split())
VALUES = tuple(_VALUES.split())
