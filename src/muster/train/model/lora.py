"""Low-rank adapters through PEFT, injected on the meta device.

The modules are peft's; the model keeps its own names (``q_proj.base_layer.weight``, ``q_proj.lora_A.default.weight``).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from muster.config.spec import Lora
from muster.core.errors import UsageError
from muster.train.distributed.reduce import local
from muster.train.model.mixtures import experts
from muster.train.model.mixtures.load import Mixture
from muster.train.model.pretrained import embeddings_of
from muster.train.model.sharding import decoder_layers
from muster.train.model.weights import fill, local_ranges, plain_name, uniform

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

MARKS = (".lora_A.", ".lora_B.", ".lora_magnitude_vector.")
#: Types whose mixers read weights past an adapter: peft refuses ``out_proj`` (its tuners_utils.py), and Mamba's forward
#: pass multiplies by ``dt_proj.weight`` itself.
MAMBA_TYPES = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")


#: Linear modules that weigh experts against each other.
GATES = ("gate", "router", "shared_expert_gate")


def add_adapters(model: PreTrainedModel, settings: Lora, dtype: torch.dtype, *, embeddings: bool = False) -> LoraConfig:
    """Put adapters of ``dtype`` into ``model``, freeze everything else; returns their config. ``embeddings``: the
    embedding and the head are trained as a whole in addition.

    Raises:
        UsageError: no module has one of the target names.
    """
    from peft import LoraConfig, inject_adapter_in_model

    mixture = experts.of(model) or experts.prepare(model)
    if settings.dora and mixture is not None:
        raise UsageError("model.lora.dora is for dense linear layers, and the model has experts", hint="dora: false")
    is_all = settings.targets == "all-linear"
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # a divisor's numerator: any float is accepted
        lora_dropout=settings.dropout,
        target_modules=settings.targets if isinstance(settings.targets, str) else list(settings.targets),
        exclude_modules=["out_proj", "dt_proj"] if is_all and model.config.model_type in MAMBA_TYPES else None,
        task_type="CAUSAL_LM",
        use_rslora=settings.rslora,
        use_dora=settings.dora,
        modules_to_save=[name.rpartition(".")[2] for name in embedding_modules(model)] if embeddings else None,
    )
    injected = replace(config, modules_to_save=None)
    try:
        with torch.device("meta"):
            if mixture is None:
                inject_adapter_in_model(injected, model)
            else:
                _adapt_mixture(model, mixture, settings, config)
    except ValueError as error:
        first_line = str(error).strip().splitlines()[0]
        raise UsageError(f"model.lora: {first_line}", hint="targets: all-linear, or names such as q_proj") from error
    if mixture is None and isinstance(injected.target_modules, set):  # what peft made of all-linear
        config.target_modules = sorted(injected.target_modules)  # readers expect a list of names
    for part in model.modules() if settings.dora else ():
        base = getattr(part, "base_layer", None)
        if base is not None and not isinstance(base, nn.Linear):
            raise UsageError(
                f"model.lora.dora is for linear layers, and the model has a {type(base).__name__}", hint="dora: false"
            )
    whole = set(embedding_modules(model).values()) if embeddings else set()
    for name, parameter in model.named_parameters():
        trained = is_adapter_name(name) or name in whole
        parameter.requires_grad_(trained)
        if trained:
            parameter.data = parameter.data.to(dtype)
    return config


def _adapt_mixture(model: PreTrainedModel, mixture: Mixture, settings: Lora, config: LoraConfig) -> None:
    """As peft, but that it adapts routers, and of a fused tensor what its table of renamed models says: the linear
    modules of decoder layers, routers and other gates left out, and the tensors of experts. Raises ValueError."""
    from peft.tuners.lora import Linear

    names = None if isinstance(settings.targets, str) else settings.targets
    chosen = _linear_modules(model, mixture, names)
    for name, module in chosen.items():
        owner, _, leaf = name.rpartition(".")
        adapted = Linear(module, "default", config, r=settings.rank, lora_alpha=settings.alpha)  # type: ignore[arg-type]
        setattr(model.get_submodule(owner), leaf, adapted)
    adapted_tensors = experts.add_adapters(
        mixture, rank=settings.rank, scale=scale_of(settings), dropout=settings.dropout, targets=names
    )
    if not chosen and not adapted_tensors:
        raise ValueError(f"Target modules {sorted(names or ())} not found in the base model.")
    config.target_modules = sorted({name.rpartition(".")[2] for name in chosen})
    config.target_parameters = [f"experts.{name}" for name in adapted_tensors]


def _linear_modules(model: PreTrainedModel, mixture: Mixture, names: list[str] | None) -> dict[str, nn.Module]:
    """Those of decoder layers that weigh no experts, by name; ``names``: the last parts to choose, None: all."""
    linear = {part for layer in decoder_layers(model) for part in layer.modules() if type(part) is nn.Linear}
    linear -= {part for router in mixture.routers for part in router.modules()}
    leaves = {module: name.rpartition(".")[2] for name, module in model.named_modules()}
    linear = {part for part in linear if leaves[part] not in GATES and (names is None or leaves[part] in names)}
    return {name: module for name, module in model.named_modules() if module in linear}


def scale_of(settings: Lora) -> float:
    """What an adapter's product is multiplied with."""
    return settings.alpha / (math.sqrt(settings.rank) if settings.rslora else settings.rank)


