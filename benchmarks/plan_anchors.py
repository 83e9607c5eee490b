"""The time model against published runs, as the table of docs/explanation/plan.md: one efficiency per stack, fitted on
some rows and checked on the others; then, with the constants that ship and nothing fitted, the runs with tensor or
pipeline parallel and those that the model had never seen; and, unfitted too, published runs on TPUs (the table of
docs/how-to/tpu.md).

python benchmarks/plan_anchors.py
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from statistics import geometric_mean, median

from muster.catalog import offers, rows
from muster.core.flops import Convention
from muster.core.layout import AXES, Layout
from muster.plan.constants import DEFAULT, Constants
from muster.plan.step_time import StepTime, step_time, tokens_per_second_per_gpu
from muster.plan.tpu_memory import tpu_memory
from muster.plan.workload import Setting, Workload

#: Megatron's user buffers overlap most of tensor parallel's collectives with matrix products; from memory.
HIDDEN_TENSOR_PARALLEL = 0.7


@dataclass(frozen=True, kw_only=True)
class Anchor:
    """A published training throughput. ``use``: fit, check, or unseen (of no stack with an efficiency of its own)."""

    stack: str
    use: str
    model: str
    machine: str
    gpus: int
    precision: str
    job: str
    sequence_length: int
    micro_batch: int
    rounds: int
    layout: Layout
    chunks: int
    style: str
    """fsdp: gathers each round; megatron: once a step."""
    checkpointing: str
    compile: bool
    attention: str
    """Kernel by its name in ``accelerators.yaml``; empty: not known."""
    tokens_per_s_per_gpu: float
    source: str


@cache
def anchors() -> tuple[Anchor, ...]:
    """Published runs, each on the machine of the catalogue whose GPUs and links are nearest."""
    text = resources.files("muster.catalog").joinpath("tables", "anchors.csv").read_text(encoding="utf-8")
    lines = (line for line in text.splitlines() if not line.startswith("#"))
    result = []
    for row in csv.DictReader(lines):
        result.append(
            Anchor(
                stack=row["stack"],
                use=row["use"],
                model=row["model"],
                machine=row["machine"],
                gpus=int(row["gpus"]),
                precision=row["precision"],
                job=row["job"],
                sequence_length=int(row["sequence_length"]),
                micro_batch=int(row["micro_batch"]),
                rounds=int(row["rounds"]),
                layout=Layout.of({axis.name: row.get(axis.name, 1) for axis in AXES}),
                chunks=int(row["chunks"]),
                style=row["style"],
                checkpointing=row["checkpointing"],
                compile=row["compile"] == "yes",
                attention=row["attention"],
                tokens_per_s_per_gpu=float(row["tokens_per_s_per_gpu"]),
                source=row["source"],
            )
        )
    return tuple(result)


@dataclass(frozen=True, kw_only=True)
class Check:
    """One row: the published figure and the predicted one."""

    anchor: Anchor
    efficiency: float
    predicted: float
    """Tokens/s/GPU."""
    time: StepTime

    @property
    def error(self) -> float:
        return self.predicted / self.anchor.tokens_per_s_per_gpu - 1


def checks(anchors: Sequence[Anchor], constants: Constants = DEFAULT) -> list[Check]:
    """Every row with its stack's fitted efficiency."""
    result = []
    for stack in dict.fromkeys(anchor.stack for anchor in anchors if anchor.use != "unseen"):
        published = [anchor for anchor in anchors if anchor.stack == stack]
        efficiency = fit([anchor for anchor in published if anchor.use == "fit"], constants)
        for anchor in published:
            predicted, time = predict(anchor, replace(constants, efficiency=efficiency))
            result.append(Check(anchor=anchor, efficiency=efficiency, predicted=predicted, time=time))
    return result


def median_error(result: Sequence[Check]) -> float:
    """Of the rows that nothing was fitted on."""
    return median(abs(each.error) for each in result if each.anchor.use == "check")


def fit(anchors: Sequence[Anchor], constants: Constants) -> float:
    """The efficiency at which predictions of these rows are right in the geometric mean."""
    low, high = 0.05, 2.0
    for _ in range(50):
        middle = (low + high) / 2
        trial = replace(constants, efficiency=middle)
        ratio = geometric_mean(predict(each, trial)[0] / each.tokens_per_s_per_gpu for each in anchors)
        low, high = (middle, high) if ratio < 1 else (low, middle)
    return (low + high) / 2


