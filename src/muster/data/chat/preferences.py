"""Rows of preferences: a prompt with a better and a worse answer, or with one that is labelled good or bad.

A row is recognised by its columns alone, under any type of source. ``LAYOUTS`` lists the layouts of public data sets.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from muster.core.errors import UsageError
from muster.core.typed_json import Json
from muster.core.typed_json import JsonObject as Row
from muster.data.chat.rows import RowRefusal

Rows = Literal["pairs", "labelled"]
#: Columns of a question, the first that is there; two of them where an instruction has an input.
_QUESTIONS = ("prompt", "question", "instruction", "input", "query")
#: Columns of turns before the answers.
_HISTORIES = ("prompt", "context", "conversations", "messages", "history")
#: Anthropic's marks, which begin each turn of a text.
_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}
SAME = "both answers are the same"
EMPTY = "an answer is empty"
UNDECIDED = "neither answer is better"


@dataclass(frozen=True)
class Layout:
    """How one kind of rows names its answers."""

    columns: tuple[str, ...]
    """That identify it; the first one or two hold the answers."""
    rows: Rows = "pairs"
    choice: str = ""
    """Column that says which of two answers is better."""
    first_if: Literal["negative", "zero", ""] = ""
    """Values of ``choice`` for which the first one is."""


#: The first whose columns are all there counts.
LAYOUTS = (
    Layout(("chosen", "rejected")),
    Layout(("response1", "response2", "overall_preference"), choice="overall_preference", first_if="negative"),
    Layout(("response_0", "response_1", "better_response_id"), choice="better_response_id", first_if="zero"),
    Layout(("completion", "label"), rows="labelled"),
    Layout(("messages", "label"), rows="labelled"),
    Layout(("conversations", "label"), rows="labelled"),
)


@dataclass(frozen=True)
class Preference:
    """A prompt and its answers: the better one first, or one alone. Texts, or turns of a chat."""

    prompt: str | list[Json]
    answers: tuple[str | list[Json], ...]
    grades: tuple[float, ...]
    """Of a pair one: by how much the first is better, 0 where the row does not say. Else of each 1 (good), -1 (bad)."""
    shared: Mapping[str, Json]
    """What a chat's row says besides: its tools."""

    def conversation(self, side: int) -> Row:
        """The chat with one of its answers, the only turn that is learned."""
        turns, answer = self.prompt, self.answers[side]
        assert isinstance(turns, list) and isinstance(answer, list)
        context: list[Json] = [{**turn, "weight": 0} if isinstance(turn, dict) else turn for turn in turns]
        return {"messages": [*context, *answer], **self.shared}


def layout_of(columns: Sequence[str]) -> Layout | None:
    """The layout of rows with these columns; None: they are no preferences."""
    return next((each for each in LAYOUTS if all(name in columns for name in each.columns)), None)


def preference(row: Row, rows: Rows, changes: Counter[str], *, chats: bool = True) -> Preference:
    """The preference that a row states, in the ``rows`` that an objective learns from; changes are counted.

    ``chats``: there is a chat template, so that texts with marks of turns become chats.

    Raises:
        UsageError: a column is of another type than its layout says.
        RowRefusal: nothing can be learned from the row.
    """
    layout = layout_of(list(row))
    if layout is None:
        raise UsageError(f"the row is no preference: its columns are {', '.join(map(repr, row))}")
    if layout.rows == "labelled":
        if rows == "pairs":
            raise UsageError(f"the row has one labelled answer, and others are pairs: {', '.join(map(repr, row))}")
        return _labelled(row, layout)
    sides, margin = _sides(row, layout)
    prompt, answers = _apart(row, sides, changes, chats=chats)
    if any(_is_empty(answer) for answer in answers):
        raise RowRefusal(EMPTY)
    if answers[0] == answers[1]:
        raise RowRefusal(SAME)
    grades = (margin,) if rows == "pairs" else (1.0, -1.0)
    return Preference(prompt, answers, grades, _shared(row))


def _labelled(row: Row, layout: Layout) -> Preference:
    label = row["label"]
    if not isinstance(label, bool) and label not in (0, 1):
        raise UsageError(f"column 'label' must be true or false, got {str(label)[:40]!r}")
    name = layout.columns[0]
    answer = row[name]
    if name != "completion":
        turns = _turns(name, answer)
        prompt: str | list[Json] = turns[:-1]
        answer = turns[-1:]
    elif isinstance(answer, str) and isinstance(row.get("prompt"), str) and not row.get("system"):
        prompt = _text(row, "prompt")
    else:
        prompt = _history(row, "prompt")
        answer = _turns(name, answer, role="assistant")
    assert isinstance(answer, str | list)
    if _is_empty(answer):
        raise RowRefusal(EMPTY)
    return Preference(prompt, (answer,), (1.0 if label else -1.0,), _shared(row))


def _sides(row: Row, layout: Layout) -> tuple[tuple[Json, Json], float]:
    """The two answers, the better one first, and by how much."""
    first, second = (row[name] for name in layout.columns[:2])
    if not layout.choice:
        margin = row.get("margin")
        return (first, second), _number(margin) or 0.0
    choice = _number(row[layout.choice])
    if choice is None:
        raise UsageError(f"column {layout.choice!r} must be a number, got {str(row[layout.choice])[:40]!r}")
    if layout.first_if == "zero":
        return ((first, second) if choice == 0 else (second, first)), 0.0
    if choice == 0:
        raise RowRefusal(UNDECIDED)
    return ((first, second) if choice < 0 else (second, first)), abs(choice)


