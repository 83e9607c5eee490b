"""Mixtures of experts: their products and their adapters.

Legend: N tokens, k experts a token, S = N * k, E experts, I and O the sizes of a product, R an adapter's rank. Families
that call their experts through transformers' table (``ALL_EXPERTS_FUNCTIONS``) come here; others keep their own code.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from muster.core.errors import UsageError
from muster.train.model.mixtures.load import BIAS, Mixture, counted

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IMPLEMENTATION = "muster"
OFF = "the auxiliary loss of the experts' load (router_aux_loss_coef) is off: {}"
#: A module's tensors -> what is fused in them, by the names of published weights.
ADAPTED = {"gate_up_proj": ("gate_proj", "up_proj", "w1", "w3"), "up_proj": ("w1",), "down_proj": ("w2",)}


def find(model: PreTrainedModel) -> Mixture | None:
    """The experts of ``model`` that transformers calls through its table; None: there are none."""
    experts = [module for module in model.modules() if hasattr(module, "_is_expert_parallel")]
    if not experts:
        return None
    config = model.config.get_text_config()
    number = int(experts[0].num_experts)  # type: ignore[arg-type]
    top_k = next(
        (
            value
            for name in ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")
            if (value := getattr(config, name, None))
        ),
        1,
    )
    return Mixture(experts, routers(model), number, int(top_k))


def reports(model: PreTrainedModel, mixture: Mixture | None) -> Sequence[str]:
    """What is said once of a model's experts."""
    if mixture is not None:
        return mixture.notes
    coefficient = getattr(model.config.get_text_config(), "router_aux_loss_coef", None)
    return [OFF.format("transformers does not call its experts through its table")] if coefficient else []


