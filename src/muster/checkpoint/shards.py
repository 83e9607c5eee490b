"""Restore from shards of any tier into any layout: a torch.distributed.checkpoint reader, without its files.

``ShardReader`` can be given to ``torch.distributed.checkpoint.load``; ``restore`` does that for one rank on
its own, without a collective.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from muster.checkpoint_format.reader import Shard
from muster.checkpoint_format.shards import ITEM_BYTES, Chunk, of_replica, owner_of
from muster.core.errors import BackendError, CheckpointError, MusterError

_PIECE_BYTES = 64 << 20
#: Of this process, or what it reads from: what is read is verified, so damage never ends in these.
TROUBLE = (RuntimeError, MemoryError, OSError)


class ShardReader(StorageReader):
    """Reads tensors by name and slice from a set of shards; of a box that several hold, the first shard's."""

    def __init__(self, opened: Sequence[Shard], *, staged: bool = False) -> None:
        """``staged``: what is read goes into its tensors when ``put`` is called."""
        self._staged: list[tuple[torch.Tensor, torch.Tensor]] | None = [] if staged else None
        self._where: dict[tuple[str, tuple[int, ...]], tuple[Shard, Chunk]] = {}
        self._tensors: dict[str, list[Chunk]] = defaultdict(list)
        self.bytes_read = 0
        self.converted: dict[str, tuple[torch.dtype, torch.dtype]] = {}
        """Tensors that are of another type here: name -> stored, here."""
        for shard in opened:
            for chunk in shard.tensors:
                key = (chunk.name, chunk.offsets)
                first = self._tensors[chunk.name][0] if self._tensors[chunk.name] else chunk
                if (chunk.dtype, chunk.global_shape) != (first.dtype, first.global_shape):
                    raise CheckpointError(f"{shard.name}: {chunk.name} differs in shape or type from another shard's")
                if key in self._where:
                    if self._where[key][1].shape != chunk.shape:
                        raise CheckpointError(f"{shard.name}: {chunk.name} is cut differently than in another shard")
                    continue
                self._where[key] = (shard, chunk)
                self._tensors[chunk.name].append(chunk)

    def lend(self, names: Iterable[str]) -> None:
        """Have a replica's own tensors that are not there read from those of the first replica that has them: a replica
        that joins finds what it can begin with."""
        for name in [name for name in names if name not in self._tensors and name.startswith("replica")]:
            others = (of_replica(name, number) for number in sorted({owner_of(other) or 0 for other in self._tensors}))
            lender = next((other for other in others if other in self._tensors), None)
            for chunk in self._tensors[lender] if lender is not None else ():
                self._where[name, chunk.offsets] = self._where[chunk.name, chunk.offsets]
                self._tensors[name].append(chunk)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> global shape of everything there."""
        return {name: chunks[0].global_shape for name, chunks in self._tensors.items()}

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        return Metadata(
            state_dict_metadata={
                name: TensorStorageMetadata(
                    properties=TensorProperties(dtype=getattr(torch, chunks[0].dtype)),
                    size=torch.Size(chunks[0].global_shape),
                    chunks=[
                        ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.shape))
                        for chunk in chunks
                    ],
                )
                for name, chunks in self._tensors.items()
            }
        )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in self._in_order_of_shards(plan):
            target = planner.resolve_tensor(item).detach()
            place = (item.storage_index.fqn, tuple(item.storage_index.offset or ()))
            self.copy_box(place, tuple(item.storage_offsets), tuple(item.lengths), target)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _in_order_of_shards(self, plan: LoadPlan) -> list[ReadItem]:
        """The plan's items, those of one shard one after another; ``expect`` announces to each shard what is read of
        it."""
        items: dict[int, list[ReadItem]] = defaultdict(list)
        ranges: dict[int, list[tuple[int, int]]] = defaultdict(list)
        shards: dict[int, Shard] = {}
        for item in plan.items:
            shard, chunk = self._where[item.storage_index.fqn, tuple(item.storage_index.offset or ())]
            shards[id(shard)] = shard
            items[id(shard)].append(item)
            pieces = _pieces(chunk, tuple(item.storage_offsets), tuple(item.lengths))
            ranges[id(shard)] += (_bytes_of(chunk, first, count) for first, count in pieces)
        for number, shard in shards.items():
            shard.expect(ranges[number])
        return [item for of_shard in items.values() for item in of_shard]

    def copy_box(
        self, place: tuple[str, tuple[int, ...]], start: Sequence[int], lengths: Sequence[int], target: torch.Tensor
    ) -> None:
        """Copy a box within the chunk at ``place`` (name and offsets) into ``target``, which is as large."""
        shard, chunk = self._where[place]
        for first, count in _pieces(chunk, start, lengths):
            piece = _rows(shard, chunk, first, count)
            self.bytes_read += piece.nbytes
            if piece.dtype != target.dtype:
                self.converted[place[0]] = piece.dtype, target.dtype
            for axis in range(1, piece.dim()):
                piece = torch.narrow(piece, axis, start[axis], lengths[axis])
            into = target if target.dim() == 0 else target.narrow(0, first - start[0], count)
            if self._staged is not None:
                self._staged.append((into, piece.clone()))  # of its own: the piece may be a row of much more
            else:
                into.copy_(piece)

    def put(self) -> None:
        """Copy what was staged into its tensors."""
        while self._staged:
            into, piece = self._staged.pop()
            into.copy_(piece)

    # What the base class asks for and shards have no use for.
    def reset(self, checkpoint_id: object = None) -> None:
        pass

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return False


def restore(opened: Sequence[Shard], state: Mapping[str, torch.Tensor], *, elsewhere: Set[str] = frozenset()) -> int:
    """Fill ``state`` (DTensors of any layout, plain tensors) in place; returns the bytes read. No collective.

    What is a rank's own, and was saved by a world that had no such rank, is left as it is. ``elsewhere``: tensors of
    the same model that only other ranks hold.

    Raises:
        CheckpointError: something in ``state`` is missing, of another shape, or could not be read. The
            state may be half filled when reading (not finding) failed: do not train on.
        AccessError, BackendError: this process or what it reads from failed (no memory, no connection), which says
            nothing about the shards.
    """
    reader = ShardReader(opened)
    read_into(reader, state, elsewhere=elsewhere)
    return reader.bytes_read


def read_into(reader: ShardReader, state: Mapping[str, torch.Tensor], *, elsewhere: Set[str] = frozenset()) -> None:
    """``restore`` by a reader, which may stage what it reads. Raises as ``restore``."""
    reader.lend(state)
    problem = mismatch(reader, state, elsewhere=elsewhere) or gaps(reader, state)
    if problem:
        raise CheckpointError(problem)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            there = reader.shapes()
            requested = {name: tensor for name, tensor in state.items() if name in there}
            load(requested, storage_reader=reader, no_dist=True)
    except MusterError:
        raise
    except CheckpointException as error:  # a BaseException: ``except Exception`` would let it through
        reasons = [failure[0] if isinstance(failure, tuple) else failure for failure in error.failures.values()]
        ours = [reason for reason in reasons if isinstance(reason, MusterError)]
        if ours:
            raise ours[0] from error
        if any(isinstance(reason, TROUBLE) for reason in reasons):
            raise BackendError(f"cannot restore: {reasons[:3]}") from error
        raise CheckpointError(f"cannot restore: {reasons[:3]}") from error
    except TROUBLE as error:
        raise BackendError(f"cannot restore: {error}") from error
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"cannot restore: {error}") from error


def mismatch(
    reader: ShardReader, state: Mapping[str, torch.Tensor], *, elsewhere: Set[str] = frozenset()
) -> str | None:
    """Why the shards are of another model than ``state``; None when they fit.

    Ranks' own tensors (``rank<N>.``) are another matter: of a rank that only one of the two worlds has, none need be
    in the other.
    """
    shapes = reader.shapes()
    saved, here = {owner_of(name) for name in shapes}, {None, *(owner_of(name) for name in state)}
    for name, tensor in state.items():
        if name not in shapes:
            if owner_of(name) is not None and owner_of(name) not in saved:
                continue
            return f"foreign: it has no tensor {name!r}"
        if shapes[name] != tuple(tensor.shape):
            return f"foreign: {name} has shape {list(shapes[name])} there and {list(tensor.shape)} here"
    strange = sorted(name for name in set(shapes) - set(state) - elsewhere if owner_of(name) in here)
    if strange:
        return f"foreign: it has {strange[0]!r}, which this run does not ({len(strange)} such tensors)"
    return None


def gaps(reader: ShardReader, state: Mapping[str, torch.Tensor]) -> str | None:
    """Which tensor's boxes do not make up the whole of it; None when all do."""
    for name in state:
        chunks = reader._tensors.get(name)
        if not chunks:  # ``mismatch`` tells
            continue
        held = sum(math.prod(chunk.shape) for chunk in chunks)
        if held != math.prod(chunks[0].global_shape):
            return f"incomplete: {name} has {held} of {math.prod(chunks[0].global_shape)} elements"
    return None


