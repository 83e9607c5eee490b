"""Where a run lives: what its processes share (lease, fences, events, logs, status) is under one URI, its home.

On this machine and on shared disks the home is the run's folder itself (``FolderHome``). Where no folder is shared
(pods with a bucket), every process has a local folder of its own that looks like a run's folder, and one line in it,
the file ``home``, names the URI (``BucketHome``): what has to be seen by others is written there by conditional writes,
and threads ship files there as series of objects (``chunks``).

``open_home(run_dir)`` is the one way in; nothing outside this package asks which of the two it is, except to say so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from muster.core import event_log
from muster.core.clock import SystemClock
from muster.core.errors import UsageError
from muster.core.event_log import EventLog
from muster.core.processes import read_plain
from muster.core.protocols import Clock, Store
from muster.storage import uris
from muster.storage.home.bucket import BucketHome
from muster.storage.home.files import SUBMISSION_FILE
from muster.storage.run_registry import HOME_FILE
from muster.storage.store import open_store

__all__ = [
    "ANSWER_S",
    "HOME_FILE",
    "SUBMISSION_FILE",
    "BucketHome",
    "FolderHome",
    "Home",
    "HomeSync",
    "What",
    "open_home",
]

#: ``outputs``: what the run left behind besides checkpoints (``files.OUTPUTS``).
What = Literal["events", "logs", "outputs"]
#: Time in seconds that a call of ``Home.store`` takes at most in a bucket.
ANSWER_S = 2.0


class HomeSync(Protocol):
    """What ships a process's files to the home, from ``start`` to ``stop``."""

    @property
    def trouble(self) -> str | None:
        """Why something waits to be shipped; None: nothing waits for longer than it should."""
        ...

    def seek_supervisor(self, seeks: bool) -> None:
        """Whether this process looks for a supervisor: ``lease.json`` is copied more often then. Costs nothing."""
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
        """The writing end of ``events/WRITER.ATTEMPT.jsonl``; a predecessor's is continued. Raises as ``EventLog``.

        Contacts nothing, but for the writer ``client``, whose file another machine may have begun: as ``mirror`` then.
        """
        ...

    def end_earlier(self, run_id: str, writer: str, attempt: int) -> None:
        """Make sure that no earlier attempt of ``writer`` (an earlier term) can add to its log any more: its next
        ``sync`` raises ConflictError. Call it with the lease, before reading what they wrote. Raises as the store.
        """
        ...

    def mirror(
        self,
        into: Path,
        *,
        what: What = "events",
        on_damage: Callable[[str], None] | None = None,
    ) -> int:
        """Bring to the run's folder ``into`` (its ``events/``, ``logs/``, ...) what the home holds beyond it; bytes
        that were new. 0 where it is the same.

        ``on_damage``: called, with one line each, for files that could be brought in part only, instead of an error;
        but damage of a supervisor's events is always an error.

        Raises:
            Damaged: objects are missing or were changed, or a file here is not what the home holds; all else came.
            MusterError: as the store.
        """
        ...

    def heads(
        self,
        run_id: str,
        *,
        on_damage: Callable[[str], None] | None = None,
    ) -> Mapping[str, str]:
        """What the next line of every event file would cite, as far as it is in the home: file name -> SHA-256. Brings
        them and raises as ``mirror``."""
        ...

    def fetch(self) -> bool:
        """Bring the newest run file and code (``publish_run_file``) to the local folder; whether they were new.

        They are those of the local folder's submission, which its file ``submission`` names (absent: 1)."""
        ...

    def publish_run_file(self, submission: str, named: Mapping[str, bytes]) -> None:
        """Put a corrected run file (``resolved.json``, ``run.yaml``, code by its path) where ``fetch`` finds it."""
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


@dataclass(frozen=True)
class NothingToShip:
    """The files are where they belong."""

    trouble: str | None = None

    def seek_supervisor(self, seeks: bool) -> None:
        """Nothing to do: the lease is in the folder itself."""

    def stop(self, timeout_s: float) -> bool:
        return True


@dataclass(frozen=True)
class FolderHome:
    """See ``Home``: the folder ``local`` is all of it, and nothing is shipped."""

    local: Path
    store: Store = field(default_factory=open_store)
    is_folder: bool = True

    @property
    def uri(self) -> str:
        return str(self.local)

    def uri_of(self, *parts: str) -> str:
        return uris.join(str(self.local), *parts)

    def open_log(self, run_id: str, writer: str, attempt: int, clock: Clock | None = None) -> EventLog:
        return EventLog(run_id, self.local / "events", writer, attempt, clock or SystemClock())

    def end_earlier(self, run_id: str, writer: str, attempt: int) -> None:
        """A file's lock and the lease keep earlier ones out."""

    def mirror(
        self,
        into: Path,
        *,
        what: str = "events",
        on_damage: Callable[[str], None] | None = None,
    ) -> int:
        return 0

    def heads(
        self,
        run_id: str,
        *,
        on_damage: Callable[[str], None] | None = None,
    ) -> Mapping[str, str]:
        return event_log.heads(self.local / "events", run_id=run_id)

    def fetch(self) -> bool:
        return False

    def publish_run_file(self, submission: str, named: Mapping[str, bytes]) -> None:
        """Everybody reads the folder."""

    def publish(self, name: str, data: bytes, *, generation: str | None = None) -> str:
        if generation is None:
            return self.store.put(self.uri_of(name), data)
        return self.store.put_if(self.uri_of(name), data, generation)

    def start(self, writer: str) -> NothingToShip:
        return NothingToShip()


def open_home(local: Path) -> Home:
    """The home of the run whose folder on this machine is ``local``. Nothing is contacted yet.

    Raises:
        UsageError: the file ``home`` names no home.
    """
    try:
        uri = read_plain(local / HOME_FILE, most=1 << 10).decode().strip()
    except FileNotFoundError:
        return FolderHome(local)
    except (OSError, ValueError) as error:
        raise UsageError(f"{local / HOME_FILE} cannot be read: {error}", hint="gs://BUCKET/runs/RUN") from error
    if uris.is_local(uri) or not uri.isprintable() or " " in uri:
        raise UsageError(
            f"{local / HOME_FILE} names {uri!r}, which is no home in a bucket", hint="gs://BUCKET/runs/RUN"
        )
    loops = open_store(timeout_s=ANSWER_S, patience_s=ANSWER_S, answer_s=ANSWER_S)
    return BucketHome(local, uri.rstrip("/"), store=loops, bulk=open_store(timeout_s=5.0, patience_s=5.0))
