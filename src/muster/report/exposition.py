"""A run's figures as a Prometheus page: a fold of its events, and the text format (version 0.0.4) of what it holds.

https://prometheus.io/docs/instrumenting/exposition_formats/. A name, once there, keeps its meaning and its unit.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median

from muster.core.event_details.attempts import AttemptStarted
from muster.core.event_details.checkpoints import CheckpointCommitted, CheckpointRestored
from muster.core.event_details.hosts import HostAllocated, HostHealth, HostReadmitted, HostReleased, HostUsage
from muster.core.event_details.incidents import IncidentDetected, IncidentResolved
from muster.core.event_details.run import RunFinished
from muster.core.event_details.training import BaselineRate, ChipsUsage, Step
from muster.core.events import Event
from muster.core.incidents import KINDS
from muster.report.ledger.categories import MIN_CLEAN_STEPS, WARMUP_STEPS

#: Clean steps that a reference rests on, and steps that a recovery may take back.
_NEWEST, _TAKEN_BACK = 501, 4096
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
HOUR_NS = 3600 * 1_000_000_000
Labels = Mapping[str, str]


@dataclass
class RunningGoodput:
    """The ledger's goodput while a run goes on, from each of its events in order, in constant memory.

    The reference of a run that measured none is the median of the newest of its clean steps (``_NEWEST``), and a step
    that was lost counts until the next attempt resumes.
    """

    _attempt: int = 0
    _world: int = 0
    _steps: int = 0
    """Of this attempt."""
    _tokens: int = 0
    """Of the steps that count."""
    _counted: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_TAKEN_BACK))
    """The newest of them: (step, tokens), in rising order."""
    _newest: int = -1
    _clean: dict[int, deque[tuple[int, float]]] = field(default_factory=dict)
    """Ranks -> the newest clean steps: (step, nanoseconds for a token)."""
    _measured: tuple[float, int] | None = None
    """(tokens per second, of so many ranks), with fault tolerance off."""
    _held: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Host -> (since when, its ranks)."""
    _rank_ns: int = 0
    """Of hosts that were released."""
    _any_since_ns: int = 0
    _any_ns: int = 0
    """In which any host was held, up to when none was."""

    def add(self, event: Event) -> None:
        """Take one event; kinds that do not matter are ignored."""
        if event.kind == Step.kind:
            self._on_step(event)
        elif event.kind == AttemptStarted.kind and event.attempt > self._attempt:
            begun = event.read(AttemptStarted)
            self._attempt, self._world, self._steps = event.attempt, begun.world_size, 0
            if begun.resume_step is not None:
                self._take_back(begun.resume_step)
        elif event.kind == CheckpointRestored.kind and event.step is not None and event.attempt == self._attempt:
            self._take_back(event.step)
        elif event.kind == BaselineRate.kind:
            rate = event.read(BaselineRate)
            self._measured = (rate.tokens_per_s, rate.world_size)
        elif event.kind == HostAllocated.kind and event.host not in self._held:
            if not self._held:
                self._any_since_ns = event.wall_ns
            self._held[event.host] = (event.wall_ns, max(1, event.read(HostAllocated).gpus))
        elif event.kind == HostReleased.kind and event.host in self._held:
            since_ns, ranks = self._held.pop(event.host)
            self._rank_ns += ranks * max(0, event.wall_ns - since_ns)
            if not self._held:
                self._any_ns += max(0, event.wall_ns - self._any_since_ns)

    def _on_step(self, event: Event) -> None:
        if event.step is None or event.rank not in (0, None) or event.attempt < self._attempt:
            return  # of an attempt that was replaced: fenced
        detail = event.read(Step)
        tokens = detail.tokens or 0
        self._steps += 1
        if event.step > self._newest:
            self._newest = event.step
            self._tokens += tokens
            self._counted.append((event.step, tokens))
        if self._steps > WARMUP_STEPS and tokens and detail.step_ns > 0:
            waits = max(0, (detail.data_wait_ns or 0) + (detail.stall_ns or 0))
            clean = self._clean.setdefault(self._world, deque(maxlen=_NEWEST))
            clean.append((event.step, max(1, detail.step_ns - waits) / tokens))

    def _take_back(self, resume_step: int) -> None:
        """What was applied beyond it is taken again."""
        while self._counted and self._counted[-1][0] > resume_step:
            step, tokens = self._counted.pop()
            self._tokens -= tokens
            self._newest = step - 1
        for clean in self._clean.values():
            while clean and clean[-1][0] > resume_step:
                clean.pop()

    def _reference(self) -> tuple[float, int] | None:
        """R*: (tokens per second, of so many ranks)."""
        if self._measured is not None:
            return self._measured
        worlds = [world for world, clean in self._clean.items() if len(clean) >= MIN_CLEAN_STEPS]
        if not worlds:
            return None
        return 1e9 / median(per_token_ns for _, per_token_ns in self._clean[max(worlds)]), max(worlds)

    def of(self, wall_ns: int) -> dict[str, float]:
        """``active`` and ``purchased`` at this moment; empty before there is a reference or a host."""
        reference = self._reference()
        if reference is None:
            return {}
        tokens_per_s, world = reference
        open_ns = sum(ranks * max(0, wall_ns - since_ns) for since_ns, ranks in self._held.values())
        bought = (self._rank_ns + open_ns) * tokens_per_s / max(1, world)
        any_ns = self._any_ns + (max(0, wall_ns - self._any_since_ns) if self._held else 0)
        capacity = {"active": min(any_ns * tokens_per_s, bought), "purchased": bought}
        return {of: self._tokens * 1e9 / most for of, most in capacity.items() if most > 0}


