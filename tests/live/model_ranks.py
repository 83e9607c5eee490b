"""What each rank of ``test_model_live`` runs: builds models, takes losses and gradients, writes them to a file."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

from muster.config.spec import RunSpec
from muster.core.types import Layout
from muster.train.data_feed.batch import make_batch, padding_batch
from muster.train.distributed.device_mesh import make_meshes
from muster.train.evaluation import generate as generation
from muster.train.model.causal_lm import build_model
from muster.train.model.loss import loss_sum
from muster.train.model.weights import fill, local_ranges, normal

VOCAB, LENGTH, MICRO_BATCHES = 96, 48, 4
CPU = torch.device("cpu")
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
}
QWEN = {**LLAMA, "model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": False}
#: Gradients of its auxiliary loss leave a layer by the side of what FSDP sees.
MIXTRAL = {
    **LLAMA,
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 5.0,
}


def spec_of(case: dict) -> RunSpec:
    model = {"config": case.get("config", LLAMA), "dtype": "float32", **case.get("model", {})}
    if "source" in model:
        del model["config"]
    return RunSpec.model_validate(
        {
            "name": "case",
            "model": model,
            "data": {"sources": [{"type": "random"}]},
            "training": {"sequence_length": LENGTH, **case.get("training", {})},
        }
    )


def micro_batch(index: int, *, static_shapes: bool = False):
    """Two sequences of several documents; about half of the tokens are supervised."""
    numbers = torch.Generator().manual_seed(index)
    ids = torch.randint(0, VOCAB, (2, LENGTH), generator=numbers)
    labels = torch.randint(0, VOCAB, (2, LENGTH), generator=numbers)
    labels[torch.rand(2, LENGTH, generator=numbers) < 0.5] = -100
    lengths = [[7 + index, 20, LENGTH - 27 - index], [33, LENGTH - 33]]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    return make_batch(ids, labels, positions, [*lengths[0], *lengths[1]], CPU, static_shapes=static_shapes)


def supervised_tokens() -> int:
    return sum(micro_batch(index).supervised for index in range(MICRO_BATCHES))


def run_case(case: dict, layout: Layout) -> dict[str, torch.Tensor]:
    """Loss (summed over ranks), whole gradients and parameters of one step of ``MICRO_BATCHES`` micro-batches."""
    counters.clear()
    meshes = make_meshes(layout, "cpu")
    spec = spec_of(case)
    built = build_model(
        spec,
        device=CPU,
        vocab_size=VOCAB,
        mesh=meshes,
        seed=3,
        whole_below=case.get("whole_below", 0),
    )
    if built.lora_config is not None:  # B starts at zero: no gradient would reach A
        for name, parameter in built.named_trainable().items():
            if ".lora_B." in name:
                values = normal(name, parameter.shape, local_ranges(parameter), 0.1, seed=4, device=CPU)
                fill(parameter, values)
    assert built.proof.own_head, built.proof
    total = torch.zeros((), dtype=torch.float64)
    scale = 1.0 / supervised_tokens()
    for first in range(0, MICRO_BATCHES, layout.data_ranks):
        index = first + meshes.data_rank
        if index < MICRO_BATCHES:
            batch = micro_batch(index, static_shapes=built.module.compiled)
        else:
            batch = padding_batch(2, LENGTH, CPU, static_shapes=built.module.compiled)
        loss = loss_sum(built.module, batch, chunk_tokens=13, scale=scale)
        loss.backward()
        total += loss.detach()
    if meshes.shard.size() > 1:
        dist.all_reduce(total, group=meshes.shard.get_group())
    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    found = {"loss": total, "graphs": torch.tensor([graphs, breaks])}
    for name, parameter in built.module.model.named_parameters():
        found[f"parameter.{name}"] = whole(parameter.detach())
        if parameter.requires_grad:
            found[f"gradient.{name}"] = whole(parameter.grad)
    if case.get("generate"):
        generation.WHOLE_BYTES = 0 if case["generate"] == "in lock-step" else 1 << 30
        # Ranks that read different data generate from different prompts, of other lengths.
        prompts = [list(range(3 + meshes.data_rank, 3 + length)) for length in (4, 9, 1 + meshes.data_rank, 6)]
        rows = generation.generate(built.module, prompts, max_new_tokens=8, stop_ids=(), pad_id=0)
        found["generated"] = torch.tensor(rows)
        again = loss_sum(built.module, micro_batch(0, static_shapes=built.module.compiled), chunk_tokens=0, scale=scale)
        found["loss_after_generation"] = again.detach()
    return found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone().contiguous()


def main(rank: int, world: int, store: str, cases: dict, results: str) -> None:
    """Run every case whose layout has ``world`` ranks; rank 0 writes ``<results>/<case>.safetensors``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    try:
        for name, case in cases.items():
            found = run_case(case, Layout(**case["layout"]))
            if rank == 0:
                save_file(found, str(Path(results) / f"{name}.safetensors"))
        if rank == 0:
            (Path(results) / f"done-{world}.json").write_text(json.dumps(sorted(cases)))
    finally:
        dist.destroy_process_group()
