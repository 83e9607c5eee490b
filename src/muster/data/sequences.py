"""Packed sequences on disk: plain ``.npy`` arrays, memory-mapped, never pickled.

A store's folder holds ``input_ids.npy`` and ``labels.npy`` (int32 [N, S], labels already shifted: the target of
position t, -100 where nothing is learned), the document lengths of all sequences end to end with their offsets, and a
checksum of each sequence (XXH3-64), which is verified whenever it is read: a run never trains on damaged data.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from muster.core.errors import MusterError
from muster.data.arrays import Bytes, Float32s, Int32s, Int64s, release
from muster.data.cache import says_nothing

UNSUPERVISED = -100
#: Folder in a store with the one of mismatched answers.
MISMATCHED = "mismatched"
#: Positions gathered at once while writing: 4 MiB an array of int32.
_BLOCK_POSITIONS = 1 << 20


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
    grades: Float32s | None = None
    """Of preferences, a number for each unit (a pair, or an answer); None: there are none."""
    reference: Float32s | None = None
    """The log-probability of each document before training, where it is known."""

    @property
    def documents(self) -> Int32s:
        """Lengths of its documents, without the padding tail."""
        return self.document_lengths[:-1] if self.tokens < len(self.input_ids) else self.document_lengths

    @property
    def weight(self) -> int:
        """What it counts in a step's mean: its targets, or its units."""
        return self.supervised_tokens if self.grades is None else len(self.grades)

    def cut(self, length: int) -> Sequence:
        """Without the padding behind ``length`` positions."""
        assert length >= self.tokens, f"{self.tokens} tokens do not fit in {length}"
        tail = [length - self.tokens] if length > self.tokens else []
        return replace(
            self,
            input_ids=self.input_ids[:length],
            labels=self.labels[:length],
            position_ids=self.position_ids[:length],
            document_lengths=np.array([*self.documents, *tail], dtype=np.int32),
        )


