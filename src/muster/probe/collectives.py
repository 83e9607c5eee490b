"""One rank of a group that measures collectives: in a process of its own, which may be ended when it hangs."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from statistics import median

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore

from muster.health.network.figures import Measured, Order
from muster.probe.collective_group import Group

REPEATS = 5
_ELEMENT = 4  # float32: exact for the sums that are checked
#: The range of five normal values is 2.33 standard deviations (Tippett, 1925).
_RANGE_OF_FIVE = 2.326


def measure(
    order: Order, rank: int, *, address: str, gpu: int | None, say: Callable[[Measured | None], object]
) -> None:
    """Take part in ``order`` as ``rank``, reached at ``address``: say None when all have met, then each figure as it is
    measured.

    Raises:
        RuntimeError: a collective failed (its peer is gone, no memory...).
    """
    device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
    if gpu is not None:
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=order.start_s + order.limit_s)
    store = TCPStore(order.store, order.port, None, False, timeout=timeout, wait_for_workers=False)
    group = Group(PrefixStore(order.name, store), rank, order.world, device=device, address=address, timeout=timeout)
    group.meet()
    say(None)
    for collective in order.collectives:
        for size in order.sizes:
            say(_figure(group, collective, size))
    group.meet()  # a rank that leaves earlier would make the others' last collective fail


def _figure(group: Group, collective: str, size: int) -> Measured:
    """Once to warm up, and to check every element; then ``REPEATS`` times, all ranks beginning together."""
    call, fill, wrong_elements = _prepare(group, collective, size)
    fill()
    call()
    wrong = wrong_elements()
    took = []
    for _ in range(REPEATS):
        group.meet()
        begun = time.perf_counter()
        call()
        took.append(time.perf_counter() - begun)
    middle = median(took)
    spread = (max(took) - min(took)) / _RANGE_OF_FIVE / middle if middle > 0 else 0.0
    share = max(1, size // (group.world * _ELEMENT)) * _ELEMENT
    return Measured(
        rank=group.rank, collective=collective, size_bytes=share * group.world,
        seconds=middle, spread=spread, wrong=wrong,
    )  # fmt: skip


def _prepare(
    group: Group, collective: str, size: int
) -> tuple[Callable[[], None], Callable[[], object], Callable[[], int]]:
    """(the collective, what fills its input, how many elements of its result are wrong)."""
    share = max(1, size // (group.world * _ELEMENT))
    rank, world, device = group.rank, group.world, group.device
    whole = torch.empty(share * world, device=device)
    ranks = torch.arange(world, device=device, dtype=torch.float32)
    total = world * (world + 1) / 2
    if collective == "all_reduce":
        return (
            lambda: group.all_reduce(whole),
            lambda: whole.fill_(rank + 1),
            lambda: int(torch.count_nonzero(whole != total)),
        )
    part = torch.empty(share, device=device)
    if collective == "all_gather":
        return (
            lambda: group.all_gather(whole, part),
            lambda: part.fill_(rank + 1),
            lambda: int(torch.count_nonzero(whole.view(world, share) != (ranks + 1).unsqueeze(1))),
        )
    if collective == "reduce_scatter":
        return (
            lambda: group.reduce_scatter(part, whole),
            lambda: whole.fill_(rank + 1),
            lambda: int(torch.count_nonzero(part != total)),
        )
    if collective == "all_to_all":
        result = torch.empty_like(whole)
        return (
            lambda: group.all_to_all(result, whole),
            lambda: whole.view(world, share).copy_((rank * world + ranks).unsqueeze(1).expand(world, share)),
            lambda: int(torch.count_nonzero(result.view(world, share) != (ranks * world + rank).unsqueeze(1))),
        )
    raise ValueError(f"no collective {collective!r}")
