"""Which attention kernel separates packed documents, and how transformers calls it.

A model is built with the chosen kernel's name as its ``attn_implementation``. ``document`` (CPU) and ``varlen``
(CUDA) are registered here; the others are transformers' own. ``flex`` takes masks of the documents, the dense ones
(``sdpa``, ``eager``) derive one from the position ids, and only where no attention mask and no cache is passed: an
attention mask of ones would disable the separation silently. The others take the bounds as cumulative lengths.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from muster.core.errors import RunFailed, UsageError
from muster.train.data_feed.batch import Batch
from muster.train.model.attention_needs import Needs, unknown_arguments
from muster.train.model.document_attention import document_attention

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask
    from transformers import PreTrainedConfig

#: Names of the run file -> names in transformers.
IMPLEMENTATIONS = {
    "flash_attention_3": "flash_attention_3",
    "flash_attention_2": "flash_attention_2",
    "varlen": "muster_varlen",
    "flex": "flex_attention",
    "sdpa": "sdpa",
    "document": "muster_document",
    "eager": "eager",
}
#: What can rule a kernel out (``objection``), in the order in which it is said.
CONDITIONS = {
    "flash_attention_3": "cuda installed half head_dim sinks flash own_mask dropout hopper",
    "flash_attention_2": "cuda installed half head_dim sinks flash own_mask",
    "varlen": "cuda half head_dim sinks own_kernels arguments own_mask value_dim softcap dropout installed",
    "flex": "cuda flex own_mask dropout",
    "sdpa": "sdpa softcap sinks",
    "document": "cpu own_kernels arguments own_mask value_dim window softcap sinks dropout",
    "eager": "",
}
MODULES = {
    "flash_attention_3": "flash_attn_interface",
    "flash_attention_2": "flash_attn",
    "varlen": "torch.nn.attention.varlen",
}
#: Packages with kernels that keep documents of a row apart in state-space layers, delta rules and convolutions.
SEGMENT_KERNELS = ("fla", "causal_conv1d", "mamba_ssm")
#: Head dimensions up to which flash attention kernels work.
FLASH_HEAD_DIM = 256
FA4_HEAD_DIM = 128


@dataclass(frozen=True)
class Attention:
    """The chosen kernel and one line about why."""

    kernel: str
    reason: str
    flash: str | None = None
    """What torch's own switch puts in the place of its flash attention, under ``varlen`` (``FA3``, ``FA4``)."""
    way: str = "positions"
    """How the model learns where documents end (``ways``)."""

    @property
    def implementation(self) -> str:
        """What transformers calls it."""
        return IMPLEMENTATIONS[self.kernel]

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"

    @property
    def name(self) -> str:
        return f"{self.kernel} with {self.flash}" if self.flash else self.kernel


def choose_attention(requested: str, needs: Needs, device: torch.device, dtype: torch.dtype) -> Attention:
    """The requested kernel, or for ``auto`` the best available one that fits the model.

    Raises:
        UsageError: the requested one is not available or cannot do what the model needs.
    """
    register()
    objections = {kernel: objection(kernel, needs, device, dtype) for kernel in IMPLEMENTATIONS}
    if requested != "auto":
        if objections[requested]:
            fits = [kernel for kernel, reason in objections.items() if not reason and kernel != "eager"]
            raise UsageError(
                f"model.attention: {requested} cannot be used: {objections[requested]}",
                hint=f"use auto{', or ' + ' or '.join(fits) if fits else ''}",
            )
        return Attention(requested, "requested")
    # varlen first: flash-attn's kernels too, torch's switch brings its newer ones, they obey torch's own switch for
    # determinism, and the host waits for nothing (for flash_attention_*, transformers reads the positions each time).
    order = ["varlen", "flash_attention_3", "flash_attention_2", "flex"] if device.type == "cuda" else ["document"]
    passed: list[str] = []
    for kernel in [*order, "sdpa", "eager"]:
        if not objections[kernel]:
            flash = switched_flash(needs, device) if kernel == "varlen" else None
            return Attention(kernel, "; ".join(passed) if passed else f"the best available on {device.type}", flash)
        passed.append(f"no {kernel}: {objections[kernel]}")
    raise UsageError("no attention kernel fits this model: " + "; ".join(passed))


def newer_flash(needs: Needs, *, major: int, deterministic: bool) -> str | None:
    """The implementation that torch could put in the place of its flash attention 2, on a GPU of this compute
    capability; None: none. FA4 (beta) is left out where its backward pass has gaps: windows, large heads, determinism.

    Neither has run under Muster: the H100 that it ran on had none of them installed.
    """
    if major == 9 and installed("flash_attn_interface"):
        return "FA3"
    plain = needs.window is None and needs.head_dim <= FA4_HEAD_DIM and not deterministic
    if major == 10 and plain and installed("flash_attn.cute"):
        return "FA4"
    return None


