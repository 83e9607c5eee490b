"""The bus bandwidth to expect, from ``catalog/health/busbw.yaml``, and what was measured here before."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from statistics import median

from muster.catalog.rows import table, typed
from muster.core.typed_json import Count, Name, Record
from muster.health.network.figures import SizeResult
from muster.health.verdicts import Finding, Verdict

#: Fewer former figures make no history; a lack of more than this share of their median is noted.
_FEWEST, _LACK = 3, 0.10
#: A figure of a smaller message than this share of the expected one's says little.
_LEAST_SHARE = 0.4


@dataclass(frozen=True, kw_only=True)
class ExpectedBandwidth:
    """One family's."""

    name: str
    nodes: int
    collective: str
    size_bytes: int
    gb_s: float
    good_gb_s: float
    bad_gb_s: float
    source: str


@dataclass(frozen=True, kw_only=True)
class Past(Record):
    """One line of a network's history: its level when it was measured."""

    family: str
    """Of machines; empty: not known."""
    hosts: Count
    library: str
    """NCCL's version, or gloo."""
    collective: Name
    size_bytes: Count
    busbw: float
    date: str


def expected_bandwidth(family: str) -> ExpectedBandwidth | None:
    """None: no figure is known for this family."""
    return _rows().get(family)


@cache
def _rows() -> dict[str, ExpectedBandwidth]:
    found = table("busbw.yaml", "health")
    return typed(
        ExpectedBandwidth,
        {name: {**row, "source": f"{row['source']}, {found['date']}"} for name, row in found["busbw"].items()},
    )


def judge_level(result: SizeResult, *, hosts: int, family: str) -> Finding:
    """A network's level against its family's published figure.

    A figure of another collective, or of messages too small to be compared, is shown without a verdict.
    """
    row = expected_bandwidth(family)
    size = f"{result.size_bytes / 2**20:g} MiB"
    text = f"{result.collective} of {size} between {hosts} hosts: bus bandwidth {result.busbw:,.3g} GB/s"
    value = f"{result.busbw:.4g} GB/s"
    comparable = row is not None and row.collective == result.collective and hosts >= row.nodes
    if row is None or not comparable or result.size_bytes < _LEAST_SHARE * row.size_bytes:
        why = "no expected value" + (f" for {family}" if family else "")
        if row is not None:
            why += f" for {result.collective} of {size}"
        return Finding(check="net.busbw", verdict=Verdict.HEALTHY, message=f"{text}; {why}", value=value)
    verdict, word = Verdict.HEALTHY, "as published"
    if result.busbw < row.bad_gb_s:
        verdict, word = Verdict.DRAIN, "less than 70 % of what was published: is the fabric's plugin loaded?"
    elif result.busbw < row.good_gb_s:
        verdict, word = Verdict.NOTE, "slow"
    return Finding(
        check="net.busbw", verdict=verdict, message=f"{text}, {word}", value=value, source=row.source,
        expected=f">= {row.good_gb_s:g} GB/s for {family}",
        command="NCCL_DEBUG=INFO shows which network is used" if verdict is Verdict.DRAIN else "",
    )  # fmt: skip


def unjudged(findings: Iterable[Finding], *, family: str) -> str:
    """What is to be said where the family's figure is known and no level was held against it; else empty."""
    held = any(one.check == "net.busbw" and one.expected for one in findings)
    return "" if held or expected_bandwidth(family) is None else "not judged, so not passed"


def judge_history(now: Past, past: Iterable[Past]) -> Finding | None:
    """Against former figures of the same family, count of hosts, library, collective and size; None: too few."""

    def alike(one: Past) -> tuple[str, int, str, str, int]:
        return one.family, one.hosts, one.library, one.collective, one.size_bytes

    former = [one for one in past if alike(one) == alike(now)]
    if len(former) < _FEWEST:
        return None
    usual = median(one.busbw for one in former)
    lack = 1 - now.busbw / usual if usual > 0 else 0.0
    text = f"{now.collective} between {now.hosts} hosts was {usual:,.3g} GB/s here ({len(former)} times)"
    text += f" and is {lack:.0%} slower" if lack > _LACK else ", as now"
    return Finding(
        check="net.history",
        verdict=Verdict.NOTE if lack > _LACK else Verdict.HEALTHY,
        message=text,
        value=f"{now.busbw:.4g} GB/s",
        expected=f"> {usual * (1 - _LACK):.4g} GB/s",
        source=f"measured here since {min(one.date for one in former)}",
    )