def routers(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that choose experts."""
    recorded = [(getattr(module, "_can_record_outputs", None) or {}).get("router_logits") for module in model.modules()]
    flat = [each for found in recorded if found for each in (found if isinstance(found, list) else [found])]
    classes = tuple({getattr(each, "target_class", each) for each in flat})
    found = [module for module in model.modules() if classes and isinstance(module, classes)]
    return [module for module in found if not any(hasattr(part, "_is_expert_parallel") for part in module.modules())]


def of(model: PreTrainedModel) -> Mixture | None:
    """What ``prepare`` made of this model; None: nothing, or it was not called."""
    found = (getattr(module, "mixture", None) for module in model.modules())
    return next((mixture for mixture in found if isinstance(mixture, Mixture)), None)


def prepare(
    model: PreTrainedModel, *, trains_all: bool = False, from_random: bool = False, z: float = 0.0
) -> Mixture | None:
    """Have ``model`` compute its experts here; what its losses are by its config. ``trains_all``: no adapters."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    mixture = find(model)
    if z and (mixture is None or not mixture.routers):
        raise UsageError(
            f"training.router_z_loss: {type(model).__name__} shows no router's logits", hint="training.router_z_loss: 0"
        )
    if mixture is None:
        return None
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
    model.set_experts_implementation(IMPLEMENTATION)
    for layer, module in enumerate(mixture.experts):
        object.__setattr__(module, "mixture", mixture)  # no module of it
        module.layer = layer  # type: ignore[assignment]
    coefficient = float(getattr(model.config.get_text_config(), "router_aux_loss_coef", None) or 0.0)
    has_loss = hasattr(sys.modules[type(model).__module__], "load_balancing_loss_func")
    if trains_all:
        mixture.balance, mixture.z = coefficient if has_loss else 0.0, z
        if mixture.balance:
            mixture.notes.append(f"the auxiliary loss of the experts' load counts with the config's {coefficient:g}")
        elif coefficient:
            mixture.notes.append(OFF.format("the family has none"))
    elif coefficient or z:
        mixture.notes.append(OFF.format("model.lora freezes the routers"))
    have_bias = len(mixture.routers) == len(mixture.experts) and all(hasattr(each, BIAS) for each in mixture.routers)
    mixture.routes_in_float32 = trains_all and from_random
    mixture.moves_bias = trains_all and from_random and have_bias
    return mixture


def experts_forward(self: nn.Module, hidden_NI: Tensor, index_Nk: Tensor, weights_Nk: Tensor) -> Tensor:
    """As transformers' ``grouped_mm_experts_forward``, with adapters. ``self``: a family's module of experts."""
    mixture: Mixture = self.mixture  # type: ignore[assignment]
    mixture.count(self.layer, index_Nk)  # type: ignore[arg-type]
    tokens, top_k = index_Nk.shape
    order = torch.sort(index_Nk.flatten(), stable=True)
    expert_S, place_S = order.values, order.indices
    ends_E = counted(expert_S, mixture.num_experts).cumsum(0).to(torch.int32)
    up = "gate_up_proj" if self.has_gate else "up_proj"
    inner = _linear(self, up, hidden_NI[place_S // top_k], expert_S, ends_E)
    inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)  # type: ignore[operator]
    outer = _linear(self, "down_proj", inner, expert_S, ends_E)
    if self.has_post_expert_norm:
        outer = self.post_expert_norm(outer)  # type: ignore[operator]
    weighted = outer * weights_Nk.flatten()[place_S].unsqueeze(-1)
    back = torch.empty_like(place_S)
    back[place_S] = torch.arange(place_S.numel(), device=place_S.device)
    return weighted[back].view(tokens, top_k, -1).sum(1).to(hidden_NI.dtype)


def _linear(module: nn.Module, name: str, rows_SI: Tensor, expert_S: Tensor, ends_E: Tensor) -> Tensor:
    """Each row by its expert's matrix, bias and adapter."""
    weight = getattr(module, name)
    result = grouped(rows_SI, weight if module.is_transposed else weight.transpose(-2, -1), ends_E)
    if module.has_bias:
        result = result + getattr(module, f"{name}_bias")[expert_S]
    if name in getattr(module, "lora_A", ()):
        a_EIR, b_ERO = factors(module.lora_A[name], module.lora_B[name], len(ends_E))  # type: ignore[index]
        dropped = nn.functional.dropout(rows_SI, module.lora_dropout, module.training)  # type: ignore[arg-type]
        low = grouped(dropped, a_EIR.to(rows_SI.dtype), ends_E)
        result = result + grouped(low, b_ERO.to(rows_SI.dtype), ends_E) * module.lora_scale  # type: ignore[operator]
    return result


def factors(a: Tensor, b: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """An adapter as peft stores it (``A`` [R * E, I] expert by expert, ``B`` [O, R * E] rank by rank) as [E, I, R] and
    [E, R, O]."""
    return (
        a.view(experts, -1, a.shape[-1]).transpose(1, 2),
        b.view(b.shape[0], -1, experts).permute(2, 1, 0).contiguous(),
    )


def grouped(rows_SI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """[S, O]: rows up to ``ends_E[0]`` by the first matrix, and so on."""
    rows_SI = rows_SI.to(weight_EIO.dtype)
    width = weight_EIO.element_size()
    aligned = all(size * width % 16 == 0 for size in weight_EIO.shape[1:])
    if aligned and (not rows_SI.is_cuda or torch.cuda.get_device_capability(rows_SI.device) >= (8, 0)):
        return nn.functional.grouped_mm(rows_SI, weight_EIO, offs=ends_E)
    sizes = torch.diff(ends_E, prepend=ends_E.new_zeros(1)).tolist()
    parts = zip(torch.split(rows_SI, sizes), weight_EIO, strict=True)
    return torch.cat([part @ weight for part, weight in parts])


def add_adapters(
    mixture: Mixture, *, rank: int, scale: float, dropout: float, targets: Sequence[str] | None
) -> list[str]:
    """Give the experts adapters, on the meta device; returns the names of their tensors that have one.

    ``targets``: None for all; else by the names of fused tensors, or of what is fused in them.
    """
    adapted: set[str] = set()
    for module in mixture.experts:
        a, b = nn.ParameterDict(), nn.ParameterDict()
        for name, published in ADAPTED.items():
            weight = getattr(module, name, None)
            if weight is None or (targets is not None and not {name, *published} & set(targets)):
                continue
            experts, outputs, inputs = weight.shape
            if module.is_transposed:
                inputs, outputs = outputs, inputs
            a[name] = nn.Parameter(torch.empty(rank * experts, inputs, device="meta"))
            b[name] = nn.Parameter(torch.empty(outputs, rank * experts, device="meta"))
            adapted.add(name)
        if a:
            module.lora_A, module.lora_B = a, b
            module.lora_scale, module.lora_dropout = scale, dropout  # type: ignore[assignment]
    return sorted(adapted)


def merged(base: Tensor, a: Tensor, b: Tensor, scale: float, *, is_transposed: bool) -> Tensor:
    """The experts' tensor with its adapter, in float32."""
    a_EIR, b_ERO = factors(a.float(), b.float(), base.shape[0])
    change = torch.bmm(a_EIR, b_ERO)
    return base.float() + scale * (change if is_transposed else change.transpose(1, 2))