@dataclass(frozen=True)
class Family:
    """One metric: its samples follow each other under one head."""

    name: str
    type: str
    """gauge or counter."""
    help: str


#: (metric, labels besides the run's, value).
Sample = tuple[Family, Labels, float]

STEP_SECONDS = Family("muster_step_seconds", "gauge", "Wall time of the newest step.")
STEP_PART = Family("muster_step_part_seconds", "gauge", "Of the newest step, by rank 0's clocks: where its time went.")
LAG = Family(
    "muster_rank_lag_seconds",
    "gauge",
    "Behind the other ranks' median arrival at the sums; while one keeps coming last.",
)
STEP = Family("muster_step", "gauge", "Newest applied optimizer step.")
TOKENS = Family("muster_tokens_total", "counter", "Tokens that were trained on and count, padding excluded.")
LOSS = Family("muster_loss", "gauge", "Loss of the newest step.")
MFU = Family("muster_mfu_ratio", "gauge", "Model FLOP/s of the newest step over the peak of all ranks.")
RANKS = Family("muster_ranks", "gauge", "Ranks of the newest attempt.")
ATTEMPT = Family("muster_attempt", "gauge", "Number of the newest attempt.")
INCIDENTS = Family("muster_incidents_total", "counter", "Incidents so far, by kind.")
LOST = Family("muster_incident_lost_seconds_total", "counter", "From incidents' detection to the next new step.")
AGE = Family("muster_checkpoint_age_seconds", "gauge", "Since the newest version of the training state in this tier.")
GPU = Family("muster_gpu_health", "gauge", "1: a fault was found on this host (gpu: which one, where known).")
BUSY = Family("muster_host_processor_ratio", "gauge", "Share of the host's processors that were not idle, lately.")
CPU = Family("muster_step_processor_seconds", "gauge", "Processor time of the host's ranks in a step, lately.")
MEMORY = Family("muster_host_memory_bytes", "gauge", "Memory of the host that is in use.")
NETWORK = Family(
    "muster_host_network_bytes_total", "counter", "Over the host's network and RDMA ports, loopback left out."
)
GPU_BUSY = Family("muster_gpu_utilization_ratio", "gauge", "Share of the time in which the GPU computed, lately.")
GPU_MEMORY = Family("muster_gpu_memory_bytes", "gauge", "Memory of the GPU that is in use.")
TPU_BUSY = Family("muster_tpu_utilization_ratio", "gauge", "Share of the time in which the chip computed, lately.")
TPU_MEMORY = Family("muster_tpu_memory_bytes", "gauge", "Memory of the chip that is in use.")
USD = Family("muster_usd_total", "counter", "Dollars spent on hosts whose price is known.")
GOODPUT = Family(
    "muster_goodput_ratio", "gauge", "Tokens that count over what these hosts could have trained in their time, so far."
)
FINISHED = Family("muster_finished", "gauge", "1: the run has ended.")


