"""The seam between prepared data and tasks: what a model is asked on held-out rows, and how its answers are scored.

A data source names its task; packages add tasks by an entry point of the group ``muster.tasks``. The rows that a
task trains on come from data sources like any others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from muster.core.registry import Registry
from muster.core.typed_json import JsonObject

Row: TypeAlias = JsonObject
Entry: TypeAlias = JsonObject
"""A held-out question as stored: what ``Task.question`` returned (JSON values), and what preparation adds."""


@dataclass(frozen=True, kw_only=True)
class AnsweredRow:
    """A row with what its format says the answer is."""

    row: Row
    answers: tuple[str, ...]
    """The acceptable ones; the first is trained on."""
    is_stated: bool
    """The run file says where in a row the answer is, by a template or a format; else the columns imply it."""


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """Why a held-out row asks no question."""

    reason: str
    """In words that are the same for all such rows: they are counted."""
    message: str
    """Of this row."""


class Outcome(Protocol):
    """The score of one answer."""

    @property
    def correct(self) -> bool: ...

    @property
    def timed_out(self) -> bool: ...

    @property
    def rows(self) -> tuple[tuple[object, ...], ...]:
        """What the answer produced, to show with a sample (the first few)."""
        ...


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """How the answers to one question are scored."""

    metric: str
    """The figure of ``eval`` events that the question counts in: the share of correct answers (``query_match``)."""
    score: Callable[[str], Outcome]
    """The score of a model's answer; never raises for what the answer says."""


@dataclass(frozen=True)
class MajorityAnswer:
    """The commonest answer of the training rows: what answering without reading the question is worth."""

    template: str
    fill: Callable[[Entry], str]
    """The template as an answer to one question."""


class Task(Protocol):
    """One kind of question with a checkable answer."""

    def question(self, row: AnsweredRow, context: JsonObject) -> JsonObject | LeftOut:
        """The question of a held-out row: ``gold`` (the expected answer) and what ``scorer`` needs.

        ``context``: ``SourceType.scoring_context``.

        Raises:
            UsageError: what the source names for scoring does not fit the row.
        """
        ...

    def scorer(self, entry: Entry, context: JsonObject, *, timeout_s: float) -> Scorer:
        """How answers to a stored question are scored.

        Raises:
            UsageError: what the source names for scoring (a database) is missing or unreadable.
        """
        ...

    def majority_answer(self, rows: Iterable[AnsweredRow]) -> MajorityAnswer | None:
        """The baseline that training rows give; None: they have no answers."""
        ...


TASKS: Registry[Task] = Registry("task", "muster.tasks", {"text2sql": "muster.tasks.text2sql.task:TASK"})
