"""The reading end: files of a run's home in a bucket, copied to a folder."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from muster.core import event_log
from muster.core.errors import UsageError
from muster.core.event_log.names import LogName
from muster.core.processes import read_plain
from muster.core.protocols import Store
from muster.storage import uris
from muster.storage.home.chunks import RESTORE, Damaged, chain, chained, gap, offsets_in, uri_of
from muster.storage.home.files import replace_bytes

#: Reads at once; so many objects of a MiB or two are in memory.
THREADS = 16
#: Lists of a file at most, before objects count as missing: a list that comes in pages is not one moment's.
LISTS = 3
#: What the writers' names of supervisors begin with.
SUPERVISORS = "supervisor."
#: Of a file's name, at most.
NAME_BYTES = 255
#: Longer than any line.
_LINE_BYTES = 1 << 20
_OUTPUT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]*\.log")
_FORMAT_1 = re.compile(r"(?:0-\d{10}|\d{1,2}-\d{10}-\d{10})")
LOCK, OWNERS = ".mirror.lock", ".owners.json"


@dataclass
class _File:
    writer: str
    uri: str
    path: Path
    objects: dict[int, int]
    size: int = 0
    """Bytes that are here."""
    head: str = ""
    """Of an event file: what its next line has to cite."""
    is_here: bool = True
    """These bytes were here before."""


@dataclass
class Mirror:
    """Appends to the files of ``directory`` what the home holds of them below ``uri``, and they lack.

    What is here of a file is all that is known of it: its size says what is new. Files of the writers in ``own`` are
    left alone: they are written here. ``only``: no other writer than this one. ``on_damage``: called with damage, one
    line each, instead of an error; but damage of supervisors' events is an error, for a run's state is what they say.

    Raises:
        Damaged: objects are missing or do not continue what is here. Every other file was brought.
        UsageError: the run was written by an earlier version.
    """

    store: Store
    uri: str
    run_id: str
    directory: Path
    what: str = "events"
    own: Collection[str] = ()
    only: str | None = None
    on_damage: Callable[[str], None] | None = None
    _problems: dict[str, Damaged] = field(default_factory=dict)
    """URI of a file -> what is wrong with it."""
    _broken: set[str] = field(default_factory=set)
    """Those that cannot be read on."""

    def run(self) -> int:
        """Bytes that were new."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(self.directory / LOCK, "ab") as lock:  # another command may be bringing the same bytes
            fcntl.flock(lock, fcntl.LOCK_EX)
            total = 0
            for file, uri, found in self._fetched(self._files()):
                if file.uri not in self._broken:
                    try:
                        total += self._append(file, uri, found.result())
                    except Damaged as damage:
                        self._problems[file.uri] = damage
                        self._broken.add(file.uri)
        for uri, problem in self._problems.items():
            text = f"{self.what} of {uri[len(self.uri) + 1 :].partition('/')[0]}: {problem}"
            decides = self.what == "events" and uri.startswith(f"{self.uri}/{SUPERVISORS}")
            if self.on_damage is None or decides:
                raise Damaged(text, hint=problem.hint)
            self.on_damage(f"{text} ({problem.hint})" if problem.hint else text)
        return total

    # ------------------------------------------------------------ what there is

    def _files(self) -> list[_File]:
        """Those that the home holds more of than is here."""
        listed = self.store.list(uris.join(self.uri, self.only) if self.only else self.uri)
        named: dict[tuple[str, str], None] = {}
        for uri in listed:
            writer, _, inside = uri[len(self.uri) + 1 :].partition("/")
            name, _, offset = inside.partition("/")
            if _FORMAT_1.fullmatch(name):
                raise UsageError(
                    f"{uri} is of a home of format 3 or older, which this version does not read",
                    hint="commit 331955c5 of Muster's repository reads it, muster down ends the run",
                )
            if not self._is_name(writer, name) or not offset:
                self._problems[uri] = Damaged(f"{uri} is no part of a file of {self.what}", hint="remove it")
            elif writer not in self.own:
                named[writer, name] = None
        owners = _Owners(self.directory / OWNERS) if self.what == "logs" else None
        result = []
        for writer, name in named:
            path = self.directory / (owners.name_for(writer, name) if owners is not None else name)
            uri = uris.join(self.uri, writer, name)
            file = _File(writer, uri, path, offsets_in(listed, uri))
            if self._is_new(file):
                result.append(file)
        return result

    def _is_name(self, writer: str, name: str) -> bool:
        """Whether ``writer`` may have a file of this name."""
        longest = f"{name}@{writer}"
        if self.what != "events":
            return bool(_OUTPUT.fullmatch(name)) and writer.isprintable() and len(longest.encode()) <= NAME_BYTES
        named = LogName.of(name)
        if named is None or len(longest.encode()) > NAME_BYTES:
            return False
        return writer == (f"{SUPERVISORS}{named.attempt}" if named.writer == "supervisor" else named.writer)

    def _is_new(self, file: _File) -> bool:
        """Whether the home holds more of it than is here; the file knows then how much is here."""
        missing = gap(file.objects, file.uri)
        for _ in range(LISTS - 1 if missing is not None else 0):
            file.objects = offsets_in(self.store.list(file.uri), file.uri)
            if (missing := gap(file.objects, file.uri)) is None:
                break
        if missing is not None:
            self._problems[file.uri] = missing
        end = chain(file.objects)[1]
        with contextlib.suppress(FileNotFoundError):
            file.size = file.path.stat().st_size
        if end <= file.size:
            return False
        if self.what == "events":
            file.size, file.head = _whole_lines(file.path, file.size, self.run_id)
        file.is_here = file.size > 0
        return True

    def _fetched(self, files: list[_File]) -> Iterator[tuple[_File, str, Future[bytes]]]:
        """(file, URI of the object, what is new in it), each file's in their order; the first ones of all files come
        first. At most ``THREADS`` are read ahead of the caller."""
        reads = [list(_reads(file)) for file in files]
        ordered = [*(read[0] for read in reads), *(one for read in reads for one in read[1:])]
        waiting: deque[tuple[_File, str, Future[bytes]]] = deque()
        with ThreadPoolExecutor(THREADS, thread_name_prefix="mirror") as pool:
            for file, uri, start, size in ordered:
                if file.uri in self._broken:
                    continue
                waiting.append((file, uri, pool.submit(self._get, uri, start, size)))
                if len(waiting) >= THREADS:
                    yield waiting.popleft()
            while waiting:
                yield waiting.popleft()

    def _get(self, uri: str, start: int, size: int | None) -> bytes:
        try:
            data = self.store.get(uri, start=start).data
        except FileNotFoundError as error:
            raise Damaged(f"{uri} was removed while it was read", hint=RESTORE) from error
        if size is not None and len(data) < size:
            raise Damaged(f"{uri} has lost its end", hint=RESTORE)
        return data[:size]

    # ------------------------------------------------------------ what is written here

    def _append(self, file: _File, uri: str, data: bytes) -> int:
        """Bytes that were added: whole lines that continue the chain, or output as it is. Raises Damaged."""
        good, head = len(data), ""
        if self.what == "events":
            good, head = chained(data[: data.rfind(b"\n") + 1], file.head)
        fd = os.open(file.path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(fd, "wb", buffering=0) as here:
            here.truncate(file.size)  # what follows the last whole line was torn
            here.seek(file.size)
            rest = data[:good]
            while rest:
                rest = rest[here.write(rest) or 0 :]
        at, was_here = file.size, file.is_here
        file.size, file.head, file.is_here = file.size + good, head, False
        if good < len(data):
            if was_here and not good:
                raise Damaged(
                    f"{file.path} is not what {uri} continues", hint=f"remove {file.path}: it is brought again"
                )
            raise Damaged(f"{uri} was changed: no line of this file is at its byte {at + good}", hint=RESTORE)
        return good


def _reads(file: _File) -> Iterator[tuple[_File, str, int, int | None]]:
    """What is to be read of each object: from which byte, and how many; None: all that there is by then."""
    offsets, end = chain(file.objects)
    for offset in offsets:
        stop = offset + file.objects[offset]
        if stop > file.size:
            start = max(file.size, offset)
            yield file, uri_of(file.uri, offset), start - offset, stop - start if stop < end else None


def _whole_lines(path: Path, size: int, run_id: str) -> tuple[int, str]:
    """How many bytes of an event file are whole lines, and what the next one has to cite."""
    if size == 0:
        return 0, event_log.genesis(run_id, path.name)
    with open(path, "rb") as file:
        file.seek(max(0, size - _LINE_BYTES))
        torn = len(file.read().rpartition(b"\n")[2])
    return size - torn, event_log.head(path, run_id=run_id)


class _Owners:
    """Which writer each file of output in a folder is of: two hosts may have one of the same name."""

    def __init__(self, path: Path) -> None:
        self._path, self._writers = path, dict[str, str]()
        with contextlib.suppress(OSError, ValueError, TypeError):
            self._writers = dict(json.loads(read_plain(path)))

    def name_for(self, writer: str, name: str) -> str:
        """The name here of a writer's file: its own, or with the writer's where another one had it first."""
        if self._writers.get(name, writer) != writer:
            name = f"{name.removesuffix('.log')}@{writer}.log"
        if name not in self._writers:
            self._writers[name] = writer
            replace_bytes(self._path, json.dumps(self._writers).encode())
        return name
