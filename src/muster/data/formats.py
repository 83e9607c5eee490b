"""From a row to text with a mask: prompt and completion, plain text. (Chats: ``muster.data.chat``.)

A document is a list of segments in order, each tokenised alone, as generation will see the prompt; a supervised
segment's tokens count in the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Literal, TypeGuard

from muster.config.sections.sources import PromptTemplate, Source
from muster.config.spec import Objective
from muster.core.errors import UsageError
from muster.core.typed_json import Json
from muster.data.chat.preferences import layout_of
from muster.data.chat.rows import CHAT_COLUMNS
from muster.data.task import Row

Format = Literal["chat", "prompt_completion", "text", "preference"]
#: Key of a row of text that goes on in the next row: a file that was cut.
CONTINUES = "_muster_continues"


@dataclass(frozen=True)
class Segment:
    """Part of a document's text, and whether its tokens are supervised."""

    text: str
    supervised: bool


@dataclass(frozen=True)
class Document:
    """One row as text."""

    segments: tuple[Segment, ...]
    """None: the row has no answer to learn from."""
    ends: bool
    """Append the end-of-sequence token (supervised if the last segment is)."""


def choose_format(source: Source, columns: Sequence[str], objective: Objective | None = None) -> Format:
    """The format that the run file names, or the one that the columns imply; ``objective``: of the training.

    Raises:
        UsageError: the columns fit none, or not the one asked for.
    """
    if _learns_preferences(source, columns, objective):
        return "preference"
    needed: dict[str, tuple[str, ...]] = {"text": ("text",)}
    chat = next((name for name in CHAT_COLUMNS if name in columns), None)
    if chat is None:
        needed["chat"] = ("messages",)
    if source.format:
        if source.format == "prompt_completion" and source.template is None:
            needed["prompt_completion"] = ("prompt", "completion")
        missing = [name for name in needed.get(source.format, ()) if name not in columns]
        if missing:
            raise UsageError(f"format {source.format!r} needs column {missing[0]!r}; there are {_listed(columns)}")
        return source.format
    if source.template is not None:
        return "prompt_completion"
    if chat is not None:
        return "chat"
    if {"prompt", "completion"} <= {*columns}:
        return "prompt_completion"
    if "text" in columns:
        return "text"
    raise UsageError(
        f"no known format fits the columns {_listed(columns)}",
        hint='give the source a template, for example {prompt: "Q: {question}\\nSQL:", completion: " {sql}"}',
    )


def _learns_preferences(source: Source, columns: Sequence[str], objective: Objective | None) -> bool:
    """Whether rows with these columns are preferences to learn. Raises UsageError: rows and objective do not fit."""
    layout = layout_of(columns)
    if objective is None:
        if layout is None or source.format is not None or source.template is not None:
            return False
        raise UsageError(
            f"the columns {_listed(columns)} are preferences, and training.objective is not set",
            hint=f"training.objective: {'dpo' if layout.rows == 'pairs' else 'kto'}; or give the source a format or a "
            "template, to learn one answer of each row by itself",
        )
    if layout is None:
        raise UsageError(
            f"training.objective {objective.name} learns from preferences, and the columns are {_listed(columns)}",
            hint="rows need chosen and rejected, or (kto) completion and label: docs/how-to/preference.md",
        )
    if objective.traits.rows == "pairs" and layout.rows == "labelled":
        raise UsageError(
            f"training.objective {objective.name} learns from pairs, and rows with the columns {_listed(columns)} have "
            "one answer each",
            hint="objective: kto",
        )
    return True


def columns_of(row: Row) -> list[str]:
    """A row's columns, without what readers add."""
    return [name for name in row if not name.startswith("_")]


def prompt_and_completion(row: Row, template: PromptTemplate | None) -> tuple[str, str]:
    """The two texts of a row: of several acceptable completions the first.

    Raises:
        UsageError: a column is missing or not text.
    """
    prompt = fill(template.prompt, row) if template is not None else row_text(row, "prompt")
    return prompt, completions(row, template)[0]


def completions(row: Row, template: PromptTemplate | None) -> tuple[str, ...]:
    """The acceptable completions of a row, at least one: several where a column of it is a list of texts.

    Raises:
        UsageError: a column is missing or not text, or lists are not equally long.
    """
    lists = {name: value for name, value in row.items() if _is_texts(value)}
    if template is None:
        return _or_nothing(lists["completion"]) if "completion" in lists else (row_text(row, "completion"),)
    first = fill(template.completion, row)
    lists = {name: lists[name] for name in fields(template.completion) if name in lists}
    if not lists:
        return (first,)
    if len({len(value) for value in lists.values()}) > 1:
        raise UsageError(
            f"the lists in {_listed(list(lists))} have {', '.join(str(len(value)) for value in lists.values())} items",
            hint="a completion's lists hold one item for each acceptable answer",
        )
    items = zip(*map(_or_nothing, lists.values()), strict=True)
    return tuple(fill(template.completion, {**row, **dict(zip(lists, item, strict=True))}) for item in items)


def _is_texts(value: Json) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _or_nothing(values: list[str]) -> tuple[str, ...]:
    return tuple(values) or ("",)


def row_text(row: Row, name: str = "text") -> str:
    """The text of a column. Raises UsageError where it is missing or not text."""
    if name not in row:
        raise UsageError(f"column {name!r} is missing; there are {_listed(list(row))}")
    value = row.get(name)
    if not isinstance(value, str):
        raise UsageError(f"column {name!r} must be text, got {type(value).__name__}")
    return value


def fill(template: str, row: Row) -> str:
    """A format string over a row's columns: ``{name}`` only, so that a template can reach nothing else.

    Raises:
        UsageError: not a format string, or a column that is not there.
    """
    parts = []
    try:
        for text, name, spec, conversion in Formatter().parse(template):
            parts.append(text)
            if name is None:
                continue
            if spec or conversion or name not in row:
                raise UsageError(
                    f"template field {{{name}}} is not a column; there are {_listed(list(row))}",
                    hint="fields are column names; write {{ and }} for braces",
                )
            parts.append("" if row[name] is None else str(row[name]))
    except ValueError as error:
        raise UsageError(f"template {template!r}: {error}", hint="write {{ and }} for braces") from error
    return "".join(parts)


def fields(template: str) -> list[str]:
    """The columns that a format string names. Raises UsageError where it is none."""
    try:
        return [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise UsageError(f"template {template!r}: {error}", hint="write {{ and }} for braces") from error


def document(row: Row, format: Format, template: PromptTemplate | None, train_on: str | Sequence[str]) -> Document:
    """One row of text or of prompt and completion, masked by ``train_on``.

    Raises:
        UsageError: the row does not fit the format.
    """
    if not isinstance(train_on, str):
        raise UsageError(
            f"data.train_on names chat roles {list(train_on)}, but the format is {format!r}",
            hint="use completions or all",
        )
    if format == "text":
        return Document(segments=(Segment(row_text(row, "text"), True),), ends=CONTINUES not in row)
    prompt, completion = prompt_and_completion(row, template)
    if not completion.strip() and train_on != "all":  # else the model would learn to answer with nothing
        return Document(segments=(), ends=True)
    return Document(segments=(Segment(prompt, train_on == "all"), Segment(completion, True)), ends=True)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in list(names)[:12] if not name.startswith("_")) or "none"
