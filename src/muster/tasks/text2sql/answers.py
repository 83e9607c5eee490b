"""Held-out rows that ask for an answer, kept beside the packed sequences for evaluation by generation.

One JSON object a line in ``questions.jsonl``: ``prompt`` (or ``messages``), ``gold``, ``schema``, the number of the
source and, for generated rows, the example's index, from which its database is built again.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from muster.config.spec import FileSource, RandomSource
from muster.data.formats import Format, prompt_and_completion, row_messages
from muster.data.sources import OpenedSource, Row
from muster.tasks.text2sql import baseline
from muster.tasks.text2sql.sql_execution import run_query

FILE = "questions.jsonl"
MAX_QUESTIONS = 2_000
#: Training rows that the majority template is taken from.
_TEMPLATE_ROWS = 2_000


def collect(opened: OpenedSource, format: Format, number: int, held_rows: Any) -> list[dict[str, Any]]:
    """The questions of one source: of its held-out part (``held_rows`` None), or of those training rows.

    Where the source has a database, rows whose gold query fails or returns nothing are left out: the first cannot
    be judged, and any empty result would pass the second.
    """
    if format == "text":
        return []
    if held_rows is None:
        assert opened.heldout_rows is not None
        rows: Iterator[Row] = opened.heldout_rows()
    else:
        wanted = {int(row) for row in held_rows}
        rows = (row for place, row in enumerate(opened.rows()) if place in wanted)
    found: list[dict[str, Any]] = []
    for row in itertools.islice(rows, MAX_QUESTIONS):
        entry = _entry(row, opened, format)
        if entry is not None and _answerable(entry["gold"], opened):
            found.append({"source": number, **entry})
    return found


def write(folder: Path, by_source: Sequence[list[dict[str, Any]]]) -> int:
    """Write the questions of all sources in turn, so that the first few are of each; returns how many."""
    turns = itertools.chain.from_iterable(itertools.zip_longest(*by_source))
    chosen = [entry for entry in turns if entry is not None][:MAX_QUESTIONS]
    with open(folder / FILE, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(entry, ensure_ascii=False) + "\n" for entry in chosen)
    return len(chosen)


def template(sources: Sequence[OpenedSource]) -> str:
    """The commonest query template among the first training rows that have a query."""

    def pairs() -> Iterator[tuple[str, str]]:
        for opened in sources:
            if isinstance(opened.source, RandomSource):
                continue
            for row in itertools.islice(opened.rows(), _TEMPLATE_ROWS):
                gold = _gold(row)
                if gold is not None:
                    yield str(row.get("schema") or row.get("ddl") or ""), gold

    return baseline.majority_template(pairs())


def _entry(row: Row, opened: OpenedSource, format: Format) -> dict[str, Any] | None:
    """What is shown and what is expected; None: the row ends without an answer."""
    entry: dict[str, Any] = {name: row[f"_{name}"] for name in ("index", "shape") if f"_{name}" in row}
    entry["schema"] = row.get("schema") or row.get("ddl")
    if format == "chat":
        messages = row_messages(row)
        if messages[-1]["role"] != "assistant":
            return None
        return entry | {"messages": messages[:-1], "gold": _gold(row) or str(messages[-1]["content"])}
    prompt, completion = prompt_and_completion(row, opened.source.template)
    return entry | {"prompt": prompt, "gold": _gold(row) or completion.strip()}


def _gold(row: Row) -> str | None:
    for name in ("sql", "query"):
        if isinstance(row.get(name), str):
            return str(row[name])
    return None


def _answerable(gold: str, opened: OpenedSource) -> bool:
    if not isinstance(opened.source, FileSource) or not opened.source.database:
        return True
    found = run_query(gold, Path(opened.source.database).expanduser())
    return found.problem is None and bool(found.rows)
