"""``parallelism: auto``: of the layouts that a run's ranks can form the fastest that fits, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from muster.catalog.offers import Option
from muster.core.errors import NoPlanError
from muster.core.layout import Layout
from muster.plan.constants import Constants
from muster.plan.format import gigabytes
from muster.plan.layouts import FREE, layouts
from muster.plan.memory import DeviceOverhead, memory
from muster.plan.search import MEMORY_MARGIN
from muster.plan.step_time import step_time
from muster.plan.tpu_memory import tpu_memory
from muster.plan.workload import Setting, Workload

#: Times that differ by less are alike: then the layout with the most replicas, a loss in which leaves the others alone.
SAME = 0.02


@dataclass(frozen=True, kw_only=True)
class LayoutChoice:
    """One way of laying the ranks out."""

    layout: Layout
    reshard_after_forward: bool
    """False: parameters stay gathered from the forward to the backward pass (ZeRO-2)."""
    step_s: float
    memory_bytes: int
    fits: bool

    @property
    def title(self) -> str:
        """``dp_replicate 2 (plain data parallel)``."""
        axes = [f"{axis} {size}" for axis, size in self.layout.sizes.items() if size > 1]
        return f"{' x '.join(axes) or 'one rank'} ({self._kind})"

    @property
    def _kind(self) -> str:
        layout = self.layout
        if layout.tp > 1:
            return "tensor parallel"
        if layout.dp_shard == 1:
            return "plain data parallel" if layout.dp_replicate > 1 else "nothing to share"
        sharded = "fully sharded" if self.reshard_after_forward else "sharded, gathered once a round"
        return sharded if layout.dp_replicate == 1 else f"{sharded} inside each replica"


def compare_layouts(
    work: Workload, option: Option, num_nodes: int, *, micro_batch_size: int, activation_checkpointing: str,
    overhead: DeviceOverhead, constants: Constants,
) -> list[LayoutChoice]:  # fmt: skip
    """Every layout that the trainer could run there, the fastest of those that fit first.

    Raises:
        NoPlanError: a number that the time of a step needs is unknown.
    """
    capacity = option.offer.gpu_memory_bytes
    overhead = replace(overhead, capacity_bytes=capacity)
    result = []
    for layout in layouts(work, option, num_nodes, FREE):
        if work.local_steps and layout.dp_replicate == 1:
            continue
        groups = option.offer.gpus_per_node // layout.tp if option.is_tpu else 1  # which share a host's micro-batch
        if micro_batch_size % groups:
            continue
        setting = Setting(
            layout=layout,
            micro_batch_size=micro_batch_size // groups,
            activation_checkpointing=activation_checkpointing,
        )
        for reshard in (True, False) if layout.dp_shard > 1 and not option.is_tpu else (True,):
            job = replace(work, reshard_after_forward=reshard)
            need = (tpu_memory(job, setting) if option.is_tpu else memory(job, setting, overhead)).total_bytes
            seconds = step_time(job, setting, option, num_nodes, constants).seconds
            fits = need <= capacity * (1 - MEMORY_MARGIN)
            result.append(
                LayoutChoice(layout=layout, reshard_after_forward=reshard, step_s=seconds, memory_bytes=need, fits=fits)
            )
    fastest = min((each.step_s for each in result if each.fits), default=0.0)

    def order(each: LayoutChoice) -> tuple[bool, float, int, float]:
        as_fast = each.fits and each.step_s <= fastest * (1 + SAME)
        sharing = each.layout.ranks_per_replica if as_fast else 0
        return not each.fits, fastest if as_fast else each.step_s, sharing, each.step_s

    return sorted(result, key=order)


def reason(choices: Sequence[LayoutChoice], option: Option) -> str:
    """Why the first of ``compare_layouts``, in a sentence. Raises NoPlanError where not even that one fits."""
    if not choices:
        raise NoPlanError(
            "parallelism: auto: training.micro_batch_size is no multiple of a host's groups of chips",
            hint=f"a multiple of {option.offer.gpus_per_node}, the chips of {option.offer.machine}",
        )
    best, capacity, unit = choices[0], option.offer.gpu_memory_bytes, "chip" if option.is_tpu else "rank"
    if not best.fits:
        least = min(choices, key=lambda each: each.memory_bytes)
        raise NoPlanError(
            f"parallelism: auto: no layout of these ranks fits: {least.title} needs {gigabytes(least.memory_bytes)} of "
            f"{gigabytes(capacity)} a {unit}",
            hint="more ranks, training.activation_checkpointing: full, or a smaller training.micro_batch_size",
        )
    text = (
        f"parallelism: auto takes {best.title}: {best.step_s:.3g} s a step by the plan, "
        f"{gigabytes(best.memory_bytes)} of {gigabytes(capacity)} a {unit}"
    )
    others = [f"{each.title} {each.step_s:.3g} s" for each in choices[1:] if each.fits][:2]
    if others:
        text += f"; next {', '.join(others)}"
    too_large = [each for each in choices if not each.fits and each.step_s < best.step_s]
    if too_large:
        fastest = min(too_large, key=lambda each: each.step_s)
        text += f"; {fastest.title} would be faster and need {gigabytes(fastest.memory_bytes)}"
    return text
