"""Text-to-SQL, generated: schemas, filled databases, questions and gold queries, seeded and unlimited.

Example i of (level, seed, split) is a pure function of these four, the same in every process and Python.
Level 1: one table, four shapes (count, aggregate, list, aggregate with a condition). 2 adds conditions and
ordering, 3 joins, grouping and HAVING, 4 nested conditions. Held-out tables never occur in training (`schemas`).
A gold query never returns nothing, NULL or zero, and held-out databases distinguish gold from its likely mistakes.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from random import Random

from muster.core.typed_json import JsonObject
from muster.tasks.text2sql.query_shapes import LEVEL_1, LEVEL_2, Draft, Shape
from muster.tasks.text2sql.query_shapes_joined import LEVEL_3
from muster.tasks.text2sql.query_shapes_nested import LEVEL_4
from muster.tasks.text2sql.schemas import Table, linked_tables, single_table
from muster.tasks.text2sql.sql_execution import orders_its_result, run_query, same_rows

LEVELS = (1, 2, 3, 4)
_SHAPES: dict[int, tuple[Shape, ...]] = {1: LEVEL_1, 2: LEVEL_2, 3: LEVEL_3, 4: LEVEL_4}
#: For each level, how often questions of each level up to it are drawn.
_SHARES = {1: (1,), 2: (3, 7), 3: (1, 2, 7), 4: (1, 2, 3, 6)}
_TRIES = 200


@dataclass(frozen=True, kw_only=True)
class Example:
    """One question over one database."""

    question: str
    schema_text: str
    """Compact: ``table shop : price , name``; several tables separated by ``;``."""
    gold_sql: str
    shape: str
    """Name of the query's shape, for breakdowns."""
    tables: tuple[Table, ...]

    @property
    def prompt(self) -> str:
        """What the model reads before it answers."""
        return f"{self.schema_text} | {self.question} ?"

    @property
    def completion(self) -> str:
        """The answer as it follows the prompt."""
        return f" {self.gold_sql}"

    def row(self) -> JsonObject:
        """The example as a data row: columns for templates, and ready-made prompt and completion."""
        return {
            "question": self.question,
            "schema": self.schema_text,
            "ddl": "\n".join(create_statement(table) for table in self.tables),
            "sql": self.gold_sql,
            "prompt": self.prompt,
            "completion": self.completion,
        }


def examples(level: int, rows: int, seed: int, *, heldout: bool = False, start: int = 0) -> Iterator[Example]:
    """Examples ``start`` to ``start + rows`` of the unlimited sequence of (level, seed, split)."""
    for index in range(start, start + rows):
        yield example(level, seed, index, heldout=heldout)


def example(level: int, seed: int, index: int, *, heldout: bool = False) -> Example:
    """One example, redrawn until its rows suit the query."""
    if level not in LEVELS:
        raise ValueError(f"level {level} is not one of {LEVELS}")
    split = "heldout" if heldout else "train"
    for attempt in range(_TRIES):
        # A string seed goes through SHA-512 (random.seed, version 2): independent of PYTHONHASHSEED.
        rng = Random(f"muster-text2sql-1:{level}:{seed}:{split}:{index}:{attempt}")
        drawn = _draw(rng, level, heldout)
        if drawn is not None:
            return drawn
    raise AssertionError(f"no example after {_TRIES} draws: level {level}, seed {seed}, {split} {index}")


def build_database(drawn: Example) -> sqlite3.Connection:
    """The example's tables, filled, in memory. The caller closes it. Same example, same rows."""
    connection = sqlite3.connect(":memory:")
    for table in drawn.tables:
        connection.execute(create_statement(table))
        marks = ", ".join("?" * len(table.columns))
        connection.executemany(f"INSERT INTO {table.name} VALUES ({marks})", table.rows)
    connection.commit()
    return connection


def create_statement(table: Table) -> str:
    """``CREATE TABLE`` of one table, with its keys."""
    parts = []
    for column in table.columns:
        kind = "TEXT" if column.kind == "text" else "INTEGER"
        extra = " PRIMARY KEY" if column.kind == "key" else ""
        if column.kind == "reference":
            extra = f" REFERENCES {table.parent}(id)"
        parts.append(f"{column.name} {kind}{extra}")
    return f"CREATE TABLE {table.name} ({', '.join(parts)});"


def schema_text(tables: tuple[Table, ...]) -> str:
    """The compact form that prompts show."""
    return " ; ".join(f"table {table.name} : {' , '.join(c.name for c in table.columns)}" for table in tables)


def _draw(rng: Random, level: int, heldout: bool) -> Example | None:
    shape, tables, asked = _shape_and_tables(rng, level, heldout)
    draft = shape(rng, asked)
    if draft is None:
        return None
    shown = list(tables)
    rng.shuffle(shown)
    drawn = Example(
        question=draft.question,
        schema_text=schema_text(tuple(shown)),
        gold_sql=draft.sql,
        shape=shape.__name__,
        tables=tuple(shown),
    )
    # One table's shapes are right by construction; joins and nesting are run. Held-out ones must also
    # distinguish gold from its decoys.
    if (heldout or len(tables) > 1 or level >= 3) and not _distinguishes(drawn, draft, decoys=heldout):
        return None
    return drawn


def _shape_and_tables(rng: Random, level: int, heldout: bool) -> tuple[Shape, tuple[Table, ...], tuple[Table, ...]]:
    """(shape, tables, those it is drawn over): most questions are of a level's own shapes, the rest of each easier
    level's."""
    chosen = rng.choices(range(1, level + 1), _SHARES[level])[0]
    shape = rng.choice(_SHAPES[chosen])
    if level <= 2 or (chosen <= 2 and rng.random() < 0.5):
        numbers = 3 if chosen == 1 and level <= 2 else rng.randint(2, 4)
        tables = single_table(rng, heldout=heldout, numbers=numbers, texts=2)
        return shape, tables, tables
    # One-table shapes take the first table they are given: here any of several, the others being a distraction.
    tables = linked_tables(rng, heldout=heldout, count=rng.choice((2, 2, 3)))
    return shape, tables, (tables[rng.randrange(len(tables))],) if chosen <= 2 else tables


def _distinguishes(drawn: Example, draft: Draft, *, decoys: bool) -> bool:
    """Whether the gold query returns something, and something that its decoys do not."""
    with closing(build_database(drawn)) as connection:
        gold = run_query(drawn.gold_sql, connection)
        if gold.problem:
            raise AssertionError(f"gold query fails: {gold.message}: {drawn.gold_sql}")
        if not gold.rows or all(value in (None, 0) for row in gold.rows for value in row):
            return False
        ordered = orders_its_result(drawn.gold_sql)
        for decoy in draft.decoys if decoys else ():
            other = run_query(decoy, connection)
            if other.problem:
                raise AssertionError(f"decoy fails: {other.message}: {decoy}")
            if same_rows(other.rows, gold.rows, ordered=ordered):
                return False
    return True
