"""Fewer objects: eight segments become one, and that eight times again, until an object is full.

A writer merges what it sealed itself, from the files on its disk, so that nothing is read for it. What a writer that is
gone left behind is merged by the supervisor. Both may happen to one stream at once: nothing is removed that a wider
object does not hold already, and the newest segment, whose answer its writer may still wait for, is left to it. In a
stream that was ended that is the one before the end: its number would be free for a writer that does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from muster.core.errors import BusyError, ConflictError, MusterError
from muster.core.event_log.cadence import FAN
from muster.core.protocols import Store
from muster.storage import uris
from muster.storage.home.mirror import THREADS, streams
from muster.storage.home.segments import (
    OBJECT_BYTES,
    Damaged,
    Gap,
    Header,
    Segment,
    Span,
    cover,
    groups,
    merged_parts,
    superfluous,
)  # fmt: skip
from muster.storage.home.stream import Stream, spans_of

#: From this size on an object is not merged with smaller ones any more.
FULL_BYTES = OBJECT_BYTES // 2
#: The supervisor looks this often, in seconds, for streams that do not grow; after this many looks they are merged.
LOOK_S = 300.0
QUIET_LOOKS = 2
#: At most one of them in this time, in seconds.
TIDY_S = 10.0
#: A stream that is to be ended is listed at most so often.
TRIES = 20


def due(sealed: Sequence[Header]) -> list[list[Header]]:
    """What is to be merged now: runs of the newest objects that are of one level and not full, once they are eight."""
    result: list[Header] = []
    for header in reversed(sealed):
        if header.size > FULL_BYTES or header.ended is not None or (result and header.level != result[0].level):
            break
        if result and header.last + 1 != result[-1].first:
            break  # an object between them was damaged
        result.append(header)
    return groups(result[::-1]) if len(result) >= FAN else []


def merge_own(stream: Stream, store: Store, *, going_on: Callable[[], bool] = lambda: True) -> int:
    """Merge what is due; how many objects were made. Raises as the store, or OSError of the files here."""
    made = 0
    while going_on():
        with stream.lock:
            wanted = due(stream.sealed)
        if not wanted:
            return made
        for group in wanted:
            _merge(store, stream.uri, group, stream.read(merged_parts(group)))
            made += 1
            with stream.lock:
                if group[0] not in stream.sealed:
                    return made  # it was read anew meanwhile
                at = stream.sealed.index(group[0])
                stream.sealed[at : at + len(group)] = [merged_header(group)]
    return made


def merged_header(group: Sequence[Header]) -> Header:
    """Of the object that holds all of ``group``."""
    return Header(
        run_id=group[0].run_id,
        level=max(header.level for header in group) + 1,
        first=group[0].first,
        last=group[-1].last,
        parts=merged_parts(group),
    )


def _merge(store: Store, uri: str, group: Sequence[Header], body: bytes) -> None:
    header = merged_header(group)
    made = Segment(header, body)
    at = uris.join(uri, header.span.name)
    try:
        store.put_if_absent(at, made.encode())
    except ConflictError:  # by somebody else, or by us before we were killed
        if Segment.decode(store.get(at).data, at, run_id=header.run_id) != made:
            raise MusterError(f"{at} does not hold what its segments hold") from None
    for one in group:
        store.delete(uris.join(uri, one.span.name))


@dataclass
class Tidier:
    """Merges streams below ``uri`` that do not grow any more: of pods that are gone, of earlier supervisors."""

    store: Store
    uri: str
    run_id: str
    now_s: Callable[[], float]
    _seen: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Stream -> its newest number, and in how many looks it has been that."""
    _waiting: list[str] = field(default_factory=list)
    _next_look_s: float = 0.0
    _next_tidy_s: float = 0.0

    def tend(self) -> None:
        """Do what is due; call it often. Raises as the store: the next call goes on."""
        now_s = self.now_s()
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + LOOK_S
            self._look()
        if self._waiting and now_s >= self._next_tidy_s:
            self._next_tidy_s = now_s + TIDY_S
            self.tidy(self._waiting.pop(0))

    def _look(self) -> None:
        for stream, spans in streams(self.store, self.uri).items():
            newest = max(span.last for span in spans)
            number, looks = self._seen.get(stream, (-1, 0))
            self._seen[stream] = (newest, looks + 1 if number == newest else 0)
            if self._seen[stream][1] == QUIET_LOOKS and len(spans) > 2:
                self._waiting.append(stream)

    def tidy(self, stream: str) -> None:
        """Merge all of it into as few objects as hold it, but for what its writer wrote last and for the end."""
        uri = uris.join(self.uri, stream)
        spans = streams(self.store, self.uri, only=stream).get(stream, [])
        try:
            kept = cover(spans)
        except Gap:
            return  # its writer merges it
        for span in superfluous(spans):
            self.store.delete(uris.join(uri, span.name))
        left = kept[:-1]
        if len(left) > 1 and (newest := kept[-1]).level == 0 and _ended(self.store, uri, newest, self.run_id):
            left = left[:-1]
        for group in self._groups(uri, left) if len(left) > 1 else ():
            _merge(self.store, uri, [segment.header for segment in group], _body(group))

    def _groups(self, uri: str, spans: Sequence[Span]) -> Iterator[list[Segment]]:
        """Runs of objects that fit one; no more than one run is in memory."""
        held: list[Segment] = []
        size = 0
        for span in spans:
            at = uris.join(uri, span.name)
            try:
                segment = Segment.decode(self.store.get(at).data, at, run_id=self.run_id)
            except FileNotFoundError as error:
                raise BusyError(f"{at} was merged while it was read") from error
            if held and size + segment.header.size > OBJECT_BYTES:
                if len(held) > 1:
                    yield held
                held, size = [], 0
            held.append(segment)
            size += segment.header.size
        if len(held) > 1:
            yield held


