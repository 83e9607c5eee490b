"""One file of the double: streamed while it is new and written in order, staged otherwise (inode/file.go).

Nothing is in the bucket before a flush (the close of any descriptor) or, for a staged file, an fsync. Both make an
object, if its predecessor is the one that the file was opened on; else it is ESTALE, and what was written is gone.
"""

import errno
import threading
import time
from dataclasses import dataclass, field

from gcsfuse_bucket import Bucket, Meta, NotFound, Precondition
from gcsfuse_options import Settings

#: From this size on, an append uploads the tail alone (AppendThreshold).
COMPOSE_FROM = 1 << 21
SMALLEST_WINDOW, LARGEST_WINDOW = 1 << 20, 1 << 25


def stale(name: str) -> OSError:
    return OSError(errno.ESTALE, name)


class Streams:
    """How many files may be streamed at once (``write-global-max-blocks``)."""

    def __init__(self, most: int) -> None:
        self.free = threading.Semaphore(most)

    def take(self) -> bool:
        return self.free.acquire(blocking=False)

    def give(self) -> None:
        self.free.release()


@dataclass
class Stream:
    """Bytes under way to an object that nobody sees before it is finished."""

    replaces: Meta | None
    mtime_ns: int
    data: bytearray = field(default_factory=bytearray)
    cut: int = 0
    """Size after a truncation beyond the end."""
    broken: OSError | None = None
    """Why its object could not be made: every write fails so, until all descriptors are closed."""

    @property
    def size(self) -> int:
        return max(len(self.data), self.cut)

    def write(self, data: bytes | memoryview, offset: int) -> bool:
        """Whether that was in order. Raises OSError."""
        if self.broken is not None:
            raise self.broken
        if offset != len(self.data) and not (offset == self.cut and len(self.data) < self.cut):
            return False
        if offset == self.cut:
            self.fill()
        self.data += data
        return True

    def fill(self) -> None:
        self.data += bytes(max(0, self.cut - len(self.data)))


@dataclass
class Stage:
    """A local copy of the whole file."""

    data: bytearray
    clean: int
    """Bytes from the beginning that are the object's."""
    mtime_ns: int | None = None
    """None: nothing was changed."""


@dataclass
class Window:
    """What one descriptor has read ahead."""

    start: int = 0
    data: bytes = b""
    size: int = SMALLEST_WINDOW
    next: int = 0


