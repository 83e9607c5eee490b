"""docs/protocol.md, made from the message classes."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints

from muster.core.heartbeat_timing import MAX_INTERVAL_S
from muster.core.layout import LayoutKey
from muster.core.typed_json import Count, Int64, JsonObject, Name, Port, Seconds, Step
from muster.protocol import tables
from muster.protocol.codec import MAX_BYTES, kind_of
from muster.protocol.hello import BeatInterval
from muster.protocol.version import PROTOCOL
from muster.transport.listening import HELLO_S

_WORDS = {
    str: "text", bool: "true or false", type(None): "null", bytes: "text", int: "integer", float: "number",
    Int64: "integer", Count: "count", Step: "step", Port: "port", Seconds: "seconds", LayoutKey: "layout",
    JsonObject: "object", Name: "name", BeatInterval: f"seconds, at most {MAX_INTERVAL_S:g}",
}  # fmt: skip

_INTRODUCTION = f"""Protocol {PROTOCOL}. Each message is one frame, the JSON array `["kind", {{fields}}]`, of at most
{MAX_BYTES >> 20} MiB. Over sockets a frame follows its length and a MAC (`muster.transport.secure_session`); in a pipe
it is a line. Every field is checked once, where the frame arrives: an unknown kind, a kind of another channel, a field
that is missing, unknown or of another type ends the connection, never the process. The first message states the
protocol; processes of two protocols do not speak to each other, and the refusal names both.

Whoever connects proves within {HELLO_S:g} s that it knows the run's token, and says its first message within
{HELLO_S:g} s more; until the proof it is one of a limited number of strangers, of which the oldest is dropped for a new
one. Frames are authenticated and not encrypted (SECURITY.md).

count: an integer from 0 to 2^63 - 1; step: the same, or -1 for none; port: 0 to 65535; seconds: a number from 0 to
10^9; name: text that is not empty; layout: such as `r1s2t1p1c1e1`.

A message is added as a class in `muster/protocol/` and in the union of its channel there. With any change `PROTOCOL` in
`muster/protocol/version.py` rises: a test compares the messages with those of that number."""


def protocol_reference(generated: str) -> str:
    """Every channel and its messages. ``generated``: the line that says so."""
    records = sorted(_nested(), key=lambda cls: cls.__name__)
    return "\n".join(
        [
            "# Messages between processes",
            "",
            generated,
            "",
            _INTRODUCTION,
            "",
            *(line for channel in tables.CHANNELS for line in _channel(channel)),
            "## Values",
            "",
            *(line for cls in records for line in _class(cls.__name__, cls)),
            "## Files",
            "",
            *(line for where, cls in tables.FILES for line in _class(where, cls)),
        ]
    ).rstrip() + "\n"  # fmt: skip


def shape(cls: type) -> Mapping[str, str]:
    """Field -> its type and, where it may be left out, "?"."""
    hints = get_type_hints(cls, include_extras=True)
    return {
        field.name: _words(hints[field.name])
        + ("" if field.default is MISSING and field.default_factory is MISSING else "?")
        for field in fields(cls)
    }


def shapes() -> Mapping[str, Mapping[str, str]]:
    """All that is sent or written: class -> its shape."""
    sent = {cls for channel in tables.CHANNELS for cls in channel.messages}
    written = {cls for _, cls in tables.FILES}
    return {cls.__name__: shape(cls) for cls in sorted({*sent, *written, *_nested()}, key=lambda cls: cls.__name__)}


def _channel(channel: tables.AnyChannel) -> Iterator[str]:
    yield f"## {channel.name[0].upper()}{channel.name[1:]}"
    yield ""
    yield f"From: {channel.sender}. To: {channel.receiver}. Over: {channel.over}."
    yield ""
    for cls in channel.messages:
        yield from _class(f"`{kind_of(cls)}`", cls)


def _class(title: str, cls: type) -> Iterator[str]:
    yield f"### {title}"
    yield ""
    yield " ".join((cls.__doc__ or "").split())
    yield ""
    hints, kinds = get_type_hints(cls, include_extras=True), shape(cls)
    for name, kind in kinds.items():
        notes = [note for note in get_args(hints[name])[1:] if isinstance(note, str)] if _noted(hints[name]) else []
        optional = ", optional" if kind.endswith("?") else ""
        yield f"* `{name}` ({kind.rstrip('?')}{optional})" + "".join(f": {note}" for note in notes).replace("``", "`")
    if kinds:
        yield ""


def _noted(hint: object) -> bool:
    return get_origin(hint) is Annotated


def _words(hint: object) -> str:
    """A type, in words."""
    if hint in _WORDS:
        return _WORDS[hint]
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        bare = [note for note in inner[1:] if not isinstance(note, str)]
        return _words(Annotated[(inner[0], *bare)] if bare else inner[0])
    if origin is Literal:
        return " or ".join(f"`{word}`" for word in inner)
    if origin in (Union, types.UnionType):
        return " or ".join(_words(one) for one in inner)
    if origin is tuple:
        one = inner[-1] is Ellipsis
        return f"list of {_words(inner[0])}" if one else f"[{', '.join(_words(one) for one in inner)}]"
    if origin is not None and issubclass(origin, Mapping):
        return f"object: {_words(inner[0])} -> {_words(inner[1])}"
    assert isinstance(hint, type) and is_dataclass(hint), hint
    return hint.__name__


def _nested() -> set[type]:
    """The classes of fields, which are no message of their own."""
    sent = {cls for channel in tables.CHANNELS for cls in channel.messages}
    found: set[type] = set()
    waiting = [*sent, *(cls for _, cls in tables.FILES)]
    while waiting:
        for hint in get_type_hints(waiting.pop(), include_extras=True).values():
            new = {cls for cls in _classes(hint) if cls not in found}
            found |= new
            waiting += new
    return found - sent


def _classes(hint: object) -> Iterator[type]:
    if isinstance(hint, type) and is_dataclass(hint):
        yield hint
    elif hint != JsonObject:
        for inner in get_args(hint):
            yield from _classes(inner)
