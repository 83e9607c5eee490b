"""The tokens of a build, on disk while it goes on, chunk after chunk: what a killed preparation has done is kept.

A spool's folder holds the tokens of all chunks end to end, their mask, the documents' lengths, how many of them each
row has, and ``chunks.jsonl``: a line for each chunk with its sizes and a checksum (XXH3-64), written after its data.
Memory does not grow with the data.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from muster.data.arrays import Bytes, Int32s
from muster.data.chat.engine import ChatReport
from muster.data.tokenise import Tokens

_JOURNAL = "chunks.jsonl"
#: File of a spool -> its numbers.
_KINDS = {"ids": "<i4", "mask": "u1", "lengths": "<i8", "documents": "<i8", "seconds": "<i8", "grades": "<f4"}


@dataclass(frozen=True)
class _Chunk:
    """A line of the journal."""

    part: str
    rows: int
    documents: int
    tokens: int
    unknown: int
    report: dict[str, Any]
    sum: str
    """XXH3-64 of its arrays, in hexadecimal digits."""

    def line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @property
    def counts(self) -> tuple[int, ...]:
        """Elements in each file, in the order of ``_KINDS``."""
        return _elements(self.tokens, self.documents, self.rows)


def _elements(tokens: int, documents: int, rows: int) -> tuple[int, ...]:
    return tokens, tokens, documents, rows, documents, documents


class Spool:
    """Chunks of tokens, appended in order. A part (a split of a source) is a run of chunks."""

    def __init__(self, folder: Path) -> None:
        """Open ``folder``, which exists. Chunks in it that are whole can be taken up by ``resume``. Raises OSError."""
        self._files = {name: open(folder / f"spool.{name}", "a+b") for name in _KINDS}  # noqa: SIM115 (likewise)
        self._journal = open(folder / _JOURNAL, "a+b")  # noqa: SIM115 (held for the build)
        self.tokens = 0
        """Tokens in use."""
        self.unknown = 0
        self._documents = self._rows = self._journal_bytes = 0
        self._kept: deque[_Chunk] = deque()
        self._journal.seek(0)
        for line in self._journal.read().splitlines():
            chunk = self._verified(line)
            if chunk is None:
                break
            self._kept.append(chunk)
            self._use(chunk)
        self._cut()
        self.tokens = self.unknown = self._documents = self._rows = self._journal_bytes = 0

    def resume(self, part: str) -> Iterator[Tokens]:
        """The chunks of ``part`` that an earlier process left, if the next ones are of that part."""
        while self._kept and self._kept[0].part == part:
            chunk = self._kept.popleft()
            ids, supervised, lengths, documents, seconds, grades = self._read(chunk)
            self._use(chunk)
            yield Tokens(
                ids=ids, supervised=supervised, lengths=lengths, documents=documents, seconds=seconds, grades=grades,
                unknown=chunk.unknown, report=ChatReport.from_json(chunk.report),
            )  # fmt: skip

    def add(self, part: str, tokens: Tokens) -> None:
        """Append a chunk. What was kept and not taken up is dropped. Raises OSError."""
        if self._kept:
            self._kept.clear()
            self._cut()
        given = (tokens.ids, tokens.supervised, tokens.lengths, tokens.documents, tokens.seconds, tokens.grades)
        arrays = tuple(
            np.ascontiguousarray(array, dtype=kind) for array, kind in zip(given, _KINDS.values(), strict=True)
        )
        for file, array in zip(self._files.values(), arrays, strict=True):
            file.write(array.tobytes())
            file.flush()
        ids, _, lengths, documents, *_ = map(len, arrays)
        chunk = _Chunk(part, documents, lengths, ids, tokens.unknown, tokens.report.to_json(), _sum(arrays))
        self._journal.write(chunk.line())
        self._journal.flush()
        self._use(chunk)

    def arrays(self) -> tuple[Int32s, Bytes]:
        """All ids and their mask, mapped."""
        if not self.tokens:
            return np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.uint8)
        ids, mask = (
            np.memmap(self._files[name], dtype=_KINDS[name], mode="r", shape=(self.tokens,)) for name in ("ids", "mask")
        )
        return ids, mask

    def close(self) -> None:
        for file in (*self._files.values(), self._journal):
            file.close()

    def _use(self, chunk: _Chunk) -> None:
        self.tokens += chunk.tokens
        self.unknown += chunk.unknown
        self._documents += chunk.documents
        self._rows += chunk.rows
        self._journal_bytes += len(chunk.line())

    def _cut(self) -> None:
        """Shorten the files to what is in use."""
        counts = _elements(self.tokens, self._documents, self._rows)
        for (name, kind), count in zip(_KINDS.items(), counts, strict=True):
            self._files[name].truncate(count * np.dtype(kind).itemsize)
        self._journal.truncate(self._journal_bytes)

    def _read(self, chunk: _Chunk) -> tuple[NDArray[Any], ...]:
        """The arrays of the chunk that comes next. ValueError: the files are too short."""
        starts = _elements(self.tokens, self._documents, self._rows)
        read = []
        for (name, kind), start, count in zip(_KINDS.items(), starts, chunk.counts, strict=True):
            size = np.dtype(kind).itemsize
            self._files[name].seek(start * size)
            read.append(np.frombuffer(self._files[name].read(count * size), dtype=kind, count=count))
        return tuple(read)

    def _verified(self, line: bytes) -> _Chunk | None:
        """The next chunk by its line in the journal; None: it is not what was written."""
        try:
            chunk = _Chunk(**json.loads(line))
            ChatReport.from_json(chunk.report)
            return chunk if _sum(self._read(chunk)) == chunk.sum else None
        except (ValueError, TypeError, LookupError):
            return None


def _sum(arrays: tuple[NDArray[Any], ...]) -> str:
    digest = xxhash.xxh3_64()
    for array in arrays:
        digest.update(array.tobytes())
    return digest.hexdigest()
