"""The time model against published runs: one efficiency per stack, fitted on some rows and checked on the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import geometric_mean, median

from muster.catalog import offers, rows
from muster.catalog.rows import Anchor
from muster.plan.step_time import DEFAULT, Constants, StepTime, step_time, tokens_per_second_per_gpu
from muster.plan.workload import Setting, Workload

#: Megatron's user buffers overlap most of tensor parallel's collectives with matrix products; from memory.
HIDDEN_TENSOR_PARALLEL = 0.7


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
    for stack in dict.fromkeys(anchor.stack for anchor in anchors):
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
        loss_chunk_tokens=0,
        snapshot_every=0,
        once_a_step=megatron,
        pipeline_chunks=anchor.chunks,
        hidden_tensor_parallel=HIDDEN_TENSOR_PARALLEL if megatron else 0.0,
    )
    setting = Setting(layout=layout, micro_batch_size=anchor.micro_batch, activation_checkpointing=anchor.checkpointing)
    time = step_time(work, setting, option, anchor.gpus // per_node, replace(constants, precision=anchor.precision))
    return tokens_per_second_per_gpu(work, time), time
