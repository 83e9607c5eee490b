"""The case study and the spares table of docs/explanation/simulator.md, rehearsed: prints Markdown tables.

Run: ``python benchmarks/simulate_reference.py [seeds] [--case | --spares]``; about 0.1 s a seed and row on one core.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

from muster.config.spec import RunSpec
from muster.simulate.ensembles import PATIENCE_S, many
from muster.simulate.scenario import MIX, Saves, Scenario
from muster.simulate.stage_times import constant

#: A run file with nothing but the supervisor's settings.
SPEC = RunSpec.model_validate(
    {
        "name": "rehearsal",
        "model": {"config": {}},
        "data": {"sources": [{"type": "random"}]},
        "training": {"steps": 1000},
        "recovery": {"max_restarts_without_progress": 1000},
    }
)
#: What an interruption costs the hosts that train, beside the work that is done twice.
RECOVERY = ("detect", "restart", "restore", "warmup", "wait", "stopped")
#: name -> (the reference's goodput in percent at 5 a day, what changes against the row above)
CASE: dict[str, tuple[float, dict[str, Any]]] = {
    "1 h sync 43 s, 20-min recovery": (82.9, {}),
    "+ async 1 s": (83.7, {"stall": 1.0}),
    "+ 20 min interval": (89.7, {"every": 1200.0}),
    "+ 2 min recovery": (95.3, {"recovery": 120.0}),
    "+ elastic, quantum 4": (95.5, {"elastic": True}),
}
#: Leave one out of the last row: name -> what is taken back, and the reference at 5 and 1.5 a day.
LEFT_OUT: dict[str, tuple[dict[str, Any], float, float]] = {
    "async": ({"stall": 43.0}, -3.0, -3.2),
    "frequent": ({"every": 3600.0}, -6.4, -2.0),
    "recovery": ({"recovery": 1200.0}, -5.7, -1.8),
    "elastic": ({"elastic": False}, -0.2, 0.0),
}
#: Spares x (repair h, quantum) -> active / purchased percent in the reference.
SPARES = {
    0: {(1, 1): (99.63, 99.63), (4, 1): (99.38, 99.38), (8, 1): (99.08, 99.08), (24, 1): (98.28, 98.28),
        (4, 4): (98.34, 98.34), (24, 4): (93.80, 93.80)},
    1: {(1, 1): (99.88, 99.11), (4, 1): (99.78, 99.00), (8, 1): (99.59, 98.82), (24, 1): (98.91, 98.14),
        (4, 4): (99.57, 98.80), (24, 4): (96.24, 95.50)},
    2: {(1, 1): (99.91, 98.37), (4, 1): (99.89, 98.35), (8, 1): (99.81, 98.28), (24, 1): (99.35, 97.82),
        (4, 4): (99.86, 98.32), (24, 4): (97.92, 96.41)},
    4: {(1, 1): (99.91, 96.88), (4, 1): (99.91, 96.88), (8, 1): (99.90, 96.88), (24, 1): (99.78, 96.76),
        (4, 4): (99.91, 96.88), (24, 4): (99.49, 96.47)},
}  # fmt: skip
#: D.4: name -> (reference percent, seconds of stall after detection in full-job terms, quantum, interval s or None)
ADVANCED = {
    "in-job restart, 124 + 130 s, 5-min saves": (96.9, 254.0, 4, 300.0),
    "AWS-like 47 s": (99.33, 47.0, 4, None),
    "TrainMover-like 20 s": (99.53, 20.0, 4, None),
    "FT-HSDP-like: 3 s stall, an 8th out for 180 s": (99.52, 3 + 180 / 8, 4, None),
    "6-10 s restart, quantum 1": (99.76, 8.0, 1, None),
    "16 replicas: 2 s stall, a 16th out for 30 s": (99.81, 2 + 30 / 16, 1, None),
}


def case(*, per_day: float, stall: float = 43.0, every: float = 3600.0, recovery: float = 1200.0,
         elastic: bool = False) -> Scenario:  # fmt: skip
    """The case study: disk saves alone, constant recovery, four hours of repair. Four spares: the reference does not
    say how many it held; with fewer, waiting costs more than its table shows."""
    return Scenario(
        spec=SPEC,
        failures_per_day=per_day,
        spares=4,
        repair_h=4.0,
        # Detection is within the recovery time.
        kinds={name: replace(kind, slow_s=0.0, fast_s=0.0) for name, kind in MIX.items()},
        profile=constant(step=8.0, start=recovery),
        memory_tier=False,
        saves=Saves(every_s=every, stall_s=stall, drain_s=0.0, restore_s=0.0),
        policy="default" if elastic else "conservative",
        min_hosts=4 if elastic else 128,
        quantum_hosts=4,
        max_wait_s=PATIENCE_S,
    )


def advanced(*, stall_s: float, quantum: int, spares: int, repair_h: float, every_s: float | None = None) -> Scenario:
    """D.4 and the spares table: slow detection, every replica's state at hand, ``stall_s`` after detection."""
    return Scenario(
        spec=SPEC,
        spares=spares,
        repair_h=repair_h,
        fast_detection=False,
        # The reference counts no half-lost step: a short one makes it small here. Its own table shows about 65 s
        # for each pair of shrinking and growing again.
        profile=constant(step=0.5, start=stall_s, relayout=30.0),
        memory_tier=every_s is None,
        saves=Saves(every_s=every_s, stall_s=0.0, drain_s=0.0, restore_s=0.0) if every_s else None,
        min_hosts=1,
        quantum_hosts=quantum,
        max_wait_s=PATIENCE_S,
    )


