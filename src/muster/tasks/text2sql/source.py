"""The generator as a data source: schemas, questions and gold queries, as many rows as the run file says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from muster.config.sections.section import NotNegative, Positive
from muster.config.sections.sources import Source
from muster.core.typed_json import JsonObject, whole
from muster.data.source_type import OpenedSource, SourceType
from muster.data.task import Row
from muster.tasks.text2sql import generator

#: Generated rows kept in memory, about 1.5 kB each.
_KEPT_ROWS = 50_000


class Text2SqlSource(Source):
    """The built-in generator: schemas, filled databases, questions and gold queries."""

    type: Literal["text2sql"]
    level: Annotated[int, Field(ge=1, le=4)] = 1
    """1: one table, four query shapes. 2: conditions and ordering. 3: joins and grouping. 4: nested too."""
    rows: Positive = 20_000
    heldout_rows: Positive = 200
    seed: NotNegative = 0

    has_questions: ClassVar[bool] = True
    makes_rows: ClassVar[bool] = True


def _open(section: Text2SqlSource) -> OpenedSource:
    """Generated rows are read up to three times (tokenizer, tokens, baseline), so the first ones are kept."""
    kept: list[Row] = []

    def made(count: int, *, heldout: bool, start: int = 0) -> Iterator[Row]:
        examples = generator.examples(section.level, count - start, section.seed, heldout=heldout, start=start)
        for index, example in enumerate(examples, start=start):
            row = {**example.row(), "_index": index, "_shape": example.shape}
            yield {**row, "messages": _messages(row)} if section.format == "chat" else row

    def rows() -> Iterator[Row]:
        yield from kept
        for row in made(count, heldout=False, start=len(kept)):
            if len(kept) == whole(row, "_index") < _KEPT_ROWS:
                kept.append(row)
            yield row

    count = min(section.rows, section.limit or section.rows)
    return OpenedSource(
        type=SOURCE,
        section=section,
        label=f"text2sql level {section.level}",
        identity=section.model_dump(),
        rows=rows,
        heldout_rows=lambda: made(section.heldout_rows, heldout=True),
        expected_rows=count,
    )


def _messages(row: Row) -> list[JsonObject]:
    """The row as a user's and an assistant's turn."""
    request = f"{row['ddl']}\n\n{row['question']}".strip()
    return [{"role": "user", "content": request}, {"role": "assistant", "content": row["sql"]}]


def _scoring_context(section: Text2SqlSource) -> JsonObject:
    return {"level": section.level, "seed": section.seed}


SOURCE = SourceType(section=Text2SqlSource, open=_open, task="text2sql", scoring_context=_scoring_context)
