"""How ranks share a model: the layout axes, their one table, and the layout that a number of ranks forms.

An axis is added here, as a field of ``Layout``: keys, file names of snapshots, headers, events, the takeover and the
plan follow from ``AXES``. (``report.audit`` keeps its own list on purpose: it shares no code with what it checks.)
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, TypeAlias

from annotated_types import Predicate

from muster.core.typed_json import JsonObject


def _axis(letter: str) -> Any:
    return field(default=1, metadata={"letter": letter})


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The size of each axis; the product of all but ``ep`` is the number of ranks. Ranks are numbered with
    ``dp_replicate`` outermost, then ``pp``, ``dp_shard``, ``cp`` and ``tp``: a replica's ranks are neighbours, and so
    are a stage's."""

    dp_replicate: int = _axis("r")
    """Copies of the model."""
    dp_shard: int = _axis("s")
    """Ranks that share parameters, gradients and optimizer state (FSDP)."""
    tp: int = _axis("t")
    """Tensor parallel: ranks that share each matrix."""
    pp: int = _axis("p")
    """Pipeline parallel: stages of layers."""
    cp: int = _axis("c")
    """Context parallel: ranks that share each sequence."""
    ep: int = _axis("e")
    """Expert parallel: ranks that share the experts of a layer. They are ranks of the other axes (``dp_shard`` x ``cp``
    x ``tp``), so that it is no factor of their number."""

    @classmethod
    def of(cls, sizes: JsonObject) -> Layout:
        """From axis -> size, as headers and events hold it; an axis that is absent is 1.

        Raises:
            TypeError, ValueError: an unknown axis, or a size that is not a number.
        """
        return cls(**{name: int(str(size)) for name, size in sizes.items()})

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> size, every axis included."""
        return {axis.name: getattr(self, axis.name) for axis in AXES}

    @property
    def world_size(self) -> int:
        return math.prod(_factors(self))

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that hold one copy of the model between them; a replica's are numbered one after another."""
        return self.world_size // self.dp_replicate

    @property
    def shards(self) -> int:
        """Ranks that parameters, gradients and optimizer state are cut over: those that share a sequence too."""
        return self.dp_shard * self.cp

    @property
    def data_ranks(self) -> int:
        """Ranks that read different micro-batches."""
        return self.dp_replicate * self.dp_shard

    @property
    def key(self) -> str:
        """A name that is safe in a file name: ``r1s4t1p1c1e1``."""
        return "".join(f"{axis.letter}{getattr(self, axis.name)}" for axis in AXES)

    @classmethod
    def from_key(cls, key: str) -> Layout:
        """The inverse of ``key``. Raises ValueError."""
        match = _KEY.fullmatch(key)
        if match is None:
            raise ValueError(f"not a layout: {key!r}")
        return cls.of(match.groupdict())


@dataclass(frozen=True)
class Axis:
    """One axis: its name in the run file, and its letter in ``Layout.key``."""

    name: str
    letter: str


#: Every axis, in the order of ``Layout.key``.
AXES = tuple(Axis(axis.name, axis.metadata["letter"]) for axis in fields(Layout))
#: The axes whose sizes multiply to the number of ranks.
FACTORS = tuple(axis.name for axis in AXES if axis.name != "ep")
_factors: Callable[[Layout], tuple[int, ...]] = operator.attrgetter(*FACTORS)
#: Matches ``Layout.key`` (without groups, for patterns of file names).
KEY_PATTERN = "".join(rf"{axis.letter}\d+" for axis in AXES)
_KEY = re.compile("".join(rf"{axis.letter}(?P<{axis.name}>\d{{1,9}})" for axis in AXES))


def ranks_of(axes: Mapping[str, int]) -> int:
    """How many ranks these axes (name -> size) need together."""
    return math.prod(axes.get(name, 1) for name in FACTORS)


def _is_layout_key(key: str) -> bool:
    return _KEY.fullmatch(key) is not None


#: A field that holds a ``Layout.key``.
LayoutKey: TypeAlias = Annotated[str, Predicate(_is_layout_key)]


