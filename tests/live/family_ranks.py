"""What each rank of ``test_family_ranks_live`` runs: families cut over all ranks, against transformers' models."""

from __future__ import annotations

import json
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from every_family import VOCABULARY, families, spec, trained_from_random
from fakes.small_model import build

from muster.core.types import Layout


def main(rank: int, world: int, store: str, names: Sequence[str], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    results = {}
    for name in names:
        try:
            built = build(spec(families()[name]), vocab_size=VOCABULARY, layout=Layout(dp_shard=world))
            _, _, loss, gradient = trained_from_random(name, built, ranks=world)
            results[name] = (loss, gradient)
        except Exception:  # noqa: BLE001 (the other rank's error is the same, so that the next family can follow)
            results[name] = traceback.format_exc(limit=-2)
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()
