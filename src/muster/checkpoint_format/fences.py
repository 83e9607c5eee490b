"""One object per folder that says which attempt may commit there: older attempts change nothing.

A check before a write is not enough: an old attempt can pass it, stall, and write after a new one has taken
over. So the new attempt closes the door first (its name, conditionally), then lists the markers that had
been committed, then seals that list into the fence. A marker of another attempt that is not on the list
came too late and does not count, however it got there.

A sealed fence is kept twice, the copy written first. Readers that find the fence damaged or gone read the copy; its
holder rewrites it; if the copy is damaged too, a claim rebuilds it from the markers that are whole, unless a newer
attempt has begun (``heirs`` knows). The damaged bytes are kept as ``fence.damaged.json``.

Two copies of a run's folder count their attempts alike. So a fence also holds a nonce of its attempt, which the run's
home keeps: a copy that finds a nonce unknown to its own home came second, and is refused.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from muster.checkpoint_format.decoding import damage_as, seal, unseal
from muster.core import typed_json
from muster.core.errors import CheckpointError, ConflictError, MusterError
from muster.core.protocols import Store
from muster.core.typed_json import Record, Unreadable
from muster.storage import uris
from muster.storage.home import open_home

FORMAT = 3
#: Without nonces.
_FORMAT_BEFORE = 2
_HINT = "remove fence.json and fence.previous.json to start over"
OnRebuilt = Callable[[str], None]
"""Called with what was wrong with a fence that was written again."""
NonceOf = Callable[[int], str]
"""The nonce of an attempt of this run, in this home; empty: not known."""


def unbound(attempt: int) -> str:
    """For a writer without a home."""
    return ""


def nonces_of(run_dir: str | Path) -> NonceOf:
    """The nonces of the run in ``run_dir``: made where an attempt first needs one, the same for all its processes. One
    that is damaged, or in a home that does not answer, binds nothing and refuses no writer: snapshots are saved when
    the home is lost, too."""
    known: dict[int, str] = {}

    def nonce_of(attempt: int) -> str:
        with suppress(MusterError, OSError):
            if attempt not in known:
                home = open_home(Path(run_dir))
                uri = home.uri_of("nonces", str(attempt))
                with suppress(ConflictError):
                    home.store.put_if_absent(uri, seal({"nonce": secrets.token_hex(16)}, format=1, kind="nonce"))
                known[attempt] = str(unseal(home.store.get(uri).data, reads=1, kind="nonce")["nonce"])
        return known.get(attempt, "")

    return nonce_of


@dataclass(frozen=True, kw_only=True)
class Fence(Record):
    """Who may commit in a folder."""

    run_id: str
    attempt: int
    inherited: Mapping[str, str] | None = None
    """Marker's file name -> ``run_id/attempt`` of its writer, for what counts of others; None: not yet sealed."""
    before: Fence | None = None
    """While unsealed: the sealed fence that this one replaces."""
    nonce: str = ""
    """Of the attempt, in the home of its copy of the run; empty: not known."""

    def encode(self) -> bytes:
        return seal(typed_json.parse_object(typed_json.encode(self)), format=FORMAT, kind="fence")

    @classmethod
    def decode(cls, data: bytes) -> Fence:
        """The inverse of ``encode``. Raises CheckpointError."""
        try:
            body = unseal(data, reads=_FORMAT_BEFORE if _has_format(data, _FORMAT_BEFORE) else FORMAT, kind="fence")
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

    def refuse_copy(self, directory: str, run_id: str, nonce_of: NonceOf) -> None:
        """Raise ConflictError where another copy of this run made it."""
        if self.run_id == run_id and self.nonce and (nonce_of(self.attempt) or self.nonce) != self.nonce:
            raise ConflictError(
                f"{directory} is held by attempt {self.attempt} of another copy of run {run_id}",
                hint="give this copy a checkpoint.dir of its own; where the other copy is lost, remove fence.json and "
                "fence.previous.json there",
            )


def fence_uri(directory: str) -> str:
    return uris.join(directory, "fence.json")


def copy_uri(directory: str) -> str:
    return uris.join(directory, "fence.previous.json")


def read(store: Store, directory: str, *, on_damage: Callable[[str], None] | None = None) -> Fence | None:
    """The fence now; None where the folder is unclaimed, or nothing whole is left of its fence: every marker counts.

    Raises CheckpointError where it is of another format.
    """
    now = _look(store, directory)
    if now.damage is not None and on_damage is not None:
        rest = "its copy is read" if now.fence is not None else "every marker that is whole counts"
        on_damage(f"{now.damage}: {rest}")
    return now.fence


