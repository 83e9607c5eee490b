"""Live output of a run's pods: one followed log per pod; one watch finds pods, another the end of the run.

Nothing is polled: each connection stays open and is reopened where it breaks, from the last line's time on.
What ranks write is in their pod's own output (``backends/log_forwarder.py``), marked with the rank.
"""

from __future__ import annotations

import contextlib
import queue
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from muster.backends.gke.kubernetes.api import Cluster
from muster.backends.gke.kubernetes.streams import Lines
from muster.backends.gke.operate import locate
from muster.backends.gke.pod.continuation import API as JOBSET_API
from muster.backends.google.http import Unreachable
from muster.backends.log_forwarder import writer_of
from muster.core.clock import SystemClock
from muster.core.errors import AccessError, BackendError, MusterError
from muster.core.protocols import Clock
from muster.core.typed_json import JsonObject, text
from muster.core.types import LogChunk

DRAIN_S = 15.0
"""How long after the run's end its pods' last output is waited for; a pod of a dead node sends none."""
AHEAD_LINES = 10_000
"""Lines buffered ahead of the reader: a pager that waits slows the connections down instead of filling memory."""
LOOK_EVERY_S = 5.0
"""Where watching is not allowed, or nothing can be watched yet."""
STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:Z|[+-]\d\d:\d\d)$")


