"""Figures out of a ledger: goodput, speed, money, incidents in numbers, checkpoint exposure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from muster.report.ledger.categories import CATEGORIES
from muster.report.ledger.fold import Ledger
from muster.report.ledger.reference_rate import fault_tolerance_overhead, typical_steps
from muster.report.ledger.restorable_versions import Version, versions

_PRICED = ("usd_per_hour_now", "usd_per_step", "usd_per_million_tokens", "usd_per_goodput_point", "usd_lost")
_HOUR_NS = 3_600_000_000_000


def seconds(ns: int | float | None) -> float | None:
    return None if ns is None else ns / 1e9


def quantile(values: Sequence[float], share: float) -> float | None:
    """Linear between order statistics (type 7, as numpy's default); None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    position = (len(ordered) - 1) * share
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def tokens(ledger: Ledger) -> dict[str, Any]:
    """Tokens of the final lineage (each step once), and those that were computed in vain."""
    final = ledger.lineage.final
    lost = [step for step in ledger.lineage.steps if not step.final]
    return {
        "final_lineage": sum(step.tokens for step in final),
        "supervised": sum(int(step.detail.get("supervised_tokens", 0)) for step in final),
        "padding": sum(int(step.detail.get("padding_tokens", 0)) for step in final),
        "recomputed": sum(step.tokens for step in lost),
        "recomputed_steps": len(lost),
    }


def speed(ledger: Ledger) -> dict[str, Any]:
    """Medians over clean steps (each attempt's first two left out): tokens/s, step time, MFU; null where unknown."""
    clean = typical_steps(ledger.lineage.steps)
    mfu = [float(step.detail["mfu"]) for step in clean if step.detail.get("mfu") is not None]
    rates = [step.tokens / step.measured_ns * 1e9 for step in clean]
    return {
        "tokens_per_s": median(rates) if rates else None,
        "step_s": median(step.measured_ns for step in clean) / 1e9 if clean else None,
        "step_s_p95": quantile([step.measured_ns / 1e9 for step in clean], 0.95),
        "mfu": median(mfu) if mfu else None,
        "clean_steps": len(clean),
    }


def goodput(ledger: Ledger) -> dict[str, Any]:
    """Token goodput G = tokens in the final lineage / (R* x T), on each denominator, and the share of host-time."""
    total = tokens(ledger)["final_lineage"]
    reference = ledger.reference
    purchased = ledger.purchased_ns
    result: dict[str, Any] = {
        **dict.fromkeys(("active", "purchased", "wall")),
        "time": ledger.categories_ns["productive"] / purchased if purchased else None,
        "fault_tolerance_overhead": fault_tolerance_overhead(ledger.events, ledger.lineage.steps),
        "reference": None,
    }
    if reference is None:
        return result
    result["reference"] = {name: value for name, value in asdict(reference).items() if name != "slow_beyond"}
    if ledger.held_span is not None:
        active_ns = ledger.held_span[1] - ledger.held_span[0]
        rank_ns = sum(lane.held_ns * lane.gpus for lane in ledger.lanes.values())
        wall_ns = active_ns + ledger.queue_ns
        for name, capacity in (
            ("active", active_ns * reference.tokens_per_s),
            ("purchased", rank_ns * reference.tokens_per_rank_s),
            ("wall", wall_ns * reference.tokens_per_s),
        ):
            result[name] = total / (capacity / 1e9) if capacity else None
    return result


def cost(ledger: Ledger) -> dict[str, Any]:
    """Dollars; null wherever a host's price is unknown, since a part is not the whole."""
    unknown = sorted(host for host, lane in ledger.lanes.items() if lane.usd_per_hour is None)
    result: dict[str, Any] = {
        **dict.fromkeys(("usd", "usd_known")),
        "hosts_without_price": unknown,
        **dict.fromkeys(_PRICED),
    }
    if not ledger.lanes:
        return result
    known = sum(lane.held_ns / _HOUR_NS * (lane.usd_per_hour or 0.0) for lane in ledger.lanes.values())
    if unknown:
        result["usd_known"] = known if len(unknown) < len(ledger.lanes) else None
        return result
    final = ledger.lineage.final
    total_tokens = sum(step.tokens for step in final)
    by_category = category_usd(ledger)
    result["usd"] = result["usd_known"] = known
    result["usd_per_hour_now"] = sum(
        lane.usd_per_hour or 0.0
        for lane in ledger.lanes.values()
        if ledger.finished is None and lane.held and lane.held[-1][1] == ledger.end_ns
    )
    result["usd_per_step"] = known / len(final) if final else None
    result["usd_per_million_tokens"] = known / total_tokens * 1e6 if total_tokens else None
    result["usd_lost"] = known - (by_category["productive"] or 0.0)
    rate = goodput(ledger)["purchased"]
    if rate is not None and rate > 0:
        # The same tokens at a goodput one point higher take rate / (rate + 0.01) of the time, so of the money.
        result["usd_per_goodput_point"] = known * 0.01 / (rate + 0.01)
    return result


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


def categories(ledger: Ledger) -> dict[str, dict[str, Any]]:
    """Category -> host-seconds, share of the purchased time, dollars, meaning; all of them, zeros included."""
    purchased = ledger.purchased_ns
    usd = category_usd(ledger)
    return {
        name: {
            "host_s": ns / 1e9,
            "host_ns": ns,
            "share": ns / purchased if purchased else None,
            "usd": usd[name],
            "meaning": CATEGORIES[name],
        }
        for name, ns in ledger.categories_ns.items()
    }


def exposure(ledger: Ledger) -> dict[str, dict[str, Any]]:
    """Tier -> how old its newest restorable state was while training ran: mean, greatest and last age in seconds.

    A state is as old as the end of its step. Integrated from the tier's first version on; tiers that never
    held one do not appear.
    """
    until = max((step.end_ns for step in ledger.lineage.steps), default=ledger.end_ns)
    return {tier: _ages(held, until) for tier, held in versions(ledger.events, ledger.lineage.steps).items()}


def _ages(held: Sequence[Version], until: int) -> dict[str, Any]:
    area = 0.0
    greatest = 0
    newest = held[0].taken_ns
    spans = [*(version.at_ns for version in held[1:]), until]
    for version, end in zip(held, spans, strict=True):
        begin, newest = version.at_ns, max(newest, version.taken_ns)
        if end > begin:
            area += (end - begin) * ((begin - newest) + (end - newest)) / 2
            greatest = max(greatest, end - newest)
    length = until - held[0].at_ns
    return {
        "versions": len(held),
        "newest_step": max(version.step for version in held),
        "mean_age_s": area / length / 1e9 if length > 0 else None,
        "greatest_age_s": greatest / 1e9,
        "last_age_s": max(0, until - newest) / 1e9,
    }


def incident_kinds(ledger: Ledger) -> dict[str, dict[str, Any]]:
    """Kind -> count, L and detection latency (p50, p95, seconds) of the incidents that stopped training."""
    groups = defaultdict(list)
    for incident in ledger.incident_records.values():
        if incident.stopped_training:
            groups[incident.kind].append(incident)
            groups["all"].append(incident)
    result = {}
    for kind, members in sorted(groups.items()):
        lost = [incident.lost_ns / 1e9 for incident in members if incident.lost_ns is not None]
        noticed = [(incident.detected_ns - incident.fault_ns) / 1e9 for incident in members]
        result[kind] = {
            "count": len(members),
            "recovered": len(lost),
            "lost_s_p50": quantile(lost, 0.5),
            "lost_s_p95": quantile(lost, 0.95),
            "detect_s_p50": quantile(noticed, 0.5),
            "detect_s_p95": quantile(noticed, 0.95),
            "host_s": sum(sum(incident.host_ns.values()) for incident in members) / 1e9,
        }
    return result