def _apart(
    row: Row, sides: tuple[Json, Json], changes: Counter[str], *, chats: bool
) -> tuple[str | list[Json], tuple[str | list[Json], str | list[Json]]]:
    """The prompt, and what each side says after it."""
    if all(isinstance(side, str) for side in sides):
        first, second = map(str, sides)
        if chats and all(_TURN.match(text) for text in (first, second)):
            changes["texts with marks of turns read as chats"] += 1
            return _of_turns(_marked(first), _marked(second))
        return _asked(row, first, second)
    first_turns, second_turns = (_turns("chosen and rejected", side, role="assistant") for side in sides)
    return _of_turns(first_turns, second_turns, row)


def _asked(row: Row, first: str, second: str) -> tuple[str | list[Json], tuple[str | list[Json], str | list[Json]]]:
    """Two texts as answers to what the row's other columns ask."""
    before = [name for name in _HISTORIES if isinstance(row.get(name), list) and row[name]]
    asked = [name for name in _QUESTIONS if isinstance(row.get(name), str) and row[name]]
    if not before and not asked:
        return _common_text(first, second)
    if not before and asked[0] == "prompt" and not row.get("system"):
        return _text(row, "prompt"), (first, second)
    words = "\n".join(_text(row, name) for name in asked)
    prompt = _history(row, before[0]) if before else [_said("user", words)]
    return prompt, ([_said("assistant", first)], [_said("assistant", second)])


def _of_turns(
    first: list[Json], second: list[Json], row: Row | None = None
) -> tuple[str | list[Json], tuple[list[Json], list[Json]]]:
    """Conversations apart after their common turns; where they have none, a column of the row is the prompt."""
    shared = 0
    while shared < min(len(first), len(second)) - 1 and first[shared] == second[shared]:
        shared += 1
    if len(first) - shared != 1 or len(second) - shared != 1:
        raise RowRefusal("the conversations differ before their last turns")
    history = first[:shared]
    if not history and row is not None:
        name = next((name for name in _HISTORIES if isinstance(row.get(name), str | list) and row[name]), None)
        if name is None and (name := next((each for each in _QUESTIONS if row.get(each)), None)) is None:
            raise RowRefusal("there is no prompt")
        history = _history(row, name)
    return history, (first[shared:], second[shared:])


def _common_text(first: str, second: str) -> tuple[str, tuple[str, str]]:
    """Texts apart where they begin to differ, at the end of a word."""
    same = next((at for at, (one, two) in enumerate(zip(first, second, strict=False)) if one != two), None)
    if same is None:
        same = min(len(first), len(second))
    cut = max(first.rfind(mark, 0, same) for mark in (" ", "\n"))
    if first == second:
        raise RowRefusal(SAME)
    if cut < 1:
        raise RowRefusal("the texts have no common beginning to be their prompt")
    return first[:cut], (first[cut:], second[cut:])


def _marked(text: str) -> list[Json]:
    parts = _TURN.split(text)[1:]
    return [_said(_ROLES[role], words.strip()) for role, words in zip(parts[::2], parts[1::2], strict=True)]


def _history(row: Row, name: str) -> list[Json]:
    value = row.get(name)
    return [_said("user", value)] if isinstance(value, str) else _turns(name, value)


def _turns(name: str, value: Json, role: str | None = None) -> list[Json]:
    """The turns that a column holds; ``role``: of a text, where one may stand for a turn."""
    if isinstance(value, str) and role is not None:
        return [_said(role, value)]
    turns: Json = [value] if isinstance(value, dict) else value
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        kind = "an empty list" if value == [] else type(value).__name__
        raise UsageError(f"column {name!r} must be text or a list of turns, got {kind}")
    return list(turns)


def _said(role: str, words: str) -> Json:
    return {"role": role, "content": words}


def _is_empty(answer: str | list[Json]) -> bool:
    if isinstance(answer, str):
        return not answer.strip()
    last = answer[-1]
    assert isinstance(last, dict)
    content = last.get("content", last.get("value"))
    says = isinstance(content, str | list) and bool(content) and bool(str(content).strip())
    return not says and not last.get("tool_calls")


def _number(value: Json) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _text(row: Row, name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise UsageError(f"column {name!r} must be text, got {type(value).__name__}")
    return value


def _shared(row: Row) -> dict[str, Json]:
    """``system`` is put first where the turns have none, as in any chat."""
    return {name: row[name] for name in ("tools", "system") if row.get(name)}


def texts_of(row: Row) -> list[str]:
    """All texts of a row, for the training of a tokenizer. Raises UsageError."""
    try:
        stated = preference(row, "labelled", Counter())
    except RowRefusal:
        stated = None
    parts: list[Json] = [] if stated is None else [stated.prompt, *stated.answers]
    turns = [turn for part in parts for turn in (part if isinstance(part, list) else [part])]
    return [str(turn.get("content", turn.get("value", ""))) if isinstance(turn, dict) else str(turn) for turn in turns]
