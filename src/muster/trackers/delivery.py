"""Delivers a run's figures to one tracker, which may refuse, hang or raise at any call."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from muster.core.clock import SystemClock
from muster.core.errors import UsageError
from muster.core.event_details.training import Eval, Step
from muster.core.event_log import EventReader
from muster.core.event_log.names import LogName, event_files
from muster.core.processes import replace_text
from muster.core.protocols import Clock
from muster.core.redact import redact
from muster.core.typed_json import Int64, Record, Unreadable, decode, encode

#: Figures that are in memory at a time.
BATCH = 200
#: How often event files are read; after a failure the wait is doubled up to the second.
READ_EVERY_S, MOST_RETRY_S = 1.0, 30.0
#: A call that lasts this long is reported (W&B's client tries for 90 s before it raises); one that lasts as long as the
#: second will not return: the process is replaced.
SLOW_S, STUCK_S = 100.0, 300.0
#: Prefix of the names of an event's figures; writers whose files hold none.
PREFIXES = {Step.kind: "train", Eval.kind: "eval"}
NOT_HOSTS = ("client", "supervisor")


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What rank 0 said of a step, by full names."""

    attempt: int
    prefix: str
    step: int
    wall_ns: int
    values: Mapping[str, float]
    again: bool = False
    """An earlier attempt had figures of this step or a later one: the run went back to a checkpoint."""


class Service(Protocol):
    """A connected tracker. Each method may block and may raise anything."""

    buffer_s: float
    """For so long its client may hold what was sent in memory: after a kill that is sent again."""

    def send(self, figures: Sequence[Figures]) -> int:
        """Record the first ones; returns how many, at least one."""
        ...

    def close(self, outcome: str) -> None:
        """Flush, and record how the run ended: ``succeeded``, ``failed``, ``stopped`` or ``preempted``."""
        ...


@dataclass
class FigureReader:
    """Rank 0's figures in the event files of ``directory``, each yielded once. Holds no more than one of them."""

    directory: Path
    writer: str | None = None
    """Whose files are followed, after those of all hosts were read once. None: all of them."""
    every_steps: int = 1
    _all_were_read: bool = False

    def __post_init__(self) -> None:
        self._reader = EventReader(self.directory)

    def read(self, from_attempt: int) -> Iterator[Figures]:
        """In the order of attempts."""
        files = []
        for path in event_files(self.directory):
            name = LogName.of(path.name)
            assert name is not None
            followed = name.writer == self.writer or not self._all_were_read
            if followed and name.writer not in NOT_HOSTS and name.attempt >= from_attempt:
                files.append((name.attempt, name.part, path))
        for *_, path in sorted(files):
            for event in self._reader.read_file(path):
                prefix, step = PREFIXES.get(event.kind), event.step
                if event.rank != 0 or prefix is None or step is None:
                    continue
                if event.kind == Eval.kind or step % self.every_steps == 0:
                    values = {
                        f"{prefix}/{name}": float(value)
                        for name, value in event.detail.items()
                        if isinstance(value, int | float) and not isinstance(value, bool)
                    }
                    at_ns = event.wall_ns
                    yield Figures(attempt=event.attempt, prefix=prefix, step=step, wall_ns=at_ns, values=values)
        self._all_were_read = self.writer is not None


@dataclass(frozen=True, kw_only=True)
class Delivered(Record):
    """What a tracker has: ``trackers/NAME.json`` of the run's folder."""

    attempt: Int64 = -1
    newest: Mapping[str, Int64] = field(default_factory=dict)
    """Prefix -> newest step of that attempt or, where it has none yet, of those before."""
    away_since_ns: Int64 = 0
    """Wall time since when it accepts nothing; 0: it does."""

    def lacks(self, figures: Figures) -> bool:
        return figures.attempt > self.attempt or figures.step > self.newest.get(figures.prefix, -1)

    def plus(self, figures: Figures) -> Delivered:
        """Going back to an earlier step takes the later figures of every prefix with it."""
        newest = self.newest
        if figures.again:
            newest = {prefix: min(step, figures.step - 1) for prefix, step in newest.items()}
        return replace(self, attempt=figures.attempt, newest={**newest, figures.prefix: figures.step})


