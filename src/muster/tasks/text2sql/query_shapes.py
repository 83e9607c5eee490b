"""Query shapes over one table: levels 1 and 2 of the text-to-SQL generator.

A shape draws a question, its gold query and *decoys*: queries a model could easily write instead. A filled
database is accepted only where no decoy returns what the gold query returns, so a wrong answer cannot pass.
Identifiers follow a space wherever they can, so that a word-level vocabulary has one token for each.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from muster.tasks.text2sql.schemas import Condition, Table

AGGREGATES = {
    "MAX": ("highest", "largest", "maximum"),
    "MIN": ("lowest", "smallest", "minimum"),
    "AVG": ("average", "mean"),
    "SUM": ("total", "summed"),
}
_COMPARISONS: dict[str, tuple[str, Callable[[int, int], bool]]] = {
    ">": ("above", operator.gt),
    "<": ("below", operator.lt),
    ">=": ("at least", operator.ge),
    "<=": ("at most", operator.le),
}


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A question with its gold query and the wrong queries that must not return the same rows."""

    question: str
    sql: str
    decoys: tuple[str, ...] = ()


Shape = Callable[[Random, tuple[Table, ...]], Draft | None]
"""None: this schema or these rows do not suit the shape; draw again."""


def comparison(rng: Random, table: Table, *, prefix: str = "") -> Condition:
    """``column above N`` or ``below N`` that keeps at least two rows and drops at least two."""
    column = rng.choice(table.named("number"))
    return _threshold(table, column, rng.choice((">", "<")), rng, prefix)


def condition(rng: Random, table: Table, *, prefix: str = "") -> Condition:
    """Any simple filter of level 2: comparisons, equality, inequality, a range; it keeps some rows and drops some."""
    for _ in range(20):
        result = _any_condition(rng, table, prefix)
        if 0 < result.count(table) < len(table.rows):
            return result
    return comparison(rng, table, prefix=prefix) if table.named("number") else result


def _threshold(table: Table, column: str, sign: str, rng: Random, prefix: str) -> Condition:
    place = [other.name for other in table.columns].index(column)
    ordered = sorted(int(value) for value in table.values(column))
    bound = ordered[rng.randint(2, len(ordered) - 3)]
    words, compare = _COMPARISONS[sign]
    return Condition(
        text=f"{column} {words} {bound}",
        sql=f"{prefix}{column} {sign} {bound}",
        keeps=lambda row: compare(int(row[place]), bound),
    )


def _any_condition(rng: Random, table: Table, prefix: str) -> Condition:
    texts = table.named("text")
    numbers = table.named("number")
    if texts and (not numbers or rng.random() < 0.45):
        column = rng.choice(texts)
        place = [other.name for other in table.columns].index(column)
        value = rng.choice(table.values(column))
        words, sign, equal = ("is", "=", True) if rng.random() < 0.75 else ("is not", "<>", False)
        return Condition(
            text=f"{column} {words} '{value}'",
            sql=f"{prefix}{column} {sign} '{value}'",
            keeps=lambda row: (row[place] == value) is equal,
        )
    column = rng.choice(numbers)
    if rng.random() < 0.75:
        return _threshold(table, column, rng.choice((">", "<", ">=", "<=")), rng, prefix)
    place = [other.name for other in table.columns].index(column)
    ordered = sorted(int(value) for value in table.values(column))
    low, high = ordered[rng.randint(0, 2)], ordered[rng.randint(-3, -1)]
    return Condition(
        text=f"{column} between {low} and {high}",
        sql=f"{prefix}{column} BETWEEN {low} AND {high}",
        keeps=lambda row: low <= int(row[place]) <= high,
    )


# ---------------------------------------------------------------- level 1


def count(rng: Random, tables: tuple[Table, ...]) -> Draft:
    name = tables[0].name
    question = rng.choice((f"how many {name}", f"count the {name}", f"number of {name}"))
    return Draft(question=question, sql=f"SELECT COUNT(*) FROM {name}")


def aggregate(rng: Random, tables: tuple[Table, ...]) -> Draft:
    table = tables[0]
    function, column, word = aggregate_words(rng, table)
    return Draft(
        question=f"{word} {column} of {table.name}",
        sql=f"SELECT {function}( {column} ) FROM {table.name}",
        decoys=tuple(f"SELECT {other} FROM {table.name}" for other in _other_aggregates(table, function, column)),
    )


def listing(rng: Random, tables: tuple[Table, ...]) -> Draft:
    table = tables[0]
    column = rng.choice(table.own_columns)
    question = rng.choice((f"list the {column} of each {table.name}", f"show {column} of all {table.name}"))
    others = [other for other in table.own_columns if other != column]
    return Draft(
        question=question,
        sql=f"SELECT {column} FROM {table.name}",
        decoys=tuple(f"SELECT {other} FROM {table.name}" for other in others),
    )


def aggregate_where(rng: Random, tables: tuple[Table, ...]) -> Draft:
    table = tables[0]
    function, column, word = aggregate_words(rng, table)
    kept = comparison(rng, table)
    swapped = kept.sql.replace(" > ", " = ").replace(" < ", " > ").replace(" = ", " < ")
    head, others = f"SELECT {function}( {column} ) FROM {table.name}", _other_aggregates(table, function, column)
    return Draft(
        question=f"{word} {column} of {table.name} with {kept.text}",
        sql=f"{head} WHERE {kept.sql}",
        decoys=(
            head,
            f"{head} WHERE {swapped}",
            *(f"SELECT {other} FROM {table.name} WHERE {kept.sql}" for other in others),
        ),
    )