def check(store: Store, directory: str, *, run_id: str, attempt: int, nonce_of: NonceOf = unbound) -> None:
    """Raise ConflictError unless this run and attempt hold the sealed fence; CheckpointError where that is damaged or
    gone, which a ``claim`` repairs."""
    now = _look(store, directory)
    if now.damage is not None:
        raise CheckpointError(f"{fence_uri(directory)}: {now.damage}", hint=_HINT)
    held = now.fence
    if held is None:
        raise CheckpointError(f"{directory} is held by no run, not by run {run_id} attempt {attempt}")
    held.refuse_copy(directory, run_id, nonce_of)
    if (held.run_id, held.attempt) != (run_id, attempt) or held.inherited is None:
        holder = f"run {held.run_id} attempt {held.attempt}"
        raise ConflictError(f"{directory} is held by {holder}, not by run {run_id} attempt {attempt}")


def claim(
    store: Store,
    directory: str,
    *,
    run_id: str,
    attempt: int,
    heirs: Callable[[bool], Mapping[str, str]],
    on_rebuilt: OnRebuilt = lambda reason: None,
    nonce_of: NonceOf = unbound,
) -> None:
    """Fence off every older attempt: from now on only this one commits here. Repeating it is harmless.

    ``heirs`` lists the markers that count at that moment (see ``Fence.inherited``); its argument is whether nothing is
    left of the fence, and it raises ConflictError where a newer attempt has begun or committed here. Another run's
    fence is taken over (a new run that continues in an old one's folder).

    Raises:
        ConflictError: a newer attempt of this run, or another copy of it, has claimed the folder.
    """
    uri, lost = fence_uri(directory), False
    while True:
        now = _look(store, directory)
        held = now.fence
        if held is not None:
            held.refuse_copy(directory, run_id, nonce_of)
        if held is not None and held.run_id == run_id and held.attempt > attempt:
            raise ConflictError(f"{directory}: attempt {held.attempt} has taken over from attempt {attempt}")
        problem = now.damage
        if held is None:
            lost = True
            inherited = heirs(lost)  # before the door is closed: it raises where that is not ours to close
            problem = problem or ("it is gone" if inherited else None)
        requested = Fence(run_id=run_id, attempt=attempt, nonce=nonce_of(attempt))
        if held is not None and (held.run_id, held.attempt) == (run_id, attempt):
            if held.inherited is None:
                requested = replace(requested, inherited=heirs(lost))
            elif problem is not None:
                requested = held
            else:
                return
        elif held is not None:
            sealed = held if held.inherited is not None else held.before
            requested = replace(requested, before=sealed and replace(sealed, before=None))
        try:
            if now.data is not None:
                store.put(uris.join(directory, "fence.damaged.json"), now.data)
            if requested.inherited is not None:
                _keep_copy(store, directory, requested)
            if now.generation is None:
                store.put_if_absent(uri, requested.encode())
            else:
                store.put_if(uri, requested.encode(), now.generation)
        except ConflictError:
            continue  # another process changed it: read again
        if problem is not None:
            source = "its copy" if held is not None else "the markers that are whole"
            on_rebuilt(f"{uri}: {problem}: written again from {source}")


@dataclass(frozen=True, kw_only=True)
class _Found:
    """What ``fence.json`` holds, or the copy where that is damaged or gone."""

    fence: Fence | None
    generation: str | None = None
    """Of ``fence.json``; None: it is not there."""
    data: bytes | None = None
    """What is damaged."""
    damage: str | None = None
    """Why ``fence.json`` is not what it was; None: nothing is wrong with it."""


def _look(store: Store, directory: str) -> _Found:
    try:
        stored = store.get(fence_uri(directory))
    except FileNotFoundError:
        copy = _copy(store, directory)
        return _Found(fence=copy, damage=None if copy is None else "it is gone")
    try:
        return _Found(fence=Fence.decode(stored.data), generation=stored.generation)
    except CheckpointError as error:
        copy = _copy(store, directory)
        if copy is None and not _has_format(stored.data, FORMAT, _FORMAT_BEFORE, None):
            raise
        return _Found(fence=copy, generation=stored.generation, data=stored.data, damage=str(error))


def _copy(store: Store, directory: str) -> Fence | None:
    try:
        return Fence.decode(store.get(copy_uri(directory)).data)
    except (FileNotFoundError, CheckpointError):
        return None


def _has_format(data: bytes, *formats: int | None) -> bool:
    """Whether it states one of these; None: it states none."""
    try:
        result = typed_json.parse_object(data).get("format")
    except Unreadable:
        return None in formats
    return (result if isinstance(result, int) and not isinstance(result, bool) else None) in formats


def _keep_copy(store: Store, directory: str, fence: Fence) -> None:
    """Write the copy of ``fence``, unless it is of a newer attempt by now."""
    uri = copy_uri(directory)
    while True:
        generation, held = None, None
        with suppress(FileNotFoundError, CheckpointError):
            stored = store.get(uri)
            generation = stored.generation
            held = Fence.decode(stored.data)
        if held == fence or (held is not None and held.run_id == fence.run_id and held.attempt > fence.attempt):
            return
        with suppress(ConflictError):
            if generation is None:
                store.put_if_absent(uri, fence.encode())
            else:
                store.put_if(uri, fence.encode(), generation)
            return
