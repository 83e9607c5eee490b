"""A row's conversation put in order before it is rendered; every change is counted, in words that are reported."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection
from functools import lru_cache
from typing import NamedTuple

from muster.core.errors import UsageError
from muster.core.typed_json import Json
from muster.core.typed_json import JsonObject as Row

#: Columns that hold a chat: turns of role and content, or (ShareGPT's way) of from and value.
CHAT_COLUMNS = ("messages", "conversations")
#: Roles that chat templates name.
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython", "tool_response"})
#: Names that data sets use for them, in small letters.
_ALIASES = {
    **dict.fromkeys(("human", "prompter", "customer"), "user"),
    **dict.fromkeys(
        ("gpt", "chatgpt", "bot", "model", "bing", "bard", "ai", "chatbot", "claude", "gemini", "function_call"),
        "assistant",
    ),
    **dict.fromkeys(("observation", "function_response"), "tool"),
    "instruction": "system",
}
#: ShareGPT's own names, which are no change.
_SHAREGPT = {"human", "gpt", "function_call", "observation"}
#: One field under three names, the one that templates read first (as in transformers).
REASONING = ("reasoning_content", "thinking", "reasoning")
_TEXT_PARTS = {None, "text", "input_text", "output_text"}
#: Fields by which data sets say whether a turn is learned.
_WEIGHTS = ("weight", "train", "training", "loss")
_INLINE = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)


class RowRefusal(Exception):
    """A row or an answer is left out. The text is the same for all of this kind: they are counted."""


class NotWritten(RowRefusal):
    """The template does not write a turn, so that what follows it has no history either."""


class RowError(UsageError):
    """A row does not fit; ``index``: its number from 0."""

    index = 0


def row_error(error: UsageError, index: int) -> RowError:
    """``error`` of row ``index``. (Pickled with its attributes: it comes from other processes, too.)"""
    result = RowError(str(error), hint=error.hint)
    result.index = index
    return result


class Conversation(NamedTuple):
    """A conversation as a chat template takes it."""

    messages: list[Row]
    tools: list[Json]
    untrained: frozenset[int]
    """Turns that the row says are context: ``weight: 0``, ``train: false``."""
    tools_text: str = ""
    """``tools`` as JSON."""


def conversation(row: Row, changes: Counter[str], *, text_arguments: bool = False) -> Conversation:
    """The conversation of a row; what was changed in it is added to ``changes``.

    ``text_arguments``: the template takes the arguments of calls as JSON text, not as objects.

    Raises:
        UsageError: the row holds no conversation.
        RowRefusal: something in it cannot be written by a template.
    """
    turns = _turns(row, changes)
    tools, text = _tools(row, changes) if row.get("tools") else ([], "")
    messages: list[Row] = []
    untrained: frozenset[int] = frozenset()
    for place, turn in enumerate(turns):
        if (
            isinstance(turn, dict) and len(turn) == 2
            and turn.get("role") in ROLES and isinstance(turn.get("content"), str)
        ):  # fmt: skip
            messages.append(turn)
            continue
        messages.append(_turn(turn, changes, text_arguments))
        weights = {
            str(turn[name]).lower() for name in _WEIGHTS if isinstance(turn, dict) and turn.get(name) is not None
        }
        if weights & {"0", "0.0", "false"}:
            untrained |= {place}
        elif not weights <= {"1", "1.0", "true"}:
            changes["turns of another weight than 0 and 1, which count whole"] += 1
    return Conversation(messages, tools, untrained, text)


def with_words(message: Row, words: Callable[[str], Json], fields: Collection[str] = ()) -> Row:
    """The turn with ``words(text)`` in the place of each text but its role; empty ones stay: templates test for them.

    All names of the reasoning get one text. ``fields``: only these are changed, and names and arguments of calls.
    """
    kept = {"role", "type", "id"} if fields else {"role", "type"}

    def replaced(value: Json, name: str) -> Json:
        if isinstance(value, str):
            return words(value) if value and name not in kept else value
        if isinstance(value, dict):
            return {key: replaced(item, name if name == "arguments" else key) for key, item in value.items()}
        return [replaced(item, name) for item in value] if isinstance(value, list) else value

    thought = replaced(message.get(REASONING[0]), REASONING[0])
    result: dict[str, Json] = {}
    for name, value in message.items():
        result[name] = (
            thought if name in REASONING else value if fields and name not in fields else replaced(value, name)
        )
    return result


def reasoning_of(message: Row) -> str:
    """What the assistant thought before it answered, in a field of its own or within the content; empty: nothing."""
    value = message.get(REASONING[0])
    if isinstance(value, str) and value:
        return value
    inline = _INLINE.match(str(message.get("content") or ""))
    return inline[1] if inline else ""


def without_reasoning(message: Row, changes: Counter[str]) -> Row:
    """The assistant's turn as if it had answered at once."""
    if not reasoning_of(message):
        return message
    changes["reasoning left out (data.thinking: off)"] += 1
    kept = {name: value for name, value in message.items() if name not in REASONING}
    if isinstance(text := kept.get("content"), str):
        kept["content"] = answer_text(text)
    return kept