def figures(scenarios: dict[str, Scenario], seeds: int) -> dict[str, dict[str, float]]:
    """Name -> mean, standard error and sd of goodput (percent), and where the time went."""
    found = many([(scenario, seed) for scenario in scenarios.values() for seed in range(seeds)])
    table = {}
    for index, name in enumerate(scenarios):
        own = found[index * seeds : (index + 1) * seeds]
        active = [100 * one.goodput_active for one in own]
        whole = [one.wall_s * one.hosts / 100 for one in own]
        table[name] = {
            "active": fmean(active),
            "purchased": fmean(100 * one.goodput_purchased for one in own),
            "sd": stdev(active),
            "error": stdev(active) / math.sqrt(seeds),
            "lost": fmean(
                sum(one.host_s[n] for n in ("redone", "unfinished")) / w for one, w in zip(own, whole, strict=True)
            ),
            "down": fmean(sum(one.host_s[n] for n in RECOVERY) / w for one, w in zip(own, whole, strict=True)),
            "saves": fmean(one.host_s["checkpoint"] / w for one, w in zip(own, whole, strict=True)),
        }
    return table


def case_tables(seeds: int) -> None:
    rows: dict[str, Scenario] = {}
    settings: dict[str, Any] = {}
    for name, (_, change) in CASE.items():
        settings = {**settings, **change}
        rows[name] = case(per_day=5, **settings)
    table = figures(rows, seeds)
    print(f"\n{seeds} seeds, 5 a day\n")
    print("| policy (cumulative) | reference % | rehearsed % | sd | lost / down / saves |\n|---|---|---|---|---|")
    for name, (reference, _) in CASE.items():
        row = table[name]
        print(
            f"| {name} | {reference} | {row['active']:.2f} ± {row['error']:.2f} | {row['sd']:.2f} "
            f"| {row['lost']:.1f} / {row['down']:.1f} / {row['saves']:.1f} |"
        )
    for per_day in (5.0, 3.0, 1.5):
        left = {"all": case(per_day=per_day, **settings)}
        left |= {name: case(per_day=per_day, **{**settings, **back}) for name, (back, _, _) in LEFT_OUT.items()}
        table = figures(left, seeds)
        print(f"\nleave one out, {per_day:g} a day, all: {table['all']['active']:.2f} %\n")
        print("| left out | reference | rehearsed |\n|---|---|---|")
        for name, (_, at5, at15) in LEFT_OUT.items():
            reference = {5.0: f"{at5:+.1f}", 1.5: f"{at15:+.1f}"}.get(per_day, "")
            print(f"| {name} | {reference} | {table[name]['active'] - table['all']['active']:+.2f} |")


def spares_tables(seeds: int) -> None:
    table = figures(
        {
            name: advanced(stall_s=stall_s, quantum=quantum, spares=2, repair_h=8.0, every_s=every_s)
            for name, (_, stall_s, quantum, every_s) in ADVANCED.items()
        },
        seeds,
    )
    print("\n| policy, 8 h repair, 2 spares, slow detection | reference % | rehearsed % |\n|---|---|---|")
    for name, (reference, *_) in ADVANCED.items():
        print(f"| {name} | {reference} | {table[name]['active']:.2f} ± {table[name]['error']:.2f} |")
    print(
        "\n| spares | repair h | quantum | reference active / purchased | rehearsed | difference |\n"
        "|---|---|---|---|---|---|"
    )
    for spares, cells in SPARES.items():
        rows = {
            f"{repair} {quantum}": advanced(stall_s=2 + 30 / 16, quantum=quantum, spares=spares, repair_h=repair)
            for repair, quantum in cells
        }
        table = figures(rows, seeds)
        for (repair, quantum), (active, purchased) in cells.items():
            row = table[f"{repair} {quantum}"]
            print(
                f"| {spares} | {repair} | {quantum} | {active:.2f} / {purchased:.2f} "
                f"| {row['active']:.2f} / {row['purchased']:.2f} ± {row['error']:.2f} | {row['active'] - active:+.2f} |"
            )


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    if "--spares" not in sys.argv:
        case_tables(count)
    if "--case" not in sys.argv:
        spares_tables(count)
