"""Many seeds at once and their statistics: spread, categories, contributions, the best of a few choices."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import starmap
from statistics import fmean, stdev
from typing import Any

from muster.simulate.host_time import CATEGORIES
from muster.simulate.rehearsal import Outcome, rehearse
from muster.simulate.scenario import Scenario
from muster.simulate.stage_times import shipped

#: (done, of how many)
Progress = Callable[[int, int], None]
#: Stall of a synchronous save (Google's case study: tens of seconds; 43 s in the reference).
SYNCHRONOUS_STALL_S = 43.0
#: Without end: ``max_wait_s`` of the shipped policies in comparisons of waiting.
PATIENCE_S = 1e8


def many(
    jobs: Sequence[tuple[Scenario, int]], *, workers: int | None = None, progress: Progress | None = None
) -> list[Outcome]:
    """Rehearse each (scenario, seed), in parallel processes; in the order given."""
    workers = min(workers or os.cpu_count() or 1, len(jobs))
    report = progress or (lambda done, total: None)
    outcomes: list[Outcome] = []
    report(0, len(jobs))  # the first one of many hosts may take a minute
    with ProcessPoolExecutor(workers) if workers > 1 else nullcontext() as pool:
        for outcome in pool.map(rehearse, *zip(*jobs, strict=True)) if pool else starmap(rehearse, jobs):
            outcomes.append(outcome)
            report(len(outcomes), len(jobs))
    return outcomes


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A figure over seeds."""

    mean: float
    sd: float
    p5: float
    p50: float
    p95: float


