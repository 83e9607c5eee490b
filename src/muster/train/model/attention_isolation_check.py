"""The self-test at start: documents that share a row are computed as each alone by the model's own attention.

Documents of three lengths share a row, with the kernel that will run. Their logits in training, and the gradients, are
compared with those of each document alone through transformers' ``eager`` attention: positions that count from the
row's start, another scale or window, or a mask that the kernel drops would all differ. Rounding hides small
differences, so it is also measured whether new tokens in the outer documents change logits of the middle one (by
nothing at all), and whether its own do: otherwise the test could not fail.

What fails is tried with the next of ``attention.ways`` to tell the model where documents end, and trained one document
a row if none is right: what is behind a document cannot reach a causal model's logits, which the same test shows for a
document at the row's start.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muster.core.errors import RunFailed, UsageError
from muster.train.data_feed.batch import Batch, make_batch
from muster.train.distributed.reduce import local
from muster.train.model.attention import Attention, ways
from muster.train.model.model_with_loss import ModelWithLoss, forward_pass
from muster.train.model.sharding import evaluating, forget_gradients, reshard

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: Lengths of the outer documents. A token alone predicts nothing, and is what a row's padding may be.
BEFORE, BEHIND = 7, 1
#: Of the middle one, unless something limits documents or rows, or a sliding window is longer, up to the last.
SHORTEST, MIDDLE, LONGEST = 9, 40, 1024
#: Largest leak, as a share of the control's change. Kernels that separate documents leak exactly 0.
LEAK_SHARE = 1e-3
#: Largest difference between the chunked head and the model's own, as a share of the largest logit.
HEAD_SHARE = {torch.float32: 1e-3, torch.bfloat16: 3e-2}

#: Largest differences from the model's own attention: of logits, as a share of the largest, and of gradients, as a
#: share of their norm. In float32 on CPU, and where products are rounded to bfloat16 or TF32.
EXACT, ROUNDED = (1e-4, 1e-3), (0.1, 0.2)
#: Names of attributes of modules that draw at random in training.
_DRAWS = re.compile(r"\w*(?:drop|jitter)\w*|p")

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
    alone: str | None = None
    """Why each must be in a micro-batch of its own, without padding (an untrained Doge chooses among equal keys)."""
    way: str = "positions"
    """How the model learns where documents end (``attention.ways``)."""

    def __str__(self) -> str:
        head = "" if self.own_head else "; the model's own head is used, so logits of a whole micro-batch are held"
        changes = f"neighbours change logits by {self.leak:.2g}, its own tokens by {self.control:.2g}"
        return f"documents separated: {changes}{head}"


@dataclass(frozen=True)
class _Measured:
    """Of one way, the largest over all ranks."""

    leak: float
    control: float
    head: float
    logits: float
    """From the model's own attention."""
    gradients: float

    def wrong(self, module: ModelWithLoss, device: torch.device) -> str | None:
        """What a document's logits depend on that they should not; None: nothing."""
        if not self.leak <= LEAK_SHARE * self.control:
            return f"new neighbours change a document's logits by {self.leak:.3g}, its own tokens by {self.control:.3g}"
        exact = device.type == "cpu" and module.compute_dtype is torch.float32
        largest = EXACT if exact else ROUNDED
        for what, found, limit in zip(("logits", "gradients"), (self.logits, self.gradients), largest, strict=True):
            if not found <= limit:
                return f"{what} differ by {found:.2g} from those of each document alone by the model's own attention"
        return None


