"""Held-out questions for evaluation: what the model is shown, and how its answer is scored."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from muster.config.spec import RunSpec
from muster.core.errors import MusterError
from muster.core.typed_json import child, children, text, whole
from muster.data.chat.template import Template
from muster.data.collect_questions import FILE
from muster.data.prepare import Prepared
from muster.data.source_type import SOURCES
from muster.data.task import TASKS, Entry, Outcome
from muster.data.tokenizer import Encoder


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question of a task: its prompt, the expected answer, and how answers are scored."""

    prompt_text: str
    prompt_ids: tuple[int, ...] = field(repr=False)
    gold: str
    metric: str
    """The figure of ``eval`` events that it counts in."""
    score: Callable[[str], Outcome] = field(repr=False)
    """Never raises for what the answer says."""
    majority_answer: str | None
    shape: str | None = None
    """A name for breakdowns, where the source gives one."""


def heldout_questions(spec: RunSpec, prepared: Prepared, count: int) -> list[Question]:
    """The first ``count`` held-out questions (fewer where there are fewer; none for plain text), always the same.

    Raises:
        MusterError: the prepared data is damaged.
        UsageError: a source's database is missing or unreadable.
    """
    if prepared.tokenizer_dir is None or count < 1 or spec.data is None:
        return []
    encoder = Encoder(prepared.tokenizer_dir)
    template = None
    if encoder.chat_template is not None:
        template = Template(encoder.chat_template, encoder.template_variables, prepared.today)
    return [_question(entry, spec, encoder, template) for entry in _entries(prepared.folder / FILE, count)]


def majority_baseline(questions: Sequence[Question]) -> float | None:
    """The share of ``questions`` that the majority answer gets right; None where there is no such answer."""
    answered = [(question, question.majority_answer) for question in questions if question.majority_answer]
    if not answered:
        return None
    return sum(question.score(answer).correct for question, answer in answered) / len(questions)


def _entries(path: Path, count: int) -> list[Entry]:
    try:
        with open(path, encoding="utf-8") as file:
            return [json.loads(line) for line in islice(file, count)]
    except (OSError, ValueError) as error:
        raise MusterError(f"{path} is damaged: {error}", hint="remove its folder and start again") from error


def _question(entry: Entry, spec: RunSpec, encoder: Encoder, template: Template | None) -> Question:
    if "messages" in entry:
        assert template is not None
        tools, options = children(entry, "tools"), child(entry, "options")
        prompt = template.render(children(entry, "messages"), tools, options, prompt=True)
        ids = encoder.encode([prompt])[0]
    else:
        prompt = text(entry, "prompt")
        ids = encoder.encode_prompt(prompt)
    assert spec.data is not None
    section = spec.data.sources[whole(entry, "source")]
    source = SOURCES.get(section.type)
    assert source.task is not None
    context = source.scoring_context(section)
    scorer = TASKS.get(source.task).scorer(entry, context, timeout_s=spec.evaluation.query_timeout_s)
    return Question(
        prompt_text=prompt,
        prompt_ids=tuple(ids),
        gold=text(entry, "gold"),
        metric=scorer.metric,
        score=scorer.score,
        majority_answer=text(entry, "majority_answer") or None,
        shape=text(entry, "shape") or None,
    )
