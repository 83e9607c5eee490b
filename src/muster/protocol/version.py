"""The version of the messages. Processes of two versions do not speak to each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import muster
from muster.core.errors import UsageError
from muster.core.typed_json import Count, Json, Record

#: Raised with each change of a message (``tests/unit/protocol/schema.json`` tells when).
PROTOCOL = 7


@dataclass(frozen=True, kw_only=True)
class Version(Record):
    """What a process speaks."""

    protocol: Annotated[Count, "two processes speak to each other where it is the same"]
    muster: Annotated[str, "its version of Muster, for people"]

    def __str__(self) -> str:
        return f"protocol {self.protocol} (muster {self.muster})"


MINE = Version(protocol=PROTOCOL, muster=muster.__version__)


class OtherVersion(UsageError):
    """The other end is of another version; the text names both."""

    def __init__(self, message: str) -> None:
        super().__init__(message, hint="muster down RUN ends what runs; muster recover RUN goes on with this version")


def incompatible(mine: Version, theirs: Version | None, *, me: str, them: str) -> str | None:
    """One line that names both, where two processes cannot speak to each other; None: they can.

    ``theirs`` None: they state no version. ``me``, ``them``: who they are ("host-1", "the supervisor").
    """
    if theirs is not None and mine.protocol == theirs.protocol:
        return None
    return f"{me} speaks {mine}, {them} speaks {theirs or 'a protocol without a version (an older muster)'}"


def stated(fields: Json) -> Version | None:
    """The version in the fields of a hello or a lease of any version: this field never changes."""
    version = fields.get("version") if isinstance(fields, Mapping) else None
    if not isinstance(version, Mapping):
        return None
    protocol, release = version.get("protocol"), version.get("muster")
    if not isinstance(protocol, int) or isinstance(protocol, bool) or not isinstance(release, str):
        return None
    return Version(protocol=protocol, muster=release[:40])