def aggregate_words(rng: Random, table: Table) -> tuple[str, str, str]:
    """An aggregate function, a column for it, and what a question calls the function."""
    function = rng.choice(tuple(AGGREGATES))
    return function, rng.choice(table.named("number")), rng.choice(AGGREGATES[function])


def other_functions(function: str, column: str) -> list[str]:
    """The other aggregate functions of the same column."""
    return [f"{other}( {column} )" for other in AGGREGATES if other != function]


def _other_aggregates(table: Table, function: str, column: str) -> list[str]:
    """The same function of the other columns, the other functions of the same one."""
    columns = [f"{function}( {other} )" for other in table.named("number") if other != column]
    return columns + other_functions(function, column)


# ---------------------------------------------------------------- level 2


def count_where(rng: Random, tables: tuple[Table, ...]) -> Draft:
    table = tables[0]
    kept = condition(rng, table)
    question = rng.choice((f"how many {table.name} have {kept.text}", f"number of {table.name} with {kept.text}"))
    return Draft(
        question=question,
        sql=f"SELECT COUNT(*) FROM {table.name} WHERE {kept.sql}",
        decoys=(f"SELECT COUNT(*) FROM {table.name}",),
    )


def list_where(rng: Random, tables: tuple[Table, ...]) -> Draft:
    table = tables[0]
    columns = rng.sample(table.own_columns, rng.randint(1, 2))
    kept = condition(rng, table)
    question = rng.choice(
        (
            f"show {' and '.join(columns)} of {table.name} with {kept.text}",
            f"which {' and '.join(columns)} do {table.name} with {kept.text} have",
        )
    )
    return Draft(
        question=question,
        sql=f"SELECT {' , '.join(columns)} FROM {table.name} WHERE {kept.sql}",
        decoys=(f"SELECT {' , '.join(columns)} FROM {table.name}",),
    )


def two_conditions(rng: Random, tables: tuple[Table, ...]) -> Draft | None:
    """AND or OR of two filters on different columns; the result differs from either alone."""
    table = tables[0]
    column = rng.choice(table.own_columns)
    first, second = condition(rng, table), condition(rng, table)
    if first.sql.split()[0] == second.sql.split()[0]:
        return None
    word, keyword = rng.choice((("and", "AND"), ("or", "OR")))
    both = {place for place, row in enumerate(table.rows) if first.keeps(row) and second.keeps(row)}
    if not both:
        return None
    head = f"SELECT {column} FROM {table.name} WHERE"
    other = "OR" if keyword == "AND" else "AND"
    return Draft(
        question=f"show {column} of {table.name} with {first.text} {word} {second.text}",
        sql=f"{head} {first.sql} {keyword} {second.sql}",
        decoys=(
            head.removesuffix(" WHERE"),
            f"{head} {first.sql}",
            f"{head} {second.sql}",
            f"{head} {first.sql} {other} {second.sql}",
        ),
    )


def aggregate_any_where(rng: Random, tables: tuple[Table, ...]) -> Draft:
    table = tables[0]
    function, column, word = aggregate_words(rng, table)
    kept = condition(rng, table)
    head = f"SELECT {function}( {column} ) FROM {table.name}"
    return Draft(
        question=f"{word} {column} of {table.name} with {kept.text}", sql=f"{head} WHERE {kept.sql}", decoys=(head,)
    )


def distinct(rng: Random, tables: tuple[Table, ...]) -> Draft | None:
    table = tables[0]
    texts = table.named("text")
    if len(texts) < 2:
        return None
    column = rng.choice(texts[1:])
    if rng.random() < 0.5:
        return Draft(
            question=f"which different {column} do {table.name} have",
            sql=f"SELECT DISTINCT {column} FROM {table.name}",
            decoys=(f"SELECT {column} FROM {table.name}",),
        )
    return Draft(
        question=f"how many different {column} do {table.name} have",
        sql=f"SELECT COUNT( DISTINCT {column} ) FROM {table.name}",
        decoys=(f"SELECT COUNT( {column} ) FROM {table.name}",),
    )


def ordered(rng: Random, tables: tuple[Table, ...]) -> Draft:
    table = tables[0]
    column, key = rng.choice(table.own_columns), rng.choice(table.named("number"))
    word, keyword = rng.choice((("ascending", ""), ("descending", " DESC")))
    head = f"SELECT {column} FROM {table.name}"
    return Draft(
        question=f"list {column} of {table.name} by {word} {key}",
        sql=f"{head} ORDER BY {key}{keyword}",
        decoys=(head, f"{head} ORDER BY {key}{'' if keyword else ' DESC'}"),
    )


def top(rng: Random, tables: tuple[Table, ...]) -> Draft:
    table = tables[0]
    column, key = rng.choice(table.own_columns), rng.choice(table.named("number"))
    word, keyword = rng.choice((("lowest", ""), ("highest", " DESC")))
    number = rng.randint(1, 4)
    head = f"SELECT {column} FROM {table.name} ORDER BY {key}"
    return Draft(
        question=f"show {column} of the {number} {table.name} with the {word} {key}",
        sql=f"{head}{keyword} LIMIT {number}",
        decoys=(f"{head}{'' if keyword else ' DESC'} LIMIT {number}", f"{head}{keyword} LIMIT {number + 1}"),
    )


LEVEL_1: tuple[Shape, ...] = (count, aggregate, listing, aggregate_where)
LEVEL_2: tuple[Shape, ...] = (count_where, list_where, two_conditions, aggregate_any_where, distinct, ordered, top)
