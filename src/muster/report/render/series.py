"""Curves for the page: compact columns over time, null where nothing is known."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import TypeAlias

from muster.core.event_details.training import Eval
from muster.core.typed_json import JsonObject
from muster.report.ledger.categories import CATEGORIES
from muster.report.ledger.fold import Ledger
from muster.report.ledger.host_timeline import HostLane
from muster.report.ledger.lineage import Step
from muster.report.ledger.restorable_versions import Version, versions
from muster.report.render.usage import usage_columns

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
        "pauses": [[_at(ledger, before[1]), _at(ledger, after[0])] for before, after in pairwise(ledger.held_spans)],
        "lanes": [_lane(ledger, lane) for lane in ledger.lanes.values()],
        "steps": _steps(ledger),
        "usage": usage_columns(ledger, lambda t_ns: _at(ledger, t_ns)),
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
    """One point per step in time order; a null row where an attempt ends, so that no line crosses an outage.

    ``seen``: tokens of the final lineage up to there; null for a step that was lost.
    """
    seen = _seen(ledger)
    columns: dict[str, Callable[[Step], float | None]] = {
        "t": lambda step: _at(ledger, step.end_ns),
        "step": lambda step: step.step,
        "seen": lambda step: seen[step.step] if step.final else None,
        "loss": lambda step: step.detail.loss if step.final else None,
        "lost_loss": lambda step: None if step.final else step.detail.loss,
        "tokens_per_s": lambda step: round(step.tokens / step.measured_ns * 1e9, 2) if step.measured_ns else None,
        "mfu": lambda step: step.detail.mfu,
        "memory_bytes": lambda step: step.detail.memory_bytes,
        "grad_norm": lambda step: step.detail.grad_norm,
        "expert_load_max": lambda step: step.detail.expert_load_max,
        "expert_idle_share": lambda step: step.detail.expert_idle_share,
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


def _seen(ledger: Ledger) -> dict[int, int]:
    """Tokens of the final lineage up to the end of each of its steps."""
    final = ledger.lineage.final
    return dict(zip((step.step for step in final), accumulate(step.tokens for step in final), strict=True))


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
    seen = {0: 0} | _seen(ledger)
    result: Columns = {"t": [], "step": [], "seen": [], "loss": [], "execution_accuracy": []}
    for timed in ledger.events:
        if timed.event.kind == Eval.kind:
            detail = timed.event.read(Eval)
            result["t"].append(_at(ledger, timed.t_ns))
            result["step"].append(timed.event.step)
            result["seen"].append(None if timed.event.step is None else seen.get(timed.event.step))
            result["loss"].append(detail.loss)
            result["execution_accuracy"].append(detail.execution_accuracy)
    return result


def _moments(ledger: Ledger) -> list[int]:
    """The first purchase, then moments at equal distances of the time in which anything was held."""
    spans = ledger.held_spans
    total = sum(end - begin for begin, end in spans)
    result, before, wanted = [spans[0][0]], 0, 1
    for begin, end in spans:
        while wanted <= _SAMPLES and (at := total * wanted // _SAMPLES) <= before + end - begin:
            result.append(begin + at - before)
            wanted += 1
        before += end - begin
    return result


def _goodput(ledger: Ledger) -> Columns | None:
    """Token goodput since the first purchase, on active and purchased hosts (the definitions of the figures), and of
    the active ones over the last twentieth of the time in which anything was held."""
    span = ledger.held_span
    if span is None or ledger.reference is None or span[1] <= span[0]:
        return None
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

    def capacity(t: int) -> tuple[float, float]:
        rank_s = sum(_held_until(lane.held, t) * lane.gpus for lane in ledger.lanes.values()) / 1e9
        bought = rank_s * reference.tokens_per_rank_s
        return min(_held_until(ledger.held_spans, t) * reference.tokens_per_s / 1e9, bought), bought

    def share(done: float, of: float) -> float | None:
        return round(done / of, 5) if of > 0 else None

    result: Columns = {"t": [], "active": [], "purchased": [], "lately": []}
    moments = _moments(ledger)
    for position, t in enumerate(moments[1:], 1):
        active, purchased = capacity(t)
        since = moments[max(0, position - _SAMPLES // 20)]
        result["t"].append(_at(ledger, t))
        result["active"].append(share(tokens(t), active))
        result["purchased"].append(share(tokens(t), purchased))
        result["lately"].append(share(tokens(t) - tokens(since), active - capacity(since)[0]))
    return result


def _held_until(held: Sequence[tuple[int, int]], t: int) -> int:
    return sum(max(0, min(end, t) - begin) for begin, end in held)


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
    for t in _moments(ledger):
        result["t"].append(_at(ledger, t))
        usd = sum(_held_until(lane.held, t) / 3.6e12 * (lane.usd_per_hour or 0.0) for lane in lanes)
        result["usd"].append(round(usd, 6))
    return result
