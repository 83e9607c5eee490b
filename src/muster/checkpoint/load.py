"""Find the newest checkpoint that is whole and ours, and restore it into any layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set

import torch
import torch.distributed as dist

from muster.checkpoint import exchange
from muster.checkpoint.shards import TROUBLE, ShardReader, gaps, mismatch, read_into, restore
from muster.checkpoint_format.manifest import Manifest, OnSkip, committed, damage, missing, stranger
from muster.checkpoint_format.reader import open_checkpoint
from muster.core.errors import BackendError, CheckpointError, MusterError
from muster.core.protocols import Store


def newest_valid(
    store: Store,
    directory_uri: str,
    on_skip: OnSkip | None = None,
    *,
    state: Mapping[str, torch.Tensor] | None = None,
    group: dist.ProcessGroup | None = None,
    verify: bool = True,
) -> Manifest | None:
    """The newest committed checkpoint whose every file matches its size and checksum; None when there is none.

    With ``state``, one of another model (names or shapes) does not count either. With ``group`` (gloo) the
    call is collective: ranks share the reading of files, and all return the same manifest. ``on_skip`` is
    called with (uri, reason), on rank 0, for each that does not count. ``verify=False`` leaves the checksums
    out.

    Raises (on every rank, as ``load_newest``):
        AccessError, BackendError: one could not be read, which says nothing about what is there.
    """
    rank, ranks = exchange.rank_of(group), 1 if group is None else group.size()
    skip = on_skip if on_skip is not None and rank == 0 else lambda uri, reason: None
    for manifest in _candidates(store, directory_uri, skip, group):

        def look(manifest: Manifest = manifest) -> str | None:
            problem = missing(manifest) or (_foreign(manifest, state) if state is not None else None)
            return damage(manifest, part=rank, parts=ranks) if problem is None and verify else problem

        problem = _agreed(manifest, look, group)
        if problem is None:
            return manifest
        skip(manifest.uri, problem)
    return None


def load_newest(
    store: Store,
    directory_uri: str,
    state: Mapping[str, torch.Tensor],
    on_skip: OnSkip | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    elsewhere: Set[str] = frozenset(),
    on_conversion: Callable[[str], None] = lambda text: None,
) -> tuple[Manifest, int] | None:
    """Restore the newest committed checkpoint of this model that is whole into ``state``, between any two layouts:
    (which, the bytes read here). None: there is none, and ``state`` is as it was.

    Each rank reads what it needs of it and nothing else, and every block is verified as it is read; it is held in
    addition to the state until all ranks have theirs, since damage that one of them finds makes all of them pass it
    over. Collective over ``group`` (gloo). ``on_skip`` as in ``newest_valid``, ``elsewhere`` as in ``shards.restore``.
    ``on_conversion`` gets a sentence about tensors that were stored in another type, on rank 0.
    """
    rank, ranks = exchange.rank_of(group), 1 if group is None else group.size()
    skip = on_skip if on_skip is not None and rank == 0 else lambda uri, reason: None
    for manifest in _candidates(store, directory_uri, skip, group):
        read: list[ShardReader] = []

        def look(manifest: Manifest = manifest, read: list[ShardReader] = read) -> str | None:
            problem = missing(manifest) or stranger(manifest, part=rank, parts=ranks)
            if problem is None:
                read.append(ShardReader(open_checkpoint(manifest), staged=True))
                read_into(read[0], state, elsewhere=elsewhere)
            return problem

        problem = _agreed(manifest, look, group)
        if problem is None:
            read[0].put()
            if read[0].converted and rank == 0:
                before, here = (str(kind).removeprefix("torch.") for kind in next(iter(read[0].converted.values())))
                on_conversion(f"{manifest.uri}: {len(read[0].converted)} tensors were {before} and are {here} here")
            return manifest, read[0].bytes_read
        skip(manifest.uri, problem)
    return None


def load_into(manifest: Manifest, state: Mapping[str, torch.Tensor]) -> int:
    """Restore the checkpoint into ``state`` in place, between any two layouts; returns the bytes read here.

    Each rank reads what it needs, without a collective. Call after ``newest_valid``.

    Raises:
        CheckpointError: it is of another model, or cannot be read.
    """
    return restore(open_checkpoint(manifest), state)


def _candidates(store: Store, directory_uri: str, skip: OnSkip, group: dist.ProcessGroup | None) -> list[Manifest]:
    """Rank 0's listing on every rank: two listings could differ, and then so would the ranks' answers."""
    result: list[str] = []
    error: MusterError | None = None
    if exchange.rank_of(group) == 0:
        try:
            result = [m.encode().decode() for m in committed(store, directory_uri, on_skip=skip)]
        except MusterError as failure:
            error = failure
    answer = exchange.gather(str(error) if error else result, group)[0]
    if error is not None:
        raise error
    if isinstance(answer, str):
        raise CheckpointError(f"rank 0 could not list {directory_uri}: {answer}")
    return [Manifest.decode(text.encode(), directory=directory_uri) for text in answer]


def _agreed(manifest: Manifest, look: Callable[[], str | None], group: dist.ProcessGroup | None) -> str | None:
    """What any rank's ``look`` found wrong with a checkpoint. Raises on every rank where one could not read it: an
    older one must not be taken for that."""
    trouble: MusterError | None = None
    try:
        problem = look()
    except CheckpointError as error:
        problem = str(error)
    except MusterError as error:
        problem, trouble = None, error
    except TROUBLE as error:
        problem, trouble = None, BackendError(f"{manifest.uri}: {str(error) or type(error).__name__}")
    found = exchange.gather([problem, str(trouble) if trouble is not None else None], group)
    wrong = next((problem for problem, _ in found if problem), None)
    if wrong is not None:
        return wrong
    if trouble is not None:
        raise trouble
    for rank, (_, text) in enumerate(found):
        if text is not None:
            raise BackendError(f"rank {rank} could not read {manifest.uri}: {text}")
    return None


def _foreign(manifest: Manifest, state: Mapping[str, torch.Tensor]) -> str | None:
    reader = ShardReader(open_checkpoint(manifest))
    return mismatch(reader, state) or gaps(reader, state)