class SequenceStore:
    """Read access to a folder of packed sequences. Opening maps the files; nothing is read until asked for."""

    cut_to: int | None = None
    """Batches are cut to their longest row, rounded up to a multiple of this; None: all are of ``sequence_length``."""
    highest_position: int | None = None
    """Positions in padding stop here: some rotary embeddings look at the highest one of a batch."""

    reference: Float32s | None = None
    """The log-probability of every document before training, in order."""
    mismatched: SequenceStore | None = None
    """Of labelled answers: at the place of each the answer of another row to the same prompt."""

    def __init__(self, folder: Path, on_damage: Callable[[], None] = lambda: None) -> None:
        """``on_damage`` is called before a damaged sequence is reported.

        Raises MusterError where the folder is not a whole store, OSError where it cannot be read.
        """
        self.folder, self._on_damage = Path(folder), on_damage
        try:
            self.counts = json.loads((self.folder / "counts.json").read_text())
            self._inputs = _map(self.folder / "input_ids.npy", np.int32)
            self._labels = _map(self.folder / "labels.npy", np.int32)
            self._lengths = _map(self.folder / "document_lengths.npy", np.int32)
            self._offsets = _map(self.folder / "document_offsets.npy", np.int64)
            self._tokens = _map(self.folder / "tokens.npy", np.int32)
            self._sums = _map(self.folder / "checksums.npy", np.uint64)
            graded = (self.folder / "grades.npy").exists()
            self._grades: Float32s | None = _map(self.folder / "grades.npy", np.float32) if graded else None
            if self._grades is not None:
                counts = np.diff(self._offsets) - (np.asarray(self._tokens) < self._inputs.shape[1])
                self.firsts: Int64s = np.concatenate([[0], np.cumsum(counts)])
                """The number of the first document of each sequence; behind them how many there are."""
                if self.firsts[-1] not in (len(self._grades), 2 * len(self._grades)):
                    raise ValueError(f"it has {self.firsts[-1]} documents and {len(self._grades)} grades")
            count = int(self.counts["sequences"])
            if self._inputs.shape != self._labels.shape or {
                len(self._inputs), len(self._tokens), len(self._sums), len(self._offsets) - 1
            } != {count}:  # fmt: skip
                raise ValueError(f"its arrays are not of {count} sequences")
        except (OSError, ValueError, TypeError, KeyError) as error:
            if isinstance(error, OSError) and says_nothing(error):
                raise
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

    @property
    def longest_document(self) -> int:
        """Positions of the longest document."""
        return int(self._lengths[self._are_documents()].max())

    def by_document(self) -> SequenceStore:
        """The same documents in the same order, each in a row of its own."""
        return _ByDocument(self)

    def _positions(self, lengths: Int32s) -> Int32s:
        starts = np.cumsum(lengths) - lengths
        positions = np.arange(self.sequence_length, dtype=np.int32) - np.repeat(starts, lengths).astype(np.int32)
        return positions if self.highest_position is None else np.minimum(positions, np.int32(self.highest_position))

    def _are_documents(self) -> NDArray[np.bool_]:
        """Of ``_lengths``, those that are not of a padding tail."""
        result = np.ones(len(self._lengths), dtype=bool)
        result[self._offsets[1:][self._tokens < self.sequence_length] - 1] = False
        return result

    def __getitem__(self, index: int) -> Sequence:
        """Raises MusterError where it is not what was written."""
        if not 0 <= index < len(self._inputs):
            raise IndexError(f"sequence {index} of {len(self._inputs)}")
        for _ in range(2):  # what was only read wrongly is not removed
            lengths = np.array(self._lengths[self._offsets[index] : self._offsets[index + 1]])
            inputs, labels = np.array(self._inputs[index]), np.array(self._labels[index])
            tokens, grades = int(self._tokens[index]), self._grades_of(index)
            if _sum(inputs, labels, lengths, tokens, grades) == int(self._sums[index]):
                break
        else:
            self._on_damage()
            raise MusterError(
                f"prepared data in {self.folder} is damaged: sequence {index} is not what was written",
                hint="it is prepared again at the next start",
            )
        result = self._sequence(inputs, labels, lengths, tokens)
        if grades is None:
            return result
        known = self.reference
        part = None if known is None else known[self.firsts[index] : self.firsts[index + 1]]
        return replace(result, grades=grades, reference=part)

    def _grades_of(self, index: int) -> Float32s | None:
        if self._grades is None:
            return None
        each = max(1, int(self.firsts[-1]) // max(1, len(self._grades)))
        return np.array(self._grades[self.firsts[index] // each : self.firsts[index + 1] // each])

    def _sequence(self, inputs: Int32s, labels: Int32s, lengths: Int32s, tokens: int) -> Sequence:
        return Sequence(
            input_ids=inputs,
            labels=labels,
            position_ids=self._positions(lengths),
            document_lengths=lengths,
            tokens=tokens,
            supervised_tokens=int((labels != UNSUPERVISED).sum()),
        )


class _ByDocument(SequenceStore):
    """A store as ``SequenceStore.by_document`` gives it: rows of one document, read from those of several."""

    def __init__(self, store: SequenceStore) -> None:
        self.__dict__.update(store.__dict__)
        self._documents = np.flatnonzero(self._are_documents())

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> Sequence:
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        place = int(self._documents[index])
        number = int(np.searchsorted(self._offsets, place, side="right")) - 1
        packed = super().__getitem__(number)
        before = place - int(self._offsets[number])
        start, length = int(packed.document_lengths[:before].sum()), int(packed.document_lengths[before])
        rest = self.sequence_length - length
        inputs, labels = np.zeros_like(packed.input_ids), np.full_like(packed.labels, UNSUPERVISED)
        inputs[:length] = packed.input_ids[start : start + length]
        labels[:length] = packed.labels[start : start + length]
        lengths = np.array([length, rest] if rest else [length], dtype=np.int32)
        return self._sequence(inputs, labels, lengths, length)


def _sum(inputs: Int32s, labels: Int32s, lengths: Int32s, tokens: int, grades: Float32s | None = None) -> int:
    """XXH3-64 of one sequence, as it is in the files."""
    state = xxhash.xxh3_64()
    for array in (inputs, labels, lengths):
        state.update(np.ascontiguousarray(array, dtype="<i4").data)
    state.update(tokens.to_bytes(4, "little", signed=True))
    if grades is not None:
        state.update(np.ascontiguousarray(grades, dtype="<f4").data)
    return state.intdigest()


def write_store(
    folder: Path,
    *,
    windows: Iterable[list[list[int]]],
    ids: Int32s,
    supervised: Bytes,
    starts: Int64s,
    lengths: Int64s,
    pad_id: int,
    length: int,
    progress: Callable[[int], None] = lambda documents: None,
    seconds: Int64s | None = None,
    grades: Float32s | None = None,
) -> dict[str, int]:
    """Write one store; document d's tokens are ``ids[starts[d] : starts[d] + lengths[d] + 1]``.

    ``seconds``: where it is above 0, this range is two documents, and the second one begins there. ``grades``: of
    preferences, a number for each range.

    The last of these tokens is only ever a target, so a document takes ``lengths[d]`` positions. ``supervised``
    marks tokens that count as targets. ``windows``: document numbers of each sequence, some sequences at a time.
    ``progress``: called with the number of documents written. Returns the counts, which are stored with them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    small: dict[str, list[NDArray[Any]]] = {name: [] for name in ("tokens", "sums", "lengths", "sizes", "grades")}
    total_supervised = documents = 0
    block = max(1, _BLOCK_POSITIONS // length)
    # Written as files, not through a mapping: on a full disk a mapped write is a SIGBUS, a file write an error.
    with open(folder / "input_ids.npy", "wb") as inputs, open(folder / "labels.npy", "wb") as labels:
        for file in (inputs, labels):
            _write_header(file, 0, length)
        for bins in (window[at : at + block] for window in windows for at in range(0, len(window), block)):
            written = _gathered(bins, ids, supervised, starts, lengths, pad_id, length, seconds, grades)
            for file, filled in ((inputs, written.inputs), (labels, written.labels)):
                file.write(filled.tobytes())
            total_supervised += int((written.labels != UNSUPERVISED).sum())
            documents += sum(map(len, bins))
            for name, array in written.small().items():
                small[name].append(array)
            for array in (ids, supervised):
                release(array)
            progress(documents)
        joined = {name: np.concatenate(arrays) for name, arrays in small.items() if arrays}
        for file in (inputs, labels):
            file.seek(0)
            _write_header(file, len(joined["tokens"]), length)
    return _finish(folder, documents, length, total_supervised, joined)


@dataclass(frozen=True)
class _Block:
    """Some sequences, as they are written."""

    inputs: Int32s
    labels: Int32s
    lengths: Int32s
    """Of all their documents, the padding tail being one, end to end."""
    sizes: Int64s
    """Documents of each sequence, the padding tail included."""
    tokens: Int32s
    grades: list[Float32s] | None = None
    """Of each sequence."""

    def small(self) -> dict[str, NDArray[Any]]:
        """What there is one number of for each sequence or document."""
        parts = np.split(self.lengths, np.cumsum(self.sizes)[:-1])
        grades: Iterable[Float32s | None] = self.grades or itertools.repeat(None, len(parts))
        sums = [_sum(*row) for row in zip(self.inputs, self.labels, parts, self.tokens.tolist(), grades, strict=True)]
        return {
            "tokens": self.tokens, "sums": np.array(sums, dtype=np.uint64), "lengths": self.lengths,
            "sizes": self.sizes, **({} if self.grades is None else {"grades": np.concatenate(self.grades)}),
        }  # fmt: skip


def _gathered(
    bins: list[list[int]],
    ids: Int32s,
    supervised: Bytes,
    starts: Int64s,
    lengths: Int64s,
    pad_id: int,
    length: int,
    seconds: Int64s | None = None,
    grades: Float32s | None = None,
) -> _Block:
    counts = np.array([len(each) for each in bins])
    documents = np.concatenate([np.asarray(each, dtype=np.int64) for each in bins])
    sizes = lengths[documents]
    used = np.add.reduceat(sizes, np.cumsum(counts) - counts)
    rows, columns = np.repeat(np.arange(len(bins)), used), _ranges(used)
    source = np.repeat(starts[documents], sizes) + _ranges(sizes)
    inputs, labels = (np.full((len(bins), length), empty, dtype="<i4") for empty in (pad_id, UNSUPERVISED))
    inputs[rows, columns] = ids[source]
    source += 1
    labels[rows, columns] = np.where(supervised[source] != 0, ids[source], UNSUPERVISED)
    graded = None if grades is None else np.split(grades[documents], np.cumsum(counts)[:-1])
    if seconds is not None and (two := seconds[documents] > 0).any():
        counts = np.add.reduceat(1 + two, np.cumsum(counts) - counts)
        firsts = np.where(two, seconds[documents], sizes)
        sizes = np.insert(firsts, np.flatnonzero(two) + 1, (sizes - firsts)[two])
    padded = used < length
    tails = (length - used)[padded]
    return _Block(
        inputs=inputs,
        labels=labels,
        lengths=np.insert(sizes, np.cumsum(counts)[padded], tails).astype(np.int32),
        sizes=counts + padded,
        tokens=used.astype(np.int32),
        grades=graded,
    )


def _write_header(file: IO[bytes], count: int, length: int) -> None:
    """Of int32 [count, length]. NumPy leaves room in it, so that a later count is written over an earlier one."""
    np.lib.format.write_array_header_1_0(file, {"descr": "<i4", "fortran_order": False, "shape": (count, length)})


def _finish(
    folder: Path, documents: int, length: int, supervised_tokens: int, joined: dict[str, NDArray[Any]]
) -> dict[str, int]:
    """Write what has one number a sequence or document, and the counts, which are returned."""
    count = len(joined["tokens"])
    arrays: dict[str, NDArray[Any]] = {
        "document_lengths": joined["lengths"], "document_offsets": np.concatenate([[0], np.cumsum(joined["sizes"])]),
        "tokens": joined["tokens"], "checksums": joined["sums"],
        **{name: joined[name] for name in ("grades",) if name in joined},
    }  # fmt: skip
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array, allow_pickle=False)
    result = {
        "sequences": count,
        "documents": documents,
        "tokens": int(joined["tokens"].sum()),
        "supervised_tokens": supervised_tokens,
        "positions": count * length,
    }
    (folder / "counts.json").write_text(json.dumps(result, sort_keys=True))
    return result


def _ranges(sizes: Int64s) -> Int64s:
    """0..sizes[0]-1, 0..sizes[1]-1, ... in one array."""
    starts = np.cumsum(sizes) - sizes
    return np.arange(int(sizes.sum())) - np.repeat(starts, sizes)


def _map(path: Path, kind: type[np.generic]) -> Any:
    """Raises OSError where it cannot be read, ValueError: also where its numbers are of another kind."""
    if path.stat().st_size == 0:
        raise ValueError(f"{path.name} is empty")
    found: Any
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as failed:  # its parser of headers raises what Python's own does: TokenError, SyntaxError
        if isinstance(failed, OSError) and says_nothing(failed):
            raise
        try:
            found = np.load(path, allow_pickle=False)  # an array without elements cannot be mapped
        except Exception as error:
            raise ValueError(f"{path.name}: {error}") from error
    if found.dtype != np.dtype(kind):
        raise ValueError(f"{path.name} holds {found.dtype}")
    return found
