"""A rank hands its staged share to its host's replicator, which writes it.

The open file and the preamble's bytes follow ``Go``; ``Busy`` comes until the answer does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias, get_args

from muster.core.typed_json import Count, Record
from muster.core.types import Checksum
from muster.protocol.channel import Channel
from muster.protocol.replicator_peers import Go


@dataclass(frozen=True, kw_only=True)
class WriteShard(Record):
    """Write a share."""

    uri: str
    bytes: Annotated[Count, "of the file that is handed over"]
    preamble_bytes: Annotated[Count, "that come before them"]


@dataclass(frozen=True, kw_only=True)
class Busy(Record):
    """It is being written."""


@dataclass(frozen=True, kw_only=True)
class Written(Record):
    """It is written."""

    bytes: Count
    checksum: Checksum


@dataclass(frozen=True, kw_only=True)
class WriteFailed(Record):
    """It could not be written."""

    reason: str
    hint: str | None = None


FromWriter: TypeAlias = Go | Busy | Written | WriteFailed
TO_WRITER: Channel[WriteShard] = Channel(
    name="rank to replicator", sender="rank", receiver="replicator", over="Unix socket", messages=(WriteShard,)
)
FROM_WRITER: Channel[FromWriter] = Channel(
    name="replicator to rank",
    sender="replicator",
    receiver="rank",
    over="Unix socket",
    messages=get_args(FromWriter),
)
