"""Where a run lives: what its processes share (lease, fences, events, logs, status) is under one URI, its home.

On this machine and on shared disks the home is the run's folder itself (``FolderHome``). Where no folder is shared
(pods with a bucket), every process has a local folder of its own that looks like a run's folder, and one line in it,
the file ``home``, names the URI (``BucketHome``): what has to be seen by others is written there by conditional writes,
and a thread ships event logs as sealed segments.

``open_home(run_dir)`` is the one way in; nothing outside this package asks which of the two it is, except to say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Protocol

from muster.core.event_log import EventLog
from muster.core.protocols import Clock, Store
from muster.storage.home.folder import FolderHome

__all__ = ["HOME_FILE", "FolderHome", "Home", "HomeSync", "What", "open_home"]

#: File of a local run folder that names the URI of the run's home; absent: the folder is the home.
HOME_FILE = "home"
What = Literal["events", "logs"]


class HomeSync(Protocol):
    """What ships a process's files to the home, from ``start`` to ``stop``."""

    @property
    def trouble(self) -> str | None:
        """Why something waits to be shipped; None: nothing waits for longer than it should."""
        ...

    def stop(self, timeout_s: float) -> bool:
        """Ship what waits, and end; whether everything arrived in time."""
        ...


class Home(Protocol):
    """One run's home, as one process sees it. Thread-safe but for the logs that it opens."""

    @property
    def uri(self) -> str:
        """The home: a path or ``gs://bucket/folder``."""
        ...

    @property
    def local(self) -> Path:
        """This process's run folder."""
        ...

    @property
    def is_folder(self) -> bool:
        """The local folder is the home."""
        ...

    @property
    def store(self) -> Store:
        """For conditional writes under ``uri``; asks again where the store is busy."""
        ...

    def uri_of(self, *parts: str) -> str:
        """``uri/part/part``."""
        ...

    def open_log(self, run_id: str, writer: str, attempt: int, clock: Clock | None = None) -> EventLog:
        """The writing end of ``events/WRITER.ATTEMPT.jsonl``; a predecessor's is continued. Raises as ``EventLog``."""
        ...

    def mirror(self, into: Path, *, what: What = "events") -> int:
        """Bring to the folder ``into`` what the home holds beyond it; bytes that were new. 0 where it is the same."""
        ...

    def heads(self, run_id: str) -> Mapping[str, str]:
        """What the next line of every event file would cite, as far as it is sealed: file name -> SHA-256."""
        ...

    def fetch(self) -> bool:
        """Bring the newest run file and code (``publish_run_file``) to the local folder; whether they were new."""
        ...

    def publish(self, name: str, data: bytes, *, generation: str | None = None) -> str:
        """Write the small object ``name`` below the home, only over ``generation`` where given; its new generation.

        Raises:
            ConflictError: it is of another generation.
        """
        ...

    def start(self, writer: str) -> HomeSync:
        """Begin to ship this process's files: events at most 4 s old, its logs, and copies of what others write."""
        ...


def open_home(local: Path) -> Home:
    """The home of the run whose folder on this machine is ``local``. Nothing is contacted yet.

    Raises:
        UsageError: the file ``home`` names no home.
    """
    return FolderHome(local)