@dataclass
class RunMetrics:
    """Feed it every event of a run, in order; a constant amount of work and memory for each.

    A step that is taken again after a recovery counts once.
    """

    run_id: str
    finished: bool = False
    _attempt: int = 0
    _ranks: int = 0
    _hosts: dict[int, str] = field(default_factory=dict)
    """Of each rank."""
    _step: tuple[int, Step] | None = None
    _tokens: int = 0
    _counted: int = 0
    """The newest step whose tokens count."""
    _incidents: dict[str, int] = field(default_factory=dict)
    _lost_ns: int = 0
    _newest_ns: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Tier -> (newest step in it, since when)."""
    _faults: dict[str, HostHealth] = field(default_factory=dict)
    """By host, until it is readmitted."""
    _usage: dict[str, HostUsage] = field(default_factory=dict)
    """Each host's newest."""
    _chips: dict[str, ChipsUsage] = field(default_factory=dict)
    """Each host's newest."""
    _network: dict[tuple[str, str], int] = field(default_factory=dict)
    """(Host, direction) -> bytes so far."""
    _held: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Host -> (bought at, dollars an hour)."""
    _usd: float = 0.0
    _goodput: RunningGoodput = field(default_factory=RunningGoodput)

    def add(self, event: Event) -> None:
        """Take one event; kinds that do not matter are ignored."""
        self._goodput.add(event)
        if event.kind == Step.kind and event.step is not None:
            self._on_step(event.step, event.read(Step), event.wall_ns)
        elif event.kind == AttemptStarted.kind:
            begun = event.read(AttemptStarted)
            self._attempt, self._ranks = event.attempt, begun.world_size
            self._hosts = {rank: host for host, ranks in begun.hosts.items() for rank in ranks}
        elif event.kind == CheckpointRestored.kind and event.step is not None and self._step is not None:
            self._step = (min(self._step[0], event.step), self._step[1])
        elif event.kind == CheckpointCommitted.kind and event.step is not None:
            self._version(event.read(CheckpointCommitted).tier, event.step, event.wall_ns)
        elif event.kind == IncidentDetected.kind:
            found = event.read(IncidentDetected)
            if found.part_of is None:  # what is part of another one is no trouble more
                self._incidents[found.incident] = self._incidents.get(found.incident, 0) + 1
        elif event.kind == IncidentResolved.kind:
            self._lost_ns += event.read(IncidentResolved).lost_ns
        elif event.kind == RunFinished.kind:
            self.finished = True
        else:
            self._on_host(event)

    def _on_host(self, event: Event) -> None:
        if event.kind == HostUsage.kind:
            self._on_usage(event.host, event.read(HostUsage))
        elif event.kind == ChipsUsage.kind:
            self._chips[event.host] = event.read(ChipsUsage)
        elif event.kind == HostHealth.kind:
            self._faults[event.host] = event.read(HostHealth)
        elif event.kind == HostReadmitted.kind:
            self._faults.pop(event.host, None)
        elif event.kind == HostAllocated.kind and event.host not in self._held:
            self._held[event.host] = (event.wall_ns, event.read(HostAllocated).usd_per_hour or 0.0)
        elif event.kind == HostReleased.kind and event.host in self._held:
            self._usage.pop(event.host, None)
            self._chips.pop(event.host, None)
            bought_ns, price = self._held.pop(event.host)
            self._usd += price * max(0, event.wall_ns - bought_ns) / HOUR_NS

    def _on_usage(self, host: str, found: HostUsage) -> None:
        self._usage[host] = found
        for direction, grown in (("received", found.received_bytes), ("sent", found.sent_bytes)):
            if grown is not None:
                self._network[host, direction] = self._network.get((host, direction), 0) + grown

    def _on_step(self, number: int, detail: Step, wall_ns: int) -> None:
        self._step = (number, detail)
        if number > self._counted:
            self._tokens += detail.tokens or 0
            self._counted = number
        for tier, held in (("memory", detail.snapshot_step), ("peer", detail.peer_step)):
            if held is not None:
                self._version(tier, held, wall_ns)

    def _version(self, tier: str, step: int, wall_ns: int) -> None:
        if tier not in self._newest_ns or self._newest_ns[tier][0] != step:
            self._newest_ns[tier] = (step, wall_ns)

    def samples(self, wall_ns: int) -> Iterator[Sample]:
        """At this moment; what is not known has none."""
        yield ATTEMPT, {}, self._attempt
        yield RANKS, {}, self._ranks
        yield FINISHED, {}, float(self.finished)
        if self._step is not None:
            yield from self._of_step(*self._step)
            yield from self._lags(self._step[1])
        yield TOKENS, {}, self._tokens
        # Each known kind from the start: increase() sees nothing of a series whose first value is 1.
        for kind in sorted({*KINDS.names(), *self._incidents}):
            yield INCIDENTS, {"kind": kind}, self._incidents.get(kind, 0)
        yield LOST, {}, self._lost_ns / 1e9
        for tier, (_, since_ns) in sorted(self._newest_ns.items()):
            yield AGE, {"tier": tier}, max(0, wall_ns - since_ns) / 1e9
        for host, found in sorted(self._faults.items()):
            for gpu in found.resettable or ("",):
                yield GPU, {"host": host, "gpu": str(gpu), "class": found.verdict or "replace"}, 1.0
        yield from self._of_hosts()
        held = sum(price * max(0, wall_ns - bought_ns) / HOUR_NS for bought_ns, price in self._held.values())
        yield USD, {}, self._usd + held
        for of, ratio in self._goodput.of(wall_ns).items():
            yield GOODPUT, {"of": of}, ratio

    @staticmethod
    def _of_step(number: int, detail: Step) -> Iterator[Sample]:
        yield STEP, {}, number
        yield STEP_SECONDS, {}, detail.step_ns / 1e9
        parts = (
            ("compute", detail.compute_ns),
            ("comm_exposed", detail.comm_ns),
            ("data_wait", detail.data_wait_ns),
            ("host_stall", detail.host_gap_ns),
            ("checkpoint", detail.stall_ns),
        )
        for part, spent_ns in parts:
            if spent_ns is not None:
                yield STEP_PART, {"part": part}, spent_ns / 1e9
        if detail.loss is not None:
            yield LOSS, {}, detail.loss
        if detail.mfu is not None:
            yield MFU, {}, detail.mfu

    def _of_hosts(self) -> Iterator[Sample]:
        usage = sorted(self._usage.items())
        for host, found in usage:
            if found.busy is not None:
                yield BUSY, {"host": host}, found.busy
        for host, found in usage:
            yield CPU, {"host": host}, found.cpu_ns / max(1, found.steps) / 1e9
        for host, found in usage:
            if found.memory_bytes is not None:
                yield MEMORY, {"host": host}, found.memory_bytes
        for (host, direction), count in sorted(self._network.items()):
            yield NETWORK, {"host": host, "direction": direction}, count
        for host, found in usage:
            for number, share in enumerate(found.gpu_busy):
                yield GPU_BUSY, {"host": host, "gpu": str(number)}, share
        for host, found in usage:
            for number, size in enumerate(found.gpu_memory_bytes):
                yield GPU_MEMORY, {"host": host, "gpu": str(number)}, size
        for host, chips in sorted(self._chips.items()):
            for number, share in enumerate(chips.busy):
                yield TPU_BUSY, {"host": host, "chip": str(number)}, share
        for host, chips in sorted(self._chips.items()):
            for number, size in enumerate(chips.memory_bytes):
                yield TPU_MEMORY, {"host": host, "chip": str(number)}, size

    def _lags(self, detail: Step) -> Iterator[Sample]:
        """How ``health.stragglers`` counts: against the others' median, so that one that is early is no lag of all."""
        for one in detail.pace if len(detail.pace) > 1 else ():
            others = statistics.median(other.ahead_us for other in detail.pace if other is not one)
            labels = {"rank": str(one.rank), "host": self._hosts.get(one.rank, "")}
            yield LAG, labels, max(0.0, others - one.ahead_us) / 1e6

    def page(self, wall_ns: int) -> str:
        given = self.samples(wall_ns)
        return text_format((family, {"run": self.run_id, **labels}, value) for family, labels, value in given)


def text_format(samples: Iterable[Sample]) -> str:
    """The page of these samples; those of one metric follow each other."""
    lines: list[str] = []
    before: Family | None = None
    for family, labels, value in samples:
        if family != before:
            lines += [f"# HELP {family.name} {_escaped(family.help)}", f"# TYPE {family.name} {family.type}"]
            before = family
        given = ",".join(f'{name}="{_escaped(text, quote=True)}"' for name, text in labels.items())
        lines.append(f"{family.name}{{{given}}} {float(value)!r}")
    return "\n".join(lines) + "\n"


def _escaped(text: str, *, quote: bool = False) -> str:
    result = text.replace("\\", "\\\\").replace("\n", "\\n")
    return result.replace('"', '\\"') if quote else result
