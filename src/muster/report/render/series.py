"""Curves for the page: compact columns over time, null where nothing is known."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TypeAlias

from muster.core.event_details.training import Eval
from muster.core.typed_json import JsonObject
from muster.report.ledger.categories import CATEGORIES
from muster.report.ledger.fold import Ledger
from muster.report.ledger.host_timeline import HostLane
from muster.report.ledger.lineage import Step
from muster.report.ledger.restorable_versions import Version, versions

Columns: TypeAlias = dict[str, list[float | None]]

#: Points of a curve; a screen shows fewer.
_POINTS = 2000
_SAMPLES = 400

#: States that lanes show: steps are one state there, the ledger splits them further.
STATES = ("train", *(name for name in CATEGORIES if name != "productive"))


def series(ledger: Ledger) -> JsonObject:
    """Columns for every chart; times in seconds since the run began."""
    return {
        "states": list(STATES),
        "incidents": list(ledger.incident_records),
        "lanes": [_lane(ledger, lane) for lane in ledger.lanes.values()],
        "steps": _steps(ledger),
        "evals": _evals(ledger),
        "goodput": _goodput(ledger),
        "ages": _ages(ledger),
        "cost": _cost(ledger),
    }


def _at(ledger: Ledger, t_ns: int) -> float:
    digits = 3 if ledger.end_ns - ledger.begin_ns < 3_600_000_000_000 else 2
    return round((t_ns - ledger.begin_ns) / 1e9, digits)


def _lane(ledger: Ledger, lane: HostLane) -> JsonObject:
    known = {name: position for position, name in enumerate(ledger.incident_records)}
    return {
        "host": lane.host,
        "segments": [
            [
                _at(ledger, segment.begin_ns),
                _at(ledger, segment.end_ns),
                STATES.index(segment.state) if segment.state in STATES else STATES.index("unattributed"),
                known.get(segment.incident_id or "", -1),
            ]
            for segment in lane.segments
        ],
    }


def _steps(ledger: Ledger) -> Columns:
    """One point per step in time order; a null row where an attempt ends, so that no line crosses an outage."""
    columns: dict[str, Callable[[Step], float | None]] = {
        "t": lambda step: _at(ledger, step.end_ns),
        "step": lambda step: step.step,
        "loss": lambda step: step.detail.loss if step.final else None,
        "lost_loss": lambda step: None if step.final else step.detail.loss,
        "tokens_per_s": lambda step: round(step.tokens / step.measured_ns * 1e9, 2) if step.measured_ns else None,
        "mfu": lambda step: step.detail.mfu,
        "memory_bytes": lambda step: step.detail.memory_bytes,
        "grad_norm": lambda step: step.detail.grad_norm,
    }
    chosen = _thinned(ledger.lineage.steps)
    result: Columns = {name: [] for name in columns}
    for position, step in enumerate(chosen):
        if position and step.attempt != chosen[position - 1].attempt:
            for name, column in result.items():
                column.append(_at(ledger, step.begin_ns) if name == "t" else None)
        for name, value in columns.items():
            result[name].append(value(step))
    return result


def _thinned(steps: Sequence[Step]) -> list[Step]:
    """At most about ``_POINTS`` steps: of each bucket the two with the least and the greatest loss."""
    if len(steps) <= _POINTS:
        return list(steps)
    width = -(-len(steps) // (_POINTS // 2))
    result: list[Step] = []
    for begin in range(0, len(steps), width):
        bucket = steps[begin : begin + width]
        ends = {
            id(step): step
            for step in (min(bucket, key=_loss), max(bucket, key=_loss), bucket[0] if begin == 0 else bucket[-1])
        }
        result += sorted(ends.values(), key=lambda step: step.end_ns)
    return result


def _loss(step: Step) -> float:
    return step.detail.loss or 0.0


def _evals(ledger: Ledger) -> Columns:
    result: Columns = {"t": [], "step": [], "loss": [], "execution_accuracy": []}
    for timed in ledger.events:
        if timed.event.kind == Eval.kind:
            detail = timed.event.read(Eval)
            result["t"].append(_at(ledger, timed.t_ns))
            result["step"].append(timed.event.step)
            result["loss"].append(detail.loss)
            result["execution_accuracy"].append(detail.execution_accuracy)
    return result


def _moments(begin: int, end: int) -> list[int]:
    return [begin + (end - begin) * n // _SAMPLES for n in range(1, _SAMPLES + 1)]


def _goodput(ledger: Ledger) -> Columns | None:
    """Token goodput since the first purchase, on active and purchased hosts, and over the last twentieth."""
    span = ledger.held_span
    if span is None or ledger.reference is None or span[1] <= span[0]:
        return None
    begin, end = span
    reference = ledger.reference
    final = sorted((step for step in ledger.lineage.steps if step.final), key=lambda step: step.end_ns)
    ends = [step.end_ns for step in final]
    sums = list(accumulate((step.tokens for step in final), initial=0))

    def tokens(t: int) -> float:
        position = bisect_right(ends, t)
        whole = float(sums[position])
        if position < len(final) and final[position].begin_ns < t:
            step = final[position]
            whole += step.tokens * (t - step.begin_ns) / step.length_ns
        return whole

    window = max(1, (end - begin) // 20)
    result: Columns = {"t": [], "active": [], "purchased": [], "lately": []}
    for t in _moments(begin, end):
        rank_ns = sum(_held_until(lane, t) * lane.gpus for lane in ledger.lanes.values())
        since = max(begin, t - window)
        result["t"].append(_at(ledger, t))
        result["active"].append(round(tokens(t) / (reference.tokens_per_s * (t - begin) / 1e9), 5))
        result["purchased"].append(
            round(tokens(t) / (reference.tokens_per_rank_s * rank_ns / 1e9), 5) if rank_ns else None
        )
        lately = (tokens(t) - tokens(since)) / (reference.tokens_per_s * (t - since) / 1e9)
        result["lately"].append(round(lately, 5))
    return result


def _held_until(lane: HostLane, t: int) -> int:
    return sum(max(0, min(end, t) - begin) for begin, end in lane.held)


def _ages(ledger: Ledger) -> dict[str, dict[str, list[float]]]:
    """Tier -> a saw-tooth: the age of its newest restorable state, from its first version to the last step."""
    until = max((step.end_ns for step in ledger.lineage.steps), default=ledger.end_ns)
    result = versions(ledger.events, ledger.lineage.steps)
    return {tier: _sawtooth(ledger, held, until) for tier, held in result.items()}


def _sawtooth(ledger: Ledger, held: list[Version], until: int) -> dict[str, list[float]]:
    """Each tooth rises to the next version and falls to that one's age; of many teeth the tallest are kept."""
    teeth: list[tuple[int, int, int]] = []
    newest = held[0].taken_ns
    for version in held:
        at = version.at_ns
        before, newest = at - newest, max(newest, version.taken_ns)
        teeth.append((at, before, at - newest))
    stride = -(-len(teeth) // (_POINTS // 2))
    kept = [teeth[0], *(max(teeth[n : n + stride], key=lambda tooth: tooth[1]) for n in range(1, len(teeth), stride))]
    result: dict[str, list[float]] = {"t": [], "age": []}
    for position, (at, before, after) in enumerate(kept):
        for age in (before, after) if position else (after,):
            result["t"].append(_at(ledger, at))
            result["age"].append(round(age / 1e9, 3))
    if until > held[-1].at_ns:
        result["t"].append(_at(ledger, until))
        result["age"].append(round((until - newest) / 1e9, 3))
    return result


def _cost(ledger: Ledger) -> Columns | None:
    """Dollars spent so far. None: a price is unknown."""
    span = ledger.held_span
    lanes = list(ledger.lanes.values())
    if span is None or span[1] <= span[0] or any(lane.usd_per_hour is None for lane in lanes):
        return None
    result: Columns = {"t": [], "usd": []}
    for t in [span[0], *_moments(*span)]:
        result["t"].append(_at(ledger, t))
        usd = sum(_held_until(lane, t) / 3.6e12 * (lane.usd_per_hour or 0.0) for lane in lanes)
        result["usd"].append(round(usd, 6))
    return result
