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
from dataclasses import dataclass, field, replace
from functools import cached_property
from multiprocessing import current_process, get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

import numpy as np

from muster.config.sections.sources import PromptTemplate
from muster.core.errors import MusterError, UsageError
from muster.core.typed_json import Json
from muster.data import formats
from muster.data.arrays import Bytes, Float32s, Int32s, Int64s
from muster.data.chat.engine import ChatEngine, ChatReport, ChatRules, refuse
from muster.data.chat.masks import Document as Masked
from muster.data.chat.preferences import EMPTY, Preference, Rows, preference
from muster.data.chat.rows import RowError, RowRefusal, row_error
from muster.data.formats import Document, Format, Segment
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
    chat: ChatRules
    rows: Rows | None = None
    """Of preferences: what the objective learns from."""

    @cached_property
    def encoder(self) -> Encoder:
        return Encoder(self.folder)

    @cached_property
    def chat_engine(self) -> ChatEngine:
        return ChatEngine(self.encoder, self.chat)


@dataclass(frozen=True)
class Tokens:
    """The documents of a chunk, end to end, and how many each row has (0: it is left out)."""

    ids: Int32s = field(repr=False)
    supervised: Bytes = field(repr=False)
    """1 where the token counts as a target"""
    lengths: Int64s = field(repr=False)
    """Tokens of each document"""
    documents: Int64s = field(repr=False)
    """Documents of each row"""
    seconds: Int64s = field(default_factory=lambda: np.zeros(0, dtype=np.int64), repr=False)
    """Of each document, as in ``mixture.Documents``"""
    grades: Float32s = field(default_factory=lambda: np.zeros(0, dtype=np.float32), repr=False)
    """Likewise"""
    unknown: int = 0
    """Tokens that are the unknown token."""
    report: ChatReport = field(default_factory=ChatReport)

    def __post_init__(self) -> None:
        for name in ("seconds", "grades"):
            if len(array := getattr(self, name)) != len(self.lengths):
                object.__setattr__(self, name, np.zeros(len(self.lengths), dtype=array.dtype))


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
        for start, chunk in itertools.chain(first, chunks):
            with _one_thread(count == 1):
                tokens = tokenise_rows(chunk, recipe, first_row=start)
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


def tokenise_rows(rows: Sequence[Row], recipe: Recipe, *, first_row: int = 0) -> Tokens:
    """One chunk, here. Raises RowError."""
    encoder = recipe.encoder
    report = ChatReport()
    seconds, grades = [], []
    if recipe.format == "preference":
        units, counts = _preferences(rows, recipe, first_row, report)
        result = [(unit.ids, unit.mask) for unit in units]
        seconds, grades = [unit.second for unit in units], [unit.grade for unit in units]
    elif recipe.format == "chat":
        by_row, report = recipe.chat_engine.documents(rows, first_row)
        result = list(itertools.chain.from_iterable(by_row))
        counts = list(map(len, by_row))
    else:
        documents = _documents(rows, recipe, first_row)
        counts = [int(bool(document.segments)) for document in documents]
        report.empty = len(counts) - sum(counts)
        result = _by_segments([document for document in documents if document.segments], encoder)
    ids = np.fromiter(itertools.chain.from_iterable(row_ids for row_ids, _ in result), dtype=np.int32)
    supervised = np.fromiter(itertools.chain.from_iterable(mask for _, mask in result), dtype=np.uint8)
    unknown = encoder.fast.token_to_id(encoder.special["unk"]) if "unk" in encoder.special else None
    return Tokens(
        ids=ids,
        supervised=supervised,
        lengths=np.array([len(row_ids) for row_ids, _ in result], dtype=np.int64),
        documents=np.array(counts, dtype=np.int64),
        seconds=np.array(seconds, dtype=np.int64),
        grades=np.array(grades, dtype=np.float32),
        unknown=0 if unknown is None else int((ids == unknown).sum()),
        report=report,
    )


def _documents(rows: Sequence[Row], recipe: Recipe, first_row: int) -> list[Document]:
    """Of rows that are no chats. Raises RowError."""
    result: list[Document] = []
    for index, row in enumerate(rows):
        try:
            result.append(formats.document(row, recipe.format, recipe.template, recipe.chat.train_on))
        except UsageError as error:
            raise row_error(error, first_row + index) from error
    return result


class _Unit(NamedTuple):
    """Two documents that are kept together, end to end."""

    ids: list[int]
    mask: bytearray
    second: int
    grade: float