def _body(group: Sequence[Segment]) -> bytes:
    """The bytes of ``merged_parts`` of the group."""
    pieces: dict[str, list[bytes]] = {}
    for segment in group:
        for part, data in segment.stretches():
            pieces.setdefault(part.name, []).append(data)
    return b"".join(piece for found in pieces.values() for piece in found)


class Merged(BusyError):
    """What was listed is not there any more: list again."""


def _ended(store: Store, uri: str, span: Span, run_id: str) -> bool:
    """Whether this object says that the stream at ``uri`` was ended. Raises as the store, or Merged."""
    at = uris.join(uri, span.name)
    try:
        return Segment.decode(store.get(at).data, at, run_id=run_id).header.ended is not None
    except Damaged:
        return False
    except FileNotFoundError as error:
        raise Merged(f"{at} was merged while it was read") from error


def end_streams(store: Store, uri: str, writers: Sequence[str], *, run_id: str, by: str) -> None:
    """``end_stream`` for each of these streams below ``uri``, after one list for all of them. Raises as the store."""
    if not writers:
        return
    found = streams(store, uri)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="ending") as pool:
        ending = [
            pool.submit(end_stream, store, uris.join(uri, writer), found.get(writer, []), run_id=run_id, by=by)
            for writer in writers
        ]
        for one in ending:
            one.result()


def end_stream(store: Store, uri: str, spans: Sequence[Span], *, run_id: str, by: str) -> None:
    """Make sure that whoever still writes the stream at ``uri`` cannot add to it: its next number is taken.

    ``spans``: its objects, as they were listed. Raises as the store; BusyError: it changes all the time.
    """
    for _ in range(TRIES):
        newest = max(spans, key=lambda span: (span.last, -span.level), default=None)
        try:
            if newest is not None and newest.level == 0 and _ended(store, uri, newest, run_id):
                return
            number = newest.last + 1 if newest is not None else 0
            header = Header(run_id=run_id, level=0, first=number, last=number, ended=by)
            store.put_if_absent(uris.join(uri, header.span.name), Segment(header, b"").encode())
            return
        except (ConflictError, Merged):  # it was written or merged meanwhile, perhaps by us
            spans = spans_of(store.list(uri))
    raise BusyError(f"{uri} changes while it is ended")
