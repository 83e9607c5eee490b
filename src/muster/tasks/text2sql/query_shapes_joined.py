"""Query shapes with grouping and joins: level 3 of the text-to-SQL generator.

Linked tables come parent first; a child's ``<parent>_id`` refers to the parent's ``id``. Columns of joined queries
are qualified by their table.
"""

from __future__ import annotations

from collections import Counter
from random import Random

from muster.tasks.text2sql.query_shapes import Draft, Shape, aggregate_words, condition, other_functions
from muster.tasks.text2sql.schemas import Table


def join(child: Table, parent: Table) -> str:
    """``child JOIN parent ON ...``"""
    reference = qualified(child, f"{parent.name}_id")
    return f"{child.name} JOIN {parent.name} ON {reference} = {qualified(parent, 'id')}"


def qualified(table: Table, column: str) -> str:
    """``table . column``: SQL allows the spaces, and with them a word-level vocabulary has one token for a name."""
    return f"{table.name} . {column}"


def label(table: Table) -> str:
    """The column that names a row: its values are distinct."""
    return table.named("text")[0]


# ---------------------------------------------------------------- grouping one table


def group_count(rng: Random, tables: tuple[Table, ...]) -> Draft | None:
    table = tables[-1]
    if len(table.named("text")) < 2:
        return None
    column = rng.choice(table.named("text")[1:])
    question = rng.choice((f"how many {table.name} for each {column}", f"count the {table.name} per {column}"))
    return Draft(
        question=question,
        sql=f"SELECT {column} , COUNT(*) FROM {table.name} GROUP BY {column}",
        decoys=(
            f"SELECT {column} , COUNT( DISTINCT {label(table)} ) + 1 FROM {table.name} GROUP BY {column}",
            f"SELECT {label(table)} , COUNT(*) FROM {table.name} GROUP BY {label(table)}",
        ),
    )


def group_aggregate(rng: Random, tables: tuple[Table, ...]) -> Draft | None:
    table = tables[-1]
    if len(table.named("text")) < 2:
        return None
    column = rng.choice(table.named("text")[1:])
    function, number, word = aggregate_words(rng, table)
    head = f"SELECT {column} , {{}} FROM {table.name} GROUP BY {column}"
    return Draft(
        question=f"{word} {number} of {table.name} for each {column}",
        sql=head.format(f"{function}( {number} )"),
        decoys=tuple(map(head.format, other_functions(function, number))),
    )


def group_having(rng: Random, tables: tuple[Table, ...]) -> Draft | None:
    """Groups with at least so many rows: some qualify, some do not."""
    table = tables[-1]
    if len(table.named("text")) < 2:
        return None
    column = rng.choice(table.named("text")[1:])
    sizes = sorted(Counter(table.values(column)).values())
    if sizes[0] == sizes[-1]:
        return None
    least = sizes[-1]
    head = f"SELECT {column} FROM {table.name} GROUP BY {column}"
    return Draft(
        question=f"which {column} have at least {least} {table.name}",
        sql=f"{head} HAVING COUNT(*) >= {least}",
        decoys=(head, f"{head} HAVING COUNT(*) < {least}"),
    )


# ---------------------------------------------------------------- joining


def join_list(rng: Random, tables: tuple[Table, ...]) -> Draft:
    """A child's column, filtered by its parent."""
    parent, child = tables[-2:]
    column = rng.choice(child.own_columns)
    kept = condition(rng, parent, prefix=f"{parent.name} . ")
    head = f"SELECT {qualified(child, column)} FROM {join(child, parent)}"
    question = rng.choice(
        (
            f"show {column} of {child.name} whose {parent.name} has {kept.text}",
            f"list the {column} of each {child.name} of a {parent.name} with {kept.text}",
        )
    )
    return Draft(question=question, sql=f"{head} WHERE {kept.sql}", decoys=(head,))


def join_count_where(rng: Random, tables: tuple[Table, ...]) -> Draft:
    parent, child = tables[-2:]
    kept = condition(rng, parent, prefix=f"{parent.name} . ")
    head = f"SELECT COUNT(*) FROM {join(child, parent)}"
    return Draft(
        question=f"how many {child.name} belong to a {parent.name} with {kept.text}",
        sql=f"{head} WHERE {kept.sql}",
        decoys=(head, f"SELECT COUNT(*) FROM {parent.name} WHERE {kept.sql}"),
    )


