"""Which attention kernel separates packed documents, and how transformers calls it.

A model is built with the chosen kernel's name as its ``attn_implementation``. ``document`` (CPU) and ``varlen``
(CUDA) are registered here; the others are transformers' own. All but the dense ones (``sdpa``, ``eager``,
``flex``) take the documents' bounds as cumulative lengths; those derive a mask from the position ids, and only
where no attention mask and no cache is passed: an attention mask of ones would disable the separation silently.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from muster.core.errors import UsageError
from muster.train.data_feed.batch import Batch
from muster.train.model.document_attention import document_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
    "flash_attention_3": "cuda installed half head_dim sinks flash dropout hopper",
    "flash_attention_2": "cuda installed half head_dim sinks flash",
    "varlen": "cuda half head_dim sinks own_kernels softcap dropout installed",
    "flex": "cuda flex dropout",
    "sdpa": "sdpa softcap sinks",
    "document": "cpu own_kernels window softcap sinks dropout",
    "eager": "",
}
MODULES = {
    "flash_attention_3": "flash_attn_interface",
    "flash_attention_2": "flash_attn",
    "varlen": "torch.nn.attention.varlen",
}
#: Head dimensions up to which flash attention kernels work.
FLASH_HEAD_DIM = 256


@dataclass(frozen=True)
class Attention:
    """The chosen kernel and one line about why."""

    kernel: str
    reason: str

    @property
    def implementation(self) -> str:
        """What transformers calls it."""
        return IMPLEMENTATIONS[self.kernel]

    def __str__(self) -> str:
        return f"{self.kernel} ({self.reason})"


@dataclass(frozen=True)
class Needs:
    """What a model requires of its attention."""

    window: int | None
    """Sliding window that is shorter than the sequences, if any."""
    softcap: bool
    sinks: bool
    head_dim: int
    dropout: bool
    own_kernels: bool
    """The model calls kernels through transformers' table, so that others can be registered."""
    sdpa: bool
    flash: bool
    flex: bool


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
    order = ["flash_attention_3", "flash_attention_2", "varlen", "flex"] if device.type == "cuda" else ["document"]
    passed: list[str] = []
    for kernel in [*order, "sdpa", "eager"]:
        if not objections[kernel]:
            return Attention(kernel, "; ".join(passed) if passed else f"the best available on {device.type}")
        passed.append(f"no {kernel}: {objections[kernel]}")
    raise UsageError("no attention kernel fits this model: " + "; ".join(passed))


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
        "installed": (importlib.util.find_spec(module) is None, absent),
        "half": (not half, f"it needs bfloat16, the model computes in {str(dtype).removeprefix('torch.')}"),
        "sdpa": (not needs.sdpa, "the model does not support it"),
        "flash": (not needs.flash, "the model does not support it"),
        "flex": (not needs.flex, "the model does not support it"),
        "own_kernels": (not needs.own_kernels, "the model does not take registered kernels"),
        "window": (needs.window is not None, f"the model has a sliding window of {needs.window}"),
        "softcap": (needs.softcap, "the model caps its attention scores"),
        "sinks": (needs.sinks, "the model has attention sinks"),
        "dropout": (needs.dropout, "the model has attention dropout"),
        "head_dim": (needs.head_dim > FLASH_HEAD_DIM, f"heads of {needs.head_dim} are larger than {FLASH_HEAD_DIM}"),
    }
    conditions = [reasons[name] for name in CONDITIONS[kernel].split()]
    return next((reason for applies, reason in conditions if applies), None)


def needs_of(model: PreTrainedModel, sequence_length: int) -> Needs:
    """What a transformers model (on the meta device or real) needs."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or []
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in kinds if kinds else getattr(config, "use_sliding_window", True)
    if not (slides and window and window < sequence_length):
        window = None
    if "chunked_attention" in kinds:
        window = min(window or sequence_length, getattr(config, "attention_chunk_size", None) or sequence_length)
    heads = getattr(config, "num_attention_heads", 1)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Needs(
        window=window,
        softcap=bool(getattr(config, "attn_logit_softcapping", None)),
        sinks=any(name.endswith("sinks") for name, _ in model.named_parameters()),
        head_dim=int(head_dim),
        dropout=float(getattr(config, "attention_dropout", 0.0) or 0.0) > 0,
        own_kernels=bool(getattr(model, "_supports_attention_backend", False)),
        sdpa=bool(getattr(model, "_supports_sdpa", False)),
        flash=bool(getattr(model, "_supports_flash_attn", False)),
        flex=bool(getattr(model, "_supports_flex_attn", False)),
    )


def attention_arguments(batch: Batch, attention: Attention) -> dict[str, Tensor | int]:
    """Keyword arguments that carry the documents' bounds through the model to its kernel."""
    if attention.kernel in ("sdpa", "eager", "flex"):
        return {}
    return {
        "cu_seq_lens_q": batch.cu_seqlens,
        "cu_seq_lens_k": batch.cu_seqlens,
        "max_length_q": batch.max_seqlen,
        "max_length_k": batch.max_seqlen,
    }


# ---------------------------------------------------------------- our kernels, as transformers calls them


def register() -> None:
    """Register our kernels with transformers; idempotent."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    for name, kernel in (("muster_document", _document), ("muster_varlen", _varlen)):
        AttentionInterface.register(name, kernel)
        AttentionMaskInterface.register(name, _no_mask)


def _no_mask(*_: object, **__: object) -> None:
    return None


def _document(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor,
    **_: object,
) -> tuple[Tensor, None]:
    """[B, H, S, D] -> [B, S, H, D] through ``document_attention``."""
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
    **_: object,
) -> tuple[Tensor, None]:
    """[B, H, S, D] -> [B, S, H, D] through PyTorch's own flash attention over documents."""
    from torch.nn.attention.varlen import varlen_attn

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
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return torch.unflatten(output, 0, (query.shape[0], query.shape[2])), None


def _tokens(tensor: Tensor) -> Tensor:
    """[B, H, S, D] -> [B * S, H, D]"""
    return tensor.transpose(1, 2).flatten(0, 1)
