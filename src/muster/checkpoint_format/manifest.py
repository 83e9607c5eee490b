"""Checkpoints as values, without torch: manifests, commit markers, the fence, and what may be deleted.

::

    <dir>/fence.json                      the run and attempt that may commit (fence.previous.json: its copy)
    <dir>/commits/step-00000042.json      the marker: a manifest, written last, conditionally
    <dir>/commits/begun-<run>.a3          attempt 3 has begun: its name says so, even if the fence is lost (older
                                          attempts' are removed then)
    <dir>/step-00000042.a3/...            the data of step 42 by attempt 3

A checkpoint exists when its marker does and the fence (``checkpoint_format.fences``) admits it.
"""

from __future__ import annotations

import builtins
import math
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from muster.checkpoint_format import fences
from muster.checkpoint_format.checksum import checksum_of
from muster.checkpoint_format.decoding import damage_as, seal, unseal
from muster.checkpoint_format.fences import NonceOf, OnRebuilt, unbound
from muster.checkpoint_format.shard_file import ShardFile, StoredFile
from muster.core import typed_json
from muster.core.errors import CheckpointError, ConflictError, MusterError
from muster.core.protocols import Store
from muster.core.typed_json import JsonObject, Record
from muster.core.types import Checkpoint, Layout
from muster.storage import uris
from muster.storage.store import blobs

FORMAT = 2
_KIND = "commit marker"
_MARKER = re.compile(r"^step-(\d{8,})\.json$")
_PREFIX = re.compile(r"^step-(\d{8,})\.a(\d+)$")
_BEGUN = re.compile(r"^begun-(.+)\.a(\d+)$")
OnSkip = Callable[[str, str], None]
"""Called with (uri, reason) for what is there and not usable."""


HELDOUT_LOSS = "heldout_loss"
"""In ``extra``."""


@dataclass(frozen=True, kw_only=True)
class Manifest(Record):
    """One committed checkpoint: everything needed to decide whether it can be restored."""

    run_id: str
    attempt: int
    step: int
    layout: Layout
    prefix: str
    """Folder of the data, relative to ``directory``: a moved folder still restores."""
    files: tuple[StoredFile, ...]
    """The shards."""
    index: StoredFile
    bytes: int
    created_ns: int
    """Wall clock."""
    version: str
    """Of the code that wrote it."""
    extra: JsonObject = field(default_factory=dict)
    """Small JSON values: data and model fingerprints."""
    directory: str = ""
    """The folder it was read from; not written into the marker."""

    @property
    def heldout_loss(self) -> float | None:
        """Of the state that it holds, where that was evaluated."""
        found = self.extra.get(HELDOUT_LOSS)
        return (
            float(found)
            if isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found)
            else None
        )

    @property
    def uri(self) -> str:
        """The data's folder."""
        return uris.join(self.directory, self.prefix)

    @property
    def marker_uri(self) -> str:
        return marker_uri(self.directory, self.step)

    def encode(self) -> builtins.bytes:
        body = dict(typed_json.parse_object(typed_json.encode(self)))
        del body["directory"]
        return seal(body, format=FORMAT, kind=_KIND)

    @classmethod
    def decode(cls, data: builtins.bytes, *, directory: str) -> Manifest:
        """The inverse of ``encode``. Raises CheckpointError saying what is wrong."""
        body = unseal(data, reads=FORMAT, kind=_KIND)
        with damage_as(f"not a {_KIND}"):
            manifest = typed_json.convert(cls, {**body, "directory": directory})
            manifest._check()
        return manifest

    def checkpoint(self, *, tier: str) -> Checkpoint:
        """The noun that listings show."""
        return Checkpoint(step=self.step, tier=tier, uri=self.uri, bytes=self.bytes, layout=self.layout, committed=True)

    def _check(self) -> None:
        if min(self.step, self.attempt, self.bytes, *(item.bytes for item in (*self.files, self.index))) < 0:
            raise ValueError("a number is negative")
        if _PREFIX.match(self.prefix) is None:
            raise ValueError(f"unexpected prefix {self.prefix!r}")
        for item in (*self.files, self.index):
            # A name is joined to the folder and read: it must not lead out of it.
            if not item.name or "/" in item.name or item.name.startswith("."):
                raise ValueError(f"unexpected file name {item.name!r}")
        if not self.files:
            raise ValueError("it names no files")


def step_prefix(step: int, attempt: int) -> str:
    """The data folder's name: final, and different for each attempt, since a bucket cannot rename."""
    return f"step-{step:08d}.a{attempt}"


def marker_uri(directory: str, step: int) -> str:
    return uris.join(directory, "commits", f"step-{step:08d}.json")


def begun_uri(directory: str, run_id: str, attempt: int) -> str:
    """An object whose name alone counts: no damage to a file's bytes takes it back."""
    return uris.join(directory, "commits", f"begun-{run_id}.a{attempt}")


# ---------------------------------------------------------------- reading


