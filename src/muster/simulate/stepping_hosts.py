"""The steps of virtual hosts: an event queue instead of sleep, a number instead of a clock.

Stage times are drawn from a profile. Nothing sleeps and nothing polls: a healthy segment of steps is one event.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from muster.core.snapshots import SnapshotCopy
from muster.core.typed_json import JsonObject
from muster.core.types import Topology
from muster.protocol.to_agent import EndAttempt, StartAttempt
from muster.protocol.to_supervisor import RankExit, RanksEnded, ResetResult
from muster.protocol.values import LastWords, RankEvent
from muster.simulate.host_time import HostTime, Report, VirtualHost, hold_snapshots
from muster.simulate.stage_arithmetic import DiskTier, Pace, Stages, StepSegment
from muster.supervise.recovery.inputs import SECOND_NS
from muster.supervise.recovery.state_machine import RecoveryStateMachine


@dataclass
class SteppingHosts:
    """Hosts, a clock, and the steps that the hosts' ranks take together."""

    machine: RecoveryStateMachine
    names: list[str]
    total_steps: int
    stages: Stages = field(default_factory=Stages)
    places: Mapping[str, Topology] = field(default_factory=dict)
    """What hosts say of where they stand."""
    memory_tier: bool = True
    snapshot_every_steps: int = 1
    disk: DiskTier | None = None
    micro_batches: int = 0
    """Of a step: each of a host's ``data_ranks_per_host`` computes whole ones, in rounds. 0: they divide evenly."""
    data_ranks_per_host: int = 1
    draw: Callable[[str, float], float] = field(default=lambda stage, seconds: seconds)
    """(stage, its time in the profile) -> how long it takes this time."""
    time: HostTime = field(default_factory=HostTime)
    """Every purchased host-second by what became of it."""
    disk_step: int = 0
    """Step of the newest usable checkpoint on disk."""
    now_ns: int = 0
    hosts: dict[str, VirtualHost] = field(default_factory=dict)
    history: list[tuple[int, int, StepSegment]] = field(default_factory=list)
    """(attempt, last applied step, the segment) of every segment that is over."""
    extra_start_s: float = 0.0
    """Of the next start alone: a device that is reset in place."""
    slow: float = 1.0
    reset_works: bool = True
    ranks_obey: bool = True
    """False: ranks that are asked to save hang."""
    disk_takes: bool = True
    """False: what memory holds cannot be written."""
    _queue: list[tuple[int, int, Callable[[], None]]] = field(default_factory=list)
    """(nanoseconds, number, what happens then): a heap, in order of entry where the times are equal."""
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _step: int = 0
    _segment: int = 0
    """Changes whenever what was scheduled for the current steps no longer holds."""
    _run: StepSegment | None = None
    _segment_began_ns: int | None = None
    _job: str = "start"
    _world: frozenset[str] = frozenset()
    _world_size: int = 0
    _ending: tuple[int, float] = (-1, 0.0)

    @property
    def step_s(self) -> float:
        """A step on the hosts that run: the batch is constant, so fewer hosts take longer."""
        active = len(self.machine.state.active)
        requested = self.machine.settings.wanted_hosts
        return self.slow * self.stages.pace_s(active, requested, self.micro_batches, self.data_ranks_per_host)

    @property
    def now_s(self) -> float:
        return self.now_ns / SECOND_NS

    @property
    def stepping(self) -> bool:
        return self._segment_began_ns is not None

    def at(self, seconds: float, act: Callable[[], None]) -> None:
        """Call ``act`` when the clock reads ``seconds``."""
        heapq.heappush(self._queue, (round(seconds * SECOND_NS), next(self._numbers), act))

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        self.at(self.now_s + max(0.0, seconds), act)

    def receive_from(self, host: VirtualHost, message: Report) -> None:
        """A host's agent sends a message, now, if the host is up."""
        raise NotImplementedError

    def receive_later(self, delay_s: float, host: VirtualHost, message: Report) -> None:
        """The same after ``delay_s``, if the agent has not restarted by then."""
        boots = host.boots
        self.after(delay_s, lambda: self.receive_from(host, message) if host.boots == boots else None)

    def change_pace(self, slow: float) -> None:
        """From now on every step takes ``slow`` times as long as on healthy hosts."""
        self.settle_steps()
        self.slow = slow
        if self._run is not None and self.stepping:
            self._run.change(self._productive_s(), self.step_s, slow)
            self._segment += 1
            self._schedule_steps(self.machine.state.attempt)

    def _advance(self, to_ns: int) -> None:
        """Advance the clock to ``to_ns``; nothing happens in between."""
        span_s = (to_ns - self.now_ns) / SECOND_NS
        self.now_ns = to_ns
        if span_s <= 0:
            return
        world = self._world if self._job in ("stepping", "detect") else None
        self.time.pass_by(span_s, self._job, self.hosts.values(), self.machine.state, world)

    def _close(self) -> None:
        self.settle_steps()
        self.halt(self._job)
        for host in self.hosts.values():
            if host.held_since_ns is not None:
                self.time.purchased_s += (self.now_ns - host.held_since_ns) / SECOND_NS

    def maybe_begin(self, start: StartAttempt) -> None:
        """A host was sent its start; the ranks of an attempt start once its last host was."""
        world = start.contexts[0].world_size
        if start.contexts[-1].rank != world - 1:  # hosts are sent it in the order of their ranks
            return
        active = [host for host in self.hosts.values() if host.up and host.attempt == start.attempt and host.ranks]
        if sum(len(host.ranks) for host in active) < world:
            return
        restore = start.contexts[0].restore
        before = self._step
        self._step = restore.step if restore else self.disk_step
        requested = self.machine.settings.wanted_hosts
        self.time.lose(max(0, before - self._step) * self.stages.step_s * requested)
        self._segment += 1
        self._world = frozenset(host.name for host in active)
        self._begin(start.attempt, world, restore is None and self.disk is not None and self.disk_step > 0)

    def _begin(self, attempt: int, world: int, from_disk: bool) -> None:
        """Ranks start, and step later."""
        segment, first = self._segment, self._world_size == 0
        start_s, warmup_s = self.stages.starting(self.draw, first=first, other_size=world != self._world_size)
        start_s, self.extra_start_s = start_s + self.extra_start_s, 0.0
        restore_s = self.draw("restore", self.disk.restore_s) if self.disk and from_disk else 0.0
        self._world_size = world
        self._job = "start" if first else "restart"
        if not first:
            self.after(start_s, lambda: self._now_doing(segment, "restore"))
            self.after(start_s + restore_s, lambda: self._now_doing(segment, "warmup"))
        if any(self._unreadable(host) for host in self.hosts.values()):
            self.after(start_s, lambda: self._reject(segment))
        self.after(start_s + restore_s + warmup_s, lambda: self._step_on(segment, attempt))

    def _unreadable(self, host: VirtualHost) -> tuple[SnapshotCopy, ...]:
        """Of what a host's ranks start from: the copies whose bytes have changed."""
        return tuple(copy for copy in host.starts_from if copy in self.hosts[copy.host].rotten)

    def _reject(self, segment: int) -> None:
        """On each host that was to start from copies that are not intact, a rank says so and fails."""
        if segment != self._segment:
            return
        self.halt("detect")
        for host in self.hosts.values():
            if host.up and host.ranks and (rejected := self._unreadable(host)):
                host.dead.add(host.ranks[0])
                text = f"the snapshot of rank {rejected[0].rank} is not intact"
                last = LastWords(exception="SnapshotNotIntact", message=text, rejected=rejected)
                self.receive_later(self.stages.detect_exit_s, host, self.exit_of(host, host.ranks[0], 1, last))

    def _now_doing(self, segment: int, job: str) -> None:
        if segment == self._segment:
            self._job = job

    def _step_on(self, segment: int, attempt: int) -> None:
        """Ranks step from now on: the first step is reported, then the end of the segment."""
        if segment != self._segment:
            return
        pace = Pace(from_s=0.0, steps=0.0, step_s=self.step_s, slow=self.slow)
        self._run = StepSegment(began_ns=self.now_ns, first_step=self._step, hosts=len(self._world), paces=[pace])
        self._segment_began_ns = self.now_ns
        self._job = "stepping"
        self._schedule_steps(attempt)

    def _schedule_steps(self, attempt: int) -> None:
        """Schedule the reports of the current steps: the first, the first new one, the last."""
        segment, run = self._segment, self._run
        assert run is not None
        done = self._step - run.first_step
        new = max(self.machine.state.last_applied_step + 1 - run.first_step, done + 1)
        for steps in sorted({done + 1, new}):
            self.at(run.when_s(steps, self.disk), lambda: self._report_step_of(segment, attempt))
        self.at(run.when_s(self.total_steps - run.first_step, self.disk), lambda: self._leave(segment, attempt, 0))

    def _report_step_of(self, segment: int, attempt: int) -> None:
        if segment == self._segment:
            self.settle_steps()
            self._report_step(attempt)

    def _report_step(self, attempt: int) -> None:
        first = self.running(0)
        if first is not None and self._step:
            detail = {"step_ns": round(self.step_s * SECOND_NS)}
            self.receive_from(first, self.event("step", attempt, self._step, detail))

    def event(self, kind: str, attempt: int, step: int | None, detail: JsonObject, *, rank: int = 0) -> RankEvent:
        at_ns = self.now_ns
        return RankEvent(kind=kind, attempt=attempt, mono_ns=at_ns, wall_ns=at_ns, rank=rank, step=step, detail=detail)

    def exit_of(self, host: VirtualHost, rank: int, code: int, last: LastWords | None = None) -> RankExit:
        """What the agent says of a rank whose process ends now."""
        return RankExit(attempt=host.attempt, rank=rank, pid=1, code=code, step=self._step, last=last)

    def _productive_s(self) -> float:
        """Training time of the segment so far."""
        elapsed_s = (self.now_ns - (self._segment_began_ns or 0)) / SECOND_NS
        return self.disk.productive_s(elapsed_s) if self.disk else elapsed_s

    def settle_steps(self) -> None:
        """Bring the applied step, and the snapshots, up to now."""
        run = self._run
        if run is None or self._segment_began_ns is None:
            return
        self._step = min(self.total_steps, run.first_step + int(run.steps(self._productive_s()) + 1e-6))
        if self.disk is not None:
            elapsed_s = (self.now_ns - self._segment_began_ns) / SECOND_NS
            if usable_s := self.disk.usable_s(elapsed_s):
                self.disk_step = max(self.disk_step, run.first_step + int(run.steps(usable_s) + 1e-6))
        held = self._step - self._step % max(1, self.snapshot_every_steps)
        if held <= run.first_step or not self.memory_tier:
            return
        active = [self.hosts[name] for name in self.machine.state.active if name in self._world]
        stepping = [host for host in active if host.up and host.ranks]
        previous = held - max(1, self.snapshot_every_steps)
        before = previous if previous > run.first_step else None
        layout = self.machine.state.layout.key
        hold_snapshots(stepping, layout, held, before)

    def halt(self, job: str) -> None:
        """No more steps: their time is classified, and the hosts are in ``job`` from here on."""
        if self._segment_began_ns is not None:
            self.settle_steps()
            self._report_step(self.machine.state.attempt)
        if self._segment_began_ns is not None and self._run is not None:
            self.history.append((self.machine.state.attempt, self._step, self._run))
            steps, requested = self._step - self._run.first_step, self.machine.settings.wanted_hosts
            parts = self._run.parts((self.now_ns - self._segment_began_ns) / SECOND_NS, self._productive_s(), steps)
            good_host_s = steps * self.stages.step_s * requested
            self.time.classify(parts, self._run.hosts, good_host_s=good_host_s, overhead=self.stages.overhead)
        self._segment_began_ns = None
        self._segment += 1
        if self._job not in ("start", "stopped"):
            self._job = job

    def end_ranks(self, host: VirtualHost, order: EndAttempt) -> None:
        """A host ends its ranks but those that it is to keep, and then lists its snapshots."""
        self.settle_steps()
        if host.ranks:
            self.halt("restart")
        if self._job == "detect":
            self._job = "restart"
        kept = {rank: self._step for rank in order.keep if rank in host.ranks}
        host.ranks, host.hung = [], None
        reset = ResetResult(ok=self.reset_works, evidence="as the test wants it") if order.reset else None
        answer = RanksEnded(attempt=order.attempt, snapshots=host.list_snapshots(), kept=kept, reset=reset)
        if self._ending[0] != order.attempt:  # drawn once for an attempt: the slowest host counts
            self._ending = (order.attempt, self.draw("end", self.stages.end_ranks_s))
        self.receive_later(self._ending[1], host, answer)

    def leave_after_step(self, code: int, *, save: bool = False) -> None:
        """All ranks exit with ``code`` once the current step is applied, and saved."""
        segment, attempt = self._segment, self.machine.state.attempt
        self.after(self.step_s, lambda: self._leave(segment, attempt, code, save=save))

    def _leave(self, segment: int, attempt: int, code: int, *, save: bool = False) -> None:
        if segment == self._segment:
            self.settle_steps()
            self.halt("restart")
            if save and self.disk_takes:
                self.report_checkpoint(self.running(0), self._step, attempt, "disk")
            self._exit_all(code)

    def report_checkpoint(self, host: VirtualHost | None, step: int, attempt: int, uri: str) -> None:
        """A checkpoint is committed, and ``host`` reports it."""
        self.disk_step = max(self.disk_step, step)
        if host is not None:
            detail: JsonObject = {"tier": "disk", "uri": uri, "bytes": 1}
            self.receive_from(host, self.event("checkpoint.committed", attempt, step, detail))

    def _exit_all(self, code: int) -> None:
        for host in list(self.hosts.values()):
            for rank in list(host.ranks) if host.up else []:
                host.dead.add(rank)
                self.receive_from(host, self.exit_of(host, rank, code))
            host.ranks = []

    def running(self, rank: int) -> VirtualHost | None:
        return next((host for host in self.hosts.values() if host.up and rank in host.ranks), None)
