"""What every reader of a format does: a damage becomes a CheckpointError, and another format is refused by number."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterator

from muster.checkpoint_format.checksum import checksum_of
from muster.core.errors import CheckpointError
from muster.core.typed_json import Json, JsonObject, Unreadable, parse_object

_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError, struct.error)


@contextlib.contextmanager
def damage_as(what: str) -> Iterator[None]:
    """Raise what damaged bytes make Python raise as a CheckpointError: "``what``: why"."""
    try:
        yield
    except _DAMAGE as error:
        raise CheckpointError(f"{what}: {error}") from error


def check_format(found: object, *, reads: int, what: str) -> None:
    """Raise CheckpointError unless ``found`` is the number of the format that this version reads."""
    if not isinstance(found, int) or isinstance(found, bool):
        raise CheckpointError(f"{what} of an unknown format")
    if found != reads:
        raise CheckpointError(f"{what} of format {found}, this version reads {reads}")


def seal(body: JsonObject, *, format: int, kind: str) -> bytes:
    """``body`` as the text of a small file that holds its format and its own checksum."""
    checksum = checksum_of(kind.encode(), _canonical(body))
    sealed = {"format": format, "checksum": {"algorithm": checksum.algorithm, "value": checksum.value}, "body": body}
    return (json.dumps(sealed, sort_keys=True, indent=1, allow_nan=False) + "\n").encode()


def unseal(data: bytes, *, reads: int, kind: str) -> JsonObject:
    """What ``seal`` was given. Raises CheckpointError where it is damaged, of another format or of another kind."""
    try:
        sealed = parse_object(data)
    except Unreadable as error:
        raise CheckpointError(f"not a {kind}: {error}") from error
    check_format(sealed.get("format"), reads=reads, what=f"a {kind}")
    body, found = sealed.get("body"), sealed.get("checksum")
    if not isinstance(body, dict) or not isinstance(found, dict) or sealed.keys() != {"format", "checksum", "body"}:
        raise CheckpointError(f"not a {kind}: its body or its checksum is missing")
    with damage_as(f"not a {kind}"):
        checksum = checksum_of(kind.encode(), _canonical(body))
    if found != {"algorithm": checksum.algorithm, "value": checksum.value}:
        raise CheckpointError(f"the {kind} does not match its checksum: damaged")
    return body


def _canonical(body: Json) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
