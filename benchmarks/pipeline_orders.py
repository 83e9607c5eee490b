"""The orders of a pipeline of two stages on two CPU ranks: step time, and peak memory beside what the plan says.

    python benchmarks/pipeline_orders.py [--rounds 3] [--json FILE] [--smoke]

Orders take turns within a round; a step is the median after three warm-up steps, and of the rounds. Memory is measured
as ``plan_memory.py`` does, by its model, in the first round: of the fuller rank, above the process after its imports.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "src")]
import plan_memory  # noqa: E402
from loops import job as jobs  # noqa: E402
from trainer_cpu import SMALL, TINY, WARMUP  # noqa: E402

ORDERS = ("1f1b", "interleaved", "zero_bubble", "zbv")
MICRO_BATCHES = 8


def keys(order: str) -> dict[str, Any]:
    """Of the run file."""
    return {"parallelism__pp": 2, "parallelism__dp_shard": 1, "parallelism__pp_schedule": order}


def step_s(order: str, folder: Path, *, smoke: bool) -> float:
    """Seconds of a step."""
    model = {**(TINY if smoke else SMALL), "num_hidden_layers": 4 if smoke else 8}
    shape = {"batch": MICRO_BATCHES, "micro": 1, "sequence_length": 64 if smoke else 256, "steps": 6 if smoke else 10}
    spec = jobs.muster_spec(jobs.job(model, **shape), folder / "cache", ranks=2, **keys(order))
    events, began = jobs.run_muster(spec, folder / "run", ranks=2)
    return jobs.measured(jobs.steps_of(events), began, warmup=WARMUP).step_s


def memory(order: str, *, smoke: bool) -> tuple[int, int]:
    """(measured, planned) bytes of the fuller rank."""
    changes = {
        "model__dtype": "float32",
        "training__micro_batch_size": 1 if smoke else 2,
        "training__global_batch_size": MICRO_BATCHES * (1 if smoke else 2),
        "training__sequence_length": 64 if smoke else 512,
        **keys(order),
    }
    raw, layout = plan_memory.spec_of(changes), {"pp": 2}
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(128 * 1024)  # see there; not where time is measured
    try:
        growth, _ = plan_memory.measured(raw, layout, 2)
    finally:
        del os.environ["MALLOC_MMAP_THRESHOLD_"]
    return growth, plan_memory.predicted(raw, layout, 2).total_bytes


def main() -> None:
    arguments = jobs.arguments(__doc__)
    rounds = 1 if arguments.smoke else arguments.rounds
    seconds: dict[str, list[float]] = {order: [] for order in ORDERS}
    bytes_: dict[str, tuple[int, int]] = {}
    before = jobs.machine()
    for number in range(rounds):
        for order in ORDERS[number % len(ORDERS) :] + ORDERS[: number % len(ORDERS)]:
            with tempfile.TemporaryDirectory(prefix="muster-orders-") as folder:
                seconds[order].append(step_s(order, Path(folder), smoke=arguments.smoke))
            if not number:
                bytes_[order] = memory(order, smoke=arguments.smoke)
                print(f"{order}: {bytes_[order]} bytes measured and planned", flush=True)
            print(f"round {number + 1}, {order}: {seconds[order][-1]:.4f} s, load {os.getloadavg()[0]:.1f}", flush=True)
    first = statistics.median(seconds[ORDERS[0]])
    print(f"pp 2, {MICRO_BATCHES} micro-batches, {rounds} rounds; {before}")
    for order in ORDERS:
        step = statistics.median(seconds[order])
        measured, planned = bytes_[order]
        spread = f"{min(seconds[order]):.4f}-{max(seconds[order]):.4f}"
        print(
            f"{order:12s} {step:8.4f} s ({spread}), {step / first:.3f} of 1f1b; {measured / 2**20:6.0f} MiB measured, "
            f"{planned / 2**20:7.0f} planned ({planned / measured - 1:+.1%})"
        )
    if arguments.json:
        found = {"machine": [before, jobs.machine()], "step_s": seconds, "measured_and_planned_bytes": bytes_}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
