"""One object per folder that says which attempt may commit there: older attempts change nothing.

A check before a write is not enough: an old attempt can pass it, stall, and write after a new one has taken
over. So the new attempt closes the door first (its name, conditionally), then lists the markers that had
been committed, then seals that list into the fence. A marker of another attempt that is not on the list
came too late and does not count, however it got there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from muster.checkpoint_format.decoding import damage_as, seal, unseal
from muster.core import typed_json
from muster.core.errors import CheckpointError, ConflictError
from muster.core.protocols import Store
from muster.core.typed_json import Record
from muster.storage import uris

FORMAT = 2
_HINT = "remove fence.json to start over"


@dataclass(frozen=True, kw_only=True)
class Fence(Record):
    """Who may commit in a folder."""

    run_id: str
    attempt: int
    inherited: Mapping[str, str] | None = None
    """Marker's file name -> ``run_id/attempt`` of its writer, for what counts of others; None: not yet sealed."""
    before: Fence | None = None
    """While unsealed: the sealed fence that this one replaces."""

    def encode(self) -> bytes:
        return seal(typed_json.parse_object(typed_json.encode(self)), format=FORMAT, kind="fence")

    @classmethod
    def decode(cls, data: bytes) -> Fence:
        """The inverse of ``encode``. Raises CheckpointError."""
        try:
            body = unseal(data, reads=FORMAT, kind="fence")
            with damage_as("not a fence"):
                return typed_json.convert(cls, body)
        except CheckpointError as error:
            raise CheckpointError(str(error), hint=_HINT) from error

    def admits(self, marker: str, run_id: str, attempt: int) -> bool:
        """Whether a marker (its file name) that names this writer counts."""
        if (run_id, attempt) == (self.run_id, self.attempt):
            return True
        if self.inherited is None:
            return self.before is None or self.before.admits(marker, run_id, attempt)
        return self.inherited.get(marker) == f"{run_id}/{attempt}"


def fence_uri(directory: str) -> str:
    return uris.join(directory, "fence.json")


def read(store: Store, directory: str) -> Fence | None:
    """The fence now; None where the folder is unclaimed. Raises CheckpointError when malformed."""
    try:
        return Fence.decode(store.get(fence_uri(directory)).data)
    except FileNotFoundError:
        return None


def check(store: Store, directory: str, *, run_id: str, attempt: int) -> None:
    """Raise ConflictError unless this run and attempt hold the sealed fence."""
    held = read(store, directory)
    if held is None or (held.run_id, held.attempt) != (run_id, attempt) or held.inherited is None:
        holder = f"run {held.run_id} attempt {held.attempt}" if held else "no run"
        raise ConflictError(f"{directory} is held by {holder}, not by run {run_id} attempt {attempt}")


def claim(store: Store, directory: str, *, run_id: str, attempt: int, heirs: Callable[[], Mapping[str, str]]) -> None:
    """Fence off every older attempt: from now on only this one commits here. Repeating it is harmless.

    ``heirs`` lists the markers that count at that moment (see ``Fence.inherited``). Another run's fence is
    taken over (a new run that continues in an old one's folder).

    Raises:
        ConflictError: a newer attempt of this run has claimed the folder.
    """
    uri = fence_uri(directory)
    while True:
        generation, held = None, None
        with suppress(FileNotFoundError):
            stored = store.get(uri)
            generation, held = stored.generation, Fence.decode(stored.data)
        if held is not None and held.run_id == run_id and held.attempt > attempt:
            raise ConflictError(f"{directory}: attempt {held.attempt} has taken over from attempt {attempt}")
        if held is not None and (held.run_id, held.attempt) == (run_id, attempt):
            if held.inherited is not None:
                return
            requested = Fence(run_id=run_id, attempt=attempt, inherited=heirs())
        else:
            sealed = held if held is None or held.inherited is not None else held.before
            requested = Fence(run_id=run_id, attempt=attempt, before=sealed and replace(sealed, before=None))
        try:
            if generation is None:
                store.put_if_absent(uri, requested.encode())
            else:
                store.put_if(uri, requested.encode(), generation)
        except ConflictError:
            continue  # another process changed it: read again
