"""A run's folder as its home: every process of the run sees the same files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from muster.core import event_log
from muster.core.clock import SystemClock
from muster.core.event_log import EventLog
from muster.core.protocols import Clock, Store
from muster.storage import uris
from muster.storage.store import open_store


@dataclass(frozen=True)
class NothingToShip:
    """The files are where they belong."""

    trouble: str | None = None

    def lonely(self, lonely: bool) -> None:
        """The lease is where it belongs."""

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
