"""A rank's packed micro-batches as arrays over all chips."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from muster.core.errors import UsageError
from muster.train.data_feed.batch import IGNORED, Batch
from muster.train_jax.layout import ROWS, TP

KEYS = ("ids", "labels", "positions", "documents")


def check_rows(rows: int, mesh: Mesh) -> None:
    """Raises UsageError where the rows of a host's micro-batch cannot be shared out to its chips."""
    groups = groups_of_host(mesh)
    if rows % groups:
        tp = mesh.shape[TP]
        of_tp = f"{groups} groups of {tp} chips" if tp > 1 else f"{groups} chips"
        raise UsageError(
            f"training.micro_batch_size {rows} cannot be shared out to the {of_tp} of a host",
            hint=f"give a multiple of {groups}",
        )


def groups_of_host(mesh: Mesh) -> int:
    """Into how many parts this host's rows are split: its chips, or groups of those that share a row."""
    return int(mesh.local_mesh.size // mesh.shape[TP])


def step_arrays(batches: Sequence[Batch], mesh: Mesh) -> dict[str, Array]:
    """int32[rounds, B, S] each, B over all hosts; every process hands over its own rows. See ``model.row_losses``."""
    local = {key: np.stack([part[key] for part in map(_arrays, batches)]) for key in KEYS}
    return {key: _over_all(values, mesh, PartitionSpec(None, ROWS)) for key, values in local.items()}


def batch_arrays(batch: Batch, rows: int, mesh: Mesh) -> dict[str, Array]:
    """int32[B, S] each, of one batch of at most ``rows`` rows, filled up with rows that have no target."""
    result = {}
    for key, values in _arrays(batch).items():
        missing = rows - values.shape[0]
        filled = np.pad(values, ((0, missing), (0, 0)), constant_values=IGNORED if key == "labels" else 0)
        result[key] = _over_all(filled, mesh, PartitionSpec(ROWS))
    return result


def own_rows(array: Array, axis: int = -1) -> np.ndarray:
    """This process's part of an array whose rows are its ``axis``, in order."""
    parts = {shard.index[axis].start or 0: shard.data for shard in array.addressable_shards}  # a group's chips: copies
    return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)], axis=axis)


def rows_over_all(values: np.ndarray, mesh: Mesh) -> Array:
    """[B, ...] of every process's own rows."""
    return _over_all(values, mesh, PartitionSpec(ROWS))


def _arrays(batch: Batch) -> dict[str, np.ndarray]:
    rows, length = batch.input_ids.shape
    bounds = batch.cu_seqlens.numpy()
    documents = np.repeat(np.arange(len(bounds) - 1, dtype=np.int32), np.diff(bounds)).reshape(rows, length)
    return {
        "ids": batch.input_ids.numpy().astype(np.int32),
        "labels": batch.labels.numpy().astype(np.int32),
        "positions": batch.position_ids.numpy().astype(np.int32),
        "documents": documents,
    }


def _over_all(values: np.ndarray, mesh: Mesh, spec: PartitionSpec) -> Array:
    result: Array = jax.make_array_from_process_local_data(NamedSharding(mesh, spec), values)
    return result
