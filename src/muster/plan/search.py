"""All layouts x machines x modes x node counts x micro-batches x recomputation; the cheapest, the fastest, and what
lies between. Every offer that is not taken has a reason of one phrase.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from muster.catalog.offers import Option
from muster.core.errors import NoPlanError
from muster.plan.constants import DEFAULT, Constants
from muster.plan.cost import STEP_SIGMA, Cost, cost
from muster.plan.format import dollars, duration, gigabytes
from muster.plan.goodput import Goodput, goodput
from muster.plan.layouts import FREE, Pins, node_counts, settings
from muster.plan.memory import CUDA, DeviceOverhead, MemoryEstimate, memory
from muster.plan.step_time import StepTime, step_time
from muster.plan.tpu_memory import tpu_memory
from muster.plan.workload import Setting, Workload

#: A plan leaves so much of a GPU's memory free: the closed form's worst error against measurements.
MEMORY_MARGIN = 0.05
#: A dearer plan must be so much faster to be offered.
LEAST_GAIN = 0.03
#: Modes that need something the run file must name.
NEEDS = {
    "reservation": "needs a reservation, and resources.reservation names none",
    "calendar": "needs a calendar booking, and resources.reservation names none",
    "commitment": "a commitment is for a year or three, not for a run",
}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Constraints that the 90th percentile must keep."""

    max_usd: float | None = None
    max_hours: float | None = None
    """The shorter of ``limits.max_hours`` and the time to ``limits.deadline``."""
    hours_name: str = "limits.max_hours"


UNLIMITED = Limits()


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way of running the job, with everything that is predicted about it."""

    option: Option
    num_nodes: int
    setting: Setting
    memory: MemoryEstimate
    time: StepTime
    goodput: Goodput
    cost: Cost

    @property
    def gpus(self) -> int:
        return self.num_nodes * self.option.offer.gpus_per_node

    @property
    def title(self) -> str:
        """``2 x a4-highgpu-8g DWS flex-start us-central1``."""
        return f"{self.num_nodes} x {self.option.title}"


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """An offer that was not taken, and why in one phrase."""

    option: Option
    reason: str


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a search found."""

    cheapest: Candidate | None
    fastest: Candidate | None
    frontier: tuple[Candidate, ...]
    """By rising cost and falling time; begins with the cheapest and ends with the fastest."""
    candidates: tuple[Candidate, ...]
    """The best setting of every offer and node count that keeps the limits."""
    rejected: tuple[Rejection, ...]
    evaluated: int
    """Settings whose memory was computed."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is searched: the job, what is on offer, and the rules."""

    work: Workload
    options: Sequence[Option]
    pins: Pins = FREE
    limits: Limits = UNLIMITED
    reservation: bool = False
    """The run file names a reservation."""
    constants: Constants = DEFAULT
    overhead: DeviceOverhead = CUDA
    sigma: float = STEP_SIGMA
    tpus: bool = False
    """``resources.device`` is tpu: TPUs alone are planned, else none."""