@dataclass(kw_only=True)
class Follower:
    """Follows the pods with ``labels`` until ``over()``; ``chunks`` is called once."""

    cluster: Cluster
    namespace: str
    labels: Mapping[str, str]
    over: Callable[[], bool]
    """Whether the run has ended."""
    clock: Clock = field(default_factory=SystemClock)
    pause_s: float = 0.5
    """Between a connection that broke and the next."""
    _queue: queue.Queue[LogChunk | MusterError | None] = field(default_factory=lambda: queue.Queue(AHEAD_LINES))
    _opened: list[Lines] = field(default_factory=list)
    _readers: dict[str, threading.Thread] = field(default_factory=dict)
    _stopping: threading.Event = field(default_factory=threading.Event)
    _ended: threading.Event = field(default_factory=threading.Event)
    _looked: threading.Event = field(default_factory=threading.Event)

    def chunks(self) -> Iterator[LogChunk]:
        """Whole lines, each of one task, in the order in which they arrive. An interrupt ends it at once.

        Raises:
            AccessError, BackendError: what the cluster refuses for good.
        """
        for work in (self._watch_run, self._watch_pods):
            threading.Thread(target=self._guarded, args=(work,), daemon=True).start()
        try:
            while not (self._ended.is_set() and self._looked.is_set()):
                yield from self._next(None)
            until = self.clock.monotonic_ns() + int(DRAIN_S * 1e9)
            while (left_ns := until - self.clock.monotonic_ns()) > 0 and (self._reading() or not self._queue.empty()):
                yield from self._next(left_ns / 1e9)
            for _ in range(self._queue.qsize()):
                yield from self._next(0.0)
        finally:
            self._stopping.set()
            for stream in list(self._opened):
                stream.close()

    def _next(self, timeout_s: float | None) -> Iterator[LogChunk]:
        """The next line; nothing where something else happened, or nothing in time."""
        with contextlib.suppress(queue.Empty):
            result = self._queue.get(timeout=timeout_s)
            if isinstance(result, MusterError):
                raise result
            if result is not None:
                yield result

    def _put(self, result: LogChunk | MusterError | None) -> None:
        """Wait for room until the reader leaves."""
        while not self._stopping.is_set():
            with contextlib.suppress(queue.Full):
                self._queue.put(result, timeout=1.0)
                return

    def _reading(self) -> bool:
        return any(reader.is_alive() for reader in list(self._readers.values()))

    # ---------------------------------------------------------------- what there is

    def _watch_run(self) -> None:
        """Until the run has ended: checks when the JobSet changes, and when the watch is lost."""
        while not self._stopping.is_set() and not self._over_now():
            with self._breaks():
                for _ in self._watch(JOBSET_API, "jobsets"):
                    if self._stopping.is_set() or self._over_now():
                        return
            self._stopping.wait(self.pause_s)

    def _over_now(self) -> bool:
        with contextlib.suppress(Unreachable):
            if self.over():
                self._ended.set()
                self._put(None)
        return self._ended.is_set()

    def _watch_pods(self) -> None:
        while not self._stopping.is_set():
            with self._breaks():
                # A reader that starts after the end of the run finds the remaining pods by this list alone.
                for pod in self.cluster.list("v1", "pods", namespace=self.namespace, labels=self.labels):
                    self._meet(pod)
                self._looked.set()
                self._put(None)
                for pod in self._watch("v1", "pods"):
                    self._meet(pod)
            self._stopping.wait(self.pause_s)

    def _watch(self, api: str, plural: str) -> Iterator[JsonObject]:
        try:
            yield from self.cluster.watch(
                api, plural, namespace=self.namespace, labels=self.labels, opened=self._opened
            )
        except AccessError:  # who may list may not always watch
            self._stopping.wait(LOOK_EVERY_S)

    def _meet(self, pod: JsonObject) -> None:
        """Start one reader for a pod whose containers may have started."""
        name = text(pod, "metadata", "name")
        if text(pod, "status", "phase") in ("", "Pending") or name in self._readers or self._stopping.is_set():
            return
        reader = threading.Thread(target=self._guarded, args=(lambda: self._read(name, pod),), daemon=True)
        self._readers[name] = reader
        reader.start()

    # ---------------------------------------------------------------- one pod

    def _read(self, name: str, pod: JsonObject) -> None:
        """The whole output of the container that does the pod's work, however often the connection breaks."""
        task, container = locate.task(pod)
        position = LogPosition()
        while not self._stopping.is_set():
            with self._breaks():
                position.reopened()
                lines = self.cluster.follow_log(self.namespace, name, container, since=position.since)
                if lines is None:
                    return
                self._opened.append(lines)
                try:
                    for line in lines:
                        if self._stopping.is_set():
                            return
                        if (fresh := position.fresh(line)) is not None:
                            writer, text = writer_of(fresh.decode(errors="replace"), task)
                            self._put(LogChunk(task=writer, text=text, next_offset=0))
                finally:
                    self._opened.remove(lines)
                    lines.close()
                if self._container_ended(name):
                    return
            self._stopping.wait(self.pause_s)

    def _container_ended(self, name: str) -> bool:
        result = self.cluster.get(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": self.namespace}}
        )
        return result is None or text(result, "status", "phase") in ("Succeeded", "Failed")

    # ---------------------------------------------------------------- edges

    @contextlib.contextmanager
    def _breaks(self) -> Iterator[None]:
        """Errors that asking again resolves."""
        with contextlib.suppress(Unreachable, OSError):
            yield

    def _guarded(self, work: Callable[[], None]) -> None:
        """A thread's edge: its errors are raised where the lines are read."""
        try:
            work()
        except MusterError as error:
            self._put(error)
        except Exception as error:  # noqa: BLE001 (else the reader waits forever)
            self._put(BackendError(f"following the logs broke: {error!r}", hint="muster logs without -f"))
        finally:
            self._put(None)


@dataclass
class LogPosition:
    """How far one pod's output was read: the last line's time, and how many lines bear it.

    A server that is asked for lines since a time cuts it to the second: what was read already comes again.
    """

    since: str | None = None
    _last: str = ""
    _same: int = 0
    _again: int | None = None
    """Lines with the last one's time that came again so far; None once there is news."""

    def reopened(self) -> None:
        """The next lines come from ``since`` on."""
        self._again = 0

    def fresh(self, line: bytes) -> bytes | None:
        """The line without its time; None where it was read before."""
        stamp, space, rest = line.partition(b" ")
        key = _sortable(stamp.decode("ascii", errors="replace"))
        if not space or key is None:
            return line
        if self._again is not None:
            if key < self._last:
                return None
            if key == self._last and self._again < self._same:
                self._again += 1
                return None
            self._again = None
        self._same = self._same + 1 if key == self._last else 1
        self.since, self._last = stamp.decode(), key
        return rest


def _sortable(stamp: str) -> str | None:
    """``2026-01-02T03:04:05.6Z`` with all nine digits, so that text sorts as time; None where it is none."""
    result = STAMP.match(stamp)
    return f"{result[1]}.{result[2] or '':0<9}" if result else None
