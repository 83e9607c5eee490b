"""From a row to text with a mask: chat turns, prompt and completion, plain text.

A document is a list of segments in order; a supervised segment's tokens count in the loss. Whether the
tokenizer is asked segment by segment (prompt and completion, as generation will see the prompt) or on the whole
text (chat) is the format's choice.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Literal, TypeGuard

from muster.config.sections.sources import PromptTemplate, Source
from muster.core.errors import UsageError
from muster.core.typed_json import Json
from muster.data.task import Row

Format = Literal["chat", "prompt_completion", "text"]
RenderChat = Callable[..., str]
"""(messages, add the assistant's header[, tools]) -> text, by the tokenizer's chat template."""


#: Columns that hold a chat: turns of role and content, or (ShareGPT's way) of from and value.
CHAT_COLUMNS = ("messages", "conversations")
#: Key of a row of text that goes on in the next row: a file that was cut.
CONTINUES = "_muster_continues"
#: ShareGPT's names for roles.
_ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}


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
    turn_end: Callable[[], str | None] = lambda: None,
) -> Document:
    """One row in ``format``, masked by ``train_on``. ``turn_end`` gives the token that a turn of a chat ends with: what
    the template writes after it (a line's end) is never learned.

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
        tools = row_tools(row)
        render = (lambda turns, header: render_chat(turns, header, tools)) if tools else render_chat
        segments = _chat(messages, train_on, render, turn_end) if _says_something(messages, train_on) else ()
        return Document(segments=segments, whole=True, ends=False)
    if format == "text":
        ends = CONTINUES not in row
        return Document(segments=(Segment(row_text(row, "text"), True),), whole=False, ends=ends)
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
    """The chat turns of a row, each with role and content (null only where a turn calls tools)."""
    name = next((name for name in CHAT_COLUMNS if name in row), CHAT_COLUMNS[0])
    messages = row.get(name)
    if not isinstance(messages, list) or not messages:
        raise UsageError(f"column {name!r} must be a list with at least one turn")
    return [_turn(message) for message in messages]


def _turn(message: Json) -> Row:
    if isinstance(message, dict):
        if "from" in message and "value" in message:
            who = str(message["from"])
            message = {"role": _ROLES.get(who, who), "content": message["value"]}
        if "role" in message and "tool_calls" in message:
            return {"content": None, **message}
        if "role" in message and "content" in message:
            return message
    raise UsageError(f"a chat turn needs 'role' and 'content', got {str(message)[:80]}")


def row_tools(row: Row) -> list[Json]:
    """The JSON schemas of a chat's functions: a list, or (for columns of one type) its JSON text; none: empty."""
    tools = row.get("tools") or []
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise UsageError(f"column 'tools' is not JSON: {error}") from error
    if not isinstance(tools, list):
        raise UsageError(f"column 'tools' must be a list, got {type(tools).__name__}")
    return [json.loads(tool) if isinstance(tool, str) else tool for tool in tools]


def _chat(
    messages: list[Row], train_on: str | Sequence[str], render: RenderChat, turn_end: Callable[[], str | None]
) -> tuple[Segment, ...]:
    """Render the conversation once and find each supervised turn in it as the part between two prefixes.

    A turn's text starts where the conversation before it ends (for the assistant: after its header, as when it
    is asked to answer) and ends where the conversation with it ends, or with ``turn_end``. This needs no marks in the
    template, but each prefix must really be one.
    """
    whole = render(messages, False)
    if train_on == "all":
        return (Segment(whole, True),)
    roles = {"assistant"} if train_on == "completions" else set(train_on)
    ending = turn_end()
    segments: list[Segment] = []
    done = 0
    for position, message in enumerate(messages):
        if message["role"] not in roles:
            continue
        answers = message["role"] == "assistant"
        before = render(messages[:position], answers) if position else _first_header(whole, answers, render)
        after = whole if position == len(messages) - 1 else render(messages[: position + 1], False)
        if not (whole.startswith(before) and whole.startswith(after) and done <= len(before) <= len(after)):
            raise UsageError(
                f"the chat template renders turn {position + 1} ({message['role']}) differently inside the whole "
                "conversation, so its tokens cannot be separated",
                hint="use a template that only appends, or data.train_on: all",
            )
        stop = len(after)
        if ending and (found := after.rfind(ending, len(before))) >= 0 and not after[found + len(ending) :].strip():
            stop = found + len(ending)
        segments.append(Segment(whole[done : len(before)], False))
        segments.append(Segment(whole[len(before) : stop], True))
        done = stop
    segments.append(Segment(whole[done:], False))
    return tuple(segment for segment in segments if segment.text)


def _first_header(whole: str, answers: bool, render: RenderChat) -> str:
    """What stands before the words of a conversation's first turn: for the assistant up to its header's end."""
    if not answers:
        return ""
    question: list[Row] = [{"role": "user", "content": "Q"}]
    header = render(question, True).removeprefix(render(question, False))
    place = whole.find(header)
    return whole[: place + len(header)] if header and place >= 0 else ""


def _listed(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in list(names)[:12] if not name.startswith("_")) or "none"
