"""One rehearsal: a scenario and a seed in, the use of every host-second out. The supervisor and the policy are
the real ones; hosts, clock and faults are virtual."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from muster.core.types import Topology
from muster.policy.load import load_policy
from muster.simulate import fault_schedule
from muster.simulate.cluster import Cluster
from muster.simulate.fault_schedule import Fault, schedule
from muster.simulate.scenario import HOUR_S, Scenario
from muster.simulate.stage_arithmetic import DiskTier, Stages
from muster.supervise.recovery.inputs import End, Log, Settings
from muster.supervise.recovery.phases import Ended
from muster.supervise.recovery.state import State
from muster.supervise.recovery.state_machine import RecoveryStateMachine

#: More than any rehearsal reaches: it ends by the clock.
ENDLESS_STEPS = 10**12
#: How often the scheduler tries a run that wants to run again.
REQUEUE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Interruption:
    """L of one fault: from the fault to the end of the first step beyond the last one applied before it."""

    kind: str
    lost_s: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one seed. Seconds of the job, host-seconds by category."""

    seed: int
    wall_s: float
    hosts: int
    productive_s: float
    """Applied steps of the final lineage at the reference's pace: tokens / R*."""
    purchased_host_s: float
    host_s: dict[str, float]
    faults: dict[str, int]
    """Kind -> how often it was injected."""
    interruptions: tuple[Interruption, ...]
    redone_steps: int
    gave_up: int
    """Times the run ended by its own decision and had to be started again."""
    identity_error: float
    mean_out: float
    """Hosts in repair, on average over time."""

    @property
    def goodput_active(self) -> float:
        """As the ledger's: of the time on the hosts asked for, but never of more than was bought."""
        active_s = min(self.wall_s, self.purchased_host_s / self.hosts)
        return self.productive_s / active_s if active_s else 0.0

    @property
    def goodput_purchased(self) -> float:
        return self.productive_s * self.hosts / self.purchased_host_s if self.purchased_host_s else 0.0


def rehearse(scenario: Scenario, seed: int) -> Outcome:
    """Simulate one seed. Pure: the same scenario and seed give the same outcome."""
    return Simulation(scenario, seed).run()


