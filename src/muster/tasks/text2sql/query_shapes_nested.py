"""Query shapes with nested queries: level 4 of the text-to-SQL generator."""

from __future__ import annotations

from collections import defaultdict
from random import Random
from statistics import mean

from muster.tasks.text2sql.query_shapes import Draft, Shape, condition
from muster.tasks.text2sql.query_shapes_joined import label, qualified
from muster.tasks.text2sql.schemas import Table


def above_average(rng: Random, tables: tuple[Table, ...]) -> Draft:
    """Scalar subquery: rows above or below the table's own average."""
    table = rng.choice(tables)
    column, number = rng.choice(table.own_columns), rng.choice(table.named("number"))
    word, sign, other = rng.choice((("above", ">", "<"), ("below", "<", ">")))
    head = f"SELECT {column} FROM {table.name} WHERE {number}"
    average = f"( SELECT AVG( {number} ) FROM {table.name} )"
    return Draft(
        question=f"show {column} of {table.name} with {number} {word} average",
        sql=f"{head} {sign} {average}",
        decoys=(f"SELECT {column} FROM {table.name}", f"{head} {other} {average}"),
    )


def extreme(rng: Random, tables: tuple[Table, ...]) -> Draft:
    """Scalar subquery: the row that holds the extreme of those that pass a condition."""
    table = rng.choice(tables)
    number = rng.choice(table.named("number"))
    kept = condition(rng, table)
    word, function, other = rng.choice((("highest", "MAX", "MIN"), ("lowest", "MIN", "MAX")))
    column = label(table)
    head = f"SELECT {column} FROM {table.name} WHERE {number} ="
    tail = f"FROM {table.name} WHERE {kept.sql} )"
    return Draft(
        question=f"{column} of the {table.name} with the {word} {number} among those with {kept.text}",
        sql=f"{head} ( SELECT {function}( {number} ) {tail}",
        decoys=(
            f"{head} ( SELECT {function}( {number} ) FROM {table.name} )",
            f"{head} ( SELECT {other}( {number} ) {tail}",
        ),
    )


def more_than_one(rng: Random, tables: tuple[Table, ...]) -> Draft:
    """Scalar subquery: rows compared with a named row."""
    table = rng.choice(tables)
    column, number = rng.choice(table.own_columns), rng.choice(table.named("number"))
    ordered = sorted(zip(table.values(number), table.values(label(table)), strict=True), key=lambda pair: int(pair[0]))
    name = rng.choice(ordered[1:-1])[1]
    word, sign, other = rng.choice((("more", ">", "<"), ("less", "<", ">")))
    inner = f"( SELECT {number} FROM {table.name} WHERE {label(table)} = '{name}' )"
    head = f"SELECT {column} FROM {table.name} WHERE {number}"
    return Draft(
        question=f"show {column} of {table.name} with {word} {number} than the one whose {label(table)} is '{name}'",
        sql=f"{head} {sign} {inner}",
        decoys=(f"{head} {other} {inner}", f"SELECT {column} FROM {table.name}", f"{head} {sign}= {inner}"),
    )


def has_some(rng: Random, tables: tuple[Table, ...]) -> Draft:
    """IN: parents with at least one child that passes a condition."""
    parent, child = tables[-2:]
    column = label(parent)
    kept = condition(rng, child)
    head = f"SELECT {column} FROM {parent.name} WHERE id"
    inner = f"( SELECT {parent.name}_id FROM {child.name} WHERE {kept.sql} )"
    return Draft(
        question=f"which {column} of {parent.name} have some {child.name} with {kept.text}",
        sql=f"{head} IN {inner}",
        decoys=(
            f"{head} NOT IN {inner}",
            f"{head} IN ( SELECT {parent.name}_id FROM {child.name} )",
            f"{head} IN ( SELECT id FROM {child.name} WHERE {kept.sql} )",
        ),
    )


