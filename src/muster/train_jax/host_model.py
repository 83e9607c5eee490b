"""The model as transformers builds it, on the host: names, shapes, initial values and pretrained weights.

It is never run. Its parameters are this host's boxes of the training state (``arrays``); its initial values are, bit
for bit, those that the torch trainer begins with on a CPU.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from muster.config.spec import RunSpec
from muster.core.errors import UsageError
from muster.train.model import lora, pretrained
from muster.train.model.causal_lm import dtype_on_meta, grows, on_meta, read_config, set_initial_values
from muster.train_jax.layout import split_dimensions

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedConfig, PreTrainedModel

CPU = torch.device("cpu")


@dataclass(frozen=True)
class HostModel:
    """This host's part of the model."""

    module: PreTrainedModel
    config: PreTrainedConfig
    lora_config: LoraConfig | None

    def trained(self) -> dict[str, nn.Parameter]:
        """transformers' (or peft's) name -> parameter, in the model's order."""
        return {name: value for name, value in self.module.named_parameters() if value.requires_grad}

    def frozen(self) -> dict[str, Tensor]:
        """The others, as they are computed with."""
        return {name: value.detach() for name, value in self.module.named_parameters() if not value.requires_grad}


def build_host_model(spec: RunSpec, *, vocab_size: int, hosts: DeviceMesh, chips: int, seed: int) -> HostModel:
    """The model of ``spec`` with initial values; of each parameter the box of this host of ``hosts``. Collective.

    ``chips``: of all those hosts, in groups of ``parallelism.tp``.

    Raises:
        UsageError: the model does not fit the tokenizer.
        CheckpointError: its files are missing, corrupt or of another architecture.
        BackendError: the hub cannot be reached.
    """
    assert spec.model is not None
    folder = pretrained.open_source(spec.model)
    config = read_config(spec, folder.path if folder else None, vocab_size)
    module = on_meta(copy.deepcopy(config), dtype_on_meta(spec.model))
    lora_config = None
    if spec.model.lora:
        embeddings = spec.trains_embeddings
        lora_config = lora.add_adapters(module, spec.model.lora, torch.float32, embeddings=embeddings)
    tp = spec.parallelism.tp
    _give_memory(module, hosts, chips // tp, tp)
    module.tie_weights()
    set_initial_values(module, folder, seed=seed, device=CPU, grows=grows(spec))
    return HostModel(module, config, lora_config)


def rotary_of(model: HostModel) -> tuple[tuple[float, ...], float]:
    """Inverse frequencies of the rotary embedding and the factor of its cosines and sines, as transformers computes
    them from the config.

    Raises:
        UsageError: they depend on the length of what is seen.
    """
    rotary: Any = model.module.base_model.rotary_emb
    if "dynamic" in rotary.rope_type or "longrope" in rotary.rope_type:
        raise UsageError(
            f"model: rotary embeddings of type {rotary.rope_type} are not computed on device tpu",
            hint="resources.device: cuda",
        )
    return tuple(float(value) for value in rotary.inv_freq), float(rotary.attention_scaling)


def _give_memory(module: nn.Module, hosts: DeviceMesh, groups: int, tp: int) -> None:
    """Replace what is on the meta device by memory of this host, of undefined values."""
    for prefix, part in module.named_modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            full = f"{prefix}.{name}" if prefix else name
            tensor = _box(full, parameter, hosts, groups, tp)
            part._parameters[name] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
        for name, buffer in list(part.named_buffers(recurse=False)):
            part._buffers[name] = torch.empty_like(buffer, device=CPU)


def _box(name: str, meta: Tensor, hosts: DeviceMesh, groups: int, tp: int) -> Tensor:
    if hosts.size() == 1:
        return torch.empty_like(meta, device=CPU)
    dimension, _ = split_dimensions(name, meta.shape, groups, tp)  # a host has all chips of its groups
    shape = list(meta.shape)
    if dimension is not None:
        shape[dimension] //= hosts.size()
    return DTensor.from_local(
        torch.empty(shape, dtype=meta.dtype),
        hosts,
        [Replicate() if dimension is None else Shard(dimension)],
        run_check=False,
        shape=meta.shape,
        stride=meta.stride(),
    )