class Delivery:
    """Sends figures in order, each once; a kill of the process may repeat those that were being sent.

    ``serve`` is for a thread of its own. No other method waits for the tracker.
    """

    def __init__(
        self,
        name: str,
        *,
        connect: Callable[[], Service],
        reader: FigureReader,
        record: Path,
        report: Callable[[str], None],
        redoes: bool = False,
        clock: Clock | None = None,
    ) -> None:
        """``record``: the file of ``Delivered``. ``report``: one line for the run's log. ``redoes``: the tracker takes
        a step's figures from a later attempt as well; else the first ones stay."""
        self.name, self._connect, self._reader, self._path = name, connect, reader, record
        self._report, self._redoes, self._clock = report, redoes, clock or SystemClock()
        self.ended = self.failed = False
        """Everything is delivered, or nothing ever can be; and then ``failed``."""
        self._service: Service | None = None
        self._pending: list[Figures] = []
        self._outcome: str | None = None
        self._wake, self._busy_ns = threading.Event(), 0
        self.delivered = Delivered()
        with contextlib.suppress(OSError, Unreadable):
            self.delivered = decode(Delivered, record.read_bytes())
        self._recorded = self._sure = self._handed = self.delivered
        self._handed_ns = self._clock.monotonic_ns()

    def serve(self) -> None:
        """Deliver until the outcome is delivered too."""
        wait_s = READ_EVERY_S
        while not self.ended:
            wait_s = READ_EVERY_S if self.deliver() else min(2 * wait_s, MOST_RETRY_S)
            if not self.ended:
                self._wake.wait(wait_s if self._outcome is None else READ_EVERY_S)
                self._wake.clear()

    def finish(self, outcome: str) -> None:
        """The run has ended so."""
        self._outcome = outcome
        self._wake.set()

    def deliver(self) -> bool:
        """Send all that the event files hold, then the outcome if it is known. False: the tracker did not take it."""
        outcome = self._outcome  # before the files are read: no figure comes after it
        try:
            self._busy_ns = self._clock.monotonic_ns()
            service = self._service = self._service or self._connect()
            while self._pending or self._read_more():
                self._busy_ns = self._clock.monotonic_ns()
                count = service.send(self._pending)
                for figures in self._pending[:count]:
                    self.delivered = self.delivered.plus(figures)
                self._pending = self._pending[count:]
                self._record(service.buffer_s)
            if outcome is not None:
                service.close(outcome)
                self.ended = True
            self._record(0.0 if self.ended else service.buffer_s)
        except UsageError as error:
            self._report(f"{self.name} gets no figures: {error}" + (f" ({error.hint})" if error.hint else ""))
            self.ended = self.failed = True
        except (Exception, SystemExit) as error:  # noqa: BLE001 (third-party code on which nothing depends)
            self._service = None
            self._on_away(str(error) or type(error).__name__)
            return False
        finally:
            self._busy_ns = 0
        if self.delivered.away_since_ns:
            away_s = (self._clock.wall_ns() - self.delivered.away_since_ns) / 1e9
            self._record(away_since_ns=0)
            step = max(self.delivered.newest.values(), default=0)
            self._report(f"{self.name} accepts figures again after {away_s:.0f} s, and has all up to step {step}")
        return True

    def is_stuck(self) -> bool:
        """Whether the tracker will not return from a call. One that is slow is reported, once."""
        busy_ns = self._busy_ns  # the thread of ``serve`` sets it
        lasts_s = (self._clock.monotonic_ns() - busy_ns) / 1e9 if busy_ns else 0.0
        if lasts_s > SLOW_S:
            self._on_away(f"no answer for {SLOW_S:.0f} s")
        return lasts_s > STUCK_S

    def _read_more(self) -> bool:
        """Read some that are not delivered; False: there are none."""
        known = self.delivered
        while not self._pending:
            self._busy_ns = self._clock.monotonic_ns()
            batch = list(itertools.islice(self._reader.read(known.attempt), BATCH))
            for figures in filter(known.lacks, batch):
                again = figures.step <= known.newest.get(figures.prefix, -1)
                if not again or self._redoes:
                    self._pending.append(replace(figures, again=again))
                    known = known.plus(self._pending[-1])
            if len(batch) < BATCH:
                break
        return bool(self._pending)

    def _record(self, buffer_s: float = math.inf, **changes: int) -> None:
        """Write ``delivered``, but for what was sent within the last ``buffer_s``, and not twice that before."""
        self.delivered, now_ns = replace(self.delivered, **changes), self._clock.monotonic_ns()  # type: ignore[arg-type]
        if buffer_s == 0.0:
            self._sure = self.delivered
        elif now_ns - self._handed_ns >= buffer_s * 1e9:
            self._sure, self._handed, self._handed_ns = self._handed, self.delivered, now_ns
        record = replace(self._sure, away_since_ns=self.delivered.away_since_ns)
        if record != self._recorded:
            self._recorded = record
            with contextlib.suppress(OSError):  # a full disk: after a restart some figures are sent a second time
                self._path.parent.mkdir(mode=0o700, exist_ok=True)
                replace_text(self._path, encode(record).decode())

    def _on_away(self, reason: str) -> None:
        """Report it, unless that was done since it last accepted something."""
        if not self.delivered.away_since_ns:
            self._record(away_since_ns=self._clock.wall_ns())
            self._report(
                f"{self.name} does not accept this run's figures ({' '.join(redact(reason).split())[:200]}): training "
                "goes on, they are kept and sent once it does; after the end of the run by muster track RUN"
            )