@dataclass(kw_only=True)
class Memo:
    """What offers of one machine share: memory does not depend on place or price."""

    fitting: dict[tuple[str, int], list[tuple[Setting, MemoryEstimate]]] = field(default_factory=dict)
    least: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Machine -> (fewest bytes a GPU that any setting needs, on how many machines)."""
    evaluated: int = 0


def search(problem: Problem) -> Outcome:
    """The best of everything on offer. Deterministic; nothing outside the arguments matters."""
    result: list[Candidate] = []
    rejected: list[Rejection] = []
    memo = Memo()
    fastest_settings: dict[tuple[object, ...], list[tuple[int, Setting, MemoryEstimate, StepTime]]] = {}
    for option in problem.options:
        reason = excluded(problem, option)
        if reason is None:
            key = (option.offer.machine, option.fabric, option.ceiling_flops, option.offer.max_nodes)
            try:
                if key not in fastest_settings:
                    fastest_settings[key] = best_settings(problem, option, memo)
                priced = [_candidate(problem, option, *fastest) for fastest in fastest_settings[key]]
                reason = _least_memory(problem, option, memo) if not priced else None
                kept = [candidate for candidate in priced if _over(problem.limits, candidate) is None]
                if priced and not kept:
                    reason = _over(problem.limits, min(priced, key=_excess_of(problem.limits)))
                result += kept
            except NoPlanError as error:
                reason = str(error)
        if reason is not None:
            rejected.append(Rejection(option=option, reason=reason))
    frontier = pareto(result)
    cheapest = frontier[0] if frontier else None
    return Outcome(
        cheapest=cheapest,
        fastest=frontier[-1] if frontier else None,
        frontier=frontier,
        candidates=tuple(result),
        rejected=(*rejected, *_dearer(result, frontier)),
        evaluated=memo.evaluated,
    )


def excluded(problem: Problem, option: Option) -> str | None:
    """Why this offer is not even computed; None: it is."""
    offer, pins = option.offer, problem.pins
    if option.is_tpu != problem.tpus:
        return "not a TPU, and resources.device is tpu" if problem.tpus else "a TPU: resources.device: tpu plans it"
    if pins.machine and offer.machine != pins.machine:
        return f"resources.machine asks for {pins.machine}"
    if pins.accelerator and offer.accelerator.lower() != pins.accelerator.lower():
        return f"resources.accelerator asks for {pins.accelerator}"
    if pins.gpus_per_node and offer.gpus_per_node != pins.gpus_per_node:
        return f"resources.ranks_per_host asks for machines with {pins.gpus_per_node}"
    if pins.mode and option.mode.name != pins.mode.removesuffix("_queued"):
        return f"resources.provisioning_model asks for {pins.mode}"
    if pins.locations and not any(_inside(offer.location, place) for place in pins.locations):
        return f"not known in {', '.join(pins.locations)}"
    if option.mode.name in NEEDS and not problem.reservation and pins.mode != option.mode.name:
        return NEEDS[option.mode.name]
    if problem.work.compute_bytes == 2 and option.ceiling_flops is None:
        return f"the bf16 peak of {offer.accelerator} is unknown or it has none"
    if option.price is None and not (problem.tpus and (pins.machine or pins.accelerator)):
        return "its price is unknown"  # a TPU that the run file names is planned without
    return None


def best_settings(problem: Problem, option: Option, memo: Memo) -> list[tuple[int, Setting, MemoryEstimate, StepTime]]:
    """For each node count the setting with the shortest step among those that fit."""
    result = []
    for num_nodes in node_counts(problem.work, option, problem.pins):
        best: tuple[int, Setting, MemoryEstimate, StepTime] | None = None
        for setting, need in _fitting(problem, option, num_nodes, memo):
            time = step_time(problem.work, setting, option, num_nodes, problem.constants)
            if best is None or time.seconds < best[3].seconds:
                best = (num_nodes, setting, need, time)
        if best is not None:
            result.append(best)
    return result


def _fitting(problem: Problem, option: Option, num_nodes: int, memo: Memo) -> list[tuple[Setting, MemoryEstimate]]:
    """Settings that fit; more recomputation is left out where less fits already."""
    key = (option.offer.machine, num_nodes)
    if key in memo.fitting:
        return memo.fitting[key]
    room = int(option.offer.gpu_memory_bytes * (1 - MEMORY_MARGIN))
    overhead = replace(problem.overhead, capacity_bytes=option.offer.gpu_memory_bytes)
    fitting: list[tuple[Setting, MemoryEstimate]] = []
    done: set[tuple[object, int]] = set()
    for setting in settings(problem.work, option, num_nodes, problem.pins):
        if (setting.layout, setting.micro_batch_size) in done:
            continue
        need = tpu_memory(problem.work, setting) if option.is_tpu else memory(problem.work, setting, overhead)
        memo.evaluated += 1
        least = memo.least.get(option.offer.machine)
        if least is None or need.total_bytes < least[0]:
            memo.least[option.offer.machine] = (need.total_bytes, num_nodes)
        if need.total_bytes <= room:
            fitting.append((setting, need))
            done.add((setting.layout, setting.micro_batch_size))
    memo.fitting[key] = fitting
    return fitting


def _candidate(
    problem: Problem, option: Option, num_nodes: int, setting: Setting, need: MemoryEstimate, time: StepTime
) -> Candidate:
    work = replace(problem.work, snapshot_every=time.snapshot_every)
    if option.is_tpu:  # a slice is lost as a whole, with every copy in its hosts
        work = replace(work, replicate_snapshots=False)
    args = (work, setting, option.mode, num_nodes, time.seconds, problem.constants)
    good = goodput(*args)
    worst = goodput(*args, preemptions_per_node_day=option.mode.preemptions_per_node_day.high)
    return Candidate(
        option=option,
        num_nodes=num_nodes,
        setting=setting,
        memory=need,
        time=time,
        goodput=good,
        cost=cost(problem.work, option, num_nodes, time.seconds, good, worst, sigma=problem.sigma),
    )


def pareto(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Those that nothing beats in both cost and time (by more than ``LEAST_GAIN``), by rising cost."""
    kept: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (_usd(c), c.cost.hours_p50)):
        if not kept or candidate.cost.hours_p50 < kept[-1].cost.hours_p50 * (1 - LEAST_GAIN):
            kept.append(candidate)
    return tuple(kept)


