"""Figures out of a ledger: goodput, speed, money, incidents in numbers, checkpoint exposure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from muster.core.event_details.checkpoints import CheckpointCommitted
from muster.report.ledger.categories import CATEGORIES
from muster.report.ledger.file_log import UNKNOWN, Ints
from muster.report.ledger.fold import Ledger
from muster.report.ledger.lineage import Steps
from muster.report.ledger.reference_rate import Reference, fault_tolerance_overhead, typical_steps
from muster.report.ledger.time_axis import Aligned

_HOUR_NS = 3_600_000_000_000


def quantile(values: Sequence[float], share: float) -> float | None:
    """Linear between order statistics (numpy's default); None of nothing."""
    return float(np.quantile(values, share)) if values else None


@dataclass(frozen=True, kw_only=True)
class TokenCounts:
    """Tokens of the final lineage (each step once), and those that were computed in vain."""

    final_lineage: int
    supervised: int
    padding: int
    recomputed: int
    recomputed_steps: int


def tokens(ledger: Ledger) -> TokenCounts:
    steps, final = ledger.lineage.steps, ledger.lineage.steps.final
    return TokenCounts(
        final_lineage=int(steps.tokens[final].sum()),
        supervised=int(steps.counts("supervised_tokens")[final].sum()),
        padding=int(steps.counts("padding_tokens")[final].sum()),
        recomputed=int(steps.tokens[~final].sum()),
        recomputed_steps=int((~final).sum()),
    )


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Medians over clean steps (each attempt's first two left out); None where unknown."""

    tokens_per_s: float | None
    step_s: float | None
    step_s_p95: float | None
    mfu: float | None
    clean_steps: int


def speed(steps: Steps) -> Speed:
    clean = typical_steps(steps)
    if not len(clean):
        return Speed(tokens_per_s=None, step_s=None, step_s_p95=None, mfu=None, clean_steps=0)
    measured = steps.measured_ns[clean]
    mfu = steps.numbers("mfu")[clean]
    return Speed(
        tokens_per_s=float(np.median(steps.tokens[clean] / measured * 1e9)),
        step_s=float(np.median(measured)) / 1e9,
        step_s_p95=float(np.quantile(measured / 1e9, 0.95)),
        mfu=None if np.isnan(mfu).all() else float(np.nanmedian(mfu)),
        clean_steps=len(clean),
    )


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Token goodput G = tokens in the final lineage / (R* x T), on each denominator, and the share of host-time."""

    active: float | None = None
    purchased: float | None = None
    wall: float | None = None
    time: float | None
    fault_tolerance_overhead: float | None
    reference: Reference | None


def goodput(ledger: Ledger) -> Goodput:
    total, reference, purchased = tokens(ledger).final_lineage, ledger.reference, ledger.purchased_ns
    result = Goodput(
        time=ledger.categories_ns["productive"] / purchased if purchased else None,
        fault_tolerance_overhead=fault_tolerance_overhead(ledger.events, ledger.lineage.steps),
        reference=reference,
    )
    if reference is None or ledger.held_span is None:
        return result
    rank_ns = sum(lane.held_ns * lane.gpus for lane in ledger.lanes.values())
    held_ns = sum(end - begin for begin, end in ledger.held_spans)
    bought = rank_ns * reference.tokens_per_rank_s
    wall_ns = ledger.held_span[1] - ledger.held_span[0] + ledger.queue_ns

    def share(capacity: float) -> float | None:
        return total / (capacity / 1e9) if capacity else None

    return replace(
        result,
        active=share(min(held_ns * reference.tokens_per_s, bought)),  # no more was active than was bought
        purchased=share(bought),
        wall=share(wall_ns * reference.tokens_per_s),
    )


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Dollars; None wherever a host's price is unknown, since a part is not the whole."""

    usd: float | None = None
    usd_known: float | None = None
    hosts_without_price: Sequence[str]
    usd_per_hour_now: float | None = None
    usd_per_step: float | None = None
    usd_per_million_tokens: float | None = None
    usd_per_goodput_point: float | None = None
    usd_lost: float | None = None


def cost(ledger: Ledger) -> Cost:
    unknown = sorted(host for host, lane in ledger.lanes.items() if lane.usd_per_hour is None)
    if not ledger.lanes:
        return Cost(hosts_without_price=unknown)
    known = sum(lane.held_ns / _HOUR_NS * (lane.usd_per_hour or 0.0) for lane in ledger.lanes.values())
    if unknown:
        return Cost(hosts_without_price=unknown, usd_known=known if len(unknown) < len(ledger.lanes) else None)
    final, total_tokens = len(ledger.lineage.steps.in_lineage), tokens(ledger).final_lineage
    rate = goodput(ledger).purchased
    return Cost(
        usd=known,
        usd_known=known,
        hosts_without_price=unknown,
        usd_per_hour_now=sum(
            lane.usd_per_hour or 0.0
            for lane in ledger.lanes.values()
            if ledger.finished is None and lane.held and lane.held[-1][1] == ledger.end_ns
        ),
        usd_per_step=known / final if final else None,
        usd_per_million_tokens=known / total_tokens * 1e6 if total_tokens else None,
        # The same tokens at a goodput one point higher take rate / (rate + 0.01) of the time, so of the money.
        usd_per_goodput_point=known * 0.01 / (rate + 0.01) if rate is not None and rate > 0 else None,
        usd_lost=known - (category_usd(ledger)["productive"] or 0.0),
    )


def usd_per_hour(ledger: Ledger) -> float | None:
    """Of the hosts that the newest attempt ran on; None: one's price is unknown."""
    hosts = ledger.lineage.attempts[-1].hosts if ledger.lineage.attempts else ()
    prices = [ledger.lanes[host].usd_per_hour for host in hosts if host in ledger.lanes]
    known = [price for price in prices if price is not None]
    return sum(known) if known and len(known) == len(hosts) else None


def category_usd(ledger: Ledger) -> dict[str, float | None]:
    """Category -> dollars; null where a host that spent time there has no known price."""
    result: dict[str, float | None] = {}
    for name in CATEGORIES:
        total: float | None = 0.0
        for host, spent in ledger.host_ns.items():
            price = ledger.lanes[host].usd_per_hour
            if not spent.get(name):
                continue
            total = None if price is None or total is None else total + spent[name] / _HOUR_NS * price
        result[name] = total
    return result


@dataclass(frozen=True, kw_only=True)
class CategoryTime:
    host_s: float
    host_ns: int
    share: float | None
    """Of the purchased time."""
    usd: float | None
    meaning: str


def categories(ledger: Ledger) -> dict[str, CategoryTime]:
    """By name; all of them, zeros included."""
    purchased = ledger.purchased_ns
    usd = category_usd(ledger)
    return {
        name: CategoryTime(
            host_s=ns / 1e9,
            host_ns=ns,
            share=ns / purchased if purchased else None,
            usd=usd[name],
            meaning=CATEGORIES[name],
        )
        for name, ns in ledger.categories_ns.items()
    }


@dataclass(frozen=True, kw_only=True)
class Ages:
    """How old a tier's newest restorable state was while training ran, in seconds."""

    versions: int
    newest_step: int
    mean_age_s: float | None
    greatest_age_s: float
    last_age_s: float


def exposure(ledger: Ledger) -> dict[str, Ages]:
    """Tier -> how old its newest restorable state was while training ran: mean, greatest and last age in seconds.

    A state is as old as the end of its step. Integrated from the tier's first version on; tiers that never
    held one do not appear.
    """
    until = ledger.lineage.last_end_ns(ledger.end_ns)
    return {tier: _ages(held, until) for tier, held in versions(ledger.aligned, ledger.lineage.steps).items()}


def _ages(held: Versions, until: int) -> Ages:
    begin, end, newest = held.at_ns, np.append(held.at_ns[1:], until), held.newest_ns
    lasted = end > begin
    begin, end, taken = begin[lasted], end[lasted], newest[lasted]
    area = float(((end - begin) * (((begin - taken) + (end - taken)) / 2)).sum())
    length = until - int(held.at_ns[0])
    return Ages(
        versions=len(held.at_ns),
        newest_step=int(held.step.max()),
        mean_age_s=area / length / 1e9 if length > 0 else None,
        greatest_age_s=int((end - taken).max(initial=0)) / 1e9,
        last_age_s=max(0, until - int(newest[-1])) / 1e9,
    )


@dataclass(frozen=True, kw_only=True)
class KindFigures:
    """Count, L and detection latency (p50, p95, seconds) of incidents of one kind that stopped training."""

    count: int
    recovered: int
    lost_s_p50: float | None
    lost_s_p95: float | None
    detect_s_p50: float | None
    detect_s_p95: float | None
    host_s: float


def incident_kinds(ledger: Ledger) -> dict[str, KindFigures]:
    """Kind -> figures; ``all``: every kind together."""
    groups = defaultdict(list)
    for incident in ledger.incident_records.values():
        if incident.stopped_training:
            groups[incident.kind].append(incident)
            groups["all"].append(incident)
    result = {}
    for kind, members in sorted(groups.items()):
        lost = [incident.lost_ns / 1e9 for incident in members if incident.lost_ns is not None]
        noticed = [(incident.detected_ns - incident.fault_ns) / 1e9 for incident in members]
        result[kind] = KindFigures(
            count=len(members),
            recovered=len(lost),
            lost_s_p50=quantile(lost, 0.5),
            lost_s_p95=quantile(lost, 0.95),
            detect_s_p50=quantile(noticed, 0.5),
            detect_s_p95=quantile(noticed, 0.95),
            host_s=sum(sum(incident.host_ns.values()) for incident in members) / 1e9,
        )
    return result


@dataclass(frozen=True, eq=False)
class Versions:
    """Of one tier, in the order in which they became restorable: from ``at_ns`` on ``step`` can be restored; its state
    is as old as the end of that step, ``taken_ns``."""

    at_ns: Ints
    taken_ns: Ints
    step: Ints

    @property
    def newest_ns(self) -> Ints:  # from each ``at_ns`` on
        return np.maximum.accumulate(self.taken_ns)


def versions(aligned: Aligned, steps: Steps) -> dict[str, Versions]:
    """By tier; tiers that never held one do not appear."""
    committed: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for timed in aligned.events:
        if timed.event.kind == CheckpointCommitted.kind and timed.event.step is not None:
            committed[timed.event.read(CheckpointCommitted).tier].append((timed.t_ns, timed.event.step))
    held = {tier: np.array(rows, np.int64) for tier, rows in committed.items()}
    in_time = np.argsort(aligned.step_ns, kind="stable")
    for tier, name in (("memory", "snapshot_step"), ("peer", "peer_step")):  # a snapshot has no event of its own
        said = aligned.steps.ints(name)[in_time]
        known = np.flatnonzero(said != UNKNOWN)
        new = known[np.flatnonzero(np.diff(said[known], prepend=UNKNOWN))]
        rows = np.stack((aligned.step_ns[in_time[new]], said[new]), axis=1)
        held[tier] = np.concatenate((held[tier], rows)) if tier in held else rows
    order = np.argsort(steps.step, kind="stable")
    numbers, ends = steps.step[order], steps.end_ns[order]
    return {tier: _sorted(rows[:, 0], rows[:, 1], numbers, ends) for tier, rows in held.items() if len(rows)}


def _sorted(at_ns: Ints, step: Ints, numbers: Ints, ends: Ints) -> Versions:
    """``ends``: of the steps ``numbers``, which rise; the last one of a step that was taken twice is meant."""
    taken = at_ns.copy()
    if len(numbers):
        found = np.maximum(0, np.searchsorted(numbers, step, "right") - 1)
        taken = np.where(numbers[found] == step, np.minimum(ends[found], at_ns), at_ns)
    order = np.lexsort((step, taken, at_ns))
    return Versions(at_ns[order], taken[order], step[order])