def adapted_name(name: str) -> str:
    """The parameter that the adapter of this name changes."""
    owner, _, rest = name.partition(".lora_")
    leaf = rest.partition(".")[2]
    return f"{owner}.{leaf}" if leaf in experts.ADAPTED else f"{owner}.weight"


def stored_name(name: str, names: Collection[str]) -> str:
    """The name of one of an adapter's tensors (``names``) in peft's file, which wraps a module of experts once for each
    of its adapted tensors, the first innermost."""
    owner, mark, rest = name.partition(".lora_")
    kind, _, leaf = rest.partition(".")
    if kind == "magnitude_vector":
        return f"{owner}{mark}{kind}"
    if leaf not in experts.ADAPTED:
        return name.replace(".default.", ".")
    held = [each for each in experts.ADAPTED if f"{owner}{mark}{kind}.{each}" in names]
    return f"{owner}{'.base_layer' * (len(held) - 1 - held.index(leaf))}{mark}{kind}.weight"


def report(model: PreTrainedModel) -> tuple[str, ...]:
    """Of the weights of decoder layers those that adapters change, in words; none: there are no adapters."""
    adapted = {adapted_name(name) for name in adapter_names(model)}
    inside = {id(p) for layer in decoder_layers(model) for p in layer.parameters()}
    held = {
        plain_name(name): parameter.numel()
        for name, parameter in model.named_parameters()
        if not is_adapter_name(name) and id(parameter) in inside
    }
    share = sum(count for name, count in held.items() if name in adapted) / max(1, sum(held.values()))
    return (f"adapters on {share:.1%} of the decoder layers' weights",) if adapted else ()


def embedding_modules(model: PreTrainedModel) -> dict[str, str]:
    """Embedding and head -> the parameter each uses; the same one where they are tied."""
    names = {id(module): name for name, module in model.named_modules()}
    parameters = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(module)]: parameters[id(module.weight)] for module in embeddings_of(model)}


def is_adapter_name(name: str) -> bool:
    return any(mark in name for mark in MARKS)


def adapter_names(model: nn.Module) -> list[str]:
    """Parameters that adapters added."""
    return [name for name, _ in model.named_parameters() if is_adapter_name(name)]


def initialise(model: nn.Module, names: list[str], *, seed: int, device: torch.device) -> None:
    """A: uniform, as torch initialises linear modules (Kaiming, a=sqrt(5)). B: zero, and lengths of rows (DoRA) as the
    weights have them; the model starts as its base."""
    parameters = dict(model.named_parameters())
    for name in names:
        parameter = parameters[name]
        if ".lora_B." in name:
            fill(parameter, torch.zeros_like(local(parameter)))
            continue
        owner, is_length, _ = name.partition(".lora_magnitude_vector.")
        if is_length:  # cut over ranks as the weight's rows are
            fill(parameter, local(parameters[f"{owner}.base_layer.weight"]).detach().float().norm(dim=1))
            continue
        bound = 1.0 / math.sqrt(parameter.shape[1])
        values: Tensor = uniform(name, parameter.shape, local_ranges(parameter), bound, seed=seed, device=device)
        fill(parameter, values)