def _usd(candidate: Candidate) -> float:
    """Of unknown prices: after all others."""
    return math.inf if candidate.cost.usd_p50 is None else candidate.cost.usd_p50


def _over(limits: Limits, candidate: Candidate) -> str | None:
    """Which limit it breaks."""
    usd, hours = candidate.cost.usd_p90, candidate.cost.hours_p90
    if limits.max_hours is not None and hours > limits.max_hours:
        return f"takes {duration(hours)} (p90) at best, {limits.hours_name} leaves {duration(limits.max_hours)}"
    if limits.max_usd is not None and usd is not None and usd > limits.max_usd:
        return f"costs {dollars(usd)} (p90) at best, limits.max_usd is {dollars(limits.max_usd)}"
    return None


def _excess_of(limits: Limits) -> Callable[[Candidate], float]:
    def excess(candidate: Candidate) -> float:
        hours = candidate.cost.hours_p90 / limits.max_hours if limits.max_hours else 0.0
        usd = (candidate.cost.usd_p90 or 0.0) / limits.max_usd if limits.max_usd else 0.0
        return max(hours, usd)

    return excess


def _least_memory(problem: Problem, option: Option, memo: Memo) -> str:
    """Why nothing fits on this machine."""
    least, nodes = memo.least.get(option.offer.machine, (0, 0))
    have = option.offer.gpu_memory_bytes
    if not least:
        return f"no layout of the trainer fits its number of {option.unit}s and the batch"
    chip = option.offer.accelerator
    gpus = nodes * option.offer.gpus_per_node
    need = f"{problem.work.title} needs {gigabytes(least)} a {option.unit}" + (f" even on {gpus}" if gpus > 1 else "")
    return f"{need}, {_article(chip)} {chip} has {gigabytes(have)}"


def _dearer(candidates: Sequence[Candidate], frontier: Sequence[Candidate]) -> list[Rejection]:
    """Offers that would do, but are beaten."""
    if not frontier:
        return []
    chosen = {id(candidate.option) for candidate in frontier}
    best: dict[int, Candidate] = {}
    for candidate in candidates:
        held = best.get(id(candidate.option))
        if held is None or _usd(candidate) < _usd(held):
            best[id(candidate.option)] = candidate
    least = _usd(frontier[0])
    return [
        Rejection(
            option=candidate.option,
            reason=_beaten(candidate, least),
        )
        for key, candidate in best.items()
        if key not in chosen
    ]


def _beaten(candidate: Candidate, least: float) -> str:
    if math.inf in (_usd(candidate), least):
        return "would do, its price is unknown"
    return f"would do, for {_usd(candidate) / least:.2f} x the cheapest" if least else "would do, no cheaper"


def _inside(location: str, place: str) -> bool:
    """Is a region asked for by its name or by one of its zones?"""
    return location == place or place.startswith(location + "-")


def _article(word: str) -> str:
    return "an" if word[0] in "AEHL" else "a"