def has_none(rng: Random, tables: tuple[Table, ...]) -> Draft:
    """NOT IN: parents without any child (that passes a condition)."""
    parent, child = tables[-2:]
    column = rng.choice(parent.own_columns)
    head = f"SELECT {column} FROM {parent.name} WHERE id"
    if rng.random() < 0.5:
        return Draft(
            question=f"show {column} of {parent.name} without any {child.name}",
            sql=f"{head} NOT IN ( SELECT {parent.name}_id FROM {child.name} )",
            decoys=(f"{head} IN ( SELECT {parent.name}_id FROM {child.name} )",),
        )
    kept = condition(rng, child)
    inner = f"( SELECT {parent.name}_id FROM {child.name} WHERE {kept.sql} )"
    return Draft(
        question=f"show {column} of {parent.name} without any {child.name} with {kept.text}",
        sql=f"{head} NOT IN {inner}",
        decoys=(f"{head} IN {inner}", f"{head} NOT IN ( SELECT {parent.name}_id FROM {child.name} )"),
    )


def exists(rng: Random, tables: tuple[Table, ...]) -> Draft:
    """EXISTS, correlated: parents that pass a condition and have such a child."""
    parent, child = tables[-2:]
    column = rng.choice(parent.own_columns)
    outer, inner = condition(rng, parent), condition(rng, child, prefix=f"{child.name} . ")
    link = f"{qualified(child, f'{parent.name}_id')} = {qualified(parent, 'id')}"
    there = f"EXISTS ( SELECT 1 FROM {child.name} WHERE {link} AND {inner.sql} )"
    head = f"SELECT {column} FROM {parent.name} WHERE"
    return Draft(
        question=f"show {column} of {parent.name} with {outer.text} for which a {child.name} with {inner.text} exists",
        sql=f"{head} {outer.sql} AND {there}",
        decoys=(f"{head} {outer.sql}", f"{head} {there}"),
    )


def conditional_average(rng: Random, tables: tuple[Table, ...]) -> Draft:
    """A condition and a scalar subquery with a condition of its own."""
    table = rng.choice(tables)
    column, number = rng.choice(table.own_columns), rng.choice(table.named("number"))
    outer, inner = condition(rng, table), condition(rng, table)
    head = f"SELECT {column} FROM {table.name} WHERE"
    average = f"( SELECT AVG( {number} ) FROM {table.name} WHERE {inner.sql} )"
    return Draft(
        question=(
            f"show {column} of {table.name} with {outer.text} and {number} above the average of those with {inner.text}"
        ),
        sql=f"{head} {outer.sql} AND {number} > {average}",
        decoys=(f"{head} {outer.sql}", f"{head} {number} > {average}"),
    )


def group_above_average(rng: Random, tables: tuple[Table, ...]) -> Draft | None:
    """HAVING with a scalar subquery: groups whose average is above the table's."""
    table = tables[-1]
    if len(table.named("text")) < 2:
        return None
    column, number = rng.choice(table.named("text")[1:]), rng.choice(table.named("number"))
    groups = defaultdict(list)
    for key, value in zip(table.values(column), table.values(number), strict=True):
        groups[key].append(int(value))
    overall = mean(int(value) for value in table.values(number))
    above = [key for key, values in groups.items() if mean(values) > overall]
    if not 0 < len(above) < len(groups):
        return None
    head = f"SELECT {column} FROM {table.name} GROUP BY {column}"
    average = f"( SELECT AVG( {number} ) FROM {table.name} )"
    return Draft(
        question=f"which {column} of {table.name} have an average {number} above the average of all",
        sql=f"{head} HAVING AVG( {number} ) > {average}",
        decoys=(head, f"{head} HAVING AVG( {number} ) < {average}"),
    )


LEVEL_4: tuple[Shape, ...] = (
    above_average, extreme, more_than_one, has_some, has_none, exists, conditional_average, group_above_average,
)  # fmt: skip
