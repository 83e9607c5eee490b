"""A program: peak memory of one rank's tensors, with the real model, FSDP2 wrapping and optimizer.

Nothing is allocated or sent: tensors and the process group are PyTorch's fake ones, so that
a laptop can answer for any number of ranks without the weights. Started as a process by the planner::

    python -m muster.train.memory_trace < request.json > answer.json
    request: {"spec": RunSpec, "layout": {...}, "vocab_size": V, "config": transformers config instead of the spec's}
    answer: {"peak_bytes", "moment", "kinds": {weights, gradients, optimizer, other}, "after_build_bytes", "seconds"}

Live bytes are counted by storage: each operator's new storages are added when it returns and subtracted when they are
freed. PyTorch's own tracker was not used: it has no fake CUDA on a build without it, and counts ``AdamW(foreach=True)``
three times the *global* parameters. The rank counted is rank 0; the attention kernel is the CPU's, which takes keys
and values repeated to the queries' heads.
"""

from __future__ import annotations

import json
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from muster.checkpoint import compact
from muster.config.spec import RunSpec
from muster.core.typed_json import JsonObject
from muster.core.types import Layout
from muster.train.data_feed.batch import Batch
from muster.train.distributed.device_mesh import make_meshes
from muster.train.distributed.reduce import FloatReducer, ReduceGroups, local
from muster.train.model import causal_lm
from muster.train.model.loss import loss_sum
from muster.train.model.model_with_loss import ModelWithLoss
from muster.train.optim.optimizer import ShardOptimizer, make_optimizer
from muster.train.state.training_state import named_without_wrappers

#: Every this many operators all storages are checked for a changed size; those that changed, after each operator.
LOOK_EVERY = 64


@dataclass
class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of live storages, and their peak with the stage in which it was reached.

    FSDP frees and refills whole parameters by resizing their storages, which no operator shows.
    """

    live: int = 0
    peak: int = 0
    moment: str = "build"
    peak_moment: str = "build"
    _sizes: dict[int, int] = field(default_factory=dict)
    """Storage -> the bytes last counted."""
    _held: dict[int, weakref.ref[torch.UntypedStorage]] = field(default_factory=dict)
    _resized: set[int] = field(default_factory=set)
    _operators: int = 0

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: Any = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        self._operators += 1
        self._look(list(self._held) if self._operators % LOOK_EVERY == 0 else list(self._resized))
        self.add(result)
        return result

    def add(self, values: object) -> None:
        """Count the storages of these tensors, once each."""
        for value in tree_leaves(values):
            if isinstance(value, Tensor):
                tensor = local(value)
                if tensor.device.type != "meta" or hasattr(tensor, "fake_device"):
                    self._count(tensor.untyped_storage())
        if self.live > self.peak:
            self.peak, self.peak_moment = self.live, self.moment

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._held and self._held[key]() is storage:
            return
        self._forget(key)

        def freed(reference: object, key: int = key) -> None:
            if self._held.get(key) is reference:
                self._forget(key)

        self._held[key] = weakref.ref(storage, freed)
        self._sizes[key] = storage.nbytes()
        self.live += self._sizes[key]

    def _forget(self, key: int) -> None:
        self._held.pop(key, None)
        self._resized.discard(key)
        self.live -= self._sizes.pop(key, 0)

    def _look(self, keys: Iterable[int]) -> None:
        for key in keys:
            storage = self._held[key]() if key in self._held else None
            if storage is not None and storage.nbytes() != self._sizes[key]:
                self._resized.add(key)
                self.live += storage.nbytes() - self._sizes[key]
                self._sizes[key] = storage.nbytes()


def trace(spec: RunSpec, layout: Layout, vocab_size: int) -> JsonObject:
    """Build, take two steps, and report the peak of the second (the first has no optimizer state yet)."""
    began = time.monotonic()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.ranks_per_replica)
    device = torch.device("cpu")
    module = build(spec, layout, vocab_size, device)  # on the meta device
    with FakeTensorMode(allow_non_fake_inputs=True), LiveBytes() as live:
        module.to_empty(device=device)
        module.model.tie_weights()
        named = named_without_wrappers({name: p for name, p in module.model.named_parameters() if p.requires_grad})
        reducer = FloatReducer(module, ReduceGroups(), accumulate_locally=False)
        optimizer = make_optimizer(named, spec.training.optimizer, elementwise=spec.training.exact)
        built = live.live
        micro = -(-spec.training.global_batch_size // spec.training.micro_batch_size)
        rounds = min(2, -(-micro // layout.data_ranks))
        for step in (1, 2):
            live.peak = 0
            _step(spec, module, reducer, optimizer, rounds, step, live)
        kinds = {
            "weights": _bytes(module.parameters()),
            "optimizer": _bytes(t for moment in optimizer.moments.values() for t in moment.values()),
            "gradients": _bytes(p.grad for p in module.parameters() if p.grad is not None),
        }
    dist.destroy_process_group()
    return {
        "peak_bytes": live.peak,
        "moment": live.peak_moment,
        "kinds": {**kinds, "other": live.peak - sum(kinds.values())},
        "after_build_bytes": built,
        "seconds": time.monotonic() - began,
    }


def build(spec: RunSpec, layout: Layout, vocab_size: int, device: torch.device) -> ModelWithLoss:
    """``build_model`` without values: laid out and sharded, still on the meta device."""
    assert spec.model is not None
    model = spec.model.model_copy(update={"attention": "auto"})
    training = spec.training.model_copy(update={"compile": False})
    plain = spec.model_copy(update={"model": model, "training": training})
    module, _, _ = causal_lm.laid_out(
        plain, causal_lm.read_config(spec, None, vocab_size), make_meshes(layout, "cpu"), device
    )
    module.train()
    return module


def _step(
    spec: RunSpec,
    module: ModelWithLoss,
    reducer: FloatReducer,
    optimizer: ShardOptimizer,
    rounds: int,
    step: int,
    live: LiveBytes,
) -> None:
    training = spec.training
    count, length = training.micro_batch_size, training.sequence_length
    live.moment = "start of step"
    reducer.begin(micro_batches=rounds)
    for number in range(1, rounds + 1):
        reducer.before_forward(last=number == rounds)
        batch = _batch(count, length)
        live.moment = "forward and loss"
        loss = loss_sum(module, batch, chunk_tokens=training.loss_chunk_tokens, scale=1.0)
        live.moment = "backward"
        loss.backward()  # type: ignore[no-untyped-call]
        reducer.add_loss(loss)
        del loss, batch
    live.moment = "update"
    optimizer.step(step=step, learning_rate=1e-3, scale=torch.ones(()), skip=torch.zeros(()))


def _batch(count: int, length: int) -> Batch:
    """A batch in which every token has a target: fake tensors have no values to look up."""
    tokens = torch.zeros(count, length, dtype=torch.int64)
    return Batch(
        input_ids=tokens,
        labels=tokens,
        position_ids=torch.arange(length).repeat(count, 1),
        cu_seqlens=torch.arange(0, (count + 1) * length, length, dtype=torch.int32),
        max_seqlen=length,
        targets=torch.arange(count * length),
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the local parts, each storage counted once."""
    sizes: dict[int, int] = {}
    for tensor in (held for each in tensors for held in compact.stored(local(each))):
        storage = tensor.untyped_storage()
        sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def main() -> None:
    """Answer one request."""
    request = json.load(sys.stdin)
    given = dict(request["spec"])
    if request.get("config"):
        given["model"] = {**given["model"], "config": request["config"], "source": None}
    answer = trace(RunSpec.model_validate(given), Layout(**request["layout"]), request["vocab_size"])
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