def switched_flash(needs: Needs, device: torch.device) -> str | None:
    """Have torch use ``newer_flash`` from here on, in this process; None: it uses its own."""
    if not torch.cuda.is_available():
        return None
    major = torch.cuda.get_device_capability(device)[0]
    flash = newer_flash(needs, major=major, deterministic=torch.are_deterministic_algorithms_enabled())
    if flash is None:
        return None
    try:
        from torch.nn.attention import activate_flash_attention_impl

        activate_flash_attention_impl(flash)
    except Exception as error:  # noqa: BLE001 (another package's import; only speed is at stake)
        print(f"note: torch's own flash attention is used, {flash} cannot be: {error}", file=sys.stderr, flush=True)
        return None
    return flash


def installed(module: str) -> bool:
    with suppress(ImportError):  # of the package that would hold it
        return importlib.util.find_spec(module) is not None
    return False


def objection(kernel: str, needs: Needs, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this kernel cannot be used; None: it can."""
    half = dtype in (torch.float16, torch.bfloat16)
    module = MODULES.get(kernel, "torch")
    absent = "this torch has no varlen attention" if kernel == "varlen" else f"{module} is not installed"
    on_gpu = device.type == "cuda" and torch.cuda.is_available()
    hopper = on_gpu and torch.cuda.get_device_capability(device)[0] == 9
    reasons = {
        "cpu": (device.type != "cpu", "it is for CPU"),
        "cuda": (device.type != "cuda", f"it needs CUDA, the device is {device.type}"),
        "hopper": (not hopper, "it needs a Hopper GPU"),
        "installed": (not installed(module), absent),
        "half": (not half, f"it needs bfloat16, the model computes in {str(dtype).removeprefix('torch.')}"),
        "sdpa": (not needs.sdpa, "the model does not support it"),
        "flash": (not needs.flash, "the model does not support it"),
        "flex": (not needs.flex, "the model does not support it"),
        "own_kernels": (not needs.own_kernels, "the model does not take registered kernels"),
        "arguments": (not needs.takes_arguments, "the model does not hand its arguments on to kernels"),
        "own_mask": (needs.own_mask, "the model has a mask or a bias of its own"),
        "value_dim": (needs.value_dim is not None, f"values have heads of {needs.value_dim}, not of {needs.head_dim}"),
        "window": (needs.window is not None, f"the model has a sliding window of {needs.window}"),
        "softcap": (needs.softcap, "the model caps its attention scores"),
        "sinks": (needs.sinks, "the model has attention sinks"),
        "dropout": (needs.dropout, "the model has attention dropout"),
        "head_dim": (needs.head_dim > FLASH_HEAD_DIM, f"heads of {needs.head_dim} are larger than {FLASH_HEAD_DIM}"),
    }
    conditions = [reasons[name] for name in CONDITIONS[kernel].split()]
    return next((reason for applies, reason in conditions if applies), None)


def ways(attention: Attention, device: torch.device) -> list[str]:
    """How a model may learn where documents end, in the order in which the self-test tries them.

    ``positions``: from these, and the bounds that our kernels take. ``masks``: models that make their own masks without
    looking at positions take them as attention masks. ``segments``: state-space layers and convolutions mix documents
    in silence unless their kernels get each token's document, by names that differ between families.
    """
    result = ["positions"]
    if attention.kernel in ("sdpa", "eager"):
        result.append("masks")
    if device.type == "cuda" and any(map(installed, SEGMENT_KERNELS)):
        result.append("segments")
    return result


def attention_arguments(
    batch: Batch, attention: Attention, config: PreTrainedConfig, dtype: torch.dtype
) -> dict[str, Any]:
    """Keyword arguments that carry the documents' bounds through the model of ``config`` to its kernels."""
    bounds = {
        "cu_seq_lens_q": batch.cu_seqlens,
        "cu_seq_lens_k": batch.cu_seqlens,
        "max_length_q": batch.max_seqlen,
        "max_length_k": batch.max_seqlen,
    }
    if attention.way == "segments":  # Kimi's delta rule knows the bounds by another name
        return {**bounds, "seq_idx": _documents(batch).to(torch.int32).view(1, -1), "cu_seqlens": batch.cu_seqlens}
    if attention.way == "masks":
        return {"attention_mask": dense_masks(batch, config, dtype)}
    if attention.kernel == "flex":
        masks = block_masks(batch, config)
        return {} if masks is None else {"attention_mask": masks}
    return {} if attention.kernel in ("sdpa", "eager") else bounds


# ---------------------------------------------------------------- masks of documents

#: Kinds of layers, as transformers calls them, whose masks are known here.
KINDS = ("full_attention", "sliding_attention")


def dense_masks(batch: Batch, config: PreTrainedConfig, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
    """What is added to attention scores: [B, 1, S, S], or one for each kind of layer that the model has."""
    document_BS = _documents(batch)
    at = torch.arange(document_BS.shape[1], device=document_BS.device)
    distance = at[:, None] - at
    same = (distance >= 0) & (document_BS[:, :, None] == document_BS[:, None])

    def mask(window: int | None) -> Tensor:
        seen = same if window is None else same & (distance < window)
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)[
            :, None
        ]

    window, kinds = getattr(config, "sliding_window", None), set(getattr(config, "layer_types", None) or ())
    if kinds and kinds <= set(KINDS):
        return {kind: mask(window if kind == "sliding_attention" else None) for kind in sorted(kinds)}
    return mask(None if kinds else window)


def block_masks(batch: Batch, config: PreTrainedConfig) -> BlockMask | dict[str, BlockMask] | None:
    """Flex attention's: one mask, or one for each kind of layer; None: transformers makes them. Made once a batch.

    transformers makes its own from new functions in each forward pass, which torch takes for new code: after eight
    compilations (three batches of Gemma 2) attention runs uncompiled. The host waits for nothing. While a mask is made
    there is one byte for each pair of positions of a sequence.
    """
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds:
        return _mask(batch, None) if window is None else None
    if not kinds <= set(KINDS):
        return None
    return {kind: _mask(batch, window if kind == "sliding_attention" else None) for kind in sorted(kinds)}


def _documents(batch: Batch) -> Tensor:
    """[B, S]: the number of each token's document in the batch."""
    sequences, length = batch.input_ids.shape
    at = torch.arange(sequences * length, dtype=batch.cu_seqlens.dtype, device=batch.cu_seqlens.device)
    return torch.searchsorted(batch.cu_seqlens[1:].contiguous(), at, right=True).view(sequences, length)


def _mask(batch: Batch, window: int | None) -> BlockMask:
    """``window``: positions that each one sees, itself included."""
    from torch.nn.attention.flex_attention import create_block_mask  # slow to import

    sequences, length = batch.input_ids.shape
    document_BS = _documents(batch)

    def seen(sequence: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = (query >= key) & (document_BS[sequence, query] == document_BS[sequence, key])
        return same if window is None else same & (query - key < window)

    return create_block_mask(seen, sequences, None, length, length, device=str(document_BS.device))


# ---------------------------------------------------------------- our kernels, as transformers calls them


def register() -> None:
    """Register our kernels with transformers; idempotent.

    Not a function for their mask: without one transformers makes none and does not look at the positions, which would
    make the host wait for the device in every micro-batch (``_preprocess_mask_arguments``).
    """
    from transformers import AttentionInterface

    for name, kernel in (("muster_document", _document), ("muster_varlen", _varlen)):
        AttentionInterface.register(name, kernel)


def _document(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor,
    **given: Any,
) -> tuple[Tensor, None]:
    """[B, H, S, D] -> [B, S, H, D] through ``document_attention``."""
    _refuse_dropped("document", attention_mask, given)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = document_attention(_tokens(query), _tokens(key), _tokens(value), cu_seq_lens_q, scale)
    return torch.unflatten(output, 0, (query.shape[0], query.shape[2])), None


def _varlen(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **given: Any,
) -> tuple[Tensor, None]:
    """[B, H, S, D] -> [B, S, H, D] through PyTorch's own flash attention over documents."""
    from torch.nn.attention.varlen import varlen_attn

    _refuse_dropped("varlen", attention_mask, given)
    left = -1 if sliding_window is None else sliding_window - 1
    attend: Any = varlen_attn  # its annotated result is a union over an argument that is not used here
    output: Tensor = attend(
        _tokens(query),
        _tokens(key),
        _tokens(value),
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=scaling,
        window_size=(left, 0),
        **_grouped(query.shape[1], key.shape[1]),
    )
    return torch.unflatten(output, 0, (query.shape[0], query.shape[2])), None


def _refuse_dropped(kernel: str, mask: Tensor | None, given: dict[str, Any]) -> None:
    """Raise RunFailed where a model asks for what this kernel would drop in silence: ``observe`` did not see it."""
    dropped = [name for name in ("dropout", "softcap") if given.get(name)]
    dropped += [name for name in ("s_aux", "sinks") if given.get(name) is not None] + unknown_arguments(given)
    dropped += ["a mask of the model's own"] if mask is not None else []
    if dropped:
        raise RunFailed(f"attention kernel {kernel} would drop {dropped[0]}", hint="set model.attention: sdpa")


def _grouped(query_heads: int, key_heads: int) -> dict[str, bool]:
    """What says that keys and values have fewer heads; torch 2.11 takes them without it."""
    return {"enable_gqa": query_heads != key_heads} if _varlen_names_groups() else {}


@functools.cache
def _varlen_names_groups() -> bool:
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _tokens(tensor: Tensor) -> Tensor:
    """[B, H, S, D] -> [B * S, H, D]"""
    return tensor.transpose(1, 2).flatten(0, 1)