def spread(values: Sequence[float]) -> Spread:
    """Mean, standard deviation of one run, and percentiles (nearest rank)."""
    ordered = sorted(values)
    return Spread(
        mean=fmean(ordered),
        sd=stdev(ordered) if len(ordered) > 1 else 0.0,
        p5=percentile(ordered, 0.05),
        p50=percentile(ordered, 0.50),
        p95=percentile(ordered, 0.95),
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """Nearest rank. ``ordered`` ascending and not empty."""
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One variant of the scenario, on the same seeds and faults."""

    name: str
    about: str
    active: float
    purchased: float
    change_active: float
    """Against the scenario as given; points are 100 times this."""
    change_purchased: float
    error: float
    """Standard error of ``change_active``, from paired seeds."""
    gave_up: float
    """Times a run had to be started again, on average."""
    cost_ratio: float
    """Purchased host-hours for an hour of the whole job's progress, per host: 1 is ideal."""


def choice(name: str, about: str, outcomes: Sequence[Outcome], base: Sequence[Outcome]) -> Choice:
    """How a variant did against the base, seed by seed."""
    changes = [variant.goodput_active - other.goodput_active for variant, other in zip(outcomes, base, strict=True)]
    purchased = [
        variant.goodput_purchased - other.goodput_purchased for variant, other in zip(outcomes, base, strict=True)
    ]
    work = sum(outcome.productive_s * outcome.hosts for outcome in outcomes)
    return Choice(
        name=name,
        about=about,
        active=fmean(outcome.goodput_active for outcome in outcomes),
        purchased=fmean(outcome.goodput_purchased for outcome in outcomes),
        change_active=fmean(changes),
        change_purchased=fmean(purchased),
        error=stdev(changes) / math.sqrt(len(changes)) if len(changes) > 1 else 0.0,
        gave_up=fmean(outcome.gave_up for outcome in outcomes),
        cost_ratio=sum(outcome.purchased_host_s for outcome in outcomes) / work if work else math.inf,
    )


def ablations(scenario: Scenario) -> dict[str, tuple[str, Scenario]]:
    """Technique -> (in words, the scenario without it); only those that the scenario uses."""
    variants: dict[str, tuple[str, Scenario]] = {}

    def without(technique: str, about: str, **changes: Any) -> None:
        variants[technique] = (about, scenario.with_(**changes))

    if scenario.fast_detection and not scenario.profile.detect_s:
        without("fast detection", "found with the usual timeouts", fast_detection=False)
    cold = shipped("google-restart")
    if scenario.profile.mean_s("start") + scenario.profile.mean_s("warmup") < 254:
        slow = {name: cold.stages[name] for name in ("start", "warmup", "relayout")}
        profile = replace(scenario.profile, stages={**scenario.profile.stages, **slow})
        without("warm standby", "124 s to start and 130 s to warm up, as in Google's log", profile=profile)
    if scenario.memory_tier:
        without("state in memory", "every failure goes back to the last save", memory_tier=False)
        if scenario.replicate_snapshots and scenario.replicas == 1:
            without("copy on a peer", "a lost host goes back to the last save", replicate_snapshots=False)
    saves = scenario.saves
    if saves is not None:
        if saves.stall_s < SYNCHRONOUS_STALL_S / 2:
            blocking = replace(saves, stall_s=SYNCHRONOUS_STALL_S, drain_s=0.0, slowdown=0.0)
            without("asynchronous saves", f"training waits {SYNCHRONOUS_STALL_S:g} s for each", saves=blocking)
        if saves.every_s is None:
            without("interval by formula", "a save an hour", saves=replace(saves, every_s=3600.0))
    if scenario.policy == "default" and scenario.min_hosts != scenario.hosts:
        waits = {"policy": "conservative", "max_wait_s": PATIENCE_S}
        without("going on with fewer", "waits for the full number of hosts", **waits)
    if scenario.spares and scenario.trace is None:
        without("spares", "none held", spares=0)
    return variants


def spares_around(scenario: Scenario) -> dict[str, tuple[str, Scenario]]:
    """Other numbers of spares."""
    counts = sorted({0, 1, 2, 3, 4, scenario.spares} - {scenario.spares})
    return {str(count): (f"{count} spare{'' if count == 1 else 's'}", scenario.with_(spares=count)) for count in counts}


def intervals_around(scenario: Scenario) -> dict[str, tuple[str, Scenario]]:
    """Save intervals from a quarter to four times the scenario's."""
    if scenario.saves is None or math.isinf(scenario.every_s):
        return {}
    variants = {}
    for factor in (0.25, 0.5, 2.0, 4.0):
        saves = replace(scenario.saves, every_s=scenario.every_s * factor)
        variants[f"{saves.every_s:.0f} s"] = (f"{factor:g} x", scenario.with_(saves=saves))
    return variants


def policies_around(scenario: Scenario) -> dict[str, tuple[str, Scenario]]:
    """Ways to meet missing hosts, other than the scenario's own."""
    least = scenario.quantum_hosts or 1
    rows = (
        ("default, min_hosts low", f"continues with as few as {least}", "default", least),
        ("default, all hosts", "waits an hour, then leaves and is queued", "default", scenario.hosts),
        ("conservative", "the same with swaps only", "conservative", scenario.hosts),
    )
    given = {name: (about, scenario.with_(policy=policy, min_hosts=hosts)) for name, about, policy, hosts in rows}
    return {name: (about, other) for name, (about, other) in given.items() if other != scenario}


@dataclass(frozen=True, kw_only=True)
class Study:
    """Everything that ``muster simulate`` answers."""

    scenario: Scenario
    outcomes: tuple[Outcome, ...]
    contributions: tuple[Choice, ...] = ()
    spares: tuple[Choice, ...] = ()
    intervals: tuple[Choice, ...] = ()
    policies: tuple[Choice, ...] = ()

    @property
    def active(self) -> Spread:
        return spread([outcome.goodput_active for outcome in self.outcomes])

    @property
    def purchased(self) -> Spread:
        return spread([outcome.goodput_purchased for outcome in self.outcomes])

    @property
    def host_s(self) -> dict[str, float]:
        """Category -> host-seconds, mean over seeds."""
        return {name: fmean(outcome.host_s[name] for outcome in self.outcomes) for name in CATEGORIES}

    @property
    def lost_s(self) -> Mapping[str, list[float]]:
        """Kind -> L of every interruption of every seed, ascending."""
        lost_s: dict[str, list[float]] = defaultdict(list)
        for outcome in self.outcomes:
            for interruption in outcome.interruptions:
                lost_s[interruption.kind].append(interruption.lost_s)
        return {kind: sorted(values) for kind, values in sorted(lost_s.items())}


def study(
    scenario: Scenario,
    *,
    seeds: int = 100,
    paired: int = 20,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Study:
    """Rehearse ``seeds`` seeds, and each variant on the first ``paired`` of them; 0: no variants."""
    paired = min(paired, seeds)
    groups: dict[str, dict[str, tuple[str, Scenario]]] = {}
    if paired:
        groups = {
            "contributions": ablations(scenario),
            "spares": spares_around(scenario) if scenario.trace is None else {},
            "intervals": intervals_around(scenario),
            "policies": policies_around(scenario),
        }
    jobs = [(scenario, seed) for seed in range(seeds)]
    for group in groups.values():
        jobs += [(variant, seed) for _, variant in group.values() for seed in range(paired)]
    outcomes = many(jobs, workers=workers, progress=progress)
    base, at = outcomes[:seeds], seeds
    variants: dict[str, Any] = {}
    own = {
        "spares": (str(scenario.spares), "as given"),
        "intervals": (f"{scenario.every_s:.0f} s", "as given"),
        "policies": (scenario.policy, "as given"),
    }
    for name, group in groups.items():
        choices = [choice(*own[name], base[:paired], base[:paired])] if name in own and group else []
        for variant, (about, _) in group.items():
            choices.append(choice(variant, about, outcomes[at : at + paired], base[:paired]))
            at += paired
        variants[name] = tuple(choices)
    return Study(scenario=scenario, outcomes=tuple(base), **variants)


def best(choices: Sequence[Choice]) -> Choice | None:
    """The one that gets most of what is paid for; None of none."""
    return min(choices, key=lambda candidate: candidate.cost_ratio, default=None)
