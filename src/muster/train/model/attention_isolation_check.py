"""The self-test at start: a document's logits do not depend on its neighbours, with the kernel that will run.

Three short documents share a sequence. New tokens in the outer two must leave the logits of the middle one as
they are; new tokens in the middle one must change the logits at its other tokens: otherwise the test could not fail.
A model that fails is trained one document a row: what is behind a document cannot reach a causal model's logits, which
the same test shows for a document at the row's start.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from muster.core.errors import RunFailed, UsageError
from muster.train.data_feed.batch import Batch, make_batch
from muster.train.model.model_with_loss import ModelWithLoss, forward_pass
from muster.train.model.sharding import evaluating

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LENGTHS = (5, 9, 6)
#: Of rows with one document: nothing is before it.
ALONE = (0, 9, 11)
#: Largest leak, as a share of the control's change. Kernels that separate documents leak exactly 0.
LEAK_SHARE = 1e-3
#: Largest difference between the chunked head and the model's own, as a share of the largest logit.
HEAD_SHARE = {torch.float32: 1e-3, torch.bfloat16: 3e-2}

#: Tokens of the document that the control changes, and those where it looks: next to each other, because a chunk of
#: attention (Llama 4) may end between any two.
_CHANGED, _KEPT = slice(0, -1, 2), slice(1, None, 2)


def border(config: PreTrainedConfig, sequence_length: int) -> str | None:
    """Why documents must not share a row, even where the self-test's short ones pass: attention changes at a place of
    the row, not of the document (Llama 4's chunks and temperatures, Doge's choice of keys)."""
    borders = {
        name: getattr(config, name, None) for name in ("attention_chunk_size", "floor_scale", "keep_window_size")
    }
    found = next((name for name, at in borders.items() if isinstance(at, int) and at < sequence_length), None)
    return found and f"{config.model_type} counts {found} = {borders[found]} from the start of the row"


@dataclass(frozen=True)
class RotaryBorder:
    """A document length beyond which a rotary embedding changes for all rows of a batch, the shorter ones too."""

    kind: str
    length: int


def rotary_border(config: PreTrainedConfig, sequence_length: int) -> RotaryBorder | None:
    """The model's, if sequences may be longer."""
    rope = getattr(config, "rope_parameters", None) or {}
    for values in (rope, *(each for each in rope.values() if isinstance(each, dict))):
        kind = str(values.get("rope_type", ""))
        name = "original_max_position_embeddings"
        length = {"longrope": values.get(name), "dynamic": getattr(config, "max_position_embeddings", None)}.get(kind)
        if isinstance(length, int) and length < sequence_length:
            return RotaryBorder(kind, length)
    return None


@dataclass(frozen=True)
class Proof:
    """What the self-test measured: largest changes of a document's logits."""

    leak: float
    """By new neighbours, at any of its tokens."""
    control: float
    """By new tokens of its own, at its unchanged ones."""
    own_head: bool
    """The chunked head gives the model's own logits; otherwise the model's own is used, on all tokens at once."""
    unpacked: str | None = None
    """Why documents must not share a row; None: they may."""

    def __str__(self) -> str:
        head = "" if self.own_head else "; the model's own head is used, so logits of a whole micro-batch are held"
        changes = f"neighbours change logits by {self.leak:.2g}, its own tokens by {self.control:.2g}"
        return f"documents separated: {changes}{head}"


@torch.no_grad()
def prove_isolation(module: ModelWithLoss, device: torch.device, *, static_shapes: bool = False) -> Proof:
    """Run the self-test; collective, a few forward passes of 20 tokens.

    If the chunked head does not give the model's own logits, ``module`` is switched to the model's head.
    Compiled layers run eagerly here, because these shapes occur nowhere else; the kernel is the same.

    Raises:
        UsageError: the model is not causal.
        RunFailed: the test is inconclusive.
    """
    unpacked = module.unpacked
    leak, control, head_difference = _changes(module, device, LENGTHS if unpacked is None else ALONE, static_shapes)
    if unpacked is None and not leak <= LEAK_SHARE * control:
        family, kernel = module.model.config.get_text_config().model_type, module.attention.kernel
        unpacked = (
            f"{family} does not keep documents in a row apart with attention {kernel}: new neighbours change "
            f"a document's logits by {leak:.3g}, its own tokens by {control:.3g}"
        )
        leak, control, head_difference = _changes(module, device, ALONE, static_shapes)
    if not control > 0:
        raise RunFailed(
            "the self-test of packed attention is inconclusive: a document's own tokens do not change its logits",
            hint="check that the model's weights are finite and not all zero",
        )
    if not leak <= LEAK_SHARE * control:
        raise UsageError(
            f"model: {type(module.model).__name__} is not causal: tokens behind a document change its logits "
            f"by {leak:.3g}, its own by {control:.3g}",
            hint="choose a causal language model",
        )
    if module.own_head and not head_difference <= HEAD_SHARE[module.compute_dtype]:
        module.own_head = False
    return Proof(leak, control, module.own_head, unpacked)