def read_tensor(reader: ShardReader, name: str) -> torch.Tensor:
    """One whole tensor on the CPU. Raises CheckpointError when it is absent or incomplete."""
    chunks = reader._tensors.get(name)
    if not chunks:
        raise CheckpointError(f"no tensor {name!r}")
    tensor = torch.empty(chunks[0].global_shape, dtype=getattr(torch, chunks[0].dtype))
    problem = gaps(reader, {name: tensor})
    if problem:
        raise CheckpointError(problem)
    for chunk in chunks:
        box = tuple(slice(at, at + length) for at, length in zip(chunk.offsets, chunk.shape, strict=True))
        reader.copy_box((name, chunk.offsets), (0,) * len(chunk.shape), chunk.shape, tensor[box])
    return tensor


def _pieces(chunk: Chunk, start: Sequence[int], lengths: Sequence[int]) -> list[tuple[int, int]]:
    """(first row, rows) of the chunk to read at a time, so that no read is larger than it must be."""
    if not chunk.shape:
        return [(0, 1)]
    row_bytes = max(1, chunk.bytes // max(1, chunk.shape[0]))
    step = max(1, _PIECE_BYTES // row_bytes)
    stop = start[0] + lengths[0]
    return [(first, min(step, stop - first)) for first in range(start[0], stop, step)]


def _rows(shard: Shard, chunk: Chunk, first: int, count: int) -> torch.Tensor:
    """Rows of a chunk as a tensor over the bytes that the source returned."""
    dtype = getattr(torch, chunk.dtype)
    start, stop = _bytes_of(chunk, first, count)
    if start == stop:
        return torch.empty((count, *chunk.shape[1:]), dtype=dtype)
    data = shard.read(start, stop)
    with warnings.catch_warnings():
        # Read-only memory is fine: it is copied from and dropped.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        flat = torch.frombuffer(data, dtype=dtype)
    return flat.view((count, *chunk.shape[1:])) if chunk.shape else flat.view(())


def _bytes_of(chunk: Chunk, first: int, count: int) -> tuple[int, int]:
    """Where these rows of a chunk lie among the shard's bytes."""
    row_bytes = math.prod(chunk.shape[1:]) * ITEM_BYTES[chunk.dtype]
    start = chunk.byte_offset + first * row_bytes
    return start, start + count * row_bytes
