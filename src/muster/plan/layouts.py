"""Which layouts, micro-batches and recomputation the trainer can run on a number of machines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from muster.catalog.offers import Option
from muster.config.compatibility import refusals_of, splits_adapters
from muster.core.types import Layout
from muster.plan.workload import Setting, Workload


@dataclass(frozen=True, kw_only=True)
class Pins:
    """What the run file fixes; None: the plan chooses."""

    axes: Mapping[str, int] = field(default_factory=dict)
    """Layout axis -> size; ``dp_shard`` -1: what remains."""
    micro_batch_size: int | None = None
    activation_checkpointing: str | None = None
    num_nodes: int | None = None
    gpus_per_node: int | None = None
    machine: str | None = None
    accelerator: str | None = None
    mode: str | None = None
    locations: tuple[str, ...] = ()


FREE = Pins()
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
CHECKPOINTING = ("none", "selective", "full")


def settings(work: Workload, option: Option, num_nodes: int, pins: Pins) -> Iterator[Setting]:
    """Everything that could be run there, whether it fits or not."""
    for layout in layouts(work, option, num_nodes, pins):
        groups = option.offer.gpus_per_node // layout.tp if option.is_tpu else 1
        for micro in micro_batches(work, layout, pins, groups=groups):
            for kind in (pins.activation_checkpointing,) if pins.activation_checkpointing else CHECKPOINTING:
                yield Setting(layout=layout, micro_batch_size=micro, activation_checkpointing=kind)


def layouts(work: Workload, option: Option, num_nodes: int, pins: Pins) -> Iterator[Layout]:
    """dp_replicate x pp x dp_shard x tp = GPUs. tp stays in a machine and divides the heads; replicas are machines.
    Stages are tried where the run file asks for them.

    A slice of TPUs is one copy of the model, in groups of tp chips of a host, which divides heads and KV heads.

    Sharding over a part of a machine is left out: it costs memory and saves nothing measurable on NVLink.
    """
    if option.is_tpu:
        for tp in tensor_groups(work, option, pins):
            yield Layout(dp_shard=num_nodes * option.offer.gpus_per_node // tp, tp=tp)
        return
    cp, pp = pins.axes.get("cp", 1), pins.axes.get("pp", 1)  # never chosen, only taken as given
    world, rest = divmod(num_nodes * option.offer.gpus_per_node, cp * pp)
    for tp in _divisors(option.offer.gpus_per_node) if not rest and pp <= work.shape.layers else ():
        if tp > 1 and (work.shape.heads % tp or work.shape.kv_heads % tp):
            continue
        data, rest = divmod(world, tp)
        if rest:
            continue
        inside = max(1, option.offer.gpus_per_node // (tp * cp))
        shards = {data, max(1, inside), 1}
        shards |= {nodes * inside for nodes in _divisors(num_nodes)}
        for shard in sorted(shards):
            if data % shard:
                continue
            layout = Layout(dp_replicate=data // shard, dp_shard=shard, tp=tp, pp=pp, cp=cp)
            if work.lora_rank and not splits_adapters(work.lora_rank, tp=tp, shards=layout.shards):
                continue
            used = work.used_features | {axis for axis, size in layout.sizes.items() if size > 1}
            if all(size in (-1, layout.sizes[axis]) for axis, size in pins.axes.items()) and not refusals_of(used):
                yield layout


def tensor_groups(work: Workload, option: Option, pins: Pins) -> list[int]:
    """Sizes of ``tp`` that a slice of TPUs can have, rising: the run file's alone where it gives one."""
    chips, shape, given = option.offer.gpus_per_node, work.shape, pins.axes.get("tp")
    tried = [given] if given is not None else _divisors(chips)
    return [tp for tp in tried if not (chips % tp or shape.heads % tp or shape.kv_heads % tp)]


def micro_batches(work: Workload, layout: Layout, pins: Pins, *, groups: int = 1) -> Iterator[int]:
    """Sizes that divide the global batch; none so large that ranks would have nothing to do.

    ``groups``: of a rank's chips; they share the rows of the run file's micro-batch.
    """
    if pins.micro_batch_size is not None:
        if pins.micro_batch_size % groups == 0:
            yield pins.micro_batch_size // groups
        return
    most = max(1, work.global_batch_size // layout.data_ranks)
    for size in MICRO_BATCHES:
        if size <= most and work.global_batch_size % size == 0:
            yield size


def node_counts(work: Workload, option: Option, pins: Pins) -> Iterator[int]:
    """Machines to try: powers of two up to where every rank has one sequence a step."""
    if pins.num_nodes is not None:
        yield pins.num_nodes
        return
    if option.is_tpu:
        together = max(tensor_groups(work, option, pins), default=1)  # chips that share a sequence
        for hosts, _ in option.slices:
            if hosts * option.offer.gpus_per_node // together <= work.global_batch_size:
                yield hosts
        return
    most = max(1, -(-work.global_batch_size * 8 // option.offer.gpus_per_node))  # tp up to 8 shares a sequence
    nodes = 1
    while nodes <= min(most, option.offer.max_nodes):
        yield nodes
        nodes *= 2


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
