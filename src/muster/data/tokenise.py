"""Rows into token arrays, in worker processes where there is enough to do.

The workers are plain processes outside any process group: they share nothing with training, so slow preparation
can never run into a collective's timeout. Chunks come back in order, whichever worker finishes first.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import current_process, get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np

from muster.config.sections.sources import PromptTemplate
from muster.core.errors import MusterError, UsageError
from muster.core.typed_json import Json
from muster.data import formats
from muster.data.arrays import Bytes, Int32s, Int64s
from muster.data.formats import Document, Format
from muster.data.task import Row
from muster.data.tokenizer import Encoder

#: A chunk's rows, and its characters (which its last row may exceed): about half a second's work.
CHUNK_ROWS, CHUNK_CHARACTERS = 4096, 1 << 20
#: Fewer chunks are tokenised here: starting processes costs more (about a second) than they would save.
_CHUNKS_HERE = 4
_AHEAD = 2
_THREADS = "TOKENIZERS_PARALLELISM"


@dataclass(frozen=True)
class Recipe:
    """How rows become tokens; small, so that it travels to workers."""

    folder: Path
    format: Format
    template: PromptTemplate | None
    train_on: str | tuple[str, ...]


@dataclass(frozen=True)
class Tokens:
    """The documents of a chunk, end to end. Row i has ``lengths[i]`` tokens (0: nothing in it)."""

    ids: Int32s = field(repr=False)
    supervised: Bytes = field(repr=False)
    """1 where the token counts as a target"""
    lengths: Int64s = field(repr=False)
    unknown: int = 0
    """Tokens that are the unknown token."""
    empty_completions: int = 0
    """Rows left out because there is no answer to learn from."""


class RowError(UsageError):
    """A row does not fit; ``index``: its number from 0."""

    index = 0


def tokenise(rows: Iterable[Row], recipe: Recipe, *, workers: int, first_row: int = 0) -> Iterator[Tokens]:
    """Tokens of ``rows``, chunk by chunk, in order. ``workers``: processes, each on one core; 0: one per core.

    ``first_row``: the number of the first of them.

    Raises:
        RowError: a row does not fit.
        MusterError: a worker died.
    """
    chunks = _chunks(rows, first_row)
    first = list(itertools.islice(chunks, _CHUNKS_HERE))
    count = workers or len(os.sched_getaffinity(0))
    if len(first) < _CHUNKS_HERE or count == 1:
        encoder = Encoder(recipe.folder)
        for start, chunk in itertools.chain(first, chunks):
            with _one_thread(count == 1):
                tokens = tokenise_rows(chunk, recipe, encoder, first_row=start)
            yield tokens
        return
    yield from _in_processes(itertools.chain(first, chunks), recipe, count)


@contextmanager
def _one_thread(wanted: bool) -> Iterator[None]:
    """While it lasts the tokenizers library starts no threads of its own: else as many as there are cores."""
    before = os.environ.pop(_THREADS, None) if wanted else None
    try:
        if wanted:
            os.environ[_THREADS] = "false"
        yield
    finally:
        if wanted:
            os.environ.pop(_THREADS, None)
            os.environ.update({} if before is None else {_THREADS: before})


def refuse_while_starting() -> None:
    """Fail in a worker that is importing an unguarded main script: there, a second preparation of the same data
    would wait for the first, which waits for this worker.

    Raises:
        UsageError: always in such a worker.
    """
    if getattr(current_process(), "_inheriting", False):
        raise UsageError("data prepared by a script without a main guard", hint="use if __name__ == '__main__'")


def tokenise_rows(rows: Sequence[Row], recipe: Recipe, encoder: Encoder, *, first_row: int = 0) -> Tokens:
    """One chunk, here. Raises RowError."""
    documents: list[Document] = []
    for index, row in enumerate(rows):
        try:
            as_text = formats.document(
                row, recipe.format, recipe.template, recipe.train_on, encoder.render_chat, lambda: encoder.turn_end
            )
            documents.append(as_text)
        except UsageError as error:
            raise row_error(error, first_row + index) from error
    if recipe.format == "chat":
        result = _by_offsets(documents, encoder)
    else:
        result = _by_segments(documents, encoder)
    ids = np.fromiter(itertools.chain.from_iterable(row_ids for row_ids, _ in result), dtype=np.int32)
    supervised = np.fromiter(itertools.chain.from_iterable(mask for _, mask in result), dtype=np.uint8)
    unknown = encoder.fast.token_to_id(encoder.special["unk"]) if "unk" in encoder.special else None
    return Tokens(
        ids=ids,
        supervised=supervised,
        lengths=np.array([len(row_ids) for row_ids, _ in result], dtype=np.int64),
        unknown=0 if unknown is None else int((ids == unknown).sum()),
        empty_completions=sum(not document.segments for document in documents),
    )


def row_error(error: UsageError, index: int) -> RowError:
    """``error`` of row ``index``. (Pickled with its attributes: it comes from other processes, too.)"""
    result = RowError(str(error), hint=error.hint)
    result.index = index
    return result


def _by_segments(documents: Sequence[Document], encoder: Encoder) -> list[tuple[list[int], bytes]]:
    """Segments tokenised apart: a prompt's tokens are then exactly those that generation will start from."""
    encoded = iter(encoder.encode([segment.text for document in documents for segment in document.segments]))
    prefix, end = list(encoder.prefix), encoder.eos_id
    result: list[tuple[list[int], bytes]] = []
    for document in documents:
        if not document.segments:
            result.append(([], b""))
            continue
        ids, mask = _joined(document, encoded)
        if not document.whole:
            ids, mask = [*prefix, *ids], bytes(len(prefix)) + mask
        if document.ends and end is not None:
            ids.append(end)
            mask += b"\1" if document.segments[-1].supervised else b"\0"
        result.append((ids, mask))
    return result


