"""Held-out questions for evaluation: what the model is shown, and how its answer is judged.

Answers are judged by running them where there is a database (the generator's, or a source's ``database``), and
by comparing the normalised query where there is none.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from muster.config.spec import FileSource, RunSpec, Text2SqlSource
from muster.core.errors import MusterError
from muster.data.prepare import Prepared
from muster.data.tokenizer import Encoder
from muster.tasks.text2sql import answers, baseline, generator, sql_execution
from muster.tasks.text2sql.sql_execution import Outcome

_FENCE = re.compile(r"```(?:sql|sqlite)?\s*\n?(.*?)```", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question: its prompt, the gold query, and ``run``, which judges a predicted query and never raises for
    what that query does."""

    prompt_text: str
    prompt_ids: tuple[int, ...] = field(repr=False)
    gold_sql: str
    schema: str = ""
    shape: str | None = None
    """Name of the query's shape, where the generator made it."""
    run: Callable[[str], Outcome] = field(repr=False)
    executes: bool
    """Whether ``run`` executes; else it compares the queries' text."""


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """What the majority template scores on the same questions."""

    accuracy: float
    template: str


def heldout_questions(spec: RunSpec, prepared: Prepared, count: int) -> list[Question]:
    """The first ``count`` held-out questions (fewer where there are fewer; none for plain text), always the same.

    Raises:
        MusterError: the prepared data is damaged.
        UsageError: a source's database is missing or unreadable.
    """
    if prepared.tokenizer_dir is None or count < 1 or spec.data is None:
        return []
    encoder = Encoder(prepared.tokenizer_dir)
    entries = _entries(prepared.folder / answers.FILE, count)
    return [_question(entry, spec, encoder) for entry in entries]


def majority_baseline(prepared: Prepared, questions: Sequence[Question]) -> Baseline | None:
    """The majority-template baseline on ``questions``; None where there are none."""
    template = str(prepared.stats.get("majority_template") or "")
    if not questions or not template:
        return None
    right = sum(each.run(baseline.fill(template, each.schema)).correct for each in questions)
    return Baseline(accuracy=right / len(questions), template=template)


def answer(text: str) -> str:
    """The query in a model's answer: what its first code fence holds, where it wrote one, else all of it."""
    fenced = _FENCE.search(text)
    return (fenced[1] if fenced else text).strip()


def _entries(path: Path, count: int) -> list[dict[str, Any]]:
    found = []
    try:
        with open(path, encoding="utf-8") as file:
            for line in file:
                found.append(json.loads(line))
                if len(found) == count:
                    break
    except (OSError, ValueError) as error:
        raise MusterError(f"{path} is damaged: {error}", hint="remove its folder and start again") from error
    return found


def _question(entry: dict[str, Any], spec: RunSpec, encoder: Encoder) -> Question:
    if "messages" in entry:
        prompt = encoder.render_chat(entry["messages"], True)
        ids = encoder.encode([prompt])[0]
    else:
        prompt = entry["prompt"]
        ids = encoder.encode_prompt(prompt)
    run, executes = _judge(entry, spec)
    return Question(
        prompt_text=prompt,
        prompt_ids=tuple(ids),
        gold_sql=entry["gold"],
        schema=entry.get("schema") or "",
        shape=entry.get("shape"),
        run=run,
        executes=executes,
    )


def _judge(entry: dict[str, Any], spec: RunSpec) -> tuple[Callable[[str], Outcome], bool]:
    """How a predicted query of this question is judged."""
    assert spec.data is not None
    source = spec.data.sources[entry["source"]]
    gold, timeout_s = entry["gold"], spec.evaluation.query_timeout_s
    if isinstance(source, Text2SqlSource):
        found = generator.example(source.level, source.seed, entry["index"], heldout=True)

        def against_generated(predicted: str) -> Outcome:
            connection = generator.build_database(found)
            try:
                return sql_execution.compare(answer(predicted), gold, connection, timeout_s)
            finally:
                connection.close()

        return against_generated, True
    if isinstance(source, FileSource) and source.database:
        path = Path(os.path.expanduser(source.database))
        return (lambda predicted: sql_execution.compare(answer(predicted), gold, path, timeout_s)), True
    return (lambda predicted: sql_execution.match(answer(predicted), gold)), False