def committed(store: Store, directory: str, *, on_skip: OnSkip | None = None) -> list[Manifest]:
    """Every committed checkpoint, newest step first. Looks at markers alone, not at the data.

    Malformed markers, and markers that an older attempt wrote after it was fenced off, are passed to
    ``on_skip`` and left out; a damaged fence is passed to it, too.
    """
    skip: OnSkip = on_skip or (lambda uri, reason: None)
    fence = fences.read(store, directory, on_damage=lambda reason: skip(fences.fence_uri(directory), reason))
    result = []
    for uri in store.list(uris.join(directory, "commits")):
        if _MARKER.match(uris.name(uri)) is None:
            continue
        try:
            manifest = Manifest.decode(store.get(uri).data, directory=directory)
            if uris.name(uri) != uris.name(manifest.marker_uri):
                raise CheckpointError(f"the marker is of step {manifest.step}")
            if fence is not None and not fence.admits(uris.name(uri), manifest.run_id, manifest.attempt):
                raise CheckpointError(f"committed by attempt {manifest.attempt} after attempt {fence.attempt} began")
        except FileNotFoundError:
            continue  # pruned between the listing and the reading
        except CheckpointError as error:
            skip(uri, str(error))
            continue
        result.append(manifest)
    return sorted(result, key=lambda manifest: (manifest.step, manifest.attempt), reverse=True)


# ---------------------------------------------------------------- writing


def claim(
    store: Store,
    directory: str,
    *,
    run_id: str,
    attempt: int,
    on_rebuilt: OnRebuilt = lambda reason: None,
    nonce_of: NonceOf = unbound,
) -> None:
    """Take the folder's fence: older attempts commit nothing from now on. Repeating it is harmless, and repairs a
    damaged fence: ``on_rebuilt`` is called.

    Raises:
        ConflictError: a newer attempt of this run has taken it, or another copy of the run.
    """

    def heirs(lost: bool) -> dict[str, str]:
        found = committed(store, directory)
        if lost:  # the order of attempts, and what is another run's here, can only be seen from names and markers
            committers = (m.attempt for m in found if m.run_id == run_id)
            newest = max(*_begun(store, directory, run_id), *committers, 0, attempt)
            if newest > attempt:
                raise ConflictError(f"{directory}: attempt {newest} has begun there, after attempt {attempt}")
            found = [m for m in found if m.run_id == run_id] or found
        return {uris.name(m.marker_uri): f"{m.run_id}/{m.attempt}" for m in found}

    if (held := fences.read(store, directory)) is not None:
        held.refuse_copy(directory, run_id, nonce_of)  # before its number counts here
    first = False
    with suppress(ConflictError):  # before the door is closed: a superseded attempt can always see it
        store.put_if_absent(begun_uri(directory, run_id, attempt), f"{run_id}/{attempt}\n".encode())
        first = True
    fences.claim(
        store, directory, run_id=run_id, attempt=attempt, heirs=heirs, on_rebuilt=on_rebuilt, nonce_of=nonce_of
    )
    if first:
        with suppress(MusterError, OSError):  # of these names the newest alone counts; the next attempt tries again
            for older in _begun(store, directory, run_id):
                if older < attempt:
                    store.delete(begun_uri(directory, run_id, older))


def _begun(store: Store, directory: str, run_id: str) -> list[int]:
    """The attempts of this run that have claimed the folder, independent of the fence."""
    matches = (_BEGUN.match(uris.name(uri)) for uri in store.list(uris.join(directory, "commits")))
    return [int(match.group(2)) for match in matches if match is not None and match.group(1) == run_id]


def commit(
    store: Store,
    manifest: Manifest,
    *,
    on_rebuilt: OnRebuilt = lambda reason: None,
    nonce_of: NonceOf = unbound,
) -> None:
    """Make the checkpoint exist: write its marker, if the fence is still ours.

    A marker of the same step by an older attempt (whose data was not usable, or the run would have started
    after it) is replaced.

    Raises:
        ConflictError: a newer attempt, another run, or another copy of this one has taken over.
    """
    directory, uri = manifest.directory, manifest.marker_uri
    run_id, attempt = manifest.run_id, manifest.attempt

    def hold() -> None:
        """The fence is still ours; one that is damaged is written again."""
        try:
            fences.check(store, directory, run_id=run_id, attempt=attempt, nonce_of=nonce_of)
        except CheckpointError:
            claim(store, directory, run_id=run_id, attempt=attempt, on_rebuilt=on_rebuilt, nonce_of=nonce_of)

    hold()
    data = manifest.encode()
    while True:
        with suppress(ConflictError):
            store.put_if_absent(uri, data)
            return
        try:
            there = store.get(uri)
        except FileNotFoundError:
            continue
        if there.data == data:
            return
        with suppress(CheckpointError):
            other = Manifest.decode(there.data, directory=directory)
            if other.run_id == run_id and other.attempt > attempt:
                raise ConflictError(f"{uri}: attempt {other.attempt} has committed this step already")
        try:
            store.put_if(uri, data, there.generation)
            return
        except ConflictError:
            hold()


