"""Every layout of 1 and 2 CPU ranks: step times by the plan and as measured, and what ``parallelism: auto`` takes.

    python benchmarks/layouts_cpu.py [--rounds 3] [--json FILE] [--smoke]

Layouts take turns within a round; a layout's step is the median after three warm-up steps, and of the rounds. ``auto``
is right where its layout's step is within 5 % of the best one's. Goals are printed as met or not: that one, and planned
steps within 15 % of the measured ones.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "src")]
from loops import job as jobs  # noqa: E402
from trainer_cpu import SMALL, TINY, WARMUP  # noqa: E402

#: How far a planned step may be from the measured one, and auto's from the best.
TIME_GOAL, AUTO_GOAL = 0.15, 0.05


def layouts(ranks: int) -> dict[str, dict[str, Any]]:
    """Name -> keys of ``parallelism``."""
    if ranks == 1:
        return {"one rank": {}}
    return {
        "dp_replicate 2": {"dp_replicate": 2, "dp_shard": 1},
        "dp_shard 2": {"dp_shard": 2},
        "dp_shard 2, gathered once a round": {"dp_shard": 2, "reshard_after_forward": False},
        "tp 2": {"dp_shard": 1, "tp": 2},
    }


def measure(model: dict[str, Any], ranks: int, rounds: int, steps: int, folder: Path) -> dict[str, Any]:
    one = jobs.job(model, steps=steps, batch=4, micro=2, sequence_length=64 if steps < 10 else 256)
    found: dict[str, list[float]] = {name: [] for name in layouts(ranks)}
    for number in range(rounds):
        for turn, (name, axes) in enumerate(layouts(ranks).items()):
            changes = {f"parallelism__{key}": value for key, value in axes.items()}
            spec = jobs.muster_spec(one, folder / "cache", ranks=ranks, **changes)
            events, began = jobs.run_muster(spec, folder / f"{ranks}-{number}-{turn}", ranks=ranks)
            found[name].append(jobs.measured(jobs.steps_of(events), began, warmup=WARMUP).step_s)
    measured = {name: statistics.median(values) for name, values in found.items()}
    spec = jobs.muster_spec(one, folder / "cache", ranks=ranks, parallelism="auto")
    planned, taken, why = planned_steps(spec, ranks, folder)
    best = min(measured.values())
    print(f"\n{ranks} rank(s): {why}")
    for name, seconds in sorted(measured.items(), key=lambda item: item[1]):
        mark = "  <- auto" if name == taken else ""
        error = planned[name] / seconds - 1
        spread = f"{min(found[name]):.4f}-{max(found[name]):.4f}"
        verdict = "within" if abs(error) <= TIME_GOAL else "not within"
        print(
            f"  {name:36s} {seconds:8.4f} s measured ({spread}), {planned[name]:8.4f} s planned "
            f"({error:+.0%}, {verdict} {TIME_GOAL:.0%}){mark}"
        )
    near = "within" if measured[taken] <= best * (1 + AUTO_GOAL) else "not within"
    print(f"  auto's step is {measured[taken] / best:.3f} of the best one's: {near} {AUTO_GOAL:.0%}", flush=True)
    return {
        "measured_s": measured,
        "rounds_s": found,
        "planned_s": planned,
        "auto": taken,
        "ratio": measured[taken] / best,
    }


def planned_steps(spec: dict[str, Any], ranks: int, home: Path) -> tuple[dict[str, float], str, str]:
    """(seconds of each layout by the plan, the one that ``auto`` takes, why)."""
    from muster.app.planning.auto_layout import compared, laid_out
    from muster.config.spec import RunSpec

    checked = RunSpec.model_validate(spec)
    resolved, why = laid_out(checked, home)
    assert why is not None

    def name_of(axes: dict[str, int], reshard: bool) -> str:
        for name, keys in layouts(ranks).items():
            wanted = {"dp_replicate": 1, "dp_shard": 1, "tp": 1, **keys}
            same = all(axes[key] == wanted[key] for key in ("dp_replicate", "dp_shard", "tp"))
            if same and reshard == keys.get("reshard_after_forward", True):
                return name
        raise ValueError(f"a layout that was not measured: {axes}")

    found = {name_of(each.layout.sizes, each.reshard_after_forward): each.step_s for each in compared(checked, home)[0]}
    shape = resolved.parallelism
    return found, name_of(shape.axes, shape.reshard_after_forward or shape.dp_shard == 1), why


def main() -> None:
    arguments = jobs.arguments(__doc__)
    model, rounds, steps = (TINY, 1, 6) if arguments.smoke else (SMALL, arguments.rounds, 14)
    result: dict[str, Any] = {"machine": jobs.machine()}
    with tempfile.TemporaryDirectory(prefix="muster-layouts-") as folder:
        for ranks in (1, 2):
            result[f"ranks_{ranks}"] = measure(model, ranks, rounds, steps, Path(folder))
            result["machine_after"] = jobs.machine()
            if arguments.json:  # as far as it got
                arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"load {result['machine']['load'][0]} before, {result['machine_after']['load'][0]} after")


if __name__ == "__main__":
    main()
