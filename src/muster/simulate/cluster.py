"""Virtual hosts for the real state machine: an event queue instead of sockets, a number instead of a clock.

It drives the real ``RecoveryStateMachine``. A host answers its messages as an agent would, after stage times drawn
from a profile; a fault is a function of the cluster at a time. Nothing sleeps and nothing polls: a healthy segment of
steps is one event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from muster.simulate import agent_model, connectivity
from muster.simulate.event_queue import EventQueue
from muster.simulate.host_time import HostTime, VirtualHost, hold_snapshots
from muster.simulate.stage_arithmetic import DiskTier, Pace, Stages, StepSegment
from muster.supervise.recovery.state import SECOND_NS, Effect, End, HostDown, Input, Log, Send, Tick
from muster.supervise.recovery.state_machine import RecoveryStateMachine


@dataclass
class Cluster:
    """Hosts, a clock and the state machine.

    ``run`` simulates until the run ends or ``until_s`` is reached. ``log`` is everything that the state machine
    logged: (seconds, Log). ``time`` is every purchased host-second by what became of it.
    """

    machine: RecoveryStateMachine
    names: list[str]
    total_steps: int
    stages: Stages = field(default_factory=Stages)
    replicate_snapshots: bool = True
    memory_tier: bool = True
    snapshot_every_steps: int = 1
    disk: DiskTier | None = None
    micro_batches: int = 0
    """Of a step: each of a host's ``data_ranks_per_host`` computes whole ones, in rounds. 0: they divide evenly."""
    data_ranks_per_host: int = 1
    draw: Callable[[str, float], float] = field(default=lambda stage, seconds: seconds)
    """(stage, its time in the profile) -> how long it takes this time."""
    on_log: Callable[[Log], None] = field(default=lambda log: None)
    on_end: Callable[[End], bool] = field(default=lambda end: False)
    """True: the run is started again (``resume``); False: the simulation is over."""
    time: HostTime = field(default_factory=HostTime)
    disk_step: int = 0
    """Step of the newest usable checkpoint on disk."""
    now_ns: int = 0
    hosts: dict[str, VirtualHost] = field(default_factory=dict)
    log: list[tuple[float, Log]] = field(default_factory=list)
    result: End | None = None
    history: list[tuple[int, int, StepSegment]] = field(default_factory=list)
    """(attempt, last applied step, the segment) of every segment that is over."""
    extra_start_s: float = 0.0
    """Of the next start alone: a device that is reset in place."""
    slow: float = 1.0
    _queue: EventQueue = field(default_factory=EventQueue)
    _tick_ns: int | None = None
    _step: int = 0
    reset_works: bool = True
    ranks_obey: bool = True
    """False: ranks that are asked to save hang."""
    disk_takes: bool = True
    """False: what memory holds cannot be written."""
    _segment: int = 0
    """Changes whenever what was scheduled for the current steps no longer holds."""
    _run: StepSegment | None = None
    _segment_began_ns: int | None = None
    _job: str = "start"
    _world: frozenset[str] = frozenset()
    _world_size: int = 0
    written: list[tuple[float, str, Mapping[str, Any]]] = field(default_factory=list)
    """(seconds, host, event) of what the hosts wrote into their own logs."""
    dies_at_send: bool = False
    """The supervisor is killed before it sends its next message."""
    supervised: bool = True
    _inputs: int = 0
    _ending: tuple[int, float] = (-1, 0.0)

    @property
    def step_s(self) -> float:
        """A step on the hosts that run: the batch is constant, so fewer hosts take longer."""
        active = len(self.machine.state.active)
        wanted = self.machine.settings.wanted_hosts
        return self.slow * self.stages.pace_s(active, wanted, self.micro_batches, self.data_ranks_per_host)

    @property
    def now_s(self) -> float:
        return self.now_ns / SECOND_NS

    @property
    def stepping(self) -> bool:
        return self._segment_began_ns is not None

    def at(self, seconds: float, act: Callable[[], None]) -> None:
        """Call ``act`` when the clock reads ``seconds``."""
        self._queue.push(round(seconds * SECOND_NS), act)

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        self.at(self.now_s + max(0.0, seconds), act)

    def run(self, until_s: float = 1e9) -> End | None:
        """Simulate; return how the run ended, or None when the time was up."""
        self._effects(self.machine.start(self.now_ns))
        for index, name in enumerate(self.names):
            self.hosts[name] = VirtualHost(name=name)
            self.after(self.stages.agent_start_s + index * 1e-6, lambda name=name: self.join(name))  # type: ignore[misc]
        until_ns = round(until_s * SECOND_NS)
        while self.result is None and (act := self._queue.pop(until_ns, self._advance)):
            act()
        self._close()
        return self.result

    # ------------------------------------------------------------ faults, for callers

    def kill_rank(
        self, rank: int, *, code: int = -9, last: Mapping[str, Any] | None = None, detect_s: float | None = None
    ) -> bool:
        """A rank's process dies; its host's agent sees it. False: no host runs that rank now."""
        host = self.running(rank)
        if host is None:
            return False
        self._settle_steps()
        host.dead.add(rank)
        message = {"t": "rank_exit", "attempt": host.attempt, "rank": rank, "pid": 1, "code": code,
                   "step": self._step, "last": dict(last or {})}  # fmt: skip
        self.break_world(host, message, self.stages.detect_exit_s if detect_s is None else detect_s)
        return True

    def kill_host(self, name: str, *, silent: bool = False, detect_s: float | None = None) -> None:
        """All processes of a host die (connections close), or it goes silent (a cut link, a stopped host)."""
        host = self.hosts[name]
        if not host.up:
            return
        self._settle_steps()
        if host.ranks:
            self.halt("detect")
        host.up = host.joined = host.linked = False
        host.forget()
        host.boots = boots = host.boots + 1
        reason = "silent" if silent else "all its connections closed"
        delay = self.stages.detect_silence_s if silent else self.stages.detect_exit_s
        self.after(delay if detect_s is None else detect_s, lambda: self._down(name, reason, boots))

    def return_host(self, name: str) -> None:
        """A repaired host's agent starts; a name not seen before is a new machine."""
        host = self.hosts.get(name)
        if host is None:
            host = self.hosts[name] = VirtualHost(name=name, up=False, held_since_ns=None)
        if host.up:
            return
        host.up, host.joined, host.attempt = True, False, 0
        if host.held_since_ns is None:
            host.held_since_ns = self.now_ns
        boots = host.boots
        self.after(self.draw("agent_start", self.stages.agent_start_s), lambda: self.join(name, boots=boots))

    def change_pace(self, slow: float) -> None:
        """From now on every step takes ``slow`` times as long as on healthy hosts."""
        self._settle_steps()
        self.slow = slow
        if self._run is not None and self.stepping:
            self._run.change(self._productive_s(), self.step_s, slow)
            self._segment += 1
            self._schedule_steps(self.machine.state.attempt)

    def receive_from(self, host: VirtualHost, message: Mapping[str, Any]) -> None:
        """A host's agent sends a message, now."""
        self._from(host.name, message, boots=host.boots)

    def replace_supervisor(self, machine: RecoveryStateMachine) -> None:
        """The supervisor died; another one takes over from the log (see ``connectivity``)."""
        connectivity.replace_supervisor(self, machine)

    def start_supervisor(self, machine: RecoveryStateMachine) -> None:
        """From now on this supervisor acts."""
        self.supervised, self.machine, self._tick_ns = True, machine, None
        self._effects(machine.start(self.now_ns))

    def resume(self, machine: RecoveryStateMachine) -> None:
        """The run had ended and is started again, on agents of its own: only the disk tier remembers."""
        self._job, self._world_size = "start", 0
        for host in self.hosts.values():
            host.forget()
            host.attempt, host.joined, host.linked = 0, False, True
        self.start_supervisor(machine)
        for name, host in self.hosts.items():
            if host.up:
                self.after(self.draw("agent_start", self.stages.agent_start_s), lambda name=name: self.join(name))  # type: ignore[misc]

    def _advance(self, to_ns: int) -> None:
        """Advance the clock to ``to_ns``; nothing happens in between."""
        span_s = (to_ns - self.now_ns) / SECOND_NS
        self.now_ns = to_ns
        if span_s <= 0:
            return
        world = self._world if self._job in ("stepping", "detect") else None
        self.time.pass_by(span_s, self._job, self.hosts.values(), self.machine.state, world)

    def _close(self) -> None:
        self._settle_steps()
        self.halt(self._job)
        for host in self.hosts.values():
            if host.held_since_ns is not None:
                self.time.purchased_s += (self.now_ns - host.held_since_ns) / SECOND_NS

    def join(self, name: str, *, boots: int | None = None) -> None:
        """An agent connects; one of an earlier boot (``boots``) no longer exists."""
        host = self.hosts[name]
        if host.up and boots in (None, host.boots):
            host.joined = True
            self._settle_steps()
            connectivity.connect(self, host, self._step)
            if 0 in host.ranks and self.stepping:  # a new supervisor is sent the next step
                self.after(self.step_s, lambda segment=self._segment: self._report_step_of(segment, host.attempt))  # type: ignore[misc]

    def give(self, given: Input) -> None:
        if self.result is None and self.supervised:
            self._inputs += 1
            self._effects(self.machine.handle(given, self.now_ns))

    _give = give

    def _from(self, name: str, message: Mapping[str, Any], *, boots: int) -> None:
        host = self.hosts[name]
        if host.up and host.boots == boots:
            connectivity.report(self, host, message)

    def _down(self, name: str, reason: str, boots: int) -> None:
        if self.hosts[name].boots == boots and not self.hosts[name].joined:
            self._give(HostDown(host=name, reason=reason))

    def break_world(self, host: VirtualHost, message: Mapping[str, Any], detect_s: float) -> None:
        """No rank steps any more; the message with the cause comes ``detect_s`` later."""
        boots = host.boots
        self.halt("detect")
        self.after(detect_s, lambda: self._from(host.name, message, boots=boots))

    def _effects(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Log):
                self.log.append((self.now_s, effect))
                self.on_log(effect)
            elif isinstance(effect, Send):
                if connectivity.cut_off(self):
                    return
                agent_model.handle_message(self, effect.host, effect.message)
            elif self.on_end(effect):
                self.halt("stopped")
                self._job = "stopped"
            else:
                self.result = effect
        deadline = self.machine.deadline_ns
        if deadline is not None and deadline != self._tick_ns:
            self._tick_ns = deadline
            self.at(deadline / SECOND_NS, lambda: self._tick(deadline))

    def _tick(self, deadline: int) -> None:
        if self.machine.deadline_ns == deadline:
            self.now_ns = max(self.now_ns, deadline)
            self._give(Tick())

    def maybe_begin(self, attempt: int, message: Mapping[str, Any]) -> None:
        """A host was sent its start; the ranks of an attempt start once its last host was."""
        world = int(message["contexts"][0]["world_size"])
        if int(message["contexts"][-1]["rank"]) != world - 1:  # hosts are sent it in the order of their ranks
            return
        active = [host for host in self.hosts.values() if host.up and host.attempt == attempt and host.ranks]
        if sum(len(host.ranks) for host in active) < world:
            return
        restore = message["contexts"][0].get("restore")
        before = self._step
        self._step = int(restore["step"]) if restore else self.disk_step
        wanted = self.machine.settings.wanted_hosts
        self.time.lose(max(0, before - self._step) * self.stages.step_s * wanted)
        self._segment += 1
        self._world = frozenset(host.name for host in active)
        self._begin(attempt, world, restore is None and self.disk is not None and self.disk_step > 0)

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
        self.after(start_s + restore_s + warmup_s, lambda: self._step_on(segment, attempt))

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
            self._settle_steps()
            self._report_step(attempt)

    def _report_step(self, attempt: int) -> None:
        first = next((host for host in self.hosts.values() if 0 in host.ranks and host.up), None)
        if first is not None and self._step:
            event = {"kind": "step", "attempt": attempt, "rank": 0, "step": self._step, "detail": {}}
            self._from(first.name, {"t": "event", "event": event}, boots=first.boots)

    def _productive_s(self) -> float:
        """Training time of the segment so far."""
        elapsed_s = (self.now_ns - (self._segment_began_ns or 0)) / SECOND_NS
        return self.disk.productive_s(elapsed_s) if self.disk else elapsed_s

    def _settle_steps(self) -> None:
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
        ring = [host for host in active if host.up and host.ranks]
        hold_snapshots(ring, self.machine.state.layout.key, held, replicate_snapshots=self.replicate_snapshots)

    def halt(self, job: str) -> None:
        """No more steps: their time is classified, and the hosts are in ``job`` from here on."""
        if self._segment_began_ns is not None:
            self._settle_steps()
            self._report_step(self.machine.state.attempt)
        if self._segment_began_ns is not None and self._run is not None:
            self.history.append((self.machine.state.attempt, self._step, self._run))
            steps, wanted = self._step - self._run.first_step, self.machine.settings.wanted_hosts
            parts = self._run.parts((self.now_ns - self._segment_began_ns) / SECOND_NS, self._productive_s(), steps)
            good_host_s = steps * self.stages.step_s * wanted
            self.time.classify(parts, self._run.hosts, good_host_s=good_host_s, tax=self.stages.tax)
        self._segment_began_ns = None
        self._segment += 1
        if self._job not in ("start", "stopped"):
            self._job = job

    def end_ranks(self, host: VirtualHost, attempt: int, keep: Iterable[int], *, reset: bool = False) -> None:
        """A host ends its ranks but those in ``keep``, and then lists its snapshots."""
        self._settle_steps()
        if host.ranks:
            self.halt("restart")
        if self._job == "detect":
            self._job = "restart"
        kept = {str(rank): self._step for rank in keep if rank in host.ranks}
        host.ranks, host.hung = [], None
        message = {"t": "collected", "attempt": attempt, "snapshots": host.list_snapshots(), "kept": kept}
        if reset:
            message["reset"] = {"ok": self.reset_works, "evidence": "as the test wants it"}
        boots = host.boots
        if self._ending[0] != attempt:  # drawn once for an attempt: the slowest host counts
            self._ending = (attempt, self.draw("end", self.stages.end_ranks_s))
        self.after(self._ending[1], lambda: self._from(host.name, message, boots=boots))

    def leave_after_step(self, code: int, *, save: bool = False) -> None:
        """All ranks exit with ``code`` once the current step is applied, and saved."""
        segment, attempt = self._segment, self.machine.state.attempt
        self.after(self.step_s, lambda: self._leave(segment, attempt, code, save=save))

    def _leave(self, segment: int, attempt: int, code: int, *, save: bool = False) -> None:
        if segment == self._segment:
            self._settle_steps()
            self.halt("restart")
            if save and self.disk_takes:
                agent_model.report_save(self, self._step, attempt)
            agent_model.exit_all(self, attempt, code)

    def running(self, rank: int) -> VirtualHost | None:
        return next((host for host in self.hosts.values() if host.up and rank in host.ranks), None)
