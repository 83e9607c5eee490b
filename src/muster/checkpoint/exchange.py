"""Small JSON values between ranks: what checkpoint collectives carry, so that nothing is unpickled."""

from __future__ import annotations

import json
from typing import TypeVar

import torch
import torch.distributed as dist

_Value = TypeVar("_Value")


def gather(value: _Value, group: dist.ProcessGroup | None) -> list[_Value]:
    """Every rank's ``value`` (JSON), in rank order, on every rank. ``group`` None: this process alone.

    Blocks until all ranks of the gloo ``group`` have called it; raises RuntimeError when one died. Uses the group's
    own methods: it may be one that torch's registry does not know (``train.groups``).
    """
    if group is None or group.size() == 1:
        return [value]
    data = json.dumps(value, separators=(",", ":")).encode()
    ranks = group.size()
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
    group.allgather([sizes], [torch.tensor([len(data)], dtype=torch.int64)]).wait()
    longest = max(int(size) for size in sizes)
    local = torch.zeros(longest, dtype=torch.uint8)
    local[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    everyone = [torch.empty(longest, dtype=torch.uint8) for _ in range(ranks)]
    group.allgather([everyone], [local]).wait()
    return [json.loads(tensor[: int(size)].numpy().tobytes()) for tensor, size in zip(everyone, sizes, strict=True)]


def rank_of(group: dist.ProcessGroup | None) -> int:
    return group.rank() if group is not None else 0
