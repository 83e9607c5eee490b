"""A run whose home is in a bucket: conditional writes, and a local folder that looks like a run's."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from muster.core import event_log
from muster.core.clock import SystemClock
from muster.core.errors import MusterError, UsageError
from muster.core.event_log import EventLog
from muster.core.event_log.names import parts_pattern
from muster.core.protocols import Clock, Store
from muster.storage import uris
from muster.storage.home import files
from muster.storage.home.chunks import Fence
from muster.storage.home.mirror import THREADS, Mirror
from muster.storage.home.shipper import Shipper
from muster.storage.home.sync import BucketSync
from muster.storage.run_registry import existing_id

SUPERVISOR, CLIENT = "supervisor", "client"
_OUTPUT = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.@-]*\.log$")


@dataclass
class BucketHome:
    """See ``Home``. ``store`` is for the loops of processes: no call takes longer than about 2 s. ``bulk`` is for
    threads that ship and read."""

    local: Path
    uri: str
    store: Store
    bulk: Store
    now_s: Callable[[], float] = time.monotonic
    is_folder: bool = False
    shippers: dict[str, Shipper] = field(default_factory=dict)
    """Of event logs that this process writes, by the name of the writer in the home."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def uri_of(self, *parts: str) -> str:
        return uris.join(self.uri, *parts)

    def open_log(self, run_id: str, writer: str, attempt: int, clock: Clock | None = None) -> EventLog:
        if writer == CLIENT:  # another machine may have written before this one, or since
            if (before := self.shippers.pop(CLIENT, None)) is not None:
                before.release()
            self._mirror("events", self.local, run_id, only=CLIENT, on_damage=_warn)
        sealer = self.shipper(run_id, writer, attempt)
        return EventLog(run_id, self.local / "events", writer, attempt, clock or SystemClock(), sealer=sealer)

    def shipper(self, run_id: str, writer: str, attempt: int = 0) -> Shipper:
        """Of this writer's event files. All attempts of a host share one; each supervisor has its own."""
        one = writer == SUPERVISOR
        name = f"{writer}.{attempt}" if one else writer
        files_of = parts_pattern(writer, attempt if one else None)
        with self._lock:
            if name not in self.shippers:
                uri, folder = self.uri_of("events", name), self.local / "events"
                shared = writer == CLIENT
                self.shippers[name] = Shipper(self.bulk, uri, run_id, folder, files_of, self.now_s, is_shared=shared)
            return self.shippers[name]

    def output(self, name: str) -> Shipper:
        """Of what the programs of this machine print."""
        return Shipper(self.bulk, self.uri_of("logs", name), None, self.local / "logs", _OUTPUT, now_s=self.now_s)

    def end_earlier(self, run_id: str, writer: str, attempt: int) -> None:
        marker = self.uri_of("ended", writer)
        fence = Fence(self.bulk)
        with ThreadPoolExecutor(THREADS, thread_name_prefix="ending") as pool:
            for one in [
                pool.submit(fence.end_log, self.uri_of("events", f"{writer}.{number}"), writer, number)
                for number in range(self._ended_up_to(marker) + 1, attempt)
            ]:
                one.result()
        with contextlib.suppress(MusterError, OSError):  # it spares the next one requests, no more
            self.bulk.put(marker, b"%d\n" % (attempt - 1))

    def _ended_up_to(self, marker: str) -> int:
        """All attempts up to this one were ended; 0 where nobody knows."""
        try:
            return int(self.bulk.get(marker).data)
        except (FileNotFoundError, ValueError):
            return 0

    def mirror(
        self,
        into: Path,
        *,
        what: str = "events",
        on_damage: Callable[[str], None] | None = None,
    ) -> int:
        if what == "outputs":
            return files.fetch_outputs(self.bulk, self.uri, into)
        return self._mirror(what, into, self._run_id(into), on_damage=on_damage)

    def _mirror(
        self,
        what: str,
        into: Path,
        run_id: str,
        *,
        only: str | None = None,
        on_damage: Callable[[str], None] | None = None,
    ) -> int:
        own = self.shippers if what == "events" and into == self.local else ()
        mirror = Mirror(
            self.bulk, self.uri_of(what), run_id, into / what, what, own=tuple(own), only=only, on_damage=on_damage
        )
        return mirror.run()

    def heads(
        self,
        run_id: str,
        *,
        on_damage: Callable[[str], None] | None = None,
    ) -> Mapping[str, str]:
        self._mirror("events", self.local, run_id, on_damage=on_damage)
        return event_log.heads(self.local / "events", run_id=run_id)

    def fetch(self) -> bool:
        return files.fetch_run_file(self.bulk, self.uri, self.local)

    def publish_run_file(self, submission: str, named: Mapping[str, bytes]) -> None:
        files.publish_run_file(self.bulk, self.uri, submission, named)

    def publish(self, name: str, data: bytes, *, generation: str | None = None) -> str:
        if generation is None:
            return self.store.put(self.uri_of(name), data)
        return self.store.put_if(self.uri_of(name), data, generation)

    def start(self, writer: str) -> BucketSync:
        sync = BucketSync(self, writer, self._run_id(self.local), now_s=self.now_s)
        sync.start()
        return sync

    def _run_id(self, folder: Path) -> str:
        found = existing_id(self.local) or existing_id(folder)
        if found is None:
            raise UsageError(f"{self.local} holds no run", hint="its file `run_id` names the run")
        return found


def _warn(text: str) -> None:
    """Damage in what this user wrote keeps nobody from writing on."""
    print(text, file=sys.stderr)
