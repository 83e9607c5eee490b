"""Workloads and options that the planner's tests share."""

from muster.catalog import offers, rows
from muster.plan.workload import Workload

LLAMA = {name.rsplit("-", 1)[-1]: f"meta-llama/Llama-3.{'2' if name[-2] in '13' and len(name) == 2 else '1'}-{name}"
         for name in ("1B", "3B", "8B", "70B", "405B")}  # fmt: skip


def job(size="8B", **changes):
    model = rows.find_model(LLAMA[size])
    defaults = {"shape": model.shape, "sequence_length": 4096, "global_batch_size": 64, "steps": 1000, "compile": True}
    return Workload(**{**defaults, "snapshot_every": 0, **changes})


def option(machine="a3-megagpu-8g", mode="flex_start", region="us-central1"):
    for each in offers.catalogue():
        if (each.offer.machine, each.mode.name, each.offer.location) == (machine, mode, region):
            return each
    return offers.option(rows.machines()[machine], rows.modes()[mode], region, None)
