"""The reading end: what the home holds, as the files that they were cut from."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import tempfile
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from io import RawIOBase
from pathlib import Path

from muster.core import event_log
from muster.core.errors import BusyError, MusterError
from muster.core.protocols import Store
from muster.storage import uris
from muster.storage.home.segments import Damaged, Gap, Part, Segment, Span, cover, is_whole

#: Reads at once; so many objects of at most 8 MiB are in memory.
THREADS = 16
#: Lists at most: each follows a merge that removed what was about to be read.
ROUNDS = 8
#: What the streams of supervisors begin with.
SUPERVISORS = "supervisor."
#: Of a file's name, at most.
NAME_BYTES = 255
_FILE = {
    "events": re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]*\.\d+\.jsonl$"),
    "logs": re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.@-]*\.log$"),
}


class _Again(Exception):
    """What was listed is not there any more."""


class _Anew(Exception):
    """A file here is not what was brought: its stream is read from the beginning."""


@dataclass
class Mirror:
    """Appends to the files of ``directory`` what the streams below ``uri`` hold beyond them.

    Incremental: ``directory/.mirror.json`` says how far each stream was read, so that an object is read once. Streams
    in ``own`` are left alone: their files are written here. An event file that was damaged here is kept as
    ``NAME.damaged`` and brought anew; what was cut short is made whole. An object that was damaged in the home is left
    out: in its place stands one line of as many bytes that is no event, and what follows it comes. ``only``: no other
    stream than this one. ``on_damage``: told of damage instead of an error; of supervisors' events only of objects
    that were left out.

    Raises:
        MusterError: segments are missing or damaged, or a file here is not what the home holds. Everything else was
            brought.
    """

    store: Store
    uri: str
    run_id: str
    directory: Path
    what: str = "events"
    own: Collection[str] = ()
    only: str | None = None
    on_damage: Callable[[str], None] | None = None
    _heads: dict[str, str] = field(default_factory=dict)
    _anew: set[str] = field(default_factory=set)

    def run(self) -> int:
        """Bytes that were new."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(self.directory / LOCK, "ab") as lock:  # another command may be bringing the same bytes
            fcntl.flock(lock, fcntl.LOCK_EX)
            return self._run()

    def _run(self) -> int:
        state = self._state()
        self._look_again(state)
        total = 0
        problems: dict[str, MusterError] = {}
        for _ in range(ROUNDS):
            problems.clear()
            todo = self._todo(state.next_number, problems)
            again = False
            for stream, span, result in self._fetched(todo):
                if stream in problems:
                    continue
                try:
                    total += self._apply(stream, result(), state)
                    state.next_number[stream] = max(state.next_number.get(stream, 0), span.last + 1)
                except _Again:
                    again = True
                    problems[stream] = BusyError(f"{uris.join(self.uri, stream, span.name)} was merged meanwhile")
                except _Anew as error:
                    again = True
                    state.forget(stream)
                    problems[stream] = BusyError(str(error))
                except Damaged as error:
                    state.damage[f"{stream}/{span.name}"] = str(error)
                    state.next_number[stream] = max(state.next_number.get(stream, 0), span.last + 1)
                except MusterError as error:
                    problems[stream] = error
            if todo:
                self._save(state)
            if not again and not any(isinstance(problem, Gap) for problem in problems.values()):
                break
        serious = [self._told(stream, problem) for stream, problem in problems.items()]
        serious += [self._left_out(stream, text) for stream, text in state.damaged() if self._is_wanted(stream)]
        for found in serious:
            if found is not None:
                raise found
        return total

    def _look_again(self, state: _State) -> None:
        """Read streams anew of which an object was damaged, and is not any more: brought back, or merged."""
        for key in list(state.damage):
            stream, _, name = key.partition("/")
            span = Span.of(name)
            if span is None or not self._is_wanted(stream):
                continue
            with contextlib.suppress(Damaged):
                with contextlib.suppress(_Again):
                    self._get(stream, span)
                state.forget(stream)

    def _is_wanted(self, stream: str) -> bool:
        return stream not in self.own and self.only in (None, stream)

    def _left_out(self, stream: str, problem: str) -> MusterError | None:
        text = f"{self.what} of {stream}: {problem}: what it held is left out"
        if self.on_damage is None:
            return Damaged(text, hint="everything else was brought")
        self.on_damage(text)
        return None

    def _told(self, stream: str, problem: MusterError) -> MusterError | None:
        """None once it was reported: damage stays, and nobody is to be stopped by one host's; all else may pass."""
        text = f"{self.what} of {stream}: {problem}"
        decides = self.what == "events" and stream.startswith(SUPERVISORS)  # a run's state is what these events say
        if self.on_damage is None or type(problem) not in (MusterError, Gap) or decides:
            return type(problem)(text, hint=problem.hint)
        self.on_damage(text)
        return None

    def _todo(self, after: Mapping[str, int], problems: dict[str, MusterError]) -> list[tuple[str, Span]]:
        """Objects that hold something new, stream by stream, in order."""
        result: list[tuple[str, Span]] = []
        for stream, spans in streams(self.store, self.uri, only=self.only).items():
            if stream in self.own:
                continue
            try:
                result += [(stream, span) for span in cover(spans) if span.last >= after.get(stream, 0)]
            except Gap as gap:
                problems[stream] = gap
        return result

    def _fetched(self, todo: Sequence[tuple[str, Span]]) -> Iterator[tuple[str, Span, Callable[[], Segment]]]:
        """In the order of ``todo``, at most ``THREADS`` ahead of who takes them."""
        waiting: deque[tuple[str, Span, Future[Segment]]] = deque()
        with ThreadPoolExecutor(THREADS, thread_name_prefix="mirror") as pool:
            for stream, span in todo:
                waiting.append((stream, span, pool.submit(self._get, stream, span)))
                if len(waiting) >= THREADS:
                    stream, span, future = waiting.popleft()
                    yield stream, span, future.result
            while waiting:
                stream, span, future = waiting.popleft()
                yield stream, span, future.result

    def _get(self, stream: str, span: Span) -> Segment:
        uri = uris.join(self.uri, stream, span.name)
        try:
            try:
                return Segment.decode(self.store.get(uri).data, uri, run_id=self.run_id)
            except Damaged:  # perhaps on its way only
                return Segment.decode(self.store.get(uri).data, uri, run_id=self.run_id)
        except FileNotFoundError as error:
            raise _Again from error

    def _apply(self, stream: str, segment: Segment, state: _State) -> int:
        new = 0
        for part, data in segment.stretches():
            longest = f"{part.name}@{stream}"
            if not (_FILE[self.what].match(part.name) and stream.isprintable() and len(longest.encode()) <= NAME_BYTES):
                raise MusterError(f"{part.name!r} is no name of a file of {self.what}")
            name = state.file_of(stream, part.name)
            new += self._append(name, part, data, lossy=any(found == stream for found, _ in state.damaged()))
            state.sizes[name] = max(state.sizes.get(name, 0), part.end)
        return new

    def _append(self, name: str, part: Part, data: bytes, *, lossy: bool) -> int:
        """``lossy``: an object before this one was left out."""
        path = self.directory / name
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(fd, "a+b", buffering=0) as file:
            have = os.fstat(fd).st_size
            if have < part.start and lossy:
                _write(file, _filler(part.start - have))
                have, self._heads[name] = part.start, part.prev
            if have < part.start:
                self._bring_anew(path, aside=False)
                raise MusterError(f"{path} lacks bytes {have} to {part.start}", hint="remove it: it is brought again")
            overlap, rest = data[: have - part.start], data[have - part.start :]
            chained = self.what == "events"
            # What is damaged in the home may be whole here.
            if (os.pread(fd, len(overlap), part.start) != overlap and not (chained and not is_whole(part, data))) or (
                chained and not overlap and self._head(name) != part.prev
            ):
                self._bring_anew(path, aside=chained)
                raise MusterError(f"{path} is not what the home holds", hint="move it aside: it is brought again")
            if not rest:
                return 0
            _write(file, rest)
            self._heads[name] = part.head
            return part.end - have

    def _bring_anew(self, path: Path, *, aside: bool) -> None:
        """``aside``: what is here is kept under another name. Raises _Anew, once for each file."""
        self._heads.pop(path.name, None)
        if path.name in self._anew:
            return
        self._anew.add(path.name)
        if aside:
            os.replace(path, path.with_name(f"{path.name}.damaged"))
        raise _Anew(f"{path} was damaged")

    def _head(self, name: str) -> str:
        if name not in self._heads:
            self._heads[name] = event_log.head(self.directory / name, run_id=self.run_id)
        return self._heads[name]

    def _state(self) -> _State:
        state = _State()
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            held = json.loads((self.directory / STATE).read_text())
            if held["uri"] == self.uri:
                state = _State(*(dict(held[key]) for key in ("next", "owners", "sizes", "damage")))
        for name, stream in state.owners.items():
            with contextlib.suppress(FileNotFoundError):
                if (self.directory / name).stat().st_size >= state.sizes.get(name, 0):
                    continue
            state.forget(stream)  # a file was removed or cut short here: read its stream again
        return state

    def _save(self, state: _State) -> None:
        held = {
            "uri": self.uri,
            "next": state.next_number,
            "owners": state.owners,
            "sizes": state.sizes,
            "damage": state.damage,
        }
        with tempfile.NamedTemporaryFile("w", dir=self.directory, prefix=".mirror-", delete=False) as file:
            json.dump(held, file)
        os.replace(file.name, self.directory / STATE)


