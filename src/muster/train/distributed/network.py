"""The network between a run's hosts, measured by its ranks before the first step (``check.network``).

By groups as training makes them, over all ranks and with the run's own settings of NCCL: what is measured is what the
run will use. All ranks decide alike what is measured next, by figures that all of them have.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore, Store

from muster.core.event_details.network import ALL, MEMORY, TIME, NetworkEnd, NetworkFigure, NetworkMeasured
from muster.core.typed_json import encode, parse_object
from muster.protocol.ranks import AgentClient, RankContext
from muster.train.distributed.process_groups import gloo_group, named, nccl_group

COLLECTIVES = ("all_gather", "all_reduce")
"""all_gather is what is held against a published figure; all_reduce is what replicas wait for."""
SIZES, SIZES_GLOO = (16 << 20, 128 << 20, 1 << 30, 8 << 30), (1 << 20, 8 << 20, 64 << 20)
"""Bytes of the whole output. The largest are those of the published figures; gloo's larger ones say no more."""
REPEATS = 5
MOST_S = 20.0
"""For a size with all its repeats: a slow network is measured at smaller ones."""
WITHIN_S = 300.0
"""For the ranks to meet, and for each collective."""
_ELEMENT = 4  # float32: exact for the sums that are checked
_ROUNDED = 1.05
"""What an allocator takes for more than was asked for."""
_RANGE_OF_FIVE = 2.326
"""The range of five normal values in standard deviations (Tippett, 1925)."""
_NO_LIMIT = float(1 << 50)


def measure(context: RankContext, agent: AgentClient, *, device: torch.device, store: Store) -> None:
    """Measure together with all ranks of the attempt; rank 0 says what came of it, in one event. Nothing where all
    ranks are on one host. What was allocated is free again at the end.

    Raises:
        RuntimeError: another rank is gone, or has not come within ``WITHIN_S``.
    """
    if context.local_world_size >= context.world_size:
        return
    keys, timeout = PrefixStore(f"a{context.attempt}/network", store), timedelta(seconds=WITHIN_S)
    keys.set(f"host{context.rank}", context.host)
    make = nccl_group if device.type == "cuda" else gloo_group
    group = make(keys, rank=context.rank, size=context.world_size, timeout=timeout)
    named(group, attempt=context.attempt, what="network", ranks=range(context.world_size))
    try:
        figures, ends = _measured(Ring(group, context.rank, context.world_size, device), agent.progress)
        if context.rank == 0:
            hosts = dict.fromkeys(keys.get(f"host{rank}").decode() for rank in range(context.world_size))
            library = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if device.type == "cuda" else "gloo"  # type: ignore[no-untyped-call]
            detail = NetworkMeasured(
                hosts=tuple(hosts), ranks=context.world_size, library=library, figures=figures, ends=ends
            )
            agent.emit(NetworkMeasured.kind, **parse_object(encode(detail)))  # type: ignore[arg-type]
    finally:
        group.shutdown()
        if device.type == "cuda":
            torch.cuda.empty_cache()


class Ring:
    """The group, and collectives whose every element is known beforehand."""

    def __init__(self, group: dist.ProcessGroup, rank: int, world: int, device: torch.device) -> None:
        self.group, self.rank, self.world, self.device = group, rank, world, device
        self._token = torch.zeros(1, device=device)

    def meet(self) -> None:
        self.wait(self.group.allreduce([self._token], dist.AllreduceOptions()))

    def wait(self, work: dist.Work) -> None:
        """Until it is done here; NCCL's own ``wait`` orders streams only."""
        work.wait()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def gathered(self, *values: float) -> torch.Tensor:
        """Every rank's, a row each."""
        part = torch.tensor(values, dtype=torch.float64, device=self.device)
        whole = torch.empty(self.world * len(values), dtype=torch.float64, device=self.device)
        self.wait(self.group._allgather_base(whole, part, AllgatherOptions()))
        return whole.view(self.world, len(values)).cpu()

    def free_bytes(self) -> float:
        """On this rank's GPU; a processor's memory is no limit to messages this small."""
        return float(torch.cuda.mem_get_info(self.device)[0]) if self.device.type == "cuda" else _NO_LIMIT

    def prepared(self, collective: str, share: int) -> tuple[Callable[[], None], Callable[[], int]]:
        """(the collective, of ``share`` elements from each rank; how many elements of its result are wrong)."""
        whole = torch.zeros(share * self.world, device=self.device)
        if collective == "all_reduce":
            total = self.world * (self.world + 1) / 2

            def reduce() -> None:
                self.wait(self.group.allreduce([whole], dist.AllreduceOptions()))

            whole.fill_(self.rank + 1)
            return reduce, lambda: int((whole != total).sum())
        part = torch.full((share,), float(self.rank + 1), device=self.device)
        right = torch.arange(1, self.world + 1, device=self.device, dtype=torch.float32).unsqueeze(1)

        def gather() -> None:
            self.wait(self.group._allgather_base(whole, part, AllgatherOptions()))

        return gather, lambda: int((whole.view(self.world, share) != right).sum())


def _measured(ring: Ring, progress: Callable[[], None]) -> tuple[tuple[NetworkFigure, ...], tuple[NetworkEnd, ...]]:
    """Of each collective from the smallest size up, as long as a size fits into the memory and into its time."""
    sizes = SIZES if ring.device.type == "cuda" else SIZES_GLOO
    ring.meet()
    room = float(ring.gathered(ring.free_bytes()).min())
    figures, ends = list[NetworkFigure](), list[NetworkEnd]()
    for collective in COLLECTIVES:
        figures.append(_figure(ring, collective, sizes[0]))
        progress()
        end = NetworkEnd(collective=collective, reason=ALL)
        for size in sizes[1:]:
            last = figures[-1]
            bytes_, seconds = memory(size, ring.world), last.seconds * size / last.size_bytes * (REPEATS + 1)
            if bytes_ > room:
                end = replace(end, reason=MEMORY, next_bytes=size, needed=bytes_, available=room)
                break
            if seconds > MOST_S:
                end = replace(end, reason=TIME, next_bytes=size, needed=seconds, available=MOST_S)
                break
            figures.append(_figure(ring, collective, size))
            progress()
        ends.append(end)
    return tuple(figures), tuple(ends)


def memory(size: int, world: int) -> float:
    """Bytes that a size takes on each rank: output, input, and a byte of each element's comparison."""
    return size * (1 + 1 / world + 1 / _ELEMENT) * _ROUNDED


def _figure(ring: Ring, collective: str, size: int) -> NetworkFigure:
    """Once to warm up, and to check every element; then ``REPEATS`` times, all ranks beginning together. The slowest
    rank's median."""
    share = max(1, size // (ring.world * _ELEMENT))
    call, wrong_elements = ring.prepared(collective, share)
    call()
    wrong = wrong_elements()
    took = []
    for _ in range(REPEATS):
        ring.meet()
        begun = time.perf_counter()
        call()
        took.append(time.perf_counter() - begun)
    middle = median(took)
    spread = (max(took) - min(took)) / _RANGE_OF_FIVE / middle if middle > 0 else 0.0
    all_ranks = ring.gathered(middle, spread, wrong)
    return NetworkFigure(
        collective=collective, size_bytes=share * _ELEMENT * ring.world, seconds=float(all_ranks[:, 0].max()),
        spread=float(all_ranks[:, 1].max()), wrong=int(all_ranks[:, 2].sum()),
    )  # fmt: skip