def join_aggregate(rng: Random, tables: tuple[Table, ...]) -> Draft:
    parent, child = tables[-2:]
    function, number, word = aggregate_words(rng, child)
    kept = condition(rng, parent, prefix=f"{parent.name} . ")
    head = f"SELECT {function}( {qualified(child, number)} ) FROM {join(child, parent)}"
    return Draft(
        question=f"{word} {number} of {child.name} whose {parent.name} has {kept.text}",
        sql=f"{head} WHERE {kept.sql}",
        decoys=(head, f"SELECT {function}( {number} ) FROM {child.name} WHERE id > 2"),
    )


def join_group_count(rng: Random, tables: tuple[Table, ...]) -> Draft:
    """Children of each parent that has any."""
    parent, child = tables[-2:]
    named = qualified(parent, label(parent))
    question = rng.choice(
        (
            f"how many {child.name} does each {parent.name} have : show {label(parent)}",
            f"{label(parent)} of each {parent.name} and its number of {child.name}",
        )
    )
    return Draft(
        question=question,
        sql=f"SELECT {named} , COUNT(*) FROM {join(child, parent)} GROUP BY {named}",
        decoys=(f"SELECT {label(parent)} , COUNT(*) FROM {parent.name} GROUP BY {label(parent)}",),
    )


def join_group_aggregate(rng: Random, tables: tuple[Table, ...]) -> Draft:
    parent, child = tables[-2:]
    named = qualified(parent, label(parent))
    function, number, word = aggregate_words(rng, child)
    head = f"SELECT {named} , {{}} FROM {join(child, parent)} GROUP BY {named}"
    return Draft(
        question=f"{label(parent)} of each {parent.name} and the {word} {number} of its {child.name}",
        sql=head.format(f"{function}( {qualified(child, number)} )"),
        decoys=tuple(map(head.format, other_functions(function, qualified(child, number)))),
    )


def join_having(rng: Random, tables: tuple[Table, ...]) -> Draft | None:
    """Parents with more than so many children: some, not all of those with any."""
    parent, child = tables[-2:]
    sizes = sorted(Counter(child.values(f"{parent.name}_id")).values())
    if sizes[0] == sizes[-1]:
        return None
    bound = rng.choice([size for size in sizes if size < sizes[-1]])
    named = qualified(parent, label(parent))
    head = f"SELECT {named} FROM {join(child, parent)} GROUP BY {named}"
    return Draft(
        question=f"which {label(parent)} of {parent.name} have more than {bound} {child.name}",
        sql=f"{head} HAVING COUNT(*) > {bound}",
        decoys=(head, f"{head} HAVING COUNT(*) < {bound}", f"{head} HAVING COUNT(*) >= {bound}"),
    )


def join_most(rng: Random, tables: tuple[Table, ...]) -> Draft | None:
    """The one parent with the most children; drawn only where there is no tie."""
    parent, child = tables[-2:]
    sizes = sorted(Counter(child.values(f"{parent.name}_id")).values())
    if len(sizes) < 2 or sizes[-1] == sizes[-2]:
        return None
    named = qualified(parent, label(parent))
    head = f"SELECT {named} FROM {join(child, parent)} GROUP BY {named} ORDER BY COUNT(*)"
    return Draft(
        question=f"which {label(parent)} of {parent.name} has the most {child.name}",
        sql=f"{head} DESC LIMIT 1",
        decoys=(f"{head} LIMIT 1", f"SELECT {label(parent)} FROM {parent.name} LIMIT 1"),
    )


def join_three(rng: Random, tables: tuple[Table, ...]) -> Draft | None:
    """Grandchildren filtered by the grandparent, across the table between."""
    if len(tables) < 3:
        return None
    top, middle, bottom = tables[-3:]
    column = rng.choice(bottom.own_columns)
    kept = condition(rng, top, prefix=f"{top.name} . ")
    reference = qualified(middle, f"{top.name}_id")
    joined = f"{join(bottom, middle)} JOIN {top.name} ON {reference} = {qualified(top, 'id')}"
    head = f"SELECT {qualified(bottom, column)} FROM {joined}"
    return Draft(
        question=f"show {column} of {bottom.name} whose {middle.name} belongs to a {top.name} with {kept.text}",
        sql=f"{head} WHERE {kept.sql}",
        decoys=(head,),
    )


LEVEL_3: tuple[Shape, ...] = (
    group_count, group_aggregate, group_having, join_list, join_count_where, join_aggregate, join_group_count,
    join_group_aggregate, join_having, join_most, join_three,
)  # fmt: skip
