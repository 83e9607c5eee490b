"""What each rank of ``test_early_sums_live`` runs: steps of replicas that are joined by a gloo group of their own."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from model_ranks import CPU, VOCAB, micro_batch, spec_of
from torch.distributed.fsdp import FSDPModule

from muster.core.types import Layout
from muster.train.distributed import early_sums
from muster.train.distributed.device_mesh import make_meshes
from muster.train.distributed.early_sums import EarlySums
from muster.train.distributed.fixed_point import FixedPointReducer
from muster.train.distributed.process_groups import GroupAborter, gloo_group
from muster.train.distributed.reduce import REPLICA, REPLICATE, SHARD, FloatReducer, ReduceGroups, local
from muster.train.model.causal_lm import build_model
from muster.train.model.loss import loss_sum
from muster.train.model.sharding import forget_gradients

ROUNDS, STEPS = 2, 3
LONG = timedelta(seconds=120)


class Rank:
    """One rank of a model cut over ``shards``, in one of ``replicas`` replicas."""

    def __init__(self, case: dict, rank: int, stores: Path) -> None:
        self.replicas, self.shards = case["replicas"], case["shards"]
        self.replica, self.shard = divmod(rank, self.shards)
        store = dist.FileStore(str(stores / f"replica-{self.replica}"), self.shards)
        dist.init_process_group("gloo", store=store, rank=self.shard, world_size=self.shards)
        layout = Layout(dp_replicate=self.replicas, dp_shard=self.shards)
        meshes = make_meshes(layout, "cpu", replica=self.replica)
        self.aborter = GroupAborter()
        across = dist.FileStore(str(stores / f"shard-{self.shard}"), self.replicas)
        group = self.aborter.watch(lambda: gloo_group(across, rank=self.replica, size=self.replicas, timeout=LONG))
        by_axis = {REPLICATE: group}
        if self.shards > 1:
            by_axis[SHARD] = by_axis[REPLICA] = meshes.shard.get_group()
        self.groups = ReduceGroups(by_axis, self.aborter)
        self.built = build_model(
            spec_of(case), device=CPU, vocab_size=VOCAB, mesh=meshes, seed=3, whole_below=case.get("whole_below", 0)
        )
        if case["sums"] == "exact":
            self.reducer = FixedPointReducer(self.built.module, self.groups)
        else:
            self.reducer = FloatReducer(self.built.module, self.groups, accumulate_locally=case["sums"] == "once")
        self.between_layers = lambda: None
        """Called in the last backward pass of a step, once the gradient has left the first layer (the last to go)."""
        self.built.module.model.get_input_embeddings().register_forward_hook(self._hooked)
        self.trained = [each for each in self.built.module.parameters() if each.requires_grad]

    def step(self, step: int, *, in_last_backward=lambda: None) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and norm; the summed gradients are in the parameters."""
        self.reducer.begin(micro_batches=ROUNDS * self.replicas * self.shards)
        for number in range(ROUNDS):
            self.reducer.before_forward(last=number == ROUNDS - 1)
            index = ((step * ROUNDS + number) * self.replicas + self.replica) * self.shards + self.shard
            loss = loss_sum(self.built.module, micro_batch(index % 13), chunk_tokens=13, scale=0.01)
            if number == ROUNDS - 1:
                self.between_layers = in_last_backward
            loss.backward()
            self.reducer.add_loss(loss)
        total, norm, fault = self.reducer.finish()
        assert not fault
        return total, norm

    def _hooked(self, module, inputs, output) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: self.between_layers())

    def gradients(self) -> list[torch.Tensor]:
        return [local(parameter.grad).clone() for parameter in self.trained]


def same_bits(rank: Rank) -> dict:
    """Each step with sums that begin early, and again with all of them begun after the backward pass."""
    begun: list[int] = []
    after = EarlySums.finish

    def counted(sums: EarlySums) -> None:
        begun.append(sums._begun)
        after(sums)

    came = EarlySums.came
    different, smallest = 0, float("inf")
    EarlySums.finish = counted
    try:
        for step in range(STEPS):
            one = [*rank.step(step), *rank.gradients()]
            EarlySums.came = lambda *of: None
            two = [*rank.step(step), *rank.gradients()]
            EarlySums.came = came
            different += sum(not torch.equal(a, b) for a, b in zip(one, two, strict=True))
            smallest = min(smallest, float(two[1]))
    finally:
        EarlySums.finish, EarlySums.came = after, came
    return {
        "units": len(rank.reducer.early._units),
        "whole": not isinstance(rank.built.module, FSDPModule),
        "begun": begun[::2],
        "later": begun[1::2],
        "different": different,
        "smallest_norm": smallest,
    }


def loses_one(rank: Rank, number: int) -> dict:
    """The last replica's ranks get ``number`` in a step's last backward pass; the others go on alone."""
    for step in range(2):
        rank.step(step)
    if rank.replica == rank.replicas - 1:
        rank.step(2, in_last_backward=lambda: os.kill(os.getpid(), number))
        raise AssertionError("still there")
    began = time.monotonic()
    pause = threading.Timer(2.0, rank.aborter)  # as the agent does, once it has heard of the loss
    pause.start()
    try:
        rank.step(2)
        raise AssertionError("no sum has failed")
    except RuntimeError as error:
        said = str(error)
    took = time.monotonic() - began
    pause.join()
    rank.groups.by_axis.pop(REPLICATE)
    forget_gradients(rank.built.module)
    alone = [*rank.step(2), *rank.gradients()]
    again = [*rank.step(2), *rank.gradients()]
    same = all(torch.equal(a, b) for a, b in zip(alone, again, strict=True))
    return {"said": said, "seconds": took, "same": same, "norm": float(alone[1])}


def main(rank: int, cases: dict, results: str) -> None:
    """Run every case that has this rank; write ``<results>/<case>-<rank>.json`` for each."""
    torch.set_num_threads(1)
    early_sums.BUCKET_BYTES = 8 << 10  # several even of adapters
    for name, case in cases.items():
        if rank >= case["replicas"] * case["shards"]:
            continue
        stores = Path(results) / f"stores-{name}"
        stores.mkdir(exist_ok=True)
        mine = Rank(case, rank, stores)
        found = loses_one(mine, signal.Signals[case["lost"]]) if "lost" in case else same_bits(mine)
        (Path(results) / f"{name}-{rank}.json").write_text(json.dumps(found))
        dist.destroy_process_group()
