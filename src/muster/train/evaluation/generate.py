"""Greedy completions from the model in training, on all ranks at once.

If the whole model fits in memory besides its shards, every FSDP unit is gathered once and ranks then generate
without collectives. On the CPU a larger model stays sharded, and its ranks generate token by token in lock-step; on
GPUs that would gather it whole again for every token (``objection``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from muster.train.model.model_with_loss import Decoding, ModelWithLoss, forward_pass
from muster.train.model.sharding import evaluating

#: A model up to this size, in its compute dtype, is gathered for generation on the CPU, whose free memory is not one
#: rank's.
WHOLE_BYTES = 4 << 30
#: Of a GPU's free memory; the rest is for the cache of keys and values.
FREE_SHARE = 0.7
BATCH = 64


@torch.no_grad()
def generate(
    module: ModelWithLoss,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    pad_id: int,
    progress: Callable[[], None] = lambda: None,
) -> list[list[int]]:
    """The most likely continuation of each prompt, token by token, up to the first of ``stop_ids``.

    Collective: every rank passes its own prompts, all ranks of a sharded group the same number (repeat one if there are
    fewer), and tp ranks and stages the same ones. Left-padded batches with a KV cache. Ends before the model's longest
    position. ``progress`` is called after each token.
    """
    groups, whole = groups_of(module), fits_everywhere(module)
    completions: list[list[int]] = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    with prepared(module, whole=whole):
        for start in range(0, len(order), BATCH):
            chosen = order[start : start + BATCH]
            batch = [list(prompts[index]) or [*stop_ids[:1], pad_id][:1] for index in chosen]
            room = min(max_new_tokens, longest_position(module) - max(map(len, batch)))
            room = room if whole else agreed(room, groups, dist.ReduceOp.MIN)
            rows = complete(module, batch, room, stop_ids, pad_id, () if whole else groups, progress)
            for index, row in zip(chosen, rows, strict=True):
                completions[index] = row
    return completions


def complete(
    module: ModelWithLoss,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    stop_ids: Sequence[int],
    pad_id: int,
    groups: Sequence[dist.ProcessGroup],
    progress: Callable[[], None],
) -> list[list[int]]:
    """One batch of prompts; with ``groups`` all their ranks make the same number of forward passes."""
    from transformers import DynamicCache

    device = next(module.parameters()).device
    width = max(map(len, prompts))
    tokens = torch.tensor([[pad_id] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    chunks = 1 if module.stage is None else module.stage.schedule.chunks
    caches = [DynamicCache(config=module.model.config) for _ in range(chunks)]
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    stops = torch.tensor(tuple(stop_ids), dtype=torch.int64, device=device)
    columns: list[Tensor] = []
    for _ in range(max_new_tokens):
        following = next_tokens(module, Decoding(tokens, mask, positions, caches))
        ended = ended | torch.isin(following, stops)
        columns.append(torch.where(ended, -1, following))
        progress()
        running = not bool(ended.all())
        if not agreed(int(running), groups, dist.ReduceOp.MAX):
            break
        tokens = torch.where(ended, pad_id, following).unsqueeze(1)
        mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=1)
        positions = positions[:, -1:] + 1
    if not columns:
        return [[] for _ in prompts]
    return [[token for token in row if token >= 0] for row in torch.stack(columns, dim=1).tolist()]


def next_tokens(module: ModelWithLoss, given: Decoding) -> Tensor:
    """int64[N]: the most likely token behind each prompt, on every stage."""
    logits = forward_pass(module, given, want="next")
    if module.stage is None:
        assert logits is not None
        return logits.argmax(1)
    link, schedule = module.stage.link, module.stage.schedule
    chosen = torch.zeros(given.tokens.shape[0], dtype=torch.int64, device=given.tokens.device)
    return link.from_stage(schedule.place(schedule.parts - 1)[0], chosen if logits is None else logits.argmax(1))


@contextmanager
def prepared(module: ModelWithLoss, *, whole: bool) -> Iterator[None]:
    """Dense attention, no compiled layers, and with ``whole`` gathered units; restored afterwards."""
    model, root = module.model, cast(torch.nn.Module, module)
    before = model.config._attn_implementation
    units = [part for part in module.modules() if isinstance(part, FSDPModule)]
    model.set_attn_implementation(module.generation_attention)
    with evaluating(module), torch.compiler.set_stance("force_eager"):
        try:
            for unit in units if whole else ():
                unit.set_reshard_after_forward(False, recurse=False)
            yield
        finally:
            for unit in units:
                unit.set_reshard_after_forward(unit is not root and module.reshard_layers, recurse=False)
            model.set_attn_implementation(before)


def objection(module: ModelWithLoss) -> str | None:
    """Why nothing can be generated now in bearable time; None: it can. Collective."""
    device = next(module.parameters()).device
    if device.type != "cuda" or fits_everywhere(module):
        return None
    size, room = whole_bytes(module) / 1e9, FREE_SHARE * free_bytes(device) / 1e9
    return (
        f"no answers are generated: the whole model takes {size:.1f} GB, a GPU here has {room:.1f} GB left beyond "
        "the training state, and in shards it would be gathered again for each token"
    )


def fits_everywhere(module: ModelWithLoss) -> bool:
    """Whether every rank has the whole model, or can gather it. Collective."""
    groups = groups_of(module)
    return not groups or bool(agreed(int(fits(module)), groups, dist.ReduceOp.MIN))


def fits(module: ModelWithLoss) -> bool:
    """Whether the whole model in its compute dtype fits in addition to what this rank holds now."""
    device = next(module.parameters()).device
    return whole_bytes(module) <= (WHOLE_BYTES if device.type == "cpu" else FREE_SHARE * free_bytes(device))


def whole_bytes(module: ModelWithLoss) -> int:
    """Of the model in its compute dtype."""
    return sum(parameter.numel() for parameter in module.parameters()) * module.compute_dtype.itemsize


def free_bytes(device: torch.device) -> float:
    """Of a GPU: what the driver has, and what the allocator holds unused."""
    free, _ = torch.cuda.mem_get_info(device)
    return float(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def groups_of(module: ModelWithLoss) -> list[dist.ProcessGroup]:
    """The ranks that hold parts of this model: shards of this stage, and the stages."""
    found = [] if module.stage is None else [module.stage.link.group]
    for parameter in module.parameters():
        if isinstance(parameter, DTensor):
            names = parameter.device_mesh.mesh_dim_names or ()
            mesh = parameter.device_mesh["dp_shard"] if "dp_shard" in names else parameter.device_mesh
            return [mesh.get_group(), *found] if mesh.size() > 1 else found
    return found


def agreed(value: int, groups: Sequence[dist.ProcessGroup], operation: dist.ReduceOp.RedOpType) -> int:
    """One number for all ranks of the groups; each group agrees in turn."""
    for group in groups:
        device = "cpu" if dist.get_backend(group) == "gloo" else "cuda"
        result = torch.tensor([value], device=device)
        dist.all_reduce(result, op=operation, group=group)
        value = int(result)
    return value


def longest_position(module: ModelWithLoss) -> int:
    """The model's longest position; for rotary embeddings too, because it was not trained beyond."""
    return int(getattr(module.model.config.get_text_config(), "max_position_embeddings", None) or 1 << 20)