def layout_for(axes: Mapping[str, int], world_size: int, *, resize: bool = False) -> Layout | None:
    """The layout that ``world_size`` ranks form; None when they cannot.

    ``axes``: axis -> size as the run file gives it (``Parallelism.axes``); ``dp_shard`` -1 takes the ranks that remain.
    ``resize``: the number of ranks may differ from the run file's. Replicas are then given up before shards: with
    ``dp_shard`` given, as many whole replicas as fit, or one smaller one; with -1 the requested replicas if they
    divide the ranks, else one. The other axes are kept as given.
    """
    inner = {name: size for name, size in axes.items() if name not in ("dp_replicate", "dp_shard")}
    data_ranks, rest = divmod(world_size, ranks_of(inner))
    if rest or not data_ranks:
        return None
    replicas, shards = axes["dp_replicate"], axes["dp_shard"]
    if shards == -1:
        replicas = 1 if resize and data_ranks % replicas else replicas
        shards = data_ranks // replicas
    elif resize:
        replicas, shards = max(1, data_ranks // shards), min(shards, data_ranks)
    layout = Layout(dp_replicate=replicas, dp_shard=shards, **inner)
    return layout if layout.world_size == world_size else None


def largest_layout(axes: Mapping[str, int], hosts: int, ranks_per_host: int) -> Layout | None:
    """The layout of the most hosts, of ``hosts``, that can form one; None: no number of them can.

    ``axes`` as for ``layout_for``, resized. Stages of a pipeline are kept as given where any number of hosts has room
    for them: whole replicas keep their processes, and a rank's memory was counted for its stage. Else the most hosts
    with the most stages that they can form.
    """
    for fewest, most in ((axes["pp"], axes["pp"]), (1, axes["pp"] - 1)):
        for number in range(hosts, 0, -1):
            for stages in range(most, fewest - 1, -1):
                layout = layout_for({**axes, "pp": stages}, number * ranks_per_host, resize=True)
                if layout is not None:
                    return layout
    return None


#: transformers' model types whose forward pass may begin behind any layer, given hidden states in place of embeddings:
#: nothing happens to them but the layers, one norm and the head. A test compares each with the whole model bit for bit.
FAMILIES = frozenset(
    ("llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2", "smollm3", "gemma", "cohere", "glm", "glm4")
)


def cut_layers(layers: int, stages: int, *, last: float = 0.0) -> list[range]:
    """The layers of each stage, in order: every stage has one, and the most loaded stage as little as possible.

    ``last``: the cost of the head (with the last norm and the loss), in layers. An embedding costs a lookup: nothing
    here. Of equally good cuts the one with the fewest layers in front, where the most micro-batches are kept.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    if not 1 <= stages <= layers:
        raise ValueError(f"{layers} layers do not make {stages} stages")

    def heaviest(in_last: int) -> tuple[float, int]:
        return max(in_last + last, -(-(layers - in_last) // (stages - 1))), -in_last

    in_last = min(range(1, layers - stages + 2), key=heaviest) if stages > 1 else layers
    ranges, start = [], 0
    for stage in range(stages):
        left = stages - 1 - stage  # of the stages before the last: larger ones first
        size = in_last if not left else -(-(layers - in_last - start) // left)
        ranges.append(range(start, start + size))
        start += size
    return ranges


def part_of(stage: int, chunk: int, stages: int, *, v: bool = False) -> int:
    """Which part of the model a chunk of a pipeline's stage is. ``v``: every second chunk is placed from the last stage
    back to the first, so that of two the first stage has both ends of the model."""
    return chunk * stages + (stages - 1 - stage if v and chunk % 2 else stage)


def forwards_ahead(stage: int, stages: int, chunks: int, micro_batches: int) -> int:
    """Forward passes of a stage of a pipeline (each through one of its ``chunks``) before it goes on with a forward and
    a backward pass in turn: it keeps the activations of one more at most. Narayanan et al. 2021, section 2.2."""
    if chunks == 1:
        return stages - 1 - stage
    group = -(-micro_batches // max(1, micro_batches // stages))
    return (chunks - 1) * group + 2 * (stages - 1 - stage)


def kept_in_v(stage: int, stages: int, micro_batches: int, layers: tuple[int, int]) -> tuple[int, int]:
    """Layers of a stage of a V whose activations it keeps at most, once for each micro-batch, until it has their
    matrices' gradients: behind a forward pass through its first chunk, and behind one through its second. ``layers``:
    of these. Qi et al. 2023, section 6."""
    first, second = layers
    ahead = 2 * stages - stage
    return (
        min(ahead, micro_batches) * first + min(stage, micro_batches) * second,
        min(ahead - 1, micro_batches) * first + min(stage + 1, micro_batches) * second,
    )


def chunk_length(rows: int, length: int, chunk_tokens: int) -> int:
    """Positions of each of a chip's ``rows`` whose logits exist at once: at most ``chunk_tokens`` (0: all) in total.

    One at the least, and a divisor of ``length``, so that all chunks have one shape and one compiled loop serves them.
    Here for the trainer on TPUs and for the plan of its memory, which know nothing of each other.
    """
    size = min(length, max(1, chunk_tokens // rows)) if chunk_tokens else length
    while length % size:
        size -= 1
    return size
