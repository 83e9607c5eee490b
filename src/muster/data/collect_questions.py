"""Held-out rows that ask for an answer, kept with the packed sequences for evaluation by generation.

One JSON object a line in ``questions.jsonl``: ``prompt`` (or ``messages``), the number of the ``source``, what the
source's task needs to score an answer (``gold`` at least), and ``majority_answer`` where there is a baseline.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from muster.core.errors import UsageError
from muster.core.typed_json import Json, JsonObject, whole
from muster.data.chat.rows import RowRefusal, answer_text
from muster.data.formats import completions, prompt_and_completion
from muster.data.source_type import OpenedSource
from muster.data.task import TASKS, AnsweredRow, LeftOut, Row
from muster.data.tokenise import Recipe

FILE = "questions.jsonl"
MAX_QUESTIONS = 2_000
#: Training rows of each source that the majority answer is taken from.
_BASELINE_ROWS = 2_000
#: Characters of the message about the first row that is left out.
_SHOWN = 300


@dataclass
class Collected:
    """The questions of one source, and what became of its other held-out rows."""

    entries: list[dict[str, Json]] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    """By reason."""
    first: str = ""
    """The first of them: where it is, and why."""


def collect(opened: OpenedSource, recipe: Recipe, number: int, held_rows: Iterable[int] | None) -> Collected:
    """The questions of one source: of its held-out part (``held_rows`` None), or of those training rows.

    Raises:
        UsageError: what the source names for scoring is missing, unreadable or does not fit a row.
    """
    found = Collected()
    if recipe.format in ("text", "preference") or opened.type.task is None:
        return found
    if held_rows is None:
        assert opened.heldout_rows is not None
        rows: Iterator[tuple[int, Row]] = enumerate(opened.heldout_rows())
    else:
        chosen = {int(row) for row in held_rows}
        rows = ((index, row) for index, row in enumerate(opened.rows()) if index in chosen)
    task, context = TASKS.get(opened.type.task), opened.type.scoring_context(opened.section)
    for index, row in itertools.islice(rows, MAX_QUESTIONS):
        try:
            answered = _answered(row, opened, recipe)
            question = task.question(answered, context) if answered is not None else None
        except UsageError as error:
            raise located(opened, error, index, held_rows is None) from error
        if isinstance(question, LeftOut):
            found.left_out[question.reason] += 1
            message = " ".join(question.message.split())[:_SHOWN]
            found.first = found.first or f"{opened.locate(index, held_rows is None)}: {message}"
        elif question is not None:
            found.entries.append({"source": number, **_shown(row, opened, recipe), **question})
    return found


def left_out_why(by_source: Sequence[Collected]) -> str:
    """What became of the held-out rows that ask no question, in a line; empty: there are none."""
    reasons = sum((each.left_out for each in by_source), Counter[str]())
    if not reasons:
        return ""
    first = next(each.first for each in by_source if each.first)
    return "; ".join([*(f"{count:,}: {reason}" for reason, count in reasons.most_common()), f"first: {first}"])


def located(opened: OpenedSource, error: UsageError, index: int, heldout: bool = False) -> UsageError:
    """``error`` of a row, with the row's place."""
    return UsageError(f"{opened.locate(index, heldout)}: {error}", hint=error.hint)


def add_majority_answers(
    sources: Sequence[OpenedSource], recipes: Sequence[Recipe | None], by_source: Sequence[list[dict[str, Json]]]
) -> str:
    """Add each task's majority answer to its questions; returns the templates (empty: there are none)."""
    templates = []
    for name in sorted({opened.type.task for opened in sources if opened.type.task}):
        rows = (
            answered
            for opened, recipe in zip(sources, recipes, strict=True)
            if opened.type.task == name and recipe is not None and recipe.format not in ("text", "preference")
            for row in itertools.islice(opened.rows(), _BASELINE_ROWS)
            if (answered := _answered(row, opened, recipe)) is not None
        )
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


def _shown(row: Row, opened: OpenedSource, recipe: Recipe) -> JsonObject:
    """What the model is shown: of a chat what training showed before the last answer."""
    if recipe.format != "chat":
        return {"prompt": prompt_and_completion(row, opened.section.template)[0]}
    found = recipe.chat_engine.conversation(row)
    _, options = recipe.chat_engine.answer(found, len(found.messages) - 1)
    return {"messages": found.messages[:-1], "tools": found.tools, "options": dict(options)}


def _answered(row: Row, opened: OpenedSource, recipe: Recipe) -> AnsweredRow | None:
    """The row with the answer that it has; None: it is a conversation that ends without one, or that is left out.

    The answer of a chat is the assistant's turn, whichever columns there are, without the reasoning before it: that is
    not what an answer is judged by.
    """
    section = opened.section
    if recipe.format != "chat":
        answers = tuple(answer.strip() for answer in completions(row, section.template))
        is_stated = section.template is not None or section.format is not None
        return AnsweredRow(row=row, answers=answers, is_stated=is_stated)
    try:
        found = recipe.chat_engine.conversation(row)
        if found.messages[-1]["role"] != "assistant":
            return None
        recipe.chat_engine.answer(found, len(found.messages) - 1)
    except RowRefusal:
        return None
    said = answer_text(str(found.messages[-1].get("content") or ""))
    return AnsweredRow(row=row, answers=(said,), is_stated=True)