@dataclass
class Simulation:
    """A cluster with the scenario's faults in its queue."""

    scenario: Scenario
    seed: int
    injected: Counter[str] = field(default_factory=Counter)
    open: list[tuple[float, str]] = field(default_factory=list)
    began: list[float] = field(default_factory=list)
    """When each fault that stopped training was injected."""
    interruptions: list[Interruption] = field(default_factory=list)
    gave_up: int = 0
    _replaced: Counter[str] = field(default_factory=Counter)
    _going: set[str] = field(default_factory=set)
    _capacity: int = 0

    def __post_init__(self) -> None:
        scenario = self.scenario
        self.rng = random.Random(f"{self.seed}:stages")
        names = [f"host-{index}" for index in range(scenario.hosts + scenario.spares)]
        self.racks = racks_of(scenario, names, self.seed)
        places = {
            name: Topology(block=str(rack * scenario.rack_hosts // scenario.block_hosts), rack=str(rack))
            for name, rack in self.racks.items()
        }
        self.spec = scenario.run_spec()
        self.policy = load_policy(scenario.policy, max_wait_s=scenario.max_wait_s)
        self.cluster = Cluster(
            machine=self.machine(State()),
            names=names,
            total_steps=ENDLESS_STEPS,
            stages=stages_of(scenario),
            places=places if scenario.rack_labels else {},
            memory_tier=scenario.memory_tier,
            snapshot_every_steps=scenario.snapshot_every,
            disk=disk_of(scenario),
            micro_batches=scenario.micro_batches,
            data_ranks_per_host=scenario.data_ranks_per_host,
            draw=self.draw,
            on_log=self.on_log,
            on_end=self.on_run_ended,
        )
        for fault in schedule(scenario, self.seed):
            self.cluster.at(fault.at_s, lambda fault=fault: self.inject(fault))  # type: ignore[misc]
        if scenario.trace is not None:
            self._capacity = len(names)
            for at_s, count in zip(scenario.trace.times_s, scenario.trace.counts, strict=True):
                self.cluster.at(at_s, lambda count=count: self.set_capacity(count))  # type: ignore[misc]

    def machine(self, state: State) -> RecoveryStateMachine:
        settings = Settings(spec=self.spec, run_id="rehearsal", run_dir="/", ranks_per_host=1)
        return RecoveryStateMachine(settings=settings, policy=self.policy, state=state)

    def run(self) -> Outcome:
        scenario, cluster = self.scenario, self.cluster
        hours = min(scenario.hours, scenario.trace.hours) if scenario.trace else scenario.hours
        wall_s = hours * HOUR_S
        cluster.at(wall_s, lambda: None)
        cluster.run(until_s=wall_s)
        redone = cluster.time.by["redone"] / (scenario.hosts * cluster.stages.step_s)
        return Outcome(
            seed=self.seed,
            wall_s=wall_s,
            hosts=scenario.hosts,
            productive_s=cluster.time.credit_s / scenario.hosts,
            purchased_host_s=cluster.time.purchased_s,
            host_s=dict(cluster.time.by),
            faults=dict(self.injected),
            interruptions=tuple(self.interruptions),
            redone_steps=round(redone),
            gave_up=self.gave_up,
            identity_error=cluster.time.identity_error,
            mean_out=cluster.time.by["out"] / wall_s,
        )

    def draw(self, stage: str, mean_s: float) -> float:
        """The profile's stage, scaled to this mean; a mean that no stage has stays as it is."""
        usual_s = self.scenario.profile.mean_s(stage)
        if mean_s <= 0 or usual_s <= 0:
            return max(0.0, mean_s)
        return self.scenario.profile.draw(stage, self.rng) * mean_s / usual_s

    # ------------------------------------------------------------ faults

    def inject(self, fault: Fault) -> None:
        """One fault, on hosts that run at this moment."""
        cluster = self.cluster
        if fault.kind == "slow":
            self.injected["slow"] += 1
            cluster.change_pace(fault.factor)
            cluster.after(fault.repair_s, lambda: cluster.change_pace(1.0))
            return
        active = [name for name in cluster.machine.state.counted_on if cluster.hosts[name].up]
        if not active:
            return
        self.injected[fault.kind] += 1
        stepping = cluster.stepping
        first = int(fault.where * len(active))
        if fault.kind == "maintenance":
            self.notify(active[first], fault)
        elif fault.kind == "false_alarm":
            fault_schedule.false_alarm(cluster, rank_of(cluster, active[first]))
        elif fault.swap:
            for name in self.neighbours(active[first], active)[: fault.hosts]:
                cluster.kill_host(name, detect_s=fault.detect_s)
                self.repair(name, fault.detect_s + fault.repair_s)
        elif fault.hangs:
            fault_schedule.hang_rank(cluster, rank_of(cluster, active[first]), detect_s=fault.detect_s)
        else:
            cluster.extra_start_s += fault.reset_s
            cluster.kill_rank(rank_of(cluster, active[first]), detect_s=fault.detect_s)
        if not cluster.stepping and (stepping or self.open):
            self.open.append((cluster.now_s, fault.kind))
            self.began.append(cluster.now_s)

    def neighbours(self, name: str, among: Sequence[str]) -> list[str]:
        """``name``, then the others in its rack, then those in the racks next to it."""
        racks = max(self.racks.values()) + 1
        away = {other: (self.rack_of(other) - self.rack_of(name)) % racks for other in among}
        return sorted(among, key=lambda other: (other != name, away[other]))

    def rack_of(self, name: str) -> int:
        """Another machine in a host's stead is in its rack."""
        return self.racks[name.partition("+")[0]]

    def last_fault_before(self, at_s: float) -> float | None:
        """Time of the last fault before ``at_s`` that stopped training; None: there was none."""
        return max((began for began in self.began if began <= at_s), default=None)

    def notify(self, name: str, fault: Fault) -> None:
        """Maintenance: a host gets notice, is taken away, and returns."""
        notice_s = self.scenario.maintenance_notice_s
        self._going.add(name)
        fault_schedule.notice(self.cluster, name, grace_s=notice_s)
        self.cluster.after(notice_s, lambda: self.cluster.kill_host(name))
        self.cluster.after(notice_s, lambda: self.repair(name, fault.repair_s))

    def repair(self, name: str, after_s: float) -> None:
        """The host returns later; one that the supervisor will not use again is replaced by another machine."""
        self._going.add(name)
        self.cluster.after(after_s, lambda: self.return_repaired(name))

    def return_repaired(self, name: str) -> None:
        cluster = self.cluster
        self._going.discard(name)
        known = cluster.machine.state.hosts.get(name)
        if known is not None and known.quarantined:
            fault_schedule.release_host(cluster, name)
            slot = name.partition("+")[0]
            self._replaced[slot] += 1
            name = f"{slot}+{self._replaced[slot]}"
            cluster.places = {**cluster.places, name: cluster.hosts[slot].place}
        cluster.return_host(name)

    # ------------------------------------------------------------ what the supervisor says

    def on_log(self, log: Log) -> None:
        if log.kind == "host.quarantined" and log.host not in self._going and log.host is not None:
            self.repair(log.host, self.scenario.repair_h * HOUR_S)
        elif log.kind == "incident.resolved" and self.open:
            at_s, kind = self.open[0]
            self.interruptions.append(Interruption(kind=kind, lost_s=self.cluster.now_s - at_s))
            self.open.clear()

    def on_run_ended(self, end: End) -> bool:
        """The run ended by its own decision: the scheduler (75) or a person (else) starts it again."""
        self.gave_up += 1
        wait_s = REQUEUE_S if end.exit_code == 75 else self.scenario.person_s
        if self.scenario.trace is not None:
            for name, host in list(self.cluster.hosts.items()):
                if host.up:
                    fault_schedule.release_host(self.cluster, name)
        state = self.cluster.machine.state
        kept = State(attempt=state.attempt, next_incident=state.next_incident)
        self.cluster.after(wait_s, lambda: self.start_again(kept))
        return True

    def start_again(self, kept: State) -> None:
        requested = self.scenario.hosts if self.scenario.policy == "conservative" else self.scenario.min_hosts or 1
        up = sum(host.up for host in self.cluster.hosts.values())
        if (self._capacity if self.scenario.trace is not None else up) < requested:
            self.cluster.after(REQUEUE_S, lambda: self.start_again(kept))
            return
        if self.scenario.trace is not None:
            for index, name in enumerate(self.cluster.names):
                if index < self._capacity:
                    self.cluster.return_host(name)
        self.cluster.resume(self.machine(kept))

    # ------------------------------------------------------------ spot capacity

    def set_capacity(self, count: int) -> None:
        """``count`` hosts are available from now on."""
        names = self.cluster.names
        self._capacity = min(count, len(names))
        if isinstance(self.cluster.machine.state.phase, Ended):
            return
        up = [name for name in names if self.cluster.hosts[name].up]
        for name in reversed(up[self._capacity :]):
            stepping = self.cluster.stepping
            fault_schedule.release_host(self.cluster, name)
            self.injected["preempted"] += 1
            if stepping and not self.cluster.stepping:
                self.open.append((self.cluster.now_s, "preempted"))
        missing = self._capacity - min(len(up), self._capacity)
        for name in [name for name in names if not self.cluster.hosts[name].up][:missing]:
            self.cluster.return_host(name)


def racks_of(scenario: Scenario, names: Sequence[str], seed: int) -> dict[str, int]:
    """Host -> number of its rack. The order of names says nothing about it: a scheduler gives hosts as they come."""
    shuffled = list(names)
    random.Random(f"{seed}:racks").shuffle(shuffled)
    return {name: index // scenario.rack_hosts for index, name in enumerate(shuffled)}


def rank_of(cluster: Cluster, name: str) -> int:
    """A rank on that host; -1 (no rank) where it runs none."""
    ranks = cluster.hosts[name].ranks
    return ranks[0] if ranks else -1


def stages_of(scenario: Scenario) -> Stages:
    """The profile's means, as the cluster takes them."""
    mean_s = scenario.profile.mean_s
    names = ("step", "start", "warmup", "agent_start", "first_start", "relayout")
    return Stages(
        **{f"{name}_s": mean_s(name) for name in names}, end_ranks_s=mean_s("end"), overhead=mean_s("overhead")
    )


def disk_of(scenario: Scenario) -> DiskTier | None:
    """The scenario's saves; None where there are none."""
    every_s, saves = scenario.every_s, scenario.saves
    if saves is None or math.isinf(every_s):
        return None
    return DiskTier(every_s=every_s, stall_s=saves.cost_s, drain_s=saves.drain_s, restore_s=saves.restore_s)