class File:
    """A file's inode. ``source`` None: it is only here, no object has its name as far as this mount knows.

    Every method needs ``lock``; each raises OSError.
    """

    def __init__(
        self, inode: int, name: str, source: Meta | None, bucket: Bucket, settings: Settings, streams: Streams
    ):
        self.inode, self.name, self.source = inode, name, source
        self.bucket, self.settings, self.streams = bucket, settings, streams
        self.lock = threading.RLock()
        self.stream: Stream | None = None
        self.stage: Stage | None = None
        self.unlinked = False
        self.lookups = self.opens = 0

    def attributes(self) -> tuple[int, int, int]:
        """(size, modification time, links); no link is left once another object has the name."""
        size = self.source.size if self.source else 0
        mtime_ns = self.source.mtime_ns if self.source else time.time_ns()
        if self.stage is not None:
            size, mtime_ns = len(self.stage.data), self.stage.mtime_ns or mtime_ns
        if self.stream is not None:
            size, mtime_ns = self.stream.size, self.stream.mtime_ns
        try:
            links = int(self.source is not None and self.bucket.stat(self.name).identity == self.source.identity)
        except NotFound:
            links = int(self.source is None and not self.unlinked)
        return size, mtime_ns, links

    # ---------------------------------------------------------------- writing

    def begin(self) -> None:
        """Stream from here on where that is possible: a new file or an empty one, and few others are streamed."""
        if self.stream is not None or self.stage is not None or not self.settings.enable_streaming_writes:
            return
        replaces = self._current() if self.source else None
        if (replaces is None or replaces.size == 0) and self.streams.take():
            self.stream = Stream(replaces, time.time_ns())

    def new(self) -> None:
        """Just created: streamed or, where that is not possible, staged; dirty in both cases."""
        self.begin()
        if self.stream is None:
            self.stage = Stage(bytearray(), 0, time.time_ns())

    def write(self, data: memoryview, offset: int) -> None:
        self.begin()
        if self.stream is not None:
            if self.stream.write(data, offset):
                return
            self.finish()
        stage = self._staged()
        stage.data += bytes(max(0, offset - len(stage.data)))
        stage.data[offset : offset + len(data)] = data
        stage.clean, stage.mtime_ns = min(stage.clean, offset), time.time_ns()

    def truncate(self, size: int) -> None:
        self.begin()
        if self.stream is not None:
            if size >= len(self.stream.data):
                self.stream.cut = size
                return
            self.finish()
        stage = self._staged()
        del stage.data[size:]
        stage.data += bytes(size - len(stage.data))
        stage.clean, stage.mtime_ns = min(stage.clean, size), time.time_ns()

    def set_mtime(self, mtime_ns: int) -> None:
        """Of a file that is in the bucket one more update of the object: the metageneration changes."""
        if self.unlinked:
            return
        if self.stream is not None:
            self.stream.mtime_ns = mtime_ns
        elif self.stage is not None and (self.stage.mtime_ns is not None or self.source is None):
            self.stage.mtime_ns = mtime_ns
        elif self.source is not None:
            try:
                self.source = self.bucket.patch(self.source, mtime_ns)
            except (NotFound, Precondition):
                pass  # taken for unlinked: said to nobody

    def flush(self) -> None:
        """What a close does, of any descriptor. Raises OSError (ESTALE) where another object has come between."""
        if self.unlinked:
            self.drop()
        elif self.stream is not None:
            self.finish()
        elif self.stage is not None:
            self._upload(self.stage)

    def sync(self) -> None:
        """What fsync does: nothing that anybody would see, for a streamed file."""
        if self.stream is None:
            self.flush()

    def finish(self) -> None:
        """Make the streamed object."""
        assert self.stream is not None
        self.stream.fill()
        stream, deadline_s = self.stream, float(self.settings.chunk_retry_deadline_secs)
        try:
            made = self.bucket.insert(
                self.name, stream.data, stream.replaces, mtime_ns=stream.mtime_ns, deadline_s=deadline_s
            )
        except OSError as error:
            gone = isinstance(error, (Precondition, NotFound))
            stream.broken = stale(self.name) if gone else error
            raise stream.broken from error
        self.drop()
        self.source = made

    def closed(self) -> None:
        """One descriptor fewer."""
        self.opens -= 1
        if self.opens == 0 and self.stream is not None and self.stream.broken:
            self.drop()

    def drop(self) -> None:
        """Forget what was written."""
        if self.stream is not None:
            self.stream = None
            self.streams.give()
        self.stage = None

    def _upload(self, stage: Stage) -> None:
        current = self._current() if self.source else None
        if stage.mtime_ns is None or (current and current.size == len(stage.data) == stage.clean):
            return
        try:
            if current and current.size >= COMPOSE_FROM and stage.clean == current.size:
                made = self.bucket.append(current, stage.data[stage.clean :], stage.mtime_ns)
            else:
                made = self.bucket.insert(self.name, stage.data, current, mtime_ns=stage.mtime_ns)
        except (Precondition, NotFound) as error:
            raise stale(self.name) from error
        self.source, self.stage = made, None

    def _current(self) -> Meta:
        """The object as the bucket has it now. Raises OSError (ESTALE) where it is not this file's any more."""
        try:
            found = self.bucket.stat(self.name, fresh=True)
        except NotFound as error:
            raise stale(self.name) from error
        if self.source is None or found.identity != self.source.identity:
            raise stale(self.name)
        return found

    def _staged(self) -> Stage:
        if self.stage is None:
            data = bytearray(self._fetch(0, self.source.size)) if self.source else bytearray()
            self.stage = Stage(data, len(data))
        return self.stage

    # ---------------------------------------------------------------- reading

    def read(self, window: Window, offset: int, size: int) -> memoryview:
        """Reading a streamed file finishes its object first; the writer goes on staged."""
        if self.stream is not None:
            self.flush()
        if self.stage is not None:
            return memoryview(bytes(self.stage.data[offset : offset + size]))
        if self.source is None or offset >= self.source.size:
            return memoryview(b"")
        end = min(offset + size, self.source.size)
        if not (window.start <= offset and end <= window.start + len(window.data)):
            in_order = offset == window.next and offset > 0
            window.size = min(window.size * 2, LARGEST_WINDOW) if in_order else SMALLEST_WINDOW
            window.start, window.data = offset, self._fetch(offset, offset + max(size, window.size))
        window.next = end
        return memoryview(window.data)[offset - window.start : end - window.start]

    def check(self) -> None:
        """Raises OSError (ESTALE, ENOENT) unless the object is still this file's (``strong-consistency-on-open``)."""
        if self.source and self.bucket.stat(self.name, fresh=True).identity != self.source.identity:
            raise stale(self.name)

    def _fetch(self, start: int, stop: int) -> bytes:
        assert self.source is not None
        try:
            return self.bucket.read(self.source, start, stop)
        except NotFound as error:
            raise stale(self.name) from error
