"""A channel: who sends which messages to whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from muster.core.typed_json import Record

_Message = TypeVar("_Message", covariant=True)


@dataclass(frozen=True, kw_only=True)
class Channel(Generic[_Message]):
    """One direction between two kinds of process. ``_Message`` is the union of ``messages``."""

    name: str
    sender: str
    receiver: str
    over: str
    """What carries it."""
    messages: tuple[type[Record], ...]