def answer_text(content: str) -> str:
    """An answer without the thinking that is written within it."""
    inline = _INLINE.match(content)
    return content[inline.end() :].lstrip("\n") if inline else content


def spoken(row: Row) -> list[tuple[str, str]]:
    """Role and text of each turn, calls of tools as JSON. Raises UsageError; a turn that no template can
    write is left out."""
    result = []
    for turn in _turns(row, Counter()):
        try:
            message = _turn(turn, Counter(), text_arguments=True)
        except RowRefusal:
            continue
        calls = json.dumps(message["tool_calls"], ensure_ascii=False) if "tool_calls" in message else ""
        result.append((str(message["role"]), str(message.get("content") or calls)))
    return result


def _turns(row: Row, changes: Counter[str]) -> list[Json]:
    name = next((name for name in CHAT_COLUMNS if row.get(name)), CHAT_COLUMNS[0])
    turns = row.get(name)
    if isinstance(turns, str) and (turns := _parsed(turns)) is not None:
        changes["conversations given as JSON text"] += 1
    if not isinstance(turns, list) or not turns:
        raise UsageError(f"column {name!r} must be a list with at least one turn")
    first, system = turns[0], row.get("system")
    roles = {first.get("role"), first.get("from")} if isinstance(first, dict) else set()
    if isinstance(system, str) and system.strip() and "system" not in roles:
        changes["system texts of a column of their own put first"] += 1
        return [{"role": "system", "content": system}, *turns]
    return turns


def _parsed(text: str) -> Json:
    """What JSON ``text`` holds; None: it is no JSON."""
    try:
        value: Json = json.loads(text)
    except ValueError:
        return None
    return value


def _turn(turn: Json, changes: Counter[str], text_arguments: bool) -> Row:
    spoken_in = {"content", "value", "tool_calls", *REASONING}
    if not isinstance(turn, dict) or not ({"role", "from"} & {*turn} and spoken_in & {*turn}):
        raise UsageError(f"a chat turn needs 'role' and 'content', got {str(turn)[:80]}")
    message: dict[str, Json] = {name: value for name, value in turn.items() if value is not None}
    if "value" in turn and "content" not in turn:
        message["content"] = message.pop("value", None)
    message["role"] = _role(message, changes, is_sharegpt="role" not in turn)
    for name in ("from", *_WEIGHTS):
        message.pop(name, None)
    if isinstance(function := message.pop("function_call", None), dict) and not message.get("tool_calls"):
        message["tool_calls"] = [{"type": "function", "function": function}]
        changes["function_call read as a call of a tool"] += 1
    if message.get("tool_calls"):
        message["tool_calls"] = _calls(message["tool_calls"], changes, text_arguments)
    else:
        message.pop("tool_calls", None)
    content = _content(message.get("content"), changes)
    if content is not None:
        message["content"] = content
    elif "tool_calls" in message:  # as transformers, which drops what is null
        message.pop("content", None)
    else:
        changes["null content read as empty text"] += 1
        message["content"] = ""
    thought = next((message[name] for name in REASONING if message.get(name) is not None), None)
    if isinstance(thought, list):
        thought = _content(thought, changes)
    if thought is not None:
        all_of_it = dict.fromkeys({*REASONING} & {*message}, thought)
        return {"thinking": thought, **message, **all_of_it, "reasoning_content": thought}
    return message


