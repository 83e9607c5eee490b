"""Held-out rows that ask for an answer, kept with the packed sequences for evaluation by generation.

One JSON object a line in ``questions.jsonl``: ``prompt`` (or ``messages``), the number of the ``source``, what the
source's task needs to score an answer (``gold`` at least), and ``majority_answer`` where there is a baseline.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from muster.core.typed_json import Json, JsonObject, whole
from muster.data.formats import Format, prompt_and_completion, row_messages
from muster.data.source_type import OpenedSource
from muster.data.task import TASKS, Row

FILE = "questions.jsonl"
MAX_QUESTIONS = 2_000
#: Training rows of each source that the majority answer is taken from.
_BASELINE_ROWS = 2_000


def collect(
    opened: OpenedSource, format: Format, number: int, held_rows: Iterable[int] | None
) -> list[dict[str, Json]]:
    """The questions of one source: of its held-out part (``held_rows`` None), or of those training rows."""
    if format == "text" or opened.type.task is None:
        return []
    if held_rows is None:
        assert opened.heldout_rows is not None
        rows: Iterator[Row] = opened.heldout_rows()
    else:
        chosen = {int(row) for row in held_rows}
        rows = (row for index, row in enumerate(opened.rows()) if index in chosen)
    task, context = TASKS.get(opened.type.task), opened.type.scoring_context(opened.section)
    entries: list[dict[str, Json]] = []
    for row in itertools.islice(rows, MAX_QUESTIONS):
        shown = _shown(row, opened, format)
        question = task.question(row, shown[1], context) if shown else None
        if shown and question is not None:
            entries.append({"source": number, **shown[0], **question})
    return entries


def add_majority_answers(sources: Sequence[OpenedSource], by_source: Sequence[list[dict[str, Json]]]) -> str:
    """Add each task's majority answer to its questions; returns the templates (empty: there are none)."""
    templates = []
    for name in sorted({opened.type.task for opened in sources if opened.type.task}):
        members = [opened for opened in sources if opened.type.task == name]
        rows = (row for opened in members for row in itertools.islice(opened.rows(), _BASELINE_ROWS))
        majority = TASKS.get(name).majority_answer(rows)
        if majority is None:
            continue
        templates.append(majority.template)
        for entries in by_source:
            for entry in entries:
                if sources[whole(entry, "source")].type.task == name:
                    entry["majority_answer"] = majority.fill(entry)
    return "; ".join(templates)


def write(folder: Path, by_source: Sequence[list[dict[str, Json]]]) -> int:
    """Write the questions of all sources in turn, so that the first few are of each; returns how many."""
    turns = itertools.chain.from_iterable(itertools.zip_longest(*by_source))
    chosen = [entry for entry in turns if entry is not None][:MAX_QUESTIONS]
    with open(folder / FILE, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(entry, ensure_ascii=False) + "\n" for entry in chosen)
    return len(chosen)


def _shown(row: Row, opened: OpenedSource, format: Format) -> tuple[JsonObject, str] | None:
    """What the model is shown, and the answer as the row has it; None: the row ends without an answer."""
    if format == "chat":
        messages = row_messages(row)
        if messages[-1]["role"] != "assistant":
            return None
        return {"messages": messages[:-1]}, str(messages[-1]["content"])
    prompt, completion = prompt_and_completion(row, opened.section.template)
    return {"prompt": prompt}, completion.strip()
