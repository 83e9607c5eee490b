"""How the documents of prepared data share rows, for a model that may not see several in one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from muster.config.spec import RunSpec
from muster.core.errors import UsageError
from muster.data.prepare import Prepared
from muster.train.model.attention_isolation_check import RotaryBorder, rotary_border
from muster.train.model.causal_lm import BuiltModel

#: Micro-batches are cut to a multiple of this: few different shapes, at most so much padding in the longest row.
CUT_TO = 64


@dataclass(frozen=True)
class Separated:
    """What a rank trains on, and how."""

    spec: RunSpec
    prepared: Prepared
    report: str | None = None
    """Where that is not what the run file asks for: why, and what it costs."""


def separate(spec: RunSpec, prepared: Prepared, built: BuiltModel) -> Separated:
    """The data in rows that ``built`` may be trained on.

    Documents share rows where the model keeps them apart; else each has a row of its own; and where a longer row in the
    batch would change a shorter one, each is in a micro-batch of its own.

    Raises:
        UsageError: the model's rotary embedding cannot be used with documents of this length.
    """
    assert spec.data is not None and built.proof is not None
    packed, rotary = spec.data.packing, rotary_border(built.config.get_text_config(), spec.training.sequence_length)
    stores = [store for store in (prepared.train, prepared.heldout) if store is not None]
    longest = max(store.longest_document for store in stores) if rotary is not None else 0
    alone = built.proof.alone if rotary is None or longest <= rotary.length else _alone(rotary, longest)
    if alone is not None and built.module.context is not None:
        raise UsageError(f"parallelism.cp is not possible: {alone}", hint="parallelism.cp: 1")
    if alone is not None and spec.training.objective is not None:
        raise UsageError(
            f"training.objective is not possible: the answers of a pair share a row, and {alone}",
            hint="a shorter training.sequence_length, or another model",
        )
    reason = alone or (built.proof.unpacked if packed else None)
    if reason is not None and packed:
        stores = [store.by_document() for store in stores]
        prepared = replace(prepared, fingerprint=f"{prepared.fingerprint}-documents")
    for store in stores:
        if alone is not None:
            store.cut_to = 1
        elif reason is not None and not built.module.compiled and built.module.context is None:
            store.cut_to = CUT_TO
        store.highest_position = None if rotary is None else rotary.length - 1
    if alone is not None:
        spec = spec.model_copy(update={"training": spec.training.model_copy(update={"micro_batch_size": 1})})
    separated = replace(prepared, train=stores[0], heldout=stores[1] if len(stores) > 1 else None)
    if reason is None:
        return Separated(spec, separated)
    fill = prepared.train.tokens / (len(stores[0]) * stores[0].sequence_length)
    how = "micro-batches of one document" if alone else "one document a row"
    report = f"trained with {how}: {reason}. {len(stores[0]):,} rows, {fill:.1%} of their positions are tokens"
    return Separated(spec, separated, report)


def _alone(rotary: RotaryBorder, longest: int) -> str:
    if rotary.kind == "dynamic":
        raise UsageError(
            f"model: rotary embeddings of type dynamic change with the longest document that was seen, and one has "
            f"{longest} tokens, more than {rotary.length}",
            hint=f"training.sequence_length: {rotary.length}, or another rope_type in the model's config (yarn)",
        )
    return f"its rotary embedding changes where a document in the batch is longer than {rotary.length} ({longest} here)"
