"""Low-rank adapters through PEFT, injected on the meta device.

The modules are peft's; the model keeps its own names (``q_proj.base_layer.weight``, ``q_proj.lora_A.default.weight``).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from muster.config.spec import Lora
from muster.core.errors import UsageError
from muster.train.distributed.reduce import local
from muster.train.model.pretrained import embeddings_of
from muster.train.model.weights import fill, local_ranges, uniform

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

MARKS = (".lora_A.", ".lora_B.")
#: Types whose mixers read weights past an adapter: peft refuses ``out_proj`` (its tuners_utils.py), and Mamba's forward
#: pass multiplies by ``dt_proj.weight`` itself.
MAMBA_TYPES = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")


def add_adapters(model: PreTrainedModel, settings: Lora, dtype: torch.dtype, *, embeddings: bool = False) -> LoraConfig:
    """Put adapters of ``dtype`` into ``model``, freeze everything else; returns their config. ``embeddings``: the
    embedding and the head are trained as a whole beside them.

    Raises:
        UsageError: no module has one of the target names.
    """
    from peft import LoraConfig, inject_adapter_in_model

    is_all = settings.targets == "all-linear"
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # a divisor's numerator: any float is accepted
        lora_dropout=settings.dropout,
        target_modules=settings.targets if isinstance(settings.targets, str) else list(settings.targets),
        exclude_modules=["out_proj", "dt_proj"] if is_all and model.config.model_type in MAMBA_TYPES else None,
        task_type="CAUSAL_LM",
        modules_to_save=[name.rpartition(".")[2] for name in embedding_modules(model)] if embeddings else None,
    )
    injected = replace(config, modules_to_save=None)
    try:
        with torch.device("meta"):
            inject_adapter_in_model(injected, model)
    except ValueError as error:
        first_line = str(error).strip().splitlines()[0]
        raise UsageError(f"model.lora: {first_line}", hint="targets: all-linear, or names such as q_proj") from error
    if isinstance(injected.target_modules, set):  # what peft made of all-linear; readers expect a list of names
        config.target_modules = sorted(injected.target_modules)
    whole = set(embedding_modules(model).values()) if embeddings else set()
    for name, parameter in model.named_parameters():
        trained = is_adapter_name(name) or name in whole
        parameter.requires_grad_(trained)
        if trained:
            parameter.data = parameter.data.to(dtype)
    return config


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
    """A: uniform, as torch initialises linear modules (Kaiming, a=sqrt(5)). B: zero; the model starts as its base."""
    parameters = dict(model.named_parameters())
    for name in names:
        parameter = parameters[name]
        if ".lora_B." in name:
            fill(parameter, torch.zeros_like(local(parameter)))
            continue
        bound = 1.0 / math.sqrt(parameter.shape[1])
        values: Tensor = uniform(name, parameter.shape, local_ranges(parameter), bound, seed=seed, device=device)
        fill(parameter, values)