def _preferences(
    rows: Sequence[Row], recipe: Recipe, first_row: int, report: ChatReport
) -> tuple[list[_Unit], list[int]]:
    """Pairs, or answers each with the answer of the row before to the same prompt; and how many each row has."""
    stated = _stated(rows, recipe, first_row, report)
    answers: dict[int, list[Masked]] = {index: [] for index in stated}
    for side in range(2):
        left = {index: stated[index] for index in answers if side < len(stated[index].answers)}
        documents = _answered(left, side, recipe, first_row, report)
        for index, document in _with_an_answer(documents, first_row, report):
            if document is not None and side and _prompt(document) != _prompt(answers[index][0]):
                refuse(report, "the chat template asks for the two answers by different prompts", first_row + index)
                document = None
            if document is None:
                del answers[index]
            else:
                answers[index].append(document)
    counts = [0] * len(rows)
    units: list[_Unit] = []
    before = list(answers.values())[-1:]
    for index, own in answers.items():
        others = own[1:]
        if recipe.rows == "labelled":
            others, before = _mismatched(own, before[0]), [own]
        counts[index] = len(stated[index].grades)
        for (ids, mask), (other, marked), grade in zip(own, others, stated[index].grades, strict=False):
            marked[0] = 0  # no token is before it
            units.append(_Unit(ids + other, mask + marked, len(ids), grade))
    return units, counts


def _stated(rows: Sequence[Row], recipe: Recipe, first_row: int, report: ChatReport) -> dict[int, Preference]:
    """Row -> what it states; a row that states nothing is left out, and counted. Raises RowError."""
    result: dict[int, Preference] = {}
    chats = recipe.encoder.chat_template is not None
    for index, row in enumerate(rows):
        try:
            result[index] = preference(row, recipe.rows or "pairs", report.changes, chats=chats)
        except RowRefusal as refusal:
            refuse(report, str(refusal), first_row + index)
        except UsageError as error:
            raise row_error(error, first_row + index) from error
    return result


def _answered(
    stated: Mapping[int, Preference], side: int, recipe: Recipe, first_row: int, report: ChatReport
) -> dict[int, Masked | None]:
    """By row the document of the prompt and one answer; None: it is left out, and counted. Raises RowError."""
    plain = {
        index: Document((Segment(each.prompt, False), Segment(str(each.answers[side]), True)), ends=True)
        for index, each in stated.items()
        if isinstance(each.prompt, str)
    }
    by_text = _by_segments([*plain.values()], recipe.encoder)
    result: dict[int, Masked | None] = dict(zip(plain, by_text, strict=True))
    places = [index for index in stated if index not in plain]
    if not places:
        return result
    try:
        by_row, made = recipe.chat_engine.documents([stated[index].conversation(side) for index in places])
    except RowError as error:
        raise row_error(error, first_row + places[error.index]) from error
    if made.first is not None:
        made.first = (first_row + places[made.first[0]], made.first[1])
    report.add(made)
    return result | {index: found[-1] if found else None for index, found in zip(places, by_row, strict=True)}


def _with_an_answer(
    documents: Mapping[int, Masked | None], first_row: int, report: ChatReport
) -> Iterator[tuple[int, Masked | None]]:
    """An answer of which the tokenizer drops every character is left out, and counted."""
    for index, document in documents.items():
        if document is not None and 1 not in document[1]:
            refuse(report, EMPTY, first_row + index)
            yield index, None
        else:
            yield index, document


def _prompt(document: Masked) -> list[int]:
    return document[0][: document[1].index(1)]


def _mismatched(own: Sequence[Masked], others: Sequence[Masked]) -> list[Masked]:
    """The prompts of one row's documents with the answers of another row's."""
    result = []
    for place, (ids, mask) in enumerate(own):
        other, marked = others[min(place, len(others) - 1)]
        begin, answer = mask.index(1), marked.index(1)
        result.append((ids[:begin] + other[answer:], bytearray(begin) + marked[answer:]))
    return result


def _by_segments(documents: Sequence[Document], encoder: Encoder) -> list[Masked]:
    """Segments tokenised apart: a prompt's tokens are then exactly those that generation will start from.

    Tokens that the texts have already, a beginning and an end, are not added again.
    """
    encoded = iter(encoder.encode([segment.text for document in documents for segment in document.segments]))
    end = encoder.eos_id
    result: list[Masked] = []
    for document in documents:
        joined, mask = _joined(document, encoded)
        ids = encoder.begun(joined)
        mask = bytearray(len(ids) - len(joined)) + mask
        if document.ends and end is not None and ids[-1:] != [end]:
            ids.append(end)
            mask += b"\1" if document.segments[-1].supervised else b"\0"
        result.append((ids, mask))
    return result


def _joined(document: Document, encoded: Iterator[list[int]]) -> Masked:
    """The tokens of a document's segments, end to end, and their mask."""
    ids: list[int] = []
    mask = bytearray()
    for segment in document.segments:
        part = next(encoded)
        ids += part
        mask += (b"\1" if segment.supervised else b"\0") * len(part)
    return ids, mask


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
    pool = ProcessPoolExecutor(
        count, mp_context=get_context("spawn"), initializer=_start_worker, initargs=(replace(recipe),)
    )
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


_worker: Recipe | None = None


def _start_worker(recipe: Recipe) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ[_THREADS] = "false"
    _worker = recipe


def _end_with_parent() -> None:
    """A pool's processes hold both ends of its queue: after a kill -9 they would wait for work forever."""
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _work(start: int, chunk: list[Row]) -> Tokens:
    assert _worker is not None
    return tokenise_rows(chunk, _worker, first_row=start)
