"""Messages as bytes, and back. The one place that knows how a frame looks: ``["kind", {fields}]`` in JSON.

The kind is the class's name in small letters (``StartAttempt``: ``start_attempt``). What is read is checked once, here:
each channel takes its own kinds only, every field has its type, no field is missing or unknown.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar, cast

from muster.core import typed_json
from muster.core.typed_json import Record, Unreadable
from muster.protocol.channel import Channel

#: No frame is larger.
MAX_BYTES = 16 * 1024 * 1024
_FRAME = re.compile(rb'\s*\[\s*"([a-z_]{1,40})"\s*,(.*)\]\s*', re.DOTALL)
_Message = TypeVar("_Message")


def kind_of(cls: type[Record]) -> str:
    """The kind that names this class of messages on the wire."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()


def encode(message: Record) -> bytes:
    """A message's frame. Raises ValueError where it is over ``MAX_BYTES``, or a field holds what JSON cannot."""
    frame = b'["%s",%s]' % (kind_of(type(message)).encode(), typed_json.encode(message))
    if len(frame) > MAX_BYTES:
        raise ValueError(f"a message {kind_of(type(message))} of {len(frame)} bytes is over the limit of {MAX_BYTES}")
    return frame


def reader_of(channel: Channel[_Message]) -> Callable[[bytes], _Message]:
    """What reads the frames of one channel. It raises Unreadable for anything that is not one of its messages."""
    kinds = {kind_of(cls).encode(): cls for cls in channel.messages}

    def read(frame: bytes) -> _Message:
        if len(frame) > MAX_BYTES:
            raise Unreadable(f"a message of {len(frame)} bytes is over the limit of {MAX_BYTES}")
        match = _FRAME.fullmatch(frame)
        if match is None:
            raise Unreadable("not a message")
        kind, fields = match.groups()
        cls = kinds.get(kind)
        if cls is None:
            raise Unreadable(f"{channel.name} has no message {kind.decode()}")
        try:
            return cast(_Message, typed_json.decode(cls, fields))
        except Unreadable as error:
            raise Unreadable(f"{kind.decode()}: {error}") from None

    return read
