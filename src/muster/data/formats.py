"""From a row to text with a mask: chat turns, prompt and completion, plain text.

A document is a list of segments in order; a supervised segment's tokens count in the loss. Whether the
tokenizer is asked segment by segment (prompt and completion, as generation will see the prompt) or on the whole
text (chat) is the format's choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Literal, TypeGuard

from muster.config.sources import PromptTemplate, Source
from muster.core.errors import UsageError
from muster.core.typed_json import Json
from muster.data.task import Row

Format = Literal["chat", "prompt_completion", "text"]
RenderChat = Callable[[Sequence[Row], bool], str]
"""(messages, add the assistant's header) -> text, by the tokenizer's chat template."""


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
    whole: bool
    """Tokenise the joined text and place the mask by character offsets; else segment by segment."""
    ends: bool
    """Append the end-of-sequence token (supervised if the last segment is)."""

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments)


def choose_format(source: Source, columns: Sequence[str]) -> Format:
    """The format that the run file names, or the one that the columns imply.

    Raises:
        UsageError: the columns fit none, or not the one asked for.
    """
    needed: dict[str, tuple[str, ...]] = {"chat": ("messages",), "text": ("text",)}
    if source.format:
        if source.format == "prompt_completion" and source.template is None:
            needed["prompt_completion"] = ("prompt", "completion")
        missing = [name for name in needed.get(source.format, ()) if name not in columns]
        if missing:
            raise UsageError(f"format {source.format!r} needs column {missing[0]!r}; there are {_listed(columns)}")
        return source.format
    if source.template is not None:
        return "prompt_completion"
    if "messages" in columns:
        return "chat"
    if "prompt" in columns and "completion" in columns:
        return "prompt_completion"
    if "text" in columns:
        return "text"
    raise UsageError(
        f"no known format fits the columns {_listed(columns)}",
        hint='give the source a template, for example {prompt: "Q: {question}\\nSQL:", completion: " {sql}"}',
    )


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


def document(
    row: Row,
    format: Format,
    template: PromptTemplate | None,
    train_on: str | Sequence[str],
    render_chat: RenderChat,
) -> Document:
    """One row in ``format``, masked by ``train_on``.

    Raises:
        UsageError: the row does not fit the format, or the chat template cannot be masked.
    """
    if not isinstance(train_on, str) and format != "chat":
        raise UsageError(
            f"data.train_on names chat roles {list(train_on)}, but the format is {format!r}",
            hint="use completions or all",
        )
    if format == "chat":
        messages = row_messages(row)
        segments = _chat(messages, train_on, render_chat) if _says_something(messages, train_on) else ()
        return Document(segments=segments, whole=True, ends=False)
    if format == "text":
        return Document(segments=(Segment(row_text(row, "text"), True),), whole=False, ends=True)
    prompt, completion = prompt_and_completion(row, template)
    if not completion.strip() and train_on != "all":  # else the model would learn to answer with nothing
        return Document(segments=(), whole=False, ends=True)
    return Document(segments=(Segment(prompt, train_on == "all"), Segment(completion, True)), whole=False, ends=True)


def _says_something(messages: list[Row], train_on: str | Sequence[str]) -> bool:
    """Whether a turn that is learned from holds anything: text, or what else a turn has (calls of tools). True where
    there is no such turn: then every label is masked, which is counted apart."""
    if train_on == "all":
        return True
    roles = {"assistant"} if train_on == "completions" else set(train_on)
    turns = [message for message in messages if message["role"] in roles]
    return not turns or any(
        value.strip() if isinstance(value, str) else value
        for turn in turns
        for name, value in turn.items()
        if name not in ("role", "name")
    )


def row_messages(row: Row) -> list[Row]:
    """The chat turns of a row."""
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise UsageError("column 'messages' must be a list with at least one turn")
    for message in messages:
        if not isinstance(message, dict) or "role" not in message or "content" not in message:
            raise UsageError(f"a chat turn needs 'role' and 'content', got {str(message)[:80]}")
    return messages


def _chat(messages: list[Row], train_on: str | Sequence[str], render: RenderChat) -> tuple[Segment, ...]:
    """Render the conversation once and find each supervised turn in it as the part between two prefixes.

    A turn's text starts where the conversation before it ends (for the assistant: after its header, as when it
    is asked to answer) and ends where the conversation with it ends. This needs no marks in the template, but
    each prefix must really be one.
    """
    whole = render(messages, False)
    if train_on == "all":
        return (Segment(whole, True),)
    roles = {"assistant"} if train_on == "completions" else set(train_on)
    segments: list[Segment] = []
    done = 0
    for position, message in enumerate(messages):
        if message["role"] not in roles:
            continue
        before = render(messages[:position], message["role"] == "assistant") if position else ""
        after = whole if position == len(messages) - 1 else render(messages[: position + 1], False)
        if not (whole.startswith(before) and whole.startswith(after) and done <= len(before) <= len(after)):
            raise UsageError(
                f"the chat template renders turn {position + 1} ({message['role']}) differently inside the whole "
                "conversation, so its tokens cannot be separated",
                hint="use a template that only appends, or data.train_on: all",
            )
        segments.append(Segment(whole[done : len(before)], False))
        segments.append(Segment(whole[len(before) : len(after)], True))
        done = len(after)
    segments.append(Segment(whole[done:], False))
    return tuple(segment for segment in segments if segment.text)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in list(names)[:12] if not name.startswith("_")) or "none"
