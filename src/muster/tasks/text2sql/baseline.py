"""The majority-template baseline: what answering without reading the question is worth.

The commonest query of the training rows, its names and literals replaced by slots, is filled with the first
tables and columns of each question's schema. A model that is not clearly above it has learned nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

#: Words of a schema's text that name nothing: SQL's own and the types.
_SQL_WORDS = """
create table if not exists primary key references foreign unique null default varchar text integer int real
number numeric float double boolean date datetime char bigint
"""
_NOT_NAMES = frozenset(_SQL_WORDS.split())
_WORD = re.compile(r"[A-Za-z_]\w*")
_PIECE = re.compile(r"'(?:[^']|'')*'|[A-Za-z_]\w*|\d+(?:\.\d+)?|\s+|.", re.DOTALL)


def majority_template(pairs: Iterable[tuple[str, str]]) -> str:
    """The commonest template of (schema text, query) pairs; ties go to the first in alphabetical order.

    Slots: ``{table0}``, ``{column0}``, ``{number}``, ``{text}``, numbered by first use in the query.
    """
    counts = Counter(abstract(sql, schema) for schema, sql in pairs)
    if not counts:
        return ""
    most = max(counts.values())
    return min(template for template, count in counts.items() if count == most)


def abstract(sql: str, schema: str) -> str:
    """A query with the schema's names and all literals replaced by slots."""
    tables, columns = names(schema)
    seen: dict[str, list[str]] = {"table": [], "column": []}
    result = []
    for piece in _PIECE.findall(sql.replace("{", "{{").replace("}", "}}")):
        low = piece.lower()
        kind = "table" if low in tables else "column" if low in columns else None
        if kind:
            if low not in seen[kind]:
                seen[kind].append(low)
            result.append(f"{{{kind}{seen[kind].index(low)}}}")
        elif piece[0] == "'":
            result.append("{text}")
        elif piece[0].isdigit():
            result.append("{number}")
        else:
            result.append(piece)
    return "".join(result)


def fill(template: str, schema: str) -> str:
    """The template as a query over ``schema``: its first table for the first slot, and so on; the last where the
    schema has too few."""
    tables, columns = names(schema)

    def named(match: re.Match[str]) -> str:
        kind, number = match[1], int(match[2] or 0)
        if kind == "number":
            return "1"
        if kind == "text":
            return "''"
        known = tables if kind == "table" else columns
        return known[min(number, len(known) - 1)] if known else "x"

    filled = re.sub(r"\{(table|column|number|text)(\d*)\}", named, template)
    return filled.replace("{{", "{").replace("}}", "}")


def names(schema: str) -> tuple[list[str], list[str]]:
    """(tables, columns) that a schema's text names, in its order, lower-case. A table follows the word ``table``."""
    tables: list[str] = []
    columns: list[str] = []
    after_table = False
    for word in (result.lower() for result in _WORD.findall(schema)):
        if word == "table":
            after_table = True
        elif after_table and word not in ("if", "not", "exists"):
            tables.append(word)
            after_table = False
        elif word not in _NOT_NAMES and word not in columns:
            columns.append(word)
    return tables, [word for word in columns if word not in tables]