def _joined(document: Document, encoded: Iterator[list[int]]) -> tuple[list[int], bytes]:
    """The tokens of a document's segments, end to end, and their mask."""
    ids: list[int] = []
    mask = b""
    for segment in document.segments:
        part = next(encoded)
        ids += part
        mask += (b"\1" if segment.supervised else b"\0") * len(part)
    return ids, mask


def _by_offsets(documents: Sequence[Document], encoder: Encoder) -> list[tuple[list[int], bytes]]:
    """The whole text tokenised at once; a token is supervised where all its characters are.

    Where a token would lie across the border of a turn (a header's line end and one that the answer begins with), the
    segments are tokenised apart, as generation will see the header; unless the tokenizer then adds to the text.
    """
    result: list[tuple[list[int], bytes]] = []
    encoded = encoder.encode_with_offsets([document.text for document in documents])
    for document, (ids, offsets) in zip(documents, encoded, strict=True):
        if not document.segments:
            result.append(([], b""))
            continue
        mask, crosses = _mask(document, offsets)
        if crosses and encoder.cuts_cleanly:
            result += _by_segments([document], encoder)
        else:
            result.append((ids, bytes(mask)))
    return result


def _mask(document: Document, offsets: Sequence[tuple[int, int]]) -> tuple[bytearray, bool]:
    """1 for each token within a supervised segment; and whether a token lies across the border of one."""
    spans = []
    position = 0
    for segment in document.segments:
        if segment.supervised:
            spans.append((position, position + len(segment.text)))
        position += len(segment.text)
    mask = bytearray(len(offsets))
    at, crosses = 0, False
    for number, (start, end) in enumerate(offsets):
        while at < len(spans) and spans[at][1] <= start:
            at += 1
        if at == len(spans):
            break
        if spans[at][0] <= start and end <= spans[at][1]:
            mask[number] = 1
        elif end > spans[at][0]:
            crosses = True
    return mask, crosses


def _chunks(rows: Iterable[Row], first_row: int) -> Iterator[tuple[int, list[Row]]]:
    chunk: list[Row] = []
    characters = 0
    for row in rows:
        chunk.append(row)
        characters += _characters(row)
        if len(chunk) == CHUNK_ROWS or characters >= CHUNK_CHARACTERS:
            yield first_row, chunk
            first_row, chunk, characters = first_row + len(chunk), [], 0
    if chunk:
        yield first_row, chunk


def _characters(value: Json) -> int:
    """Of all texts in it."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list) else 0


def _in_processes(chunks: Iterator[tuple[int, list[Row]]], recipe: Recipe, count: int) -> Iterator[Tokens]:
    """A bounded number of chunks is on its way, so a slow reader cannot fill the memory."""
    waiting: deque[Future[Tokens]] = deque()
    pool = ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=_start_worker, initargs=(recipe,))
    try:
        for start, chunk in chunks:
            waiting.append(pool.submit(_work, start, chunk))
            if len(waiting) >= count * _AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise MusterError(
            "a tokenising process died",
            hint="out of memory? try data.workers: 1; in a script of yours, guard it: if __name__ == '__main__'",
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker: tuple[Recipe, Encoder] | None = None


def _start_worker(recipe: Recipe) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ[_THREADS] = "false"
    _worker = recipe, Encoder(recipe.folder)


def _end_with_parent() -> None:
    """A pool's processes hold both ends of its queue: after a kill -9 they would wait for work for ever."""
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _work(start: int, chunk: list[Row]) -> Tokens:
    assert _worker is not None
    return tokenise_rows(chunk, *_worker, first_row=start)