def prove_isolation(
    module: ModelWithLoss, device: torch.device, *, sequence_length: int, gradients: bool = True
) -> Proof:
    """Run the self-test; collective, some passes over three short documents.

    If the chunked head does not give the model's own logits, ``module`` is switched to the model's head. It stays with
    the way that was found right. Compiled layers run eagerly here, because these shapes occur nowhere else; the kernel
    is the same. ``gradients``: compare them, too (float8 products want tokens in blocks).

    Raises:
        UsageError: the model is not causal.
        RunFailed: the test is inconclusive, or the kernel computes something else than the model's own attention.
    """
    family, kernel = module.model.config.get_text_config().model_type, module.attention.kernel
    middle = _middle(module, sequence_length)
    reasons = []
    if module.unpacked is None:
        for way in ways(module.attention, device):
            module.attention = replace(module.attention, way=way)
            try:
                measured = _measured(module, device, (BEFORE, middle, BEHIND), gradients)
            except (torch.OutOfMemoryError, dist.DistError):
                raise
            except Exception:
                if way == "positions":
                    raise
                continue  # packages are missing, or the model takes no such arguments
            wrong = measured.wrong(module, device)
            if not measured.control > 0 or wrong is None:
                return _proof(module, measured, None)
            reasons.append(wrong)
        module.attention = replace(module.attention, way="positions")
    measured = _measured(module, device, (0, middle, BEFORE), gradients)
    if not measured.leak <= LEAK_SHARE * measured.control:
        raise UsageError(
            f"model: {type(module.model).__name__} is not causal: tokens behind a document change its logits "
            f"by {measured.leak:.3g}, its own by {measured.control:.3g}",
            hint="choose a causal language model",
        )
    wrong, alone = measured.wrong(module, device) if measured.control > 0 else None, None
    if wrong is not None:
        with _own_attention(module):
            itself = _measured(module, device, (0, middle, BEFORE), gradients).wrong(module, device)
        if itself is None:
            raise RunFailed(f"attention {kernel} is not right for {family}: {wrong}", hint="set model.attention: eager")
        alone = f"padding behind a document changes what {family} computes: {itself}"
    apart = f"{family} does not keep documents in a row apart with attention {kernel}: "
    return _proof(module, measured, module.unpacked or apart + reasons[0], alone)


def _proof(module: ModelWithLoss, measured: _Measured, unpacked: str | None, alone: str | None = None) -> Proof:
    if not measured.control > 0:
        raise RunFailed(
            "the self-test of packed attention is inconclusive: a document's own tokens do not change its logits",
            hint="check that the model's weights are finite and not all zero",
        )
    if module.own_head and not measured.head <= HEAD_SHARE[module.compute_dtype]:
        module.own_head = False
    return Proof(measured.leak, measured.control, module.own_head, unpacked, alone, module.attention.way)


def _middle(module: ModelWithLoss, sequence_length: int) -> int:
    """Length of the middle document: longer than the model's window where rows may be."""
    window = module.needs.window if module.needs is not None else None
    middle = MIDDLE if window is None or window >= LONGEST else max(MIDDLE, window + SHORTEST)
    rotary = rotary_border(module.model.config.get_text_config(), sequence_length)  # such have rows of their own
    return max(SHORTEST, min(middle, sequence_length - BEFORE - BEHIND, rotary.length if rotary else middle))


def _measured(module: ModelWithLoss, device: torch.device, lengths: tuple[int, int, int], gradients: bool) -> _Measured:
    batches = probes(module, device, lengths)
    with _without_ties(module):
        with evaluating(module), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            logits = [forward_pass(module, batch, want="logits") for batch in batches]
            reference = forward_pass(module, batches[0], want="model_logits") if module.own_head else logits[0]
        difference = _from_own(module, batches[0], lengths, gradients and module.stage is None)
    changes = measured_changes([output for output in logits if output is not None], reference, device, lengths)
    changes = torch.cat([changes, difference[:1]])
    if dist.is_initialized():
        dist.all_reduce(changes, op=dist.ReduceOp.MAX)
        dist.all_reduce(difference[1:])  # of parts of the gradients
    squares = difference[1:].tolist()
    leak, control, head, apart = changes.tolist()
    return _Measured(leak, -control, head, apart, (squares[0] / squares[1]) ** 0.5 if squares[1] else squares[0])


def measured_changes(
    logits: Sequence[Tensor], reference: Tensor | None, device: torch.device, lengths: tuple[int, int, int]
) -> Tensor:
    """Leak, minus the control, and the head's error; from a stage that has no logits what leaves other ranks' maxima as
    they are."""
    if reference is None:
        return torch.tensor([0.0, -torch.inf, 0.0], dtype=torch.float64, device=device)
    start, end = lengths[0], lengths[0] + lengths[1]
    base, neighbours, own = (output[0, start:end] for output in logits)
    head_error = (reference - logits[0]).abs().max() / reference.abs().max().clamp(min=1e-30)
    return torch.stack([_largest(neighbours - base), -_largest((own - base)[_KEPT]), head_error.double()])


