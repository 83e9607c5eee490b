"""A sweep: trials are begun, ended early or continued until all are done. Ctrl-C stops them; the same words go on.

Each decision is written into the sweep's record before it is carried out, and each trial is a run of its own with its
own supervisor: killed at any moment, a sweep goes on where it was, and its trials have not noticed.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from muster.app.sweep import trial
from muster.app.sweep.definition import Definition
from muster.app.sweep.optimizer import Optimizer
from muster.app.sweep.trial import Trial
from muster.config.backends import BACKENDS
from muster.config.spec import Limits
from muster.core.clock import SystemClock
from muster.core.errors import BusyError, CapacityError, ConflictError, MusterError, first_line
from muster.core.event_details.hosts import HostAllocated
from muster.core.events import Event
from muster.core.protocols import Clock
from muster.core.types import JobState, JobStatus
from muster.storage import run_registry, sweep_record
from muster.storage.sweep_record import SweepRecord, TrialRecord
from muster.supervise.process.limits import EARLIER_SHARE, HOUR_NS, LimitsGuard

LOOK_EVERY_S = 1.0
#: Where a look asks a service: Slurm's controller serves everybody on the cluster, and Google counts requests.
LOOK_ELSEWHERE_S = 15.0
#: After a start that found no machines.
AGAIN_S = 30.0
#: So many failed trials in a row, and none complete: what is wrong is wrong with all of them.
FAILURES = 3
#: Trials that were asked to stop save first, and write that.
LEAVE_S = 60.0
LEAST_SHARE = 0.01


@dataclass(frozen=True, kw_only=True)
class Swept:
    folder: Path
    record: SweepRecord
    exit_code: int
    reason: str


def sweep(definition: Definition, *, tell: Callable[[str], None], clock: Clock | None = None) -> Swept:
    """Run all trials to their ends; blocks. ``tell`` gets a line for each event.

    Raises:
        ConflictError: another process runs this sweep.
        UsageError: the folder holds another sweep, or optuna is not installed.
        KeyboardInterrupt: all trials were asked to save and stop.
    """
    folder = definition.folder
    optimizer = Optimizer(
        definition.over,
        sampler=definition.sampler,
        pruner=definition.pruner,
        seed=definition.seed,
        parallel=definition.parallel,
    )
    run_registry.make_folder(folder)
    lock = run_registry.lock_submit(folder, sweep_record.LOCK)
    if lock is None:
        raise ConflictError(f"another muster sweep runs in {folder}", hint=f"muster status {definition.name} shows it")
    with lock:
        record, clock = definition.record(), clock or SystemClock()
        return _Sweep(definition=definition, optimizer=optimizer, record=record, tell=tell, clock=clock).run()


@dataclass
class _Sweep:
    definition: Definition
    optimizer: Optimizer
    record: SweepRecord
    tell: Callable[[str], None]
    clock: Clock
    active: dict[int, Trial] = field(default_factory=dict)
    aside: set[int] = field(default_factory=set)
    """Stopped by a person meanwhile: they are continued when the sweep is typed again."""
    short: set[int] = field(default_factory=set)
    """Ended by their share of the dollars: they are continued once others have left some."""
    said: dict[int, int] = field(default_factory=dict)
    """Trial -> step of the newest held-out loss that was reported."""
    unseen: set[int] = field(default_factory=set)
    """Trials whose status could not be read; reported once."""
    unended: set[int] = field(default_factory=set)
    """Trials that could not be ended at the first try; reported once."""
    broke: bool = False
    """Not enough dollars are left for another trial."""
    _retry_ns: int = 0

    def run(self) -> Swept:
        given = self.definition
        here = BACKENDS.get(given.loaded.spec.backend).capabilities.uses_this_machine
        self.pause_s = LOOK_EVERY_S if here else LOOK_ELSEWHERE_S
        self.budget = Budget(given.loaded.spec.limits, given.loaded.spec.recovery.grace_s, given.parallel)
        for known in self.record.trials:
            self.optimizer.known(known.values)
            self._resume(known)
        try:
            return self._loop()
        except KeyboardInterrupt:
            self._stop_all("Ctrl-C")
            raise

    def _loop(self) -> Swept:
        while True:
            if (reached := self.budget.reached(self.clock.wall_ns())) is not None:
                self._stop_all(reached)
                return self._ended(130, f"{reached} was reached: the same command with more of it goes on")
            self._fill()
            if not self.active and self.clock.monotonic_ns() >= self._retry_ns:
                break
            for found in list(self.active.values()):
                self._look(found)
            if (reason := self._hopeless()) is not None:
                self._stop_all(reason)
                return self._ended(1, reason)
            self.clock.sleep(self.pause_s)
        if self.short or self.broke:
            return self._ended(130, "limits.max_usd is used up: the same command with more of it goes on")
        if self.aside:
            return self._ended(130, f"{len(self.aside)} of its trials were stopped: the same command goes on with them")
        complete = any(known.state == "complete" for known in self.record.trials)
        return self._ended(0 if complete else 1, "done" if complete else "no trial is complete")

    def _ended(self, exit_code: int, reason: str) -> Swept:
        return Swept(folder=self.definition.folder, record=self.record, exit_code=exit_code, reason=reason)

    # ------------------------------------------------------------ begin and continue

    def _resume(self, known: TrialRecord) -> None:
        """A trial of a sweep that goes on: what it has reached is reported to Optuna, an open one is continued."""
        found = trial.find(known.number, known.run_id)
        if found is not None:
            found.look()
            self.budget.note(known.number, found.held)
            for step, loss in sorted(found.losses.items()):
                self.optimizer.report(known.number, step, loss)
                self.said[known.number] = step
        if known.state != "open":
            self.optimizer.end(known.number, known.loss, pruned=known.state == "pruned")
        elif known.reason and found is not None:  # it was decided to end it, and then the sweep was killed
            self._prune(found, known.reason)
        elif found is not None and not found.look().state.ended:  # it runs: nothing to do
            self.active[known.number] = found

    def _fill(self) -> None:
        """Go on with trials, then begin new ones, until as many run as may."""
        waiting = [known for known in self.record.trials if known.state == "open" and known.number not in self.active]
        for known in waiting:
            if known.number in self.aside or not self._has_room() or not self._affords(known.number):
                continue
            self.short.discard(known.number)
            found = trial.find(known.number, known.run_id)
            if found is None:
                self._start(known)
            elif (status := self._status(found)) is not None:
                self._continue(found, status, "goes on")
            else:
                self._later()
        while self._has_room() and len(self.record.trials) < self.definition.trials:
            if not self._affords(len(self.record.trials)):
                self.broke = True
                return
            values = self.optimizer.next()
            if values is None:
                return
            known = TrialRecord(number=len(self.record.trials), values=values, gpus=self._free_gpus())
            self._note(known)  # before it is done: a sweep that is killed now starts this one first
            self._start(known)

    def _has_room(self) -> bool:
        return len(self.active) < self.definition.parallel and self.clock.monotonic_ns() >= self._retry_ns

    def _affords(self, number: int) -> bool:
        return self.budget.allows(number, self.clock.wall_ns())

    def _free_gpus(self) -> str | None:
        taken = {self.record.trials[number].gpus for number in self.active}
        return next((share for share in self.definition.shares if share not in taken), None)

    def _start(self, known: TrialRecord) -> None:
        known = replace(known, max_usd=self.budget.share(known.number, self.clock.wall_ns()))
        with self._submitting(known.number):
            found = trial.start(known.number, self.definition.of(known, self._limits(known)), known.gpus)
            self._note(replace(known, run_id=found.run.run_id))
            self.active[known.number] = found
            self.tell(f"trial {known.number}: {self.definition.in_words(known.values)}: {found.run.run_id}")

    @contextlib.contextmanager
    def _submitting(self, number: int) -> Iterator[None]:
        """Around what starts or continues a trial: what cannot be now is tried again, any other refusal ends it."""
        with uninterrupted():
            try:
                yield
            except (CapacityError, BusyError) as error:
                self.active.pop(number, None)
                self._later()
                self.tell(f"trial {number} waits: {first_line(error)}")
            except MusterError as error:
                self._fail(number, first_line(error))

    def _later(self) -> None:
        """Nothing is started for a while; trials that are open are tried again then."""
        self._retry_ns = self.clock.monotonic_ns() + int(AGAIN_S * 1e9)

    def _continue(self, found: Trial, status: JobStatus, why: str) -> None:
        """Go on with a run that has ended, or whose supervisor has. One that has its result is only looked at."""
        known = self.record.trials[found.number]
        self.active[found.number] = found
        if not (found.lost_its_machine(status) or status.state is JobState.STOPPED):
            return
        overrides: tuple[str, ...] = ()
        if status.state.ended:  # living agents have their run file already
            known = replace(known, max_usd=self.budget.share(known.number, self.clock.wall_ns()))
            self._note(known)
            overrides = self._limits(known)
        with self._submitting(found.number):
            found.continue_(known.gpus, overrides)
            self.tell(f"trial {found.number}: {why} from step {found.step}")

    def _limits(self, known: TrialRecord) -> tuple[str, ...]:
        return self.budget.limits_of(known.number, known.max_usd, self.clock.wall_ns())

    # ------------------------------------------------------------ look

    def _status(self, found: Trial) -> JobStatus | None:
        """None: its back end does not answer. A trial goes on meanwhile: it is asked again, and nothing is decided."""
        try:
            result = found.look()
        except MusterError as error:
            if found.number not in self.unseen:
                self.tell(f"trial {found.number}: its status cannot be read: {first_line(error)}")
            self.unseen.add(found.number)
            return None
        self.unseen.discard(found.number)
        return result

    def _look(self, found: Trial) -> None:
        if (status := self._status(found)) is None:
            return
        self.budget.note(found.number, found.held)
        pruned = False
        for step, loss in sorted(found.losses.items()):
            if step > self.said.get(found.number, 0):
                self.said[found.number] = step
                pruned = self.optimizer.report(found.number, step, loss)
        if decided := self.record.trials[found.number].reason:
            if status.state.ended:
                self._over(found, "pruned")
            elif not found.ending:
                self._prune(found, decided)
        elif status.state is JobState.SUCCEEDED:
            self._complete(found)
        elif found.lost_its_machine(status):
            self._continue(found, status, "lost its machine; it goes on")
        elif status.state is JobState.FAILED:
            self._fail(found.number, status.reason)
        elif status.state is JobState.STOPPED:
            self._stopped(found, status)
        elif pruned:
            self._prune(found, self._behind(found))

    def _complete(self, found: Trial) -> None:
        if found.loss is None:
            self._fail(found.number, "it ended without a held-out loss: evaluation.num_sequences is 0?")
            return
        self._over(found, "complete")

    def _prune(self, found: Trial, reason: str) -> None:
        self._note(replace(self.record.trials[found.number], reason=reason))
        self.active[found.number] = found
        self._end_early(found, f"muster sweep: {reason}", save=False)

    def _end_early(self, found: Trial, why: str, *, save: bool) -> bool:
        """False: its back end does not answer. It is asked again."""
        try:
            found.end_early(why, save=save)
        except MusterError as error:
            if found.number not in self.unended:
                self.tell(f"trial {found.number} could not be ended: {first_line(error)}")
            self.unended.add(found.number)
            return False
        return True

    def _behind(self, found: Trial) -> str:
        """Why it is not worth going on with, in figures."""
        step = max(found.losses)
        loss = f"held-out loss {found.losses[step]:.4f} after step {step}"
        return f"{loss} is behind the others' ({self.definition.pruner})"

    def _stopped(self, found: Trial, status: JobStatus) -> None:
        """By its limits, or by a person."""
        if "limits." in status.reason:
            del self.active[found.number]
            self.budget.spent(found.number)
            self.short.add(found.number)
            self.tell(f"trial {found.number}: {status.reason}")
            return
        del self.active[found.number]
        self.aside.add(found.number)
        self.tell(f"trial {found.number}: stopped by a person after step {found.step}")

    def _over(self, found: Trial, state: sweep_record.TrialState) -> None:
        known = replace(self.record.trials[found.number], state=state, loss=found.loss)
        self._note(known)
        self.active.pop(found.number, None)
        self.budget.spent(found.number)
        self.optimizer.end(found.number, found.loss, pruned=state == "pruned")
        said = "ended early: " + known.reason if state == "pruned" else f"complete: held-out loss {found.loss:.4f}"
        self.tell(f"trial {found.number}: {said}{self._best(found)}")

    def _best(self, found: Trial) -> str:
        losses = [known.loss for known in self.record.trials if known.state == "complete" and known.loss is not None]
        return ", the best so far" if losses and found.loss == min(losses) else ""

    def _fail(self, number: int, reason: str) -> None:
        self._note(replace(self.record.trials[number], state="failed", reason=reason))
        self.active.pop(number, None)
        self.budget.spent(number)
        self.optimizer.end(number, None)
        self.tell(f"trial {number} has failed: {reason}")

    def _hopeless(self) -> str | None:
        over = [known for known in self.record.trials if known.state != "open"]
        if len(over) >= FAILURES and all(known.state == "failed" for known in over):
            return f"all of the first {len(over)} trials have failed: {over[-1].reason}"
        return None

    # ------------------------------------------------------------ end

    def _stop_all(self, why: str) -> None:
        """Every trial saves and ends; the record keeps them open."""
        until = time.monotonic() + LEAVE_S
        left = dict(self.active)
        asked = {number for number, found in left.items() if found.ending}
        while True:
            for number, found in list(left.items()):
                status = self._status(found)
                if status is not None and status.state.ended:
                    del left[number]
                elif number not in asked and self._end_early(found, f"muster sweep: {why}", save=True):
                    asked.add(number)
            if not left or time.monotonic() >= until:
                break
            self.clock.sleep(min(0.2 * self.pause_s, 3.0))
        for number in left:
            self.tell(f"trial {number} has not ended yet: muster stop {left[number].run.run_id}")

    def _note(self, known: TrialRecord) -> None:
        self.record = self.record.with_trial(known)
        sweep_record.write(self.definition.folder, self.record)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C meanwhile is raised at the end, the second at once: a run that is half submitted would be lost."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        if came:
            raise KeyboardInterrupt
        came.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


@dataclass
class Budget:
    """``limits`` of the run file over the hosts of all trials: what is left.

    Hours are those in which any trial holds hosts. Each trial has a share of the dollars set aside for it, so that a
    sweep that was killed leaves trials behind that stop in time.
    """

    limits: Limits
    grace_s: float
    parallel: int
    _events: dict[int, Sequence[Event]] = field(default_factory=dict)
    _shares: dict[int, float] = field(default_factory=dict)
    """Trial under way -> dollars that it may cost in all."""

    def note(self, number: int, events: Sequence[Event]) -> None:
        """What is known of a trial's hosts: all of it."""
        self._events[number] = list(events)

    def spent(self, number: int) -> None:
        """The trial has ended: what is left of its share is free."""
        self._shares.pop(number, None)

    def reached(self, wall_ns: int) -> str | None:
        """The limit that the sweep has come to; None: none yet."""
        guard = self._guard(self._events.values())
        limit = guard.next(wall_ns)
        if limit is not None and limit.at_wall_ns <= wall_ns:
            return limit.reason
        # With no host held, the guard foresees nothing.
        hours, usd = self.limits.max_hours, self.limits.max_usd
        if hours is not None and self._hours(self._events.values(), wall_ns) >= hours * (1 - EARLIER_SHARE):
            return f"limits.max_hours {hours:g}"
        return f"limits.max_usd {usd:g}" if usd is not None and guard.spent_usd(wall_ns) >= usd else None

    def share(self, number: int, wall_ns: int) -> float | None:
        """Dollars that this trial may cost in all: what it has cost, and an equal part of what is not assigned."""
        if self.limits.max_usd is None:
            return None
        self._shares.pop(number, None)
        self._shares[number] = self._cost(number, wall_ns) + self._free_each(wall_ns)
        return self._shares[number]

    def allows(self, number: int, wall_ns: int) -> bool:
        """Whether what is left is worth beginning, or going on with, a trial: a hundredth of the whole at least."""
        if self.limits.max_usd is None:
            return True
        self._shares.pop(number, None)
        return self._free_each(wall_ns) >= LEAST_SHARE * self.limits.max_usd

    def limits_of(self, number: int, max_usd: float | None, wall_ns: int) -> tuple[str, ...]:
        """``limits`` of one trial, as overrides: its share of the dollars, and all hours that are left."""
        dollars = () if max_usd is None else (f"limits.max_usd={max_usd!r}",)
        if self.limits.max_hours is None:
            return dollars
        left = self.limits.max_hours - self._hours(self._events.values(), wall_ns)
        own = self._hours([self._events.get(number, ())], wall_ns)
        return (*dollars, f"limits.max_hours={max(1e-3, own + left)!r}")

    def _free_each(self, wall_ns: int) -> float:
        assert self.limits.max_usd is not None
        over = sum(self._cost(other, wall_ns) for other in self._events if other not in self._shares)
        free = self.limits.max_usd - over - sum(self._shares.values())
        return max(0.0, free) / max(1, self.parallel - len(self._shares))

    def _cost(self, number: int, wall_ns: int) -> float:
        return self._guard([self._events.get(number, ())]).spent_usd(wall_ns)

    def _guard(self, trials: Iterable[Sequence[Event]]) -> LimitsGuard:
        guard = LimitsGuard(limits=self.limits, grace_s=self.grace_s)
        for event in _of_all(trials):
            guard.add(event)
        return guard

    def _hours(self, trials: Iterable[Sequence[Event]], wall_ns: int) -> float:
        """In which any of their hosts was held."""
        total_ns, held, since_ns = 0, set[str](), 0
        for event in _of_all(trials):
            at_ns, host = event.wall_ns, event.host
            if event.kind == HostAllocated.kind:
                since_ns = since_ns if held else at_ns
                held.add(host)
            elif host in held:
                held.remove(host)
                total_ns += 0 if held else at_ns - since_ns
        return (total_ns + (wall_ns - since_ns if held else 0)) / HOUR_NS


def _of_all(trials: Iterable[Sequence[Event]]) -> list[Event]:
    """In the order of their times; the hosts of several trials have names of their own."""
    named = [replace(event, host=f"{index}/{event.host}") for index, events in enumerate(trials) for event in events]
    return sorted(named, key=lambda event: event.wall_ns)
