"""Ships the files of one writer, which grow on this machine, to the run's home in a bucket.

One process at a time ships a writer's files from a folder (an advisory lock, held from the first one on): agent,
watchdog and host program may all try, and rule 3 of ``chunks`` is about one process after another.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from muster.core.errors import BusyError, ConflictError, MusterError
from muster.core.event_log.names import LogName
from muster.core.protocols import Store
from muster.storage import uris
from muster.storage.home.chunks import ChunkWriter, Damaged, chain, offsets_in
from muster.storage.store.patient import in_time


@dataclass
class Shipper:
    """Ships the files of ``directory`` that ``names`` matches below ``uri``. Thread-safe; a ``Sealer`` of event logs.

    ``run_id``: of event files; None: they are output.
    """

    store: Store
    uri: str
    run_id: str | None
    directory: Path
    names: re.Pattern[str]
    now_s: Callable[[], float] = time.monotonic
    is_shared: bool = False
    """See ``ChunkWriter``."""
    trouble: str | None = None
    """Why the last try to ship did not succeed."""
    waiting_since_s: float | None = None
    """Since when the oldest byte waits that is known to wait."""
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _files: dict[str, ChunkWriter] = field(default_factory=dict)
    _claim: BinaryIO | None = None
    """Locked while this process is the one that ships."""
    _listed: Mapping[str, int] = field(default_factory=dict)
    """What the home held when it was locked."""

    @property
    def refused(self) -> str | None:
        """Why a file of this writer is taken no more."""
        return next((file.refused for file in list(self._files.values()) if file.refused is not None), None)

    def note(self) -> None:
        """Something was written. Never blocks."""
        if self.waiting_since_s is None:
            self.waiting_since_s = self.now_s()

    def look(self) -> None:
        """Note what was written by others than those who say so."""
        if self.waiting_since_s is None and any(self._waits(name, size) for name, size in self._sizes()):
            self.note()

    def _waits(self, name: str, size: int) -> bool:
        file = self._files.get(name)
        return file is None or (file.refused is None and size > file.end and size != file.seen)

    def seal(self, timeout_s: float) -> str | None:
        """See ``Sealer``. Raises ConflictError where this writer was replaced."""
        try:
            in_time(lambda: self.ship(wait_s=timeout_s), timeout_s, self.uri)
        except ConflictError:
            raise
        except (MusterError, OSError) as error:
            return str(error)
        return None

    def ship(self, *, wait_s: float = -1) -> None:
        """Bring everything that waits to the home.

        Raises:
            ConflictError: another process writes one of these files, or has ended it. All others were shipped.
            Damaged: the same of one that is damaged.
            BusyError: another thread has been shipping for ``wait_s`` (-1: wait for it), or another process ships.
            MusterError, OSError: not now; all of it waits for the next call.
        """
        if not self._lock.acquire(timeout=wait_s):
            raise BusyError(f"{self.uri}: no answer yet")
        try:
            since_s, self.waiting_since_s = self.waiting_since_s, None  # later writes start a new wait
            try:
                self._ship()
            except (ConflictError, Damaged) as error:  # neither gets better by waiting
                self.trouble = str(error)
                raise
            except BaseException as error:
                self.waiting_since_s = self.now_s() if since_s is None else since_s
                self.trouble = str(error)
                raise
            self.trouble = None
        finally:
            self._lock.release()

    def _ship(self) -> None:
        if self._claim is None:
            self._take_claim()
        problems: list[MusterError] = []
        for name, size in self._sizes():
            file = self._files[name] if name in self._files else self._new_file(name, size)
            file.seen = size
            if size == file.end and file.refused is None:
                continue
            try:
                file.write(self._listed)
            except (ConflictError, Damaged) as error:
                problems.append(error)
        if problems:
            problems.sort(key=lambda problem: not isinstance(problem, ConflictError))
            raise problems.pop(0)  # this frame keeps no error whose traceback keeps this frame, and the claim with it

    def _take_claim(self) -> None:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = open(self.directory / f".shipping-{uris.name(self.uri)}", "ab")  # noqa: SIM115 (held while we ship)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            raise BusyError(f"another process of this host ships {self.uri}") from error
        try:
            self._listed = self.store.list(self.uri)
        except BaseException:
            file.close()
            raise
        self._claim, self._files = file, {}

    def _new_file(self, name: str, size: int) -> ChunkWriter:
        uri = uris.join(self.uri, name)
        path = self.directory / name
        file = ChunkWriter(
            store=self.store, uri=uri, path=path, run_id=self.run_id, now_s=self.now_s, is_shared=self.is_shared
        )
        self._files[name] = file
        if chain(offsets_in(self._listed, uri))[1] == size and not self._is_newest(name):
            file.end = size  # one that is not written any more is not read to learn that
        return file

    def _is_newest(self, name: str) -> bool:
        named = LogName.of(name)
        others = (LogName.of(other) for other, _ in self._sizes())
        return named is not None and all(other is None or other.attempt <= named.attempt for other in others)

    def release(self) -> None:
        """Let another process of this folder ship them; while a request of ours hangs, it must not."""
        if self._lock.acquire(timeout=0.1):
            try:
                if self._claim is not None:
                    self._claim.close()
                    self._claim = None
            finally:
                self._lock.release()

    def _sizes(self) -> list[tuple[str, int]]:
        """Its files and their sizes now; those of newer attempts first, whose lines are awaited."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self.directory) as entries:
            found = [(entry.name, entry.stat().st_size) for entry in entries if self.names.match(entry.name)]
            return sorted(found, key=_newest_first)
        return []


def _newest_first(found: tuple[str, int]) -> tuple[int, int, str]:
    name = LogName.of(found[0])
    return (-name.attempt, name.part, found[0]) if name is not None else (0, 0, found[0])
