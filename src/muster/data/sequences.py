"""Packed sequences on disk: plain ``.npy`` arrays, memory-mapped, never pickled.

A store's folder holds ``input_ids.npy`` and ``labels.npy`` (int32 [N, S], labels already shifted: the target of
position t, -100 where nothing is learned) and the document lengths of all sequences end to end with their offsets.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from muster.core.errors import MusterError
from muster.data.arrays import Bytes, Int32s, Int64s

UNSUPERVISED = -100
#: Positions gathered at once while writing: 16 MiB an array.
_BLOCK_POSITIONS = 4_000_000


@dataclass(frozen=True)
class Sequence:
    """One packed sequence of S positions."""

    input_ids: Int32s
    """[S]"""
    labels: Int32s
    """[S], shifted: the target of each position; -100: none."""
    position_ids: Int32s
    """[S], from 0 in each document."""
    document_lengths: Int32s
    """[n], summing to S; the padding tail is a document of its own."""
    tokens: int
    """Positions that are not padding."""
    supervised_tokens: int


class SequenceStore:
    """Read access to a folder of packed sequences. Opening maps the files; nothing is read until asked for."""

    def __init__(self, folder: Path) -> None:
        """Raises MusterError where the folder is not a whole store."""
        self.folder = Path(folder)
        try:
            self.counts = json.loads((self.folder / "counts.json").read_text())
            self._inputs = _map(self.folder / "input_ids.npy")
            self._labels = _map(self.folder / "labels.npy")
            self._lengths = _map(self.folder / "document_lengths.npy")
            self._offsets = _map(self.folder / "document_offsets.npy")
            self._tokens = _map(self.folder / "tokens.npy")
        except (OSError, ValueError) as error:
            raise MusterError(
                f"prepared data in {self.folder} is damaged: {error}", hint="remove that folder and start again"
            ) from error

    def __len__(self) -> int:
        return int(self._inputs.shape[0])

    def __iter__(self) -> Iterator[Sequence]:
        return (self[index] for index in range(len(self)))

    @property
    def sequence_length(self) -> int:
        return int(self._inputs.shape[1])

    @property
    def tokens(self) -> int:
        """Positions of the whole store that are not padding."""
        return int(self.counts["tokens"])

    @property
    def supervised_tokens(self) -> int:
        return int(self.counts["supervised_tokens"])

    def __getitem__(self, index: int) -> Sequence:
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        lengths = np.array(self._lengths[self._offsets[index] : self._offsets[index + 1]])
        labels = np.array(self._labels[index])
        starts = np.cumsum(lengths) - lengths
        positions = np.arange(self.sequence_length, dtype=np.int32) - np.repeat(starts, lengths).astype(np.int32)
        return Sequence(
            input_ids=np.array(self._inputs[index]),
            labels=labels,
            position_ids=positions,
            document_lengths=lengths,
            tokens=int(self._tokens[index]),
            supervised_tokens=int((labels != UNSUPERVISED).sum()),
        )


def write_store(
    folder: Path,
    *,
    bins: list[list[int]],
    ids: Int32s,
    supervised: Bytes,
    starts: Int64s,
    lengths: Int64s,
    pad_id: int,
    length: int,
) -> dict[str, int]:
    """Write one store; document d's tokens are ``ids[starts[d] : starts[d] + lengths[d] + 1]``.

    The last of these tokens is only ever a target, so a document takes ``lengths[d]`` positions. ``supervised``
    marks tokens that count as targets. Returns the counts, which are stored with them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokens = np.zeros(len(bins), dtype=np.int32)
    document_lengths: list[Int32s] = []
    offsets = np.zeros(len(bins) + 1, dtype=np.int64)
    total_supervised = 0
    block = max(1, _BLOCK_POSITIONS // length)
    # Written as files, not through a mapping: on a full disk a mapped write is a SIGBUS, a file write an error.
    with open(folder / "input_ids.npy", "wb") as inputs, open(folder / "labels.npy", "wb") as labels:
        for file in (inputs, labels):
            header = {"descr": "<i4", "fortran_order": False, "shape": (len(bins), length)}
            np.lib.format.write_array_header_1_0(file, header)
        for first in range(0, len(bins), block):
            part = bins[first : first + block]
            counts = np.array([len(bin) for bin in part])
            documents = np.concatenate([np.asarray(bin, dtype=np.int64) for bin in part])
            sizes = lengths[documents]
            used = np.add.reduceat(sizes, np.cumsum(counts) - counts)
            rows, columns = np.repeat(np.arange(len(part)), used), _ranges(used)
            source = np.repeat(starts[documents], sizes) + _ranges(sizes)
            targets = np.where(supervised[source + 1] != 0, ids[source + 1], UNSUPERVISED)
            for file, values, empty in ((inputs, ids[source], pad_id), (labels, targets, UNSUPERVISED)):
                filled = np.full((len(part), length), empty, dtype="<i4")
                filled[rows, columns] = values
                file.write(filled.tobytes())
            total_supervised += int((targets != UNSUPERVISED).sum())
            tokens[first : first + len(part)] = used
            padded = used < length
            tails = (length - used)[padded]
            document_lengths.append(np.insert(sizes, np.cumsum(counts)[padded], tails).astype(np.int32))
            offsets[first + 1 : first + len(part) + 1] = offsets[first] + np.cumsum(counts + padded)
    result = {
        "sequences": len(bins),
        "documents": sum(len(bin) for bin in bins),
        "tokens": int(tokens.sum()),
        "supervised_tokens": total_supervised,
        "positions": len(bins) * length,
    }
    joined = np.concatenate(document_lengths) if document_lengths else np.zeros(0, dtype=np.int32)
    for name, array in (("document_lengths", joined), ("document_offsets", offsets), ("tokens", tokens)):
        np.save(folder / f"{name}.npy", array, allow_pickle=False)
    (folder / "counts.json").write_text(json.dumps(result, sort_keys=True))
    return result


def _ranges(sizes: Int64s) -> Int64s:
    """0..sizes[0]-1, 0..sizes[1]-1, ... in one array."""
    starts = np.cumsum(sizes) - sizes
    return np.arange(int(sizes.sum())) - np.repeat(starts, sizes)


def _map(path: Path) -> Any:
    if path.stat().st_size == 0:
        raise ValueError(f"{path.name} is empty")
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError:
        # An array without elements cannot be mapped.
        return np.load(path, allow_pickle=False)
