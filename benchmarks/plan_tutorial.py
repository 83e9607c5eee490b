"""The published 70B run on 16 B200 (14.5 s and $0.52 a step), explained by the time model, and what would beat it.

The model's one constant is fitted to that run's step; everything else follows. Prints the table of
docs/explanation/plan.md.

    python benchmarks/plan_tutorial.py
"""

from __future__ import annotations

from dataclasses import replace

from muster.catalog import offers, rows
from muster.catalog.offers import Option
from muster.core.flops import Convention
from muster.core.types import Layout
from muster.plan.calibrate import calibrate
from muster.plan.constants import DEFAULT, Constants
from muster.plan.layouts import Pins
from muster.plan.memory import memory
from muster.plan.search import Problem, search
from muster.plan.step_time import StepTime, achieved_tflops, step_time
from muster.plan.workload import Setting, Workload

PUBLISHED_STEP_S = 14.5
WORK = Workload(
    shape=rows.models()["meta-llama/Llama-3.1-70B"].shape, sequence_length=4096, global_batch_size=128, steps=1000,
    compile=True, snapshot_every=0, attention="",  # which kernel ran is not said: as matrices
)  # fmt: skip
AS_RUN = Setting(layout=Layout(dp_shard=16), micro_batch_size=8, activation_checkpointing="full")


def offer(mode: str, region: str) -> Option:
    """The tutorial's machine in a mode and region."""
    return next(
        each
        for each in offers.catalogue()
        if (each.offer.machine, each.mode.name, each.offer.location) == ("a4-highgpu-8g", mode, region)
    )


def row(name: str, time: StepTime, option: Option, num_nodes: int, need: float, note: str) -> str:
    usd = (option.offer.usd_per_node_hour or 0) * num_nodes * time.seconds / 3600
    n6 = achieved_tflops(WORK, time, Convention.N6) / 2250
    fits = "" if need <= option.offer.gpu_memory_bytes * 0.95 else " does not fit"
    figures = f"{time.seconds:.1f} | {time.mfu or 0:.1%} | {n6:.1%} | ${usd:.2f} | {need / 1e9:.0f} GB{fits}"
    return f"| {name} | {figures} | {note} |"


def main() -> None:
    flex, spot = offer("flex_start", "us-central1"), offer("spot", "us-east1")
    constants: Constants = replace(
        DEFAULT, efficiency=calibrate(WORK, AS_RUN, flex, 2, [PUBLISHED_STEP_S] * 8, DEFAULT).efficiency
    )
    print(f"efficiency fitted to {PUBLISHED_STEP_S} s: {constants.efficiency:.3f}\n")
    print("| what | step s | MFU (CAUSAL) | MFU (N6, theirs) | $ a step | memory | why |")
    print("|---|---|---|---|---|---|---|")

    def show(name: str, setting: Setting, option: Option, nodes: int, note: str, **changes: object) -> None:
        work = replace(WORK, **changes)  # type: ignore[arg-type]
        time = step_time(work, setting, option, nodes, constants)
        print(row(name, time, option, nodes, memory(work, setting).total_bytes, note))

    show("as published", AS_RUN, flex, 2, "fitted: a quarter of the matrices is recomputation")
    small = replace(AS_RUN, micro_batch_size=1, activation_checkpointing="none")
    show("no recomputation, 8 rounds of 1", small, flex, 2, "gathers in each round eat a part of what is won")
    two = replace(AS_RUN, micro_batch_size=2, activation_checkpointing="none", layout=Layout(dp_shard=64))
    show("and 8 machines, 1 round of 2", two, flex, 8, "sharded state leaves room for activations: one round, hidden")
    show("and Spot", two, spot, 8, "half the price; the network at 0.75, lossy without a peer copy")
    fast = step_time(WORK, two, flex, 8, replace(constants, precision="fp8"))
    need = memory(WORK, two).total_bytes
    print(row("and fp8 matrices, flex-start", fast, flex, 8, need, "modelled: fp8 was no faster at 1B on one H200"))
    print()
    for title, pins in (
        ("best on 2 machines, flex-start", Pins(machine="a4-highgpu-8g", num_nodes=2, mode="flex_start")),
        ("best of everything", Pins()),
    ):
        best = search(Problem(work=WORK, options=offers.catalogue(), pins=pins, constants=constants)).cheapest
        assert best is not None
        print(
            f"{title}: {best.title}, {best.setting.layout}, micro-batch {best.setting.micro_batch_size}, checkpointing "
            f"{best.setting.activation_checkpointing}: {best.time.seconds:.1f} s, MFU {best.time.mfu or 0:.1%}, "
            f"${best.cost.usd_per_step or 0:.2f} a step"
        )


if __name__ == "__main__":
    main()
