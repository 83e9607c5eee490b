"""The self-test at start: a document's logits do not depend on its neighbours, with the kernel that will run.

Three short documents share a sequence. New tokens in the outer two must leave the logits of the middle one as
they are; new tokens in the middle one, except its last, must change the logits at its last: otherwise the test
could not fail.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from muster.core.errors import RunFailed
from muster.train.data_feed.batch import Batch, make_batch
from muster.train.model.model_with_loss import ModelWithLoss, forward_pass
from muster.train.model.sharding import evaluating

LENGTHS = (5, 9, 6)
#: Largest leak, as a share of the control's change. Kernels that separate documents leak exactly 0.
LEAK_SHARE = 1e-3
#: Largest difference between the chunked head and the model's own, as a share of the largest logit.
HEAD_SHARE = {torch.float32: 1e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Proof:
    """What the self-test measured: largest changes of the middle document's logits."""

    leak: float
    """By new neighbours, at any of its tokens."""
    control: float
    """By new tokens of its own, at its last one, which is unchanged."""
    own_head: bool
    """The chunked head gives the model's own logits; otherwise the model's own is used, on all tokens at once."""

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
        RunFailed: the kernel mixes documents, or the test is inconclusive.
    """
    batches = probes(module, device, static_shapes)
    with evaluating(module), torch.compiler.set_stance("force_eager"):
        logits = [forward_pass(module, batch, want="logits") for batch in batches]
        reference = forward_pass(module, batches[0], want="model_logits") if module.own_head else logits[0]
    changes = measured_changes([output for output in logits if output is not None], reference, device)
    if dist.is_initialized():
        dist.all_reduce(changes, op=dist.ReduceOp.MAX)
    leak, control, head_difference = float(changes[0]), -float(changes[1]), float(changes[2])
    if not leak <= LEAK_SHARE * control:
        raise RunFailed(
            f"attention kernel {module.attention.kernel} does not keep packed documents apart: new neighbours change "
            f"a document's logits by {leak:.3g}, its own tokens by {control:.3g}",
            hint="choose another model.attention (sdpa), or set data.packing: false",
        )
    if not control > 0:
        raise RunFailed(
            "the self-test of packed attention is inconclusive: a document's own tokens do not change its logits",
            hint="check that the model's weights are finite and not all zero",
        )
    if module.own_head and not head_difference <= HEAD_SHARE[module.compute_dtype]:
        module.own_head = False
    return Proof(leak, control, module.own_head)


def measured_changes(logits: Sequence[Tensor], reference: Tensor | None, device: torch.device) -> Tensor:
    """Leak, minus the control, and the head's error; from a stage that has no logits what leaves other ranks' maxima as
    they are."""
    if reference is None:
        return torch.tensor([0.0, -torch.inf, 0.0], dtype=torch.float64, device=device)
    start, end = LENGTHS[0], LENGTHS[0] + LENGTHS[1]
    base, neighbours, own = (output[0, start:end] for output in logits)
    head_error = (reference - logits[0]).abs().max() / reference.abs().max().clamp(min=1e-30)
    return torch.stack([_largest(neighbours - base), -_largest(own[-1] - base[-1]), head_error.double()])


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
    parts = (module.attention.name, name, module.compute_dtype, torch.__version__, config.hexdigest()[:16])
    return " ".join(str(part) for part in parts)


def probes(module: ModelWithLoss, device: torch.device, static_shapes: bool) -> list[Batch]:
    """The same sequence three times: unchanged, with other neighbours, with another middle document."""
    vocabulary = module.model.config.get_text_config().vocab_size
    tokens = torch.arange(3, 3 + sum(LENGTHS)) * 7 % vocabulary
    start, end = LENGTHS[0], LENGTHS[0] + LENGTHS[1]
    others = tokens.clone()
    others[:start] = (others[:start] + 1) % vocabulary
    others[end:] = (others[end:] + 1) % vocabulary
    own = tokens.clone()
    own[start : end - 1] = (own[start : end - 1] + 1) % vocabulary
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    return [
        make_batch(row[None], row.roll(-1)[None], positions[None], LENGTHS, device, static_shapes=static_shapes)
        for row in (tokens, others, own)
    ]


def _largest(difference: Tensor) -> Tensor:
    return difference.abs().max().double()
