"""Small JSON values between ranks: what checkpoint collectives carry, so that nothing is unpickled."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Every rank's ``value`` (JSON), in rank order, on every rank. ``group`` None: this process alone.

    Blocks until all ranks of the gloo ``group`` have called it; raises RuntimeError when one died.
    """
    if group is None or dist.get_world_size(group) == 1:
        return [value]
    data = json.dumps(value, separators=(",", ":")).encode()
    ranks = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([len(data)], dtype=torch.int64), group=group)
    longest = max(int(size) for size in sizes)
    mine = torch.zeros(longest, dtype=torch.uint8)
    mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    everyone = [torch.empty(longest, dtype=torch.uint8) for _ in range(ranks)]
    dist.all_gather(everyone, mine, group=group)
    return [json.loads(tensor[: int(size)].numpy().tobytes()) for tensor, size in zip(everyone, sizes, strict=True)]


def rank_of(group: dist.ProcessGroup | None) -> int:
    return dist.get_rank(group) if group is not None else 0


def size_of(group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(group) if group is not None else 1
