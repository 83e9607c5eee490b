"""Who comes last to a step's sums, and what each rank did with its time until then.

All ranks leave a step's sums together, and the next ones begin when the last rank arrives: the time of whole steps is
the same on every rank and shows no slow one. So each rank measures, by its own clock, how long it takes from one to the
other with its waits for others left out. How late the last one comes, and which it is, every rank learns from the
agreement on commands (``step_consensus``), whose message is sent anyway. Each keeps its newest steps, and while one
comes last too often for chance (``last_arrivals``) the same message carries everybody's medians every few steps. Clocks
of two hosts are never compared.

On the CPU only: a GPU's host does not wait in collectives. Nor with tensor parallel, where ranks wait for each other
inside the layers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from muster.core.typed_json import Json
from muster.train.distributed.fixed_point import FixedPointReducer
from muster.train.distributed.last_arrivals import LastArrivals
from muster.train.distributed.process_groups import Waits
from muster.train.distributed.reduce import GradientReducer

#: Steps that a rank's figures are of (fewer say nothing about who is slow), and how often (in steps) they are sent.
KEPT_STEPS, SENT_EVERY = 20, 4
#: A lag below this share of a step is no news; the one that is named must be longer (``health.stragglers``).
LEAST_SHARE = 0.02
#: The same rank's figures are reported at ever longer intervals (in steps), up to this one.
MOST_SELDOM = 1000
#: Ranks in an event, at most.
MOST_RANKS = 64
RANK_BITS = 20
_MOST_US = (1 << (62 - RANK_BITS)) - 1
#: In the order in which they are sent; ``core.event_details.training.RankPace`` says what each is.
FIELDS = (
    "steps", "last", "ahead_us", "ahead_spread_us", "late_us", "wait_us", "data_us", "stall_us", "gap_us", "tokens",
)  # fmt: skip


class Parts(NamedTuple):
    """Nanoseconds of one span of the loop by what they went to; they sum to its length."""

    compute: int
    """Its thread was on a processor (snapshots left out)."""
    comm: int
    """Inside collectives."""
    data: int
    stall: int
    gap: int
    """Its thread was on no processor, and waited for none of the others."""

    @property
    def late(self) -> int:
        """All but the waits for other ranks."""
        return self.compute + self.data + self.stall + self.gap


class Mark(NamedTuple):
    """A moment, and the sums so far."""

    at_ns: int
    cpu_ns: int
    comm_ns: int
    data_ns: int
    stall_ns: int

    def until(self, end: Mark) -> Parts:
        """What the time between went to."""
        comm, data, stall = end.comm_ns - self.comm_ns, end.data_ns - self.data_ns, end.stall_ns - self.stall_ns
        busy = max(0, end.at_ns - self.at_ns - comm - data - stall)
        compute = min(busy, max(0, end.cpu_ns - self.cpu_ns))
        return Parts(compute, comm, data, stall, busy - compute)


@dataclass
class StepClock:
    """Where the time of this rank's loop goes. For the loop's own thread."""

    waits: Waits = field(default_factory=Waits)
    data_ns: int = 0
    stall_ns: int = 0
    _stall_cpu_ns: int = 0
    _stall: tuple[int, int] = (0, 0)

    def mark(self) -> Mark:
        cpu_ns = time.thread_time_ns() - self._stall_cpu_ns
        return Mark(time.monotonic_ns(), cpu_ns, self.waits.ns, self.data_ns, self.stall_ns)

    def begin_stall(self) -> None:
        """A snapshot or save holds the loop from here."""
        self._stall = time.monotonic_ns(), time.thread_time_ns()

    def end_stall(self) -> int:
        """Its nanoseconds."""
        took_ns = time.monotonic_ns() - self._stall[0]
        self.stall_ns += took_ns
        self._stall_cpu_ns += time.thread_time_ns() - self._stall[1]
        return took_ns


class _Step(NamedTuple):
    ahead: int
    late: int
    wait: int
    data: int
    stall: int
    gap: int
    tokens: int
    last: bool


@dataclass
class Arrivals:
    """This rank's newest steps, and what all ranks sent last. Every rank makes the same calls at the same steps."""

    clock: StepClock
    rank: int = 0
    world_size: int = 1
    enabled: bool = True
    """The same on every rank."""
    _released: Mark | None = field(default=None, init=False)
    """When the last sums ended; None: something else came between, and the next arrival counts as none."""
    _sent: tuple[Parts, int] | None = field(default=None, init=False)
    """What this rank sent with it, and its tokens; None: nothing."""
    _waited_ns: int = field(default=0, init=False)
    """In the sums that followed."""
    _steps: deque[_Step] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS), init=False)
    _news: tuple[dict[str, Json], ...] = field(default=(), init=False)
    _learned: int = field(default=0, init=False)
    """Steps of which all know who came last. As ``_last`` and ``_sent_at``, the same on every rank."""
    _last: LastArrivals = field(init=False)
    _sent_at: int = field(default=0, init=False)
    _reported: tuple[int, int, int] = field(default=(-1, 0, 0), init=False)
    """The rank that was reported last; of ``_learned`` the first and the newest time."""

    def __post_init__(self) -> None:
        self._last = LastArrivals(self.world_size)

    @property
    def active(self) -> bool:
        return self.enabled and self.world_size > 1

    def arrive(self, tokens: int) -> list[int]:
        """The next sums begin. What to send with the agreement: as many figures on every rank.

        ``tokens``: of this rank's own micro-batches in this step.
        """
        if not self.active:
            return []
        released, self._sent, code = self._released, None, 0
        if released is not None:
            parts = released.until(self.clock.mark())
            self._sent = parts, tokens
            code = (min(_MOST_US, parts.late // 1000) << RANK_BITS) | self.rank
        figures = [code]
        enough = self._learned >= max(KEPT_STEPS, self._sent_at + SENT_EVERY)
        if enough and self._last.accused() is not None:
            self._sent_at = self._learned
            figures += [0] * (self.world_size * len(FIELDS))
            begin = 1 + self.rank * len(FIELDS)
            figures[begin : begin + len(FIELDS)] = self._figures()
        return figures

    def released(self) -> None:
        """The sums have ended."""
        before, self._released = self._released, self.clock.mark()
        self._waited_ns = 0 if before is None else self._released.comm_ns - before.comm_ns

    def interrupt(self) -> None:
        """Something that is no part of a step follows (an evaluation, a save, a skipped step)."""
        self._released = None

    def learn(self, figures: Sequence[int]) -> None:
        """What all ranks agreed on at the last ``arrive``: the largest of each figure. After ``released``."""
        latest_us, rank = figures[0] >> RANK_BITS, figures[0] & ((1 << RANK_BITS) - 1)
        if figures[0]:
            self._learned += 1
            self._last.add(rank)
        if self._sent is not None:
            parts, tokens = self._sent
            late_us = parts.late // 1000
            own = (late_us, self._waited_ns // 1000, parts.data // 1000, parts.stall // 1000, parts.gap // 1000)
            self._steps.append(_Step(max(0, latest_us - late_us), *own, tokens, rank == self.rank))
        self._sent = None
        if self.rank == 0 and len(figures) > 1:
            self._consider(figures[1:])

    def take_news(self) -> tuple[dict[str, Json], ...]:
        """For rank 0's next event: the figures of the ranks, once, where one of them stands out."""
        news, self._news = self._news, ()
        return news

    def _consider(self, figures: Sequence[int]) -> None:
        """Keep the ranks' figures as news if a rank stands out: at first each time, then ever more rarely."""
        news, rank = conspicuous(figures)
        last, first, newest = self._reported
        if not news:
            return
        if rank != last:
            first = self._learned
        elif self._learned - newest < min(MOST_SELDOM, newest - first):
            return
        self._reported = rank, first, self._learned
        self._news = news

    def _figures(self) -> list[int]:
        if not self._steps:
            return [0] * len(FIELDS)
        columns = list(zip(*self._steps, strict=True))
        ahead, *others, last = columns
        middle = int(median(ahead))
        spread = int(1.4826 * median(abs(value - middle) for value in ahead))
        return [len(ahead), sum(last), middle, spread, *(int(median(column)) for column in others)]


def conspicuous(figures: Sequence[int]) -> tuple[tuple[dict[str, Json], ...], int]:
    """The ranks' figures by name and the rank that came last most often; nothing unless it did so in more than half
    of enough steps, and late enough to be news.

    Of more than ``MOST_RANKS`` that one, and others from all over the world.
    """
    width = len(FIELDS)
    rows = [dict(zip(FIELDS, figures[at : at + width], strict=True)) for at in range(0, len(figures), width)]
    worst = max(range(len(rows)), key=lambda rank: rows[rank]["last"])
    slow = rows[worst]
    lag_us = median(row["ahead_us"] for row in rows if row is not slow) - slow["ahead_us"]
    step_us = slow["late_us"] + slow["wait_us"]
    if slow["steps"] < KEPT_STEPS or 2 * slow["last"] <= slow["steps"] or lag_us < LEAST_SHARE * step_us:
        return (), worst
    apart = max(1, -(-len(rows) // (MOST_RANKS - 1)))
    chosen = sorted({worst, *range(0, len(rows), apart)})
    return tuple({"rank": rank, **rows[rank]} for rank in chosen), worst


class _AllGather(DefaultAllGather):
    def __init__(self, waits: Waits) -> None:
        self._waits = waits

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        began = time.monotonic_ns()
        work = super().__call__(output_tensor, input_tensor, group, async_op)
        self._waits.ns += time.monotonic_ns() - began
        return work


class _ReduceScatter(DefaultReduceScatter):
    def __init__(self, waits: Waits) -> None:
        self._waits = waits

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> dist.Work:
        began = time.monotonic_ns()
        work = super().__call__(output_tensor, input_tensor, group, op, async_op)
        self._waits.ns += time.monotonic_ns() - began
        return work


def time_collectives(module: nn.Module, reducer: GradientReducer, waits: Waits, device: torch.device) -> None:
    """Have FSDP's own collectives counted too. On a GPU they stay as they are: there the host does not wait."""
    if device.type != "cpu":
        return
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_custom_all_gather(_AllGather(waits))
            if not isinstance(reducer, FixedPointReducer):  # it has a reduce-scatter of its own
                part.set_custom_reduce_scatter(_ReduceScatter(waits))