STATE, LOCK = ".mirror.json", ".mirror.lock"


@dataclass
class _State:
    next_number: dict[str, int] = field(default_factory=dict)
    """Of each stream: the first segment that was not read yet."""
    owners: dict[str, str] = field(default_factory=dict)
    """Of each file here: the stream that it comes from."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Of each file here: how much of it was brought."""
    damage: dict[str, str] = field(default_factory=dict)
    """Of each object that was left out (STREAM/NAME): what is wrong with it."""

    def damaged(self) -> list[tuple[str, str]]:
        """Stream, and what is wrong with an object of it."""
        return [(key.partition("/")[0], text) for key, text in self.damage.items()]

    def forget(self, stream: str) -> None:
        """Read it from its beginning."""
        self.next_number.pop(stream, None)
        self.damage = {key: text for key, text in self.damage.items() if not key.startswith(f"{stream}/")}

    def file_of(self, stream: str, name: str) -> str:
        """Two hosts may have a file of one name (output): the second one's gets its stream's name as well."""
        if self.owners.setdefault(name, stream) == stream:
            return name
        stem, dot, suffix = name.rpartition(".")
        other = f"{stem}@{stream}{dot}{suffix}"
        self.owners[other] = stream
        return other


def _write(file: RawIOBase, data: bytes) -> None:
    while data:
        data = data[file.write(data) or 0 :]


def _filler(size: int) -> bytes:
    """One line in the place of bytes that are lost: no event."""
    return (
        f"{size} bytes are lost here: their object in the run's home is damaged".encode()[: size - 1].ljust(size - 1)
        + b"\n"
    )


def streams(store: Store, uri: str, *, only: str | None = None) -> dict[str, list[Span]]:
    """Stream -> its objects, below ``uri``."""
    result: dict[str, list[Span]] = {}
    for found in store.list(uris.join(uri, only) if only else uri):
        stream, _, name = found[len(uri.rstrip("/")) + 1 :].rpartition("/")
        span = Span.of(name)
        if span is not None and stream and "/" not in stream:
            result.setdefault(stream, []).append(span)
    return result