def best(found: Iterable[Manifest]) -> list[Manifest]:
    """Those whose state was evaluated, the lowest held-out loss first; of equal ones the newer step."""
    losses = [(loss, -each.step, each) for each in found if (loss := each.heldout_loss) is not None]
    return [each for _, _, each in sorted(losses, key=lambda row: row[:2])]


def prune(store: Store, directory: str, *, keep_last: int, run_id: str, attempt: int, keep_best: int = 0) -> list[str]:
    """Remove all but the ``keep_last`` newest and the ``keep_best`` best checkpoints; returns the folders removed.

    Newest means last committed: this attempt's own before older attempts', at any step. Marker
    first, data after, so that a kill in between leaves an orphan and never a marker without data. Should
    the files of all those to be kept be missing or short, older ones are kept until one is whole.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last must be at least 1, got {keep_last}")

    def age(manifest: Manifest) -> tuple[bool, int, int]:
        return (manifest.run_id == run_id, manifest.attempt, manifest.step)

    removed, whole = [], False
    there = committed(store, directory)
    spared = [each.uri for each in best(there) if keep_best and missing(each) is None][:keep_best]
    for number, manifest in enumerate(sorted(there, key=age, reverse=True)):
        if number < keep_last or not whole:
            whole = whole or missing(manifest) is None
            continue
        if manifest.uri in spared:
            continue
        fences.check(store, directory, run_id=run_id, attempt=attempt)
        store.delete(manifest.marker_uri)
        blobs.remove_tree(manifest.uri)
        removed.append(manifest.uri)
    return removed


def remove_orphans(store: Store, directory: str, *, run_id: str, attempt: int) -> list[str]:
    """Remove data that no marker names and that an older attempt wrote; returns the folders removed.

    Call after ``claim``: writers of older attempts can no longer commit. The data of a step whose marker cannot be read
    is spared: which folder it names is not known.
    """
    fences.check(store, directory, run_id=run_id, attempt=attempt)
    named, unreadable = set(), set()
    for uri in store.list(uris.join(directory, "commits")):
        try:
            named.add(Manifest.decode(store.get(uri).data, directory=directory).prefix)
        except FileNotFoundError:
            continue
        except CheckpointError:
            marker = _MARKER.match(uris.name(uri))
            if marker is not None:
                unreadable.add(int(marker.group(1)))
    removed = []
    for prefix in blobs.folders(directory):
        match = _PREFIX.match(prefix)
        if match is None or prefix in named or int(match.group(1)) in unreadable:
            continue
        if int(match.group(2)) < attempt:
            blobs.remove_tree(uris.join(directory, prefix))
            removed.append(uris.join(directory, prefix))
    return removed


# ---------------------------------------------------------------- checking the data


def missing(manifest: Manifest) -> str | None:
    """Why the files cannot be all there, by their sizes alone; None when they can."""
    for item in (*manifest.files, manifest.index):
        uri = uris.join(manifest.uri, item.name)
        try:
            result = blobs.size(uri)
        except FileNotFoundError:
            return f"{item.name} is missing"
        if result != item.bytes:
            return f"{item.name} has {result} bytes, not {item.bytes}: truncated"
    return None


def read_index(manifest: Manifest) -> bytes:
    """The index's bytes, verified. Raises CheckpointError."""
    index, uri = manifest.index, uris.join(manifest.uri, manifest.index.name)
    try:
        data = blobs.read_range(uri, 0, index.bytes)
    except FileNotFoundError as error:
        raise CheckpointError(f"{index.name} is missing") from error
    if checksum_of(data) != index.checksum:
        raise CheckpointError(f"{index.name} does not match its checksum: damaged")
    return data


def damage(manifest: Manifest, *, part: int = 0, parts: int = 1) -> str | None:
    """Read every ``parts``-th shard from ``part`` on, compare its checksum and whose it is: what is wrong, or None.

    Part 0 has the index too.
    """
    try:
        if part == 0:
            read_index(manifest)
        for item in manifest.files[part::parts]:
            file = ShardFile(manifest.uri, item)
            file.verify()
            problem = _strange(manifest, item.name, file)
            if problem is not None:
                return problem
    except CheckpointError as error:
        return str(error)
    return None


def stranger(manifest: Manifest, *, part: int = 0, parts: int = 1) -> str | None:
    """``damage`` without the tensors' bytes, which a reader verifies as it reads them: whose each shard is."""
    try:
        strange = (_strange(manifest, item.name, ShardFile(manifest.uri, item)) for item in manifest.files[part::parts])
        return next((problem for problem in strange if problem is not None), None)
    except CheckpointError as error:
        return str(error)


def _strange(manifest: Manifest, name: str, file: ShardFile) -> str | None:
    header = file.header()
    written = (header.run_id, header.step, header.layout, step_prefix(header.step, header.attempt))
    if written == (manifest.run_id, manifest.step, manifest.layout, manifest.prefix):
        return None
    return f"{name} is of step {header.step} of attempt {header.attempt} of run {header.run_id}"