def _changes(
    module: ModelWithLoss, device: torch.device, lengths: tuple[int, int, int], static_shapes: bool
) -> tuple[float, float, float]:
    """Leak, control, and the head's error, the largest over all ranks."""
    batches = probes(module, device, static_shapes, lengths)
    with evaluating(module), torch.compiler.set_stance("force_eager"):
        logits = [forward_pass(module, batch, want="logits") for batch in batches]
        reference = forward_pass(module, batches[0], want="model_logits") if module.own_head else logits[0]
    changes = measured_changes([output for output in logits if output is not None], reference, device, lengths)
    if dist.is_initialized():
        dist.all_reduce(changes, op=dist.ReduceOp.MAX)
    return float(changes[0]), -float(changes[1]), float(changes[2])


def measured_changes(
    logits: Sequence[Tensor], reference: Tensor | None, device: torch.device, lengths: tuple[int, int, int] = LENGTHS
) -> Tensor:
    """Leak, minus the control, and the head's error; from a stage that has no logits what leaves other ranks' maxima as
    they are."""
    if reference is None:
        return torch.tensor([0.0, -torch.inf, 0.0], dtype=torch.float64, device=device)
    start, end = lengths[0], lengths[0] + lengths[1]
    base, neighbours, own = (output[0, start:end] for output in logits)
    head_error = (reference - logits[0]).abs().max() / reference.abs().max().clamp(min=1e-30)
    return torch.stack([_largest(neighbours - base), -_largest((own - base)[_KEPT]), head_error.double()])


def proven_before(module: ModelWithLoss, device: torch.device, file: Path) -> Proof | None:
    """The proof that this run's first ranks wrote to ``file``, if it is for this kernel and model; collective.

    Either all ranks use it or none. ``module`` is switched to the model's own head if the proof says so.
    """
    proof = None
    with suppress(OSError, ValueError, KeyError, TypeError):
        stored = json.loads(file.read_text())
        if stored["of"] == subject(module, device):
            proof = Proof(**stored["proof"])
    everywhere = torch.tensor(float(proof is not None), device=device)
    if dist.is_initialized():
        dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
    if proof is None or not everywhere.item():
        return None
    module.own_head = proof.own_head
    return proof


def keep_proof(module: ModelWithLoss, device: torch.device, proof: Proof, file: Path) -> None:
    """Write the proof for ranks that replace others (one rank of each replica calls this)."""
    text = json.dumps({"of": subject(module, device), "proof": asdict(proof)})
    part = file.with_suffix(f".{secrets.token_hex(4)}.part")  # replicas may write at the same time
    part.write_text(text)
    part.replace(file)


def subject(module: ModelWithLoss, device: torch.device) -> str:
    """What a proof applies to: kernel, device, type, torch, and the model's configuration."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    config = hashlib.sha256(json.dumps(module.model.config.to_dict(), sort_keys=True, default=str).encode())
    rows = "rows of one document" if module.unpacked else "packed rows"
    parts = (module.attention.name, name, module.compute_dtype, torch.__version__, config.hexdigest()[:16], rows)
    return " ".join(str(part) for part in parts)


def probes(
    module: ModelWithLoss, device: torch.device, static_shapes: bool, lengths: tuple[int, int, int] = LENGTHS
) -> list[Batch]:
    """The same sequence three times: unchanged, with other neighbours, with another middle document."""
    vocabulary = module.model.config.get_text_config().vocab_size
    tokens = torch.arange(3, 3 + sum(lengths)) * 7 % vocabulary
    start, end = lengths[0], lengths[0] + lengths[1]
    others = tokens.clone()
    others[:start] = (others[:start] + 1) % vocabulary
    others[end:] = (others[end:] + 1) % vocabulary
    own = tokens.clone()
    own[start:end][_CHANGED] = (own[start:end][_CHANGED] + 1) % vocabulary
    positions = torch.cat([torch.arange(length) for length in lengths])
    documents = [length for length in lengths if length]
    return [
        make_batch(row[None], row.roll(-1)[None], positions[None], documents, device, static_shapes=static_shapes)
        for row in (tokens, others, own)
    ]


def _largest(difference: Tensor) -> Tensor:
    return difference.abs().max().double()
