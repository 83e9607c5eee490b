"""One file of a run's home in a bucket: a series of objects, and the only process that writes them.

::

    events/host-2-k3f9a/host-2-k3f9a.3.jsonl/000000000000    bytes of the file from 0 on, as they are
    events/host-2-k3f9a/host-2-k3f9a.3.jsonl/000001048613    the next object: its name is the end of the one before

In the order of their names the objects are the file; of an event file each holds whole lines. An object whose offset is
inside another one is ignored: its bytes are there too. An empty object at the end of a file is a plug: no object can
begin there, so the file takes nothing more.

Any process may be killed and any request may be carried out late, after its sender gave up or died. Four rules keep the
file a prefix of what its writer wrote (``tests/unit/storage/test_home_protocol.py`` fails without any of them):

1. A writer has two requests: it rewrites the newest object under its generation, or creates the next one at its end.
2. A request that was not answered is sent again, with the same name and condition, until it is answered.
3. The next object is created once the newest one is full, or was written by this process with an answer. So a process
   that starts rewrites what is not full: a late request of a killed predecessor then fails, or creates an object inside
   another.
4. What the home holds is learned in this order: the list, the newest object with its generation, a plug at its end.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from muster.core.errors import BusyError, ConflictError, MusterError
from muster.core.event_log import cadence, genesis, verify
from muster.core.event_log.names import LogName
from muster.core.protocols import Store
from muster.core.typed_json import parse_object
from muster.storage import uris

#: From this size on an object is not rewritten any more, by any process: a change of it is a change of the format.
FULL_BYTES = cadence.OBJECT_BYTES
#: An object that was written this short a time ago is not rewritten: Cloud Storage takes one write a second of each.
HOT_S = 1.0
#: Objects that are missing are looked for again after this time, in seconds.
GAP_S = 60.0
#: Times that what the home holds is learned in one call: more often, another process changes it all the time.
TRIES = 20
_OFFSET = re.compile(r"\d{12}")
RESTORE = (
    "restore it from soft delete, or remove it and all after it: a writer that still has the file uploads it again"
)


class Damaged(MusterError):
    """Objects of one file are missing or were changed, or its copy here was. Other files are not concerned."""


def uri_of(file: str, offset: int) -> str:
    """Of the object of ``file`` that begins at ``offset``."""
    return uris.join(file, f"{offset:012d}")


def offsets_in(listed: Mapping[str, int], file: str) -> dict[int, int]:
    """Offset -> bytes of the objects of ``file`` in a list."""
    names = {uri[len(file) + 1 :]: size for uri, size in listed.items() if uri.startswith(f"{file}/")}
    return {int(name): size for name, size in names.items() if _OFFSET.fullmatch(name)}


def chain(objects: Mapping[int, int]) -> tuple[list[int], int]:
    """Offsets of the objects that make up a file, in order, and where they end."""
    result, end = [], 0
    while objects.get(end, 0) > 0:
        result.append(end)
        end += objects[end]
    return result, end


def gap(objects: Mapping[int, int], file: str) -> Damaged | None:
    """Which object of ``file`` is missing before others, unless the list is of several moments."""
    end, newest = chain(objects)[1], max(objects, default=0)
    if newest <= end:
        return None
    return Damaged(f"{uri_of(file, end)} is missing: there are objects up to {uri_of(file, newest)}", hint=RESTORE)


def chained(lines: bytes, head: str) -> tuple[int, str]:
    """How many bytes of these whole lines follow ``head``, each citing the one before it; and the last one's hash."""
    good = 0
    while good < len(lines):
        line = lines[good : lines.find(b"\n", good) + 1]
        try:
            if parse_object(line)["prev"] != head:
                break
        except (ValueError, KeyError):
            break
        good, head = good + len(line), hashlib.sha256(line).hexdigest()
    return good, head


