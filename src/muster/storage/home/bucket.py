"""A run whose home is in a bucket: conditional writes, a local folder that looks like a run's, and threads that ship
what is written there."""

from __future__ import annotations

import contextlib
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from muster.core import event_log
from muster.core.clock import SystemClock
from muster.core.errors import ConflictError, MusterError, UsageError
from muster.core.event_log import EventLog
from muster.core.event_log.cadence import LEASE_COPY_S, LEASE_COPY_SEEKING_S, LOGS_S, MIRROR_S, SEAL_S
from muster.core.event_log.names import parts_pattern
from muster.core.protocols import Clock, Store
from muster.storage import uris
from muster.storage.home import files
from muster.storage.home.chunks import Fence
from muster.storage.home.files import QUIET_S, Outputs, replace_bytes
from muster.storage.home.mirror import THREADS, Mirror
from muster.storage.home.shipper import Shipper
from muster.storage.run_registry import existing_id
from muster.storage.store.patient import start_thread

#: How often files are looked at, in seconds.
LOOK_S = 0.5
#: After a failure, in seconds.
RETRY_S = 1.0
SUPERVISOR, CLIENT, LEASE = "supervisor", "client", "lease.json"
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
        """All attempts up to this one were ended; 0: not known."""
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
    """Damage in this user's own files is reported, and writing continues."""
    print(text, file=sys.stderr)


@dataclass
class BucketSync:
    """See ``HomeSync``. One thread ships events and copies the lease; another one, which may wait for large objects,
    ships output and brings files. Each goes on after any error, and ``trouble`` says which."""

    home: BucketHome
    writer: str
    run_id: str
    now_s: Callable[[], float] = time.monotonic
    _seeks_supervisor: bool = True
    _stopping: threading.Event = field(default_factory=threading.Event)
    _ended: list[threading.Event] = field(default_factory=list)
    _failed: dict[str, str] = field(default_factory=dict)
    """Which work went wrong last time, and how."""
    _said: set[str] = field(default_factory=set)
    _next_s: dict[str, float] = field(default_factory=dict)
    _lease: bytes = b""
    _until_s: float = 0.0
    """When ``stop`` gives up."""

    def __post_init__(self) -> None:
        supervises = self.writer == SUPERVISOR
        if not supervises:
            self.home.shipper(self.run_id, self.writer)
        # Supervisors stand by in pods of their own: output is the pod's, of all its terms.
        self.output = self.home.output(f"{SUPERVISOR}.{socket.gethostname()}" if supervises else self.writer)
        self.outputs = Outputs(self.home.bulk, self.home.uri_of(), self.home.local)
        self._next_s["mirror"] = self.now_s() + MIRROR_S

    def start(self) -> None:
        for name, step in (("events", self.seal_events), ("files", self.ship_files)):
            ended = threading.Event()
            self._ended.append(ended)
            start_thread(partial(self._run, name, step, ended), name)

    def seek_supervisor(self, seeks: bool) -> None:
        """Whether this process looks for a supervisor: the lease is copied more often then. Costs nothing."""
        self._seeks_supervisor = seeks

    @property
    def trouble(self) -> str | None:
        return next((shipper.refused for shipper in self._shippers() if shipper.refused), self._passing_trouble())

    def _passing_trouble(self) -> str | None:
        """That may be none at the next try."""
        words = [shipper.trouble for shipper in self._shippers() if not shipper.refused]
        return next((text for text in [*words, *list(self._failed.values())] if text), None)

    def stop(self, timeout_s: float) -> bool:
        """Ship what waits, end, and let others ship; whether everything arrived in time."""
        self._until_s = time.monotonic() + timeout_s
        self._stopping.set()
        for ended in self._ended:
            ended.wait(max(0.0, self._until_s - time.monotonic()))
        if not all(ended.is_set() for ended in self._ended):
            return False
        for shipper in self._shippers():
            shipper.look()
            shipper.release()
        return self.trouble is None and all(shipper.waiting_since_s is None for shipper in self._events())

    def _events(self) -> Sequence[Shipper]:
        return list(self.home.shippers.values())

    def _shippers(self) -> Sequence[Shipper]:
        return [*self._events(), self.output]

    def _run(self, name: str, step: Callable[[], None], ended: threading.Event) -> None:
        """Call ``step`` until the end, and then until nothing goes wrong or the time is up."""
        over = False
        while not over:
            stopping = self._stopping.wait(LOOK_S)
            try:
                step()
                self._failed.pop(name, None)
            except Exception as error:  # noqa: BLE001 (reported here alone, and shipping has to go on)
                self._failed[name] = f"shipping {name} to the run's home failed: {type(error).__name__}: {error}"
                traceback.print_exc(file=sys.stderr)
            over = stopping and (self._passing_trouble() is None or time.monotonic() >= self._until_s)
            if stopping and not over:
                time.sleep(LOOK_S)
        ended.set()

    # ------------------------------------------------------------ events, lease

    def seal_events(self) -> None:
        """What is due now of shipping events and copying the lease."""
        for shipper in self._events():
            shipper.look()
            self._ship(shipper, SEAL_S - LOOK_S)
        if self.writer != SUPERVISOR:
            self._every("lease", LEASE_COPY_SEEKING_S if self._seeks_supervisor else LEASE_COPY_S, self._copy_lease)

    def _ship(self, shipper: Shipper, age_s: float) -> None:
        """Ship what waits longer than ``age_s``, or at all once this process ends."""
        since_s = shipper.waiting_since_s
        if since_s is not None and (self._stopping.is_set() or self.now_s() - since_s >= age_s):
            self._guarded(shipper.uri, shipper.ship)

    def _copy_lease(self) -> None:
        try:
            data = self.home.bulk.get(self.home.uri_of(LEASE)).data
        except FileNotFoundError:
            return
        if data != self._lease:
            replace_bytes(self.home.local / LEASE, data)
            self._lease = data

    # ------------------------------------------------------------ output, files

    def ship_files(self) -> None:
        """What is due now of shipping output and bringing files."""
        self.output.look()
        self._ship(self.output, LOGS_S - LOOK_S)
        if self._stopping.is_set():
            self._guarded("outputs", lambda: self.outputs.send(all_of_them=True))
            return
        self._every("outputs", QUIET_S, self.outputs.send)
        if self.writer == SUPERVISOR:  # so that little is left at the end, for its last word on every chain
            self._every("mirror", MIRROR_S, lambda: self.home.mirror(self.home.local, on_damage=self._say_once))

    def _say_once(self, damage: str) -> None:
        """It stays, and is no reason to wait for anything."""
        if damage not in self._said:
            self._said.add(damage)
            print(damage, file=sys.stderr)

    # ------------------------------------------------------------ helpers

    def _every(self, name: str, interval_s: float, work: Callable[[], object]) -> None:
        now_s = self.now_s()
        if now_s >= self._next_s.get(name, 0.0):
            self._next_s[name] = now_s + interval_s
            self._guarded(name, work)

    def _guarded(self, name: str, work: Callable[[], object]) -> None:
        """Do it; a failure is kept in ``trouble`` until it succeeds, and is not tried again for a second."""
        if self.now_s() < self._next_s.get(f"after {name}", 0.0) and not self._stopping.is_set():
            return
        try:
            work()
        except ConflictError:
            pass  # the shipper says so
        except (MusterError, OSError) as error:
            self._failed[name] = str(error)
            self._next_s[f"after {name}"] = self.now_s() + RETRY_S
            return
        self._failed.pop(name, None)
