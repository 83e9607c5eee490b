"""The rehearsals of docs/explanation/moonshot.md: prints its Markdown tables.

Run: ``python benchmarks/moonshot.py [seeds]``; about 0.3 s a seed and row on one core, ten times that for the rows of
two weeks. All rows meet the same faults.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, median, stdev
from typing import Any

from simulate_reference import SPEC

from muster.simulate.ensembles import many
from muster.simulate.rehearsal import Outcome
from muster.simulate.scenario import MIX, Saves, Scenario
from muster.simulate.stage_times import Profile, shipped

SHIPPED = shipped()


def stages(**mean_s: float) -> Profile:
    """The shipped stages with these means."""
    changed = {name: replace(SHIPPED.stages[name], mean_s=value) for name, value in mean_s.items()}
    return replace(SHIPPED, stages={**SHIPPED.stages, **changed})


#: The first start left out, as in a run of weeks. (The hosts' agents take 120 s before it, which is counted.)
NO_FIRST_START = {"first_start": 0.0}
QUICK_HANGS = {**MIX, "hang": replace(MIX["hang"], fast_s=3.0)}


def row(profile: Profile | None = None, **changes: Any) -> Scenario:
    """128 hosts of 8 GPUs in racks of 4, five interruptions a day, fast detection, one spare, an hour of repair."""
    given: dict[str, Any] = {"spares": 1, "repair_h": 1.0, "saves": Saves(stall_s=0.1), **changes}
    return Scenario(spec=SPEC, profile=profile or stages(**NO_FIRST_START), **given)


ROWS: dict[str, Scenario] = {
    "as shipped: first start 600 s, a save stalls 1 s": row(SHIPPED, saves=Saves()),
    "first start not counted, a save stalls 0.1 s": row(),
    "the same, racks unknown": row(rack_labels=False),
    "the same, no copies": row(replicate_snapshots=False),
    "the same, 16 replicas": row(quantum_hosts=8),
    "the same, repair 4 h": row(repair_h=4.0),
    "the same, 2 spares": row(spares=2),
    "the same, no spare": row(spares=0),
    "the same, and a rack of four lost every two days": row(correlated_per_day=0.5, correlated_hosts=4),
    "that, racks unknown": row(correlated_per_day=0.5, correlated_hosts=4, rack_labels=False),
}
#: What the rest would need: one after the other.
MORE: dict[str, Scenario] = {
    "two weeks, everything counted (20 seeds)": row(SHIPPED, hours=336.0),
    "and another number of hosts costs 5 s, not 30": row(stages(relayout=5.0), hours=336.0),
    "and a hang is seen after 3 s, not 8": row(stages(relayout=5.0), hours=336.0, kinds=QUICK_HANGS),
    "and ending, starting and warm-up take half": row(
        stages(relayout=5.0, end=0.4, start=2.0, warmup=0.75), hours=336.0, kinds=QUICK_HANGS
    ),
    "and a step takes 4 s, not 8": row(
        stages(relayout=5.0, end=0.4, start=2.0, warmup=0.75, step=4.0), hours=336.0, kinds=QUICK_HANGS
    ),
}


def line(name: str, outcomes: Sequence[Outcome]) -> str:
    active = [100 * one.goodput_active for one in outcomes]
    purchased = fmean(100 * one.goodput_purchased for one in outcomes)
    lost = fmean(interruption.lost_s for one in outcomes for interruption in one.interruptions)
    redone = 100 * fmean(one.host_s["redone"] / one.purchased_host_s for one in outcomes)
    error = stdev(active) / math.sqrt(len(active)) if len(active) > 1 else 0.0
    return f"| {name} | {fmean(active):.2f} ± {error:.2f} % | {purchased:.2f} % | {lost:.0f} s | {redone:.3f} % |"


def by_kind(outcomes: Sequence[Outcome]) -> None:
    lost_s = defaultdict(list)
    for outcome in outcomes:
        for interruption in outcome.interruptions:
            lost_s[interruption.kind].append(interruption.lost_s)
    print("\n| kind | interruptions | median L | mean L | longest |\n|---|---|---|---|---|")
    for kind in MIX:
        own = lost_s[kind]
        print(f"| {kind} | {len(own)} | {median(own):.1f} s | {fmean(own):.1f} s | {max(own):.0f} s |")


def where_it_goes(outcomes: Sequence[Outcome]) -> None:
    purchased = sum(one.purchased_host_s for one in outcomes)
    print("\n| category | of purchased time |\n|---|---|")
    for category in outcomes[0].host_s:
        share = 100 * sum(one.host_s[category] for one in outcomes) / purchased
        if share >= 0.0005:
            print(f"| {category} | {share:.3f} % |")


def table(rows: dict[str, Scenario], seeds: int) -> dict[str, list[Outcome]]:
    outcomes = many([(scenario, seed) for scenario in rows.values() for seed in range(seeds)])
    found = {name: outcomes[index * seeds : (index + 1) * seeds] for index, name in enumerate(rows)}
    print("\n| | active | purchased | mean L | repeated |\n|---|---|---|---|---|")
    for name, own in found.items():
        print(line(name, own))
    return found


def main(seeds: int) -> None:
    print(f"{seeds} seeds of 40 h")
    base = table(ROWS, seeds)["first start not counted, a save stalls 0.1 s"]
    by_kind(base)
    where_it_goes(base)
    where_it_goes(table(MORE, max(2, seeds // 3))["two weeks, everything counted (20 seeds)"])


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
