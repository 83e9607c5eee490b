"""Which layouts and features can be combined: one table of pairs. A pair that is not listed works.

The run file's validation asks it before hosts are paid for, the planner before it proposes a layout.
``docs/reference/layouts.md`` is generated from it; ``tests/live/test_layout_cells_live.py`` trains the pairs that work.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["mathematics", "library", "not built"]


@dataclass(frozen=True)
class Feature:
    """An axis of a layout, or a setting that changes what ranks compute or exchange."""

    name: str
    key: str
    """Of the run file."""
    off: str
    """How to do without it, as a hint says it."""


AXES = tuple(
    Feature(name, f"parallelism.{name}", f"{name}: 1") for name in ("dp_replicate", "dp_shard", "tp", "pp", "cp")
)
FEATURES = (
    Feature("lora", "model.lora", "lora: null"),
    Feature("float8", "training.precision", "precision: bf16"),
    Feature("compile", "training.compile", "compile: false"),
    Feature("packing", "data.packing", "packing: false"),
    Feature("exact", "training.exact", "exact: false"),
    Feature("split_backward", "parallelism.pp_schedule", "pp_schedule: interleaved"),
    Feature("local_steps", "training.local_steps", "local_steps: 0"),
    Feature("experts", "model", "a model without experts"),
    Feature("dora", "model.lora.dora", "dora: false"),
    Feature("quantised", "model.source", "a folder in bfloat16"),
    Feature("objective", "training.objective", "objective: null"),
)
BY_NAME = {feature.name: feature for feature in (*AXES, *FEATURES)}


@dataclass(frozen=True)
class Refusal:
    """Two that cannot be combined."""

    refused: str
    """Whose key a message names."""
    other: str
    kind: Kind
    """Why it is refused: the mathematics, a library, or that it is not implemented."""
    reason: str

    @property
    def key(self) -> str:
        return BY_NAME[self.refused].key

    @property
    def hint(self) -> str:
        return f"{BY_NAME[self.other].off}, or {BY_NAME[self.refused].off}"


_FSDP_REDUCES = "FSDP reduces a layer's gradients when its backward pass ends"
REFUSALS = (
    Refusal("exact", "tp", "mathematics", "a layer's sums are split, and their order depends on tp"),
    Refusal("exact", "cp", "mathematics", "gradients of keys and values are summed inside a layer"),
    Refusal("exact", "local_steps", "mathematics", "what the replicas learn depends on how many there are"),
    Refusal("split_backward", "dp_shard", "library", _FSDP_REDUCES),
    Refusal("split_backward", "tp", "library", _FSDP_REDUCES),
    Refusal("split_backward", "compile", "library", "a compiled backward pass is not split"),
    Refusal("local_steps", "pp", "not built", "stages would meet the other replicas at different moments"),
    Refusal("compile", "cp", "not built", "what a rank attends to differs in each batch"),
    Refusal(
        "tp", "experts", "not built", "transformers' plan splits the experts of a layer, which the trainer does not"
    ),
    Refusal("cp", "experts", "not built", "their auxiliary loss is a product of means over whole sequences"),
    Refusal("pp", "experts", "not built", "no mixture is known to start in the middle of its layers"),
    Refusal("dora", "tp", "not built", "each row of a weight has one length, and tp splits rows"),
    Refusal("dora", "experts", "not built", "it is computed for dense linear layers alone"),
    Refusal("dora", "quantised", "not built", "the length of a row is of weights that were not rounded"),
    Refusal("objective", "cp", "not built", "the log-probability of an answer is summed within one rank"),
    Refusal("objective", "experts", "not built", "their auxiliary loss is weighted by tokens, the objective by rows"),
    Refusal("objective", "local_steps", "not built", "the two were never tried together"),
    Refusal("float8", "lora", "not built", "adapters' matrices are too narrow"),
    Refusal("float8", "tp", "not built", "the two were never tried together"),
    Refusal("float8", "pp", "not built", "the two were never tried together"),
)


def cells() -> Iterator[tuple[Feature, Feature, Refusal | None]]:
    """Every pair of two axes, and of an axis and a feature; None: it works."""
    refusals = {frozenset((each.refused, each.other)): each for each in REFUSALS}
    for one, other in (*itertools.combinations(AXES, 2), *itertools.product(AXES, FEATURES)):
        yield one, other, refusals.get(frozenset((one.name, other.name)))


def splits_adapters(rank: int, *, tp: int, shards: int) -> bool:
    """Whether adapters of ``rank`` can be split: tp takes their long side, so that FSDP cuts the short one, evenly."""
    return tp == 1 or rank % shards == 0


def refusals_of(used: Collection[str]) -> list[Refusal]:
    """Why these features (by name) cannot be used together."""
    return [each for each in REFUSALS if each.refused in used and each.other in used]
