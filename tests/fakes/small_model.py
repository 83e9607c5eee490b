"""Small models and a process group of one rank that opens no socket, for tests of the model side."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from muster.config.spec import RunSpec
from muster.core.types import Layout
from muster.train.distributed.device_mesh import Meshes, make_meshes
from muster.train.model.causal_lm import BuiltModel, build_model

CPU = torch.device("cpu")
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}


@contextmanager
def process_group(world: int = 1, rank: int = 0) -> Iterator[None]:
    """Torch's stand-in group, whose collectives do nothing: right for one rank, and for meshes of any number."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def spec_of(config: dict[str, Any] | None = LLAMA, *, training: dict[str, Any] | None = None, **model: Any) -> RunSpec:
    given = {"dtype": "float32", **model}
    if config is not None:
        given["config"] = config
    return RunSpec.model_validate(
        {
            "name": "case",
            "model": given,
            "data": {"sources": [{"type": "random"}]},
            "training": {"sequence_length": 32, **(training or {})},
        }
    )


def build(
    spec: RunSpec, *, vocab_size: int = 50, layout: Layout | None = None, seed: int = 1, meshes: Meshes | None = None
) -> BuiltModel:
    return build_model(
        spec,
        device=CPU,
        vocab_size=vocab_size,
        mesh=meshes or make_meshes(layout or Layout(), "cpu"),
        seed=seed,
        whole_below=0,
    )


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a parameter or gradient, in FSDP or not, as a plain tensor of its own."""
    full: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()