def _role(message: Row, changes: Counter[str], *, is_sharegpt: bool) -> str:
    given = str(message.get("role", message.get("from", "")))
    role = given.strip().lower()
    if given in ROLES:
        return given
    known = _ALIASES.get(role, role if role in ROLES else None)
    if known is not None:
        if not (is_sharegpt and given in _SHAREGPT):
            changes[f"turns of role {given!r} read as {known!r}"] += 1
        return known
    if is_sharegpt:
        raise RowRefusal(f"unknown role {given[:40]!r}")
    changes[f"turns of role {given[:40]!r}, which is not known"] += 1
    return given


def _content(content: Json, changes: Counter[str]) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowRefusal(f"content of kind {type(content).__name__!r}, not text")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else part
        if kind not in _TEXT_PARTS or not isinstance(text, str):
            raise RowRefusal(f"content with a part of kind {str(kind or type(part).__name__)[:40]!r}, not text")
        texts.append(text)
    changes["content in parts joined to one text"] += 1
    return "".join(texts)


def _calls(calls: Json, changes: Counter[str], text_arguments: bool) -> list[Json]:
    if isinstance(calls, str):
        calls = _parsed(calls)
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise RowRefusal("tool_calls that are not a list of calls")
    return [_call(call, changes, text_arguments) for call in calls if isinstance(call, dict)]


def _call(call: Row, changes: Counter[str], text_arguments: bool) -> Row:
    call = {name: value for name, value in call.items() if value is not None}
    if isinstance(inner := call.get("function"), dict):
        return {**call, "function": _call(inner, changes, text_arguments)}
    given = call.get("arguments", {})
    if isinstance(given, str) and not text_arguments:
        try:
            given = json.loads(given) if given.strip() else {}
        except ValueError as error:
            raise RowRefusal("tool arguments that are not JSON") from error
        changes["tool arguments decoded from JSON text"] += 1
    elif not isinstance(given, str):  # Parquet and Arrow give every row the keys of all rows
        given = _without_nulls(given, changes)
        if text_arguments:
            given = json.dumps(given, ensure_ascii=False)
            changes["tool arguments written as JSON text"] += 1
    return {**call, "arguments": given}


def _without_nulls(value: Json, changes: Counter[str]) -> Json:
    if isinstance(value, list):
        return [_without_nulls(item, changes) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {name: _without_nulls(item, changes) for name, item in value.items() if item is not None}
    if len(kept) < len(value):
        changes["null keys left out of tool arguments and schemas"] += len(value) - len(kept)
    return kept


def _tools(row: Row, changes: Counter[str]) -> tuple[list[Json], str]:
    """The JSON schemas of the chat's functions, a list or (for columns of one type) its JSON text; and that text."""
    tools = row["tools"]
    try:
        text = tools if isinstance(tools, str) else json.dumps(tools, ensure_ascii=False)
        result, nulls = _schemas(text)
    except (TypeError, ValueError) as error:
        raise UsageError(f"column 'tools' is not JSON: {error}") from error
    changes += nulls
    return result, text


@lru_cache(maxsize=256)
def _schemas(text: str) -> tuple[list[Json], Counter[str]]:
    tools, nulls = json.loads(text) or [], Counter[str]()
    if not isinstance(tools, list):
        raise UsageError(f"column 'tools' must be a list, got {type(tools).__name__}")
    return [_without_nulls(json.loads(tool) if isinstance(tool, str) else tool, nulls) for tool in tools], nulls