def _from_own(module: ModelWithLoss, packed: Batch, lengths: tuple[int, int, int], gradients: bool) -> Tensor:
    """How far ``packed`` is from its documents alone by the model's own attention, both in training: of logits, as a
    share of the largest; and, squared and summed over this rank's part, the gradients' difference and the gradients.

    Of documents behind an empty one, which see it where a row has one document, only the one in the middle counts.
    """
    bounds = [0, lengths[0], lengths[0] + lengths[1], sum(lengths)]
    spans = [(bounds[1], bounds[2])] if not lengths[0] else list(itertools.pairwise(bounds))
    alone = [
        make_batch(
            packed.input_ids[:, a:b].cpu(), packed.labels[:, a:b].cpu(), torch.arange(b - a)[None], [b - a],
            packed.input_ids.device,
        )
        for a, b in spans
    ]  # fmt: skip
    with _without_draws(module), torch.compiler.set_stance("force_eager"), torch.set_grad_enabled(gradients):
        ours, our_gradients = _trained(module, [packed], [spans])
        with _own_attention(module):
            own, own_gradients = _trained(module, alone, [[(0, b - a)] for a, b in spans])
    result = torch.zeros(3, dtype=torch.float64, device=packed.input_ids.device)
    if own:
        largest = max(float(part.abs().max()) for part in own)
        result[0] = max(float((x - y).abs().max()) for x, y in zip(ours, own, strict=True)) / max(largest, 1e-30)
    for name, gradient in own_gradients.items():
        result[1] += (our_gradients.get(name, torch.zeros_like(gradient)) - gradient).double().square().sum()
        result[2] += gradient.double().square().sum()
    return result


def _trained(
    module: ModelWithLoss, batches: Sequence[Batch], spans: Sequence[Sequence[tuple[int, int]]]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Logits of these spans of ``batches``, and this rank's part of the gradients of their squares."""
    parts: list[Tensor] = []
    try:
        for batch, inside in zip(batches, spans, strict=True):
            logits = forward_pass(module, batch, want="logits")
            if logits is None:
                continue
            chosen = [logits[0, a:b] for a, b in inside]
            if torch.is_grad_enabled():
                torch.autograd.backward([part.square().sum() for part in chosen])
            parts += [part.detach() for part in chosen]
        return parts, {name: local(p.grad).detach() for name, p in module.named_parameters() if p.grad is not None}
    finally:
        forget_gradients(module)
        reshard(module)  # a stage has had no backward pass, which would have done it


@contextmanager
def _own_attention(module: ModelWithLoss) -> Iterator[None]:
    chosen = module.attention
    if chosen.kernel == "eager" or not (module.needs is None or module.needs.own_kernels):  # it has no other
        yield
        return
    module.attention = Attention("eager", "the model's own")
    module.model.set_attn_implementation("eager")
    try:
        yield
    finally:
        module.attention = chosen
        module.model.set_attn_implementation(chosen.implementation)


@contextmanager
def _without_ties(module: ModelWithLoss) -> Iterator[None]:
    """Noise in parameters that are one number, as zeros and ones before training: what they multiply would not show,
    and a choice among equals is none. They get their number back, to the bit."""
    held = [(part, part.flatten()[0].clone()) for part in (local(each.detach()) for each in module.parameters())
            if part.is_floating_point() and part.numel() and bool(part.min() == part.max())]  # fmt: skip
    random = torch.Generator().manual_seed(0)  # replicas draw the same
    for part, _ in held:
        part.add_(torch.randn(part.shape, generator=random).mul_(0.1).to(part))
    try:
        yield
    finally:
        for part, value in held:
            part.fill_(value)


@contextmanager
def _without_draws(module: ModelWithLoss) -> Iterator[None]:
    """Training mode without dropout and routers' noise."""
    was_training = module.training
    held = draws(module.train())
    for part, name, _ in held:
        setattr(part, name, 0.0)
    try:
        yield
    finally:
        for part, name, value in held:
            setattr(part, name, value)
        module.train(was_training)


def draws(module: nn.Module) -> list[tuple[nn.Module, str, float]]:
    """What draws at random in training, in which modules: attribute and value."""
    return [
        (part, name, value) for part in module.modules() for name, value in vars(part).items()
        if isinstance(value, float) and _DRAWS.fullmatch(name)
    ]  # fmt: skip


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
    module.own_head, module.attention = proof.own_head, replace(module.attention, way=proof.way)
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


def probes(module: ModelWithLoss, device: torch.device, lengths: tuple[int, int, int]) -> list[Batch]:
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
        make_batch(row[None], row.roll(-1)[None], positions[None], documents, device, static_shapes=module.compiled)
        for row in (tokens, others, own)
    ]


def _largest(difference: Tensor) -> Tensor:
    return difference.abs().max().double()
