"""Details of the network between a run's hosts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from muster.core.event_detail import Detail
from muster.core.typed_json import Count, Record, Seconds


@dataclass(frozen=True, kw_only=True)
class NetworkFigure(Record):
    """One size of one collective over all ranks, as nccl-tests count sizes: the slowest rank's median."""

    collective: Annotated[str, "all_gather or all_reduce"]
    size_bytes: Annotated[Count, "of the whole output"]
    seconds: Annotated[Seconds, "of one call"]
    spread: Annotated[Seconds, "standard deviation of one call, as a share of the median"] = 0.0
    wrong: Annotated[Count, "elements that were not what they should be, on all ranks"] = 0


ALL, MEMORY, TIME = "all", "memory", "time"


@dataclass(frozen=True, kw_only=True)
class NetworkEnd(Record):
    """Why a collective was measured at no larger size."""

    collective: Annotated[str, "all_gather or all_reduce"]
    reason: Annotated[str, "all: nothing larger is ever measured with this library; memory; time"]
    next_bytes: Annotated[Count, "the size that was left out; 0: none was"] = 0
    needed: Annotated[float, "by it: bytes of memory, or seconds with its repeats"] = 0.0
    available: Annotated[float, "bytes of the rank with the least, or seconds"] = 0.0


@dataclass(frozen=True, kw_only=True)
class NetworkMeasured(Detail):
    kind: ClassVar = "network.measured"
    doc: ClassVar = "Ranks of all hosts have measured collectives with each other before the first step."
    hosts: Annotated[tuple[str, ...], "whose ranks took part, by rank"]
    ranks: Annotated[int, "that took part"]
    library: Annotated[str, "NCCL and its version, or gloo"]
    figures: Annotated[tuple[NetworkFigure, ...], "in the order in which they were taken"] = ()
    ends: Annotated[
        tuple[NetworkEnd, ...], "why each collective was measured at no larger size: all, memory, time"
    ] = ()


DETAILS: tuple[type[Detail], ...] = (NetworkMeasured,)