@dataclass(kw_only=True)
class ChunkWriter:
    """Uploads one file of this machine as it grows. Not thread-safe; a second process that writes it is refused.

    The file is the truth and the buffer: nothing waits in memory, and a process that is killed loses nothing.
    """

    store: Store
    uri: str
    path: Path
    run_id: str | None
    """Of an event file, of which whole lines that continue its chain are uploaded; None: output, as it is."""
    now_s: Callable[[], float] = time.monotonic
    is_shared: bool = False
    """Other machines may write it at the same time. Then no object is begun before the newest is full: a rewrite of the
    one and a creation of the next do not exclude each other."""
    end: int = 0
    """Bytes of the file that the home holds and keeps."""
    seen: int = 0
    """Its size when it was last read: what is beyond ``end`` then is no whole line."""
    refused: str | None = None
    """Why the home takes nothing more of it."""
    is_left: bool = False
    """Its writer went on in the next part, and the home holds something else of this one: both stay as they are."""
    _is_known: bool = False
    """Whether the fields below say what the home holds."""
    _start: int = 0
    """Offset of the newest object."""
    _generation: str | None = None
    """Its generation; None: there is no object."""
    _is_mine: bool = False
    """It was written by this process, with an answer."""
    _digest: bytes = b""
    """SHA-256 of what it holds."""
    _head: str = ""
    """What the line at ``end`` has to cite."""
    _written_s: float = float("-inf")
    _pending: Literal["rewrite", "create"] | None = None
    """The request that was not answered."""
    _gap: tuple[float, str] | None = None
    """Until when objects count as missing without another list, and which."""

    def write(self, listed: Mapping[str, int] | None = None) -> None:
        """Upload what waits now; what is written meanwhile waits for the next call.

        ``listed``: what the first call begins with; it may be old, or know nothing of the file.

        Raises:
            ConflictError: another process writes this file, or a successor has ended it.
            Damaged: the file here, or what the home holds of it; nothing more of it is uploaded.
            MusterError, OSError: not now; the next call goes on.
        """
        if self.refused is not None:
            raise ConflictError(self.refused)
        if self._gap is not None and self.now_s() < self._gap[0]:
            raise Damaged(self._gap[1], hint=RESTORE)
        tries, waits = 0, self.path.stat().st_size
        while not self.is_left and not (self._is_known and self.end >= waits):
            if not self._is_known:
                if tries == TRIES:
                    raise BusyError(f"{self.uri} changes while it is read")
                self._learn(self.store.list(self.uri) if tries or self._generation else listed or {})
                tries += 1
                continue
            fresh, head = self._fresh()
            if not fresh:
                return
            self._put(fresh, head)

    # ------------------------------------------------------------ what the home holds

    def _learn(self, listed: Mapping[str, int]) -> None:
        objects = offsets_in(listed, self.uri)
        if (missing := gap(objects, self.uri)) is not None:
            self._gap = (self.now_s() + GAP_S, str(missing))
            raise missing
        offsets, end = chain(objects)
        start = offsets[-1] if offsets else 0
        newest = self.store.get(uri_of(self.uri, start)) if offsets else None
        held = newest.data if newest is not None else b""
        if objects:  # only now: a plug that comes later changes the generation after it
            try:
                there = self.store.get(uri_of(self.uri, end := start + len(held))).data
            except FileNotFoundError:
                there = None
            if there:
                return  # the file goes on there
            if there is not None:
                self._refuse(f"{self.uri} was ended by a later process of the run")
        if self._read(start, len(held)) != held:  # lines cite all before them
            self._leave(start, held)
            return
        self._start, self.end, self._is_known, self._is_mine = start, end, True, False
        self._generation = newest.generation if newest is not None else None
        self._digest = _sha256(held)
        if self.run_id is not None:
            last = held[held.rfind(b"\n", 0, -1) + 1 :]
            self._head = hashlib.sha256(last).hexdigest() if last else genesis(self.run_id, self.path.name)

    def _leave(self, start: int, held: bytes) -> None:
        """The home holds something that the file here does not."""
        uri = uri_of(self.uri, start)
        if _is_continued(self.path):
            self.is_left = True
            return
        if self.run_id is not None and verify(self.path.read_bytes(), run_id=self.run_id, name=self.path.name).problem:
            raise Damaged(f"{self.path} is damaged: the home keeps what it holds of it", hint=_GO_ON)
        if self.run_id is not None and chained(held, _first_cited(held))[0] < len(held):
            raise Damaged(f"{uri} was changed: its lines do not cite each other", hint=RESTORE)
        self._refuse(f"{uri} holds what this process did not write: another one writes this file")

    def _refuse(self, reason: str) -> None:
        self.refused = reason
        raise ConflictError(reason)

    # ------------------------------------------------------------ what is uploaded next

    def _fresh(self) -> tuple[bytes, str]:
        """What waits, at most an object's worth, and what the line after it has to cite."""
        with open(self.path, "rb") as file:
            file.seek(self.end)
            data = file.read(FULL_BYTES)
            if self.run_id is None:
                return data, ""
            if data.find(b"\n") < 0 and len(data) == FULL_BYTES:
                data += file.readline()
        data = data[: data.rfind(b"\n") + 1]  # the torn end of a killed writer is dropped by the next one
        good, head = chained(data, self._head)
        if data and not good and not _is_continued(self.path):
            raise Damaged(f"{self.path} is damaged from byte {self.end} on", hint=_GO_ON)
        return data[:good], head

    def _put(self, fresh: bytes, head: str) -> None:
        before = self._read(self._start, self.end - self._start)
        is_whole = _sha256(before) == self._digest  # what was damaged here since is not uploaded again
        is_full = len(before) >= FULL_BYTES
        is_hot = self.now_s() - self._written_s < HOT_S
        early = self._is_mine and not self.is_shared and (is_hot or not is_whole)
        create = self._generation is None or is_full or early
        if self._pending is not None:
            create = self._pending == "create"
        if not create and not is_whole:
            raise Damaged(f"{self.path} is damaged before byte {self.end}", hint=_GO_ON)
        start, body = (self.end, fresh) if create else (self._start, before + fresh)
        uri = uri_of(self.uri, start)
        self._pending = "create" if create else "rewrite"
        try:
            if create:
                generation = self.store.put_if_absent(uri, body)
            else:
                assert self._generation is not None
                generation = self.store.put_if(uri, body, self._generation)
        except ConflictError:  # no earlier try of it can be carried out any more
            self._pending, self._is_known = None, False
            return
        self._pending, self._is_mine, self._written_s = None, True, self.now_s()
        self._start, self._generation, self._digest = start, generation, _sha256(body)
        self.end, self._head = start + len(body), head

    def _read(self, start: int, size: int) -> bytes:
        try:
            with open(self.path, "rb") as file:
                file.seek(start)
                return file.read(size)
        except FileNotFoundError:
            return b""


