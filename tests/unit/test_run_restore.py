"""``muster.run.restore`` from snapshots: no rank goes on before all have read what they need."""

import threading
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from muster import run  # noqa: E402
from muster.core.errors import CheckpointError  # noqa: E402
from muster.core.types import Layout  # noqa: E402
from muster.protocol.ranks import RankContext, Restore  # noqa: E402
from muster.train.distributed.process_groups import gloo_group  # noqa: E402
from muster.train.state import snapshot_restore  # noqa: E402


def rank_of(number, group):
    context = RankContext(
        run_id="r", run_dir=".", attempt=2, host="h", rank=number, local_rank=number, world_size=2, local_world_size=2,
        layout=Layout(dp_shard=2), master_addr="", master_port=1,
    )  # fmt: skip
    return run._Rank(context=context, agent=None, spec=None, saving_group=group)


def test_a_rank_whose_snapshot_is_damaged_stops_the_others(monkeypatch):
    """Each verifies its share: what another has read may be what this one refuses."""
    ends = {}

    def restored(context, restore, held):
        if context.rank == 1:
            raise CheckpointError("rotten")
        return {}, 0

    monkeypatch.setattr(snapshot_restore, "restored", restored)
    store = dist.HashStore()

    def restore(number):
        group = gloo_group(store, rank=number, size=2, timeout=timedelta(seconds=2))
        try:
            run._from_memory(rank_of(number, group), Restore(step=9, layout=Layout(dp_shard=2)), {})
            ends[number] = "went on"
        except (CheckpointError, RuntimeError) as error:
            ends[number] = type(error).__name__

    threads = [threading.Thread(target=restore, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert ends[1] == "CheckpointError" and ends[0] not in ("went on", "CheckpointError")