def predict(anchor: Anchor, constants: Constants) -> tuple[float, StepTime]:
    """(tokens/s/GPU, where the step goes) for a published configuration."""
    layout = anchor.layout
    assert layout.world_size == anchor.gpus, f"{anchor.source}: {layout} is not {anchor.gpus} GPUs"
    option = offers.option(rows.machines()[anchor.machine], rows.modes()["reservation"], "published", None)
    per_node = min(anchor.gpus, option.offer.gpus_per_node)
    option = replace(option, offer=replace(option.offer, gpus_per_node=per_node))
    megatron = anchor.style == "megatron"
    work = Workload(
        shape=rows.models()[anchor.model].shape,
        sequence_length=anchor.sequence_length,
        global_batch_size=anchor.micro_batch * anchor.rounds * layout.data_ranks,
        steps=1,
        lora_rank=16 if anchor.job == "lora" else 0,
        compile=anchor.compile,
        attention=anchor.attention,
        loss_chunk_tokens=0,
        snapshot_every=0,
        once_a_step=megatron,
        pipeline_chunks=anchor.chunks,
        hidden_tensor_parallel=HIDDEN_TENSOR_PARALLEL if megatron else 0.0,
    )
    setting = Setting(layout=layout, micro_batch_size=anchor.micro_batch, activation_checkpointing=anchor.checkpointing)
    time = step_time(work, setting, option, anchor.gpus // per_node, replace(constants, precision=anchor.precision))
    return tokens_per_second_per_gpu(work, time), time


def table() -> str:
    """Markdown: every row, the efficiency of each stack, the median error of the checked rows."""
    found = checks(anchors())
    lines = [
        "| stack | efficiency | row | published tokens/s/GPU | predicted | error | used to |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in found:
        anchor = each.anchor
        chip = rows.machines()[anchor.machine].accelerator
        what = (
            f"{anchor.model.split('/')[-1]} {anchor.job} {anchor.precision}{'' if anchor.compile else ' eager'}, "
            f"{anchor.gpus} {chip}, {anchor.sequence_length // 1024}k"
        )
        lines.append(
            f"| {anchor.stack} | {each.efficiency:.3f} | {what} | {anchor.tokens_per_s_per_gpu:,.0f} | "
            f"{each.predicted:,.0f} | {each.error:+.1%} | {anchor.use} |"
        )
    checked = sum(each.anchor.use == "check" for each in found)
    lines += ["", f"{len(found)} rows, {checked} of them checked: median error {median_error(found):.1%}."]
    return "\n".join(lines)


def unfitted() -> str:
    """Markdown: runs with tensor or pipeline parallel, and unseen ones, by the constants that ship."""
    lines = ["| run | layout | published tokens/s/GPU | predicted | error |", "|---|---|---|---|---|"]
    errors = []
    for anchor in anchors():
        layout = anchor.layout
        if anchor.use != "unseen" and layout.tp * layout.pp == 1:
            continue
        predicted, _ = predict(anchor, DEFAULT)
        errors.append(predicted / anchor.tokens_per_s_per_gpu - 1)
        axes = " x ".join(f"{axis} {size}" for axis, size in layout.sizes.items() if size > 1)
        chip = rows.machines()[anchor.machine].accelerator
        lines.append(
            f"| {anchor.stack}, {anchor.model.split('/')[-1]} {anchor.job} {anchor.precision}, {anchor.gpus} {chip} | "
            f"{axes} | {anchor.tokens_per_s_per_gpu:,.0f} | {predicted:,.0f} | {errors[-1]:+.1%} |"
        )
    lines += ["", f"{len(errors)} rows: median error {median(map(abs, errors)):.1%}."]
    return "\n".join(lines)


def on_tpus() -> str:
    """Markdown: published runs on TPUs by the constants that ship. One sequence a chip, all recomputed, is assumed."""
    text = resources.files("muster.catalog").joinpath("tables", "tpu_anchors.csv").read_text(encoding="utf-8")
    lines = [
        "| run | slice | published | predicted | error | HBM GB a chip by the plan |",
        "|---|---|---|---|---|---|",
    ]
    errors = []
    for row in csv.DictReader(line for line in text.splitlines() if not line.startswith("#")):
        hosts, machine = int(row["hosts"]), rows.machines()[row["machine"]]
        option = offers.option(machine, rows.modes()["reservation"], "published", None)
        chips = hosts * machine.count
        work = Workload(
            shape=rows.models()[row["model"]].shape, sequence_length=int(row["sequence_length"]),
            global_batch_size=chips, steps=1, snapshot_every=0,
        )  # fmt: skip
        setting = Setting(layout=Layout(dp_shard=chips), micro_batch_size=1, activation_checkpointing="full")
        time = step_time(work, setting, option, hosts)
        rate = tokens_per_second_per_gpu(work, time)
        if row["mfu"]:
            reached = rate * work.useful_flops_per_token(Convention.FULL) / (option.ceiling_flops or 1.0)
            published, predicted = f"MFU {float(row['mfu']):.1%}", f"{reached:.1%}"
            errors.append(reached / float(row["mfu"]) - 1)
        else:
            given = float(row["tokens_per_s_per_chip"])
            published, predicted = f"{given:,.0f} tokens/s a chip", f"{rate:,.0f}"
            errors.append(rate / given - 1)
        need, have = tpu_memory(work, setting).total_bytes / 1e9, option.offer.gpu_memory_bytes / 1e9
        lines.append(
            f"| {row['model'].split('/')[-1]}, {work.sequence_length // 1024}k | {chips} {machine.accelerator}, "
            f"{option.topology(hosts)} | {published} | {predicted} | {errors[-1]:+.1%} | {need:.1f} of {have:.0f} |"
        )
    lines += ["", f"{len(errors)} rows, none fitted: median error {median(map(abs, errors)):.1%}."]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
    print()
    print(unfitted())
    print()
    print(on_tpus())