_GO_ON = "restart its process: it goes on in a new file"


def _first_cited(lines: bytes) -> str:
    """What the first of these lines cites; empty where it is none."""
    with contextlib.suppress(ValueError, KeyError):
        return str(parse_object(lines[: lines.index(b"\n") + 1])["prev"])
    return ""


def _is_continued(path: Path) -> bool:
    """Whether its writer has left this event file for the next part."""
    name = LogName.of(path.name)
    return name is not None and path.with_name(str(replace(name, part=name.part + 1))).exists()


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


@dataclass(frozen=True)
class Fence:
    """Ends files, so that the process that writes them, wherever it is, cannot add to them."""

    store: Store

    def end_log(self, uri: str, writer: str, attempt: int) -> None:
        """End every file of one log below ``uri``, and the one that its writer would go on with. Raises as the store.

        BusyError: it changes all the time.
        """
        listed = self.store.list(uri)
        known = {LogName.of(found[len(uri) + 1 :].partition("/")[0]) for found, size in listed.items() if size}
        newest = max((name.part for name in known if name is not None), default=1)
        for part in range(1, newest + 2):
            name = LogName(writer=writer, attempt=attempt, part=part)
            self.end_file(uris.join(uri, str(name)), listed)

    def end_file(self, file: str, listed: Mapping[str, int]) -> None:
        """Put a plug at its end, and then change the newest object's generation: neither request of its writer is
        carried out any more. A plug that a write has passed is inside an object, and ignored. Raises as ``end_log``."""
        for _ in range(TRIES):
            objects = offsets_in(listed, file)
            if (missing := gap(objects, file)) is not None:
                raise missing
            offsets, end = chain(objects)
            newest = self.store.get(uri_of(file, offsets[-1])) if offsets else None
            if newest is not None:
                end = offsets[-1] + len(newest.data)
            if self._plug(file, end):
                try:
                    if newest is not None:
                        self.store.put_if(uri_of(file, offsets[-1]), newest.data, newest.generation)
                    return
                except ConflictError:
                    pass  # its writer was faster
            listed = self.store.list(file)
        raise BusyError(f"{file} changes while it is ended")

    def _plug(self, file: str, end: int) -> bool:
        """Whether no object can begin at ``end``; False: one does."""
        try:
            self.store.put_if_absent(uri_of(file, end), b"")
        except ConflictError:
            return self.store.get(uri_of(file, end)).data == b""
        return True
