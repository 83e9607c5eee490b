"""Curves for the page: compact columns over time, null where nothing is known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from statistics import fmean
from typing import TypeAlias

import numpy as np

from muster.core.event_details.hosts import HostUsage
from muster.core.event_details.training import Eval
from muster.core.typed_json import JsonObject
from muster.report.ledger.categories import CATEGORIES
from muster.report.ledger.figures import Versions, versions
from muster.report.ledger.file_log import PREFERENCES, UNKNOWN, known
from muster.report.ledger.fold import Ledger
from muster.report.ledger.host_timeline import HostLane
from muster.report.ledger.lineage import Steps

Columns: TypeAlias = dict[str, list[float | None]]

#: Points of a curve; a screen shows fewer.
_POINTS = 2000
_SAMPLES = 400

#: States that lanes show: steps are one state there, the ledger splits them further.
STATES = ("train", *(name for name in CATEGORIES if name != "productive"))
#: Points of a curve.
_USAGE_POINTS = 400
Values = Sequence[HostUsage]


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
    steps = ledger.lineage.steps
    chosen = _thinned(steps)
    numbers, final, loss = steps.step[chosen].tolist(), steps.final[chosen], steps.numbers("loss")[chosen]
    with np.errstate(divide="ignore", invalid="ignore"):
        rates = np.where(steps.measured_ns > 0, steps.tokens / steps.measured_ns * 1e9, np.nan)[chosen]
    memory = steps.counts("memory_bytes", UNKNOWN)[chosen].tolist()
    columns: Columns = {
        "t": [_at(ledger, end_ns) for end_ns in steps.end_ns[chosen].tolist()],
        "step": numbers,
        "seen": [_seen(ledger, step) if kept else None for step, kept in zip(numbers, final, strict=True)],
        "loss": known(np.where(final, loss, np.nan)),
        "lost_loss": known(np.where(final, np.nan, loss)),
        "tokens_per_s": known(rates.round(2)),
        "mfu": known(steps.numbers("mfu")[chosen]),
        "memory_bytes": [None if used == UNKNOWN else used for used in memory],
        **{
            name: known(steps.numbers(name)[chosen])
            for name in ("grad_norm", "expert_load_max", "expert_idle_share", *PREFERENCES)
        },
    }
    for at in (np.flatnonzero(np.diff(steps.attempt[chosen])) + 1)[::-1].tolist():
        for name, column in columns.items():
            column.insert(at, _at(ledger, int(steps.begin_ns[chosen[at]])) if name == "t" else None)
    return columns


def _seen(ledger: Ledger, step: int) -> int | None:
    """Tokens of the final lineage up to the end of ``step``; None where it is none of its steps."""
    return 0 if step == 0 else ledger.lineage.steps.tokens_seen(step)


def _thinned(steps: Steps) -> list[int]:
    """At most about ``_POINTS`` steps: of each bucket the two with the least and the greatest loss."""
    if len(steps) <= _POINTS:
        return list(range(len(steps)))
    width = -(-len(steps) // (_POINTS // 2))
    loss = np.nan_to_num(steps.numbers("loss"))
    chosen: list[int] = []
    for begin in range(0, len(steps), width):
        bucket = loss[begin : begin + width]
        edge = 0 if begin == 0 else len(bucket) - 1
        chosen += sorted({begin + int(at) for at in (bucket.argmin(), bucket.argmax(), edge)})
    return chosen


def _evals(ledger: Ledger) -> Columns:
    figures = ("loss", "execution_accuracy", *PREFERENCES)
    result: Columns = {name: [] for name in ("t", "step", "seen", *figures)}
    for timed in ledger.events:
        if timed.event.kind == Eval.kind:
            detail = timed.event.read(Eval)
            result["t"].append(_at(ledger, timed.t_ns))
            result["step"].append(timed.event.step)
            result["seen"].append(None if timed.event.step is None else _seen(ledger, timed.event.step))
            for name in figures:
                result[name].append(getattr(detail, name))
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
    reference, held_spans = ledger.reference, ledger.held_spans
    steps = ledger.lineage.steps
    final = np.flatnonzero(steps.final)
    final = final[np.argsort(steps.end_ns[final], kind="stable")]
    ends, sums = steps.end_ns[final], np.cumsum(steps.tokens[final])

    def tokens(t: int) -> float:
        position = int(np.searchsorted(ends, t, "right"))
        whole = float(sums[position - 1]) if position else 0.0
        if position < len(final) and (begin := int(steps.begin_ns[final[position]])) < t:
            whole += float(steps.tokens[final[position]]) * (t - begin) / int(steps.length_ns[final[position]])
        return whole

    def capacity(t: int) -> tuple[float, float]:
        rank_s = sum(_held_until(lane.held, t) * lane.gpus for lane in ledger.lanes.values()) / 1e9
        bought = rank_s * reference.tokens_per_rank_s
        return min(_held_until(held_spans, t) * reference.tokens_per_s / 1e9, bought), bought

    def share(done: float, of: float) -> float | None:
        return round(done / of, 5) if of > 0 else None

    result: Columns = {"t": [], "active": [], "purchased": [], "lately": []}
    so_far = [(t, tokens(t), *capacity(t)) for t in _moments(ledger)]
    for position, (t, done, active, purchased) in enumerate(so_far[1:], 1):
        _, done_before, active_before, _ = so_far[max(0, position - _SAMPLES // 20)]
        result["t"].append(_at(ledger, t))
        result["active"].append(share(done, active))
        result["purchased"].append(share(done, purchased))
        result["lately"].append(share(done - done_before, active - active_before))
    return result


def _held_until(held: Sequence[tuple[int, int]], t: int) -> int:
    return sum(max(0, min(end, t) - begin) for begin, end in held)


def _ages(ledger: Ledger) -> dict[str, dict[str, list[float]]]:
    """Tier -> a saw-tooth: the age of its newest restorable state, from its first version to the last step."""
    until = ledger.lineage.last_end_ns(ledger.end_ns)
    result = versions(ledger.aligned, ledger.lineage.steps)
    return {tier: _sawtooth(ledger, held, until) for tier, held in result.items()}


def _sawtooth(ledger: Ledger, held: Versions, until: int) -> dict[str, list[float]]:
    """Each tooth rises to the next version and falls to that one's age; of many teeth the tallest are kept."""
    newest = held.newest_ns
    before, after = held.at_ns - np.append(newest[0], newest[:-1]), held.at_ns - newest
    stride = -(-len(newest) // (_POINTS // 2))
    kept = [0, *(n + int(before[n : n + stride].argmax()) for n in range(1, len(newest), stride))]
    result: dict[str, list[float]] = {"t": [], "age": []}
    for at in kept:
        for age in (before[at], after[at]) if at else (after[at],):
            result["t"].append(_at(ledger, int(held.at_ns[at])))
            result["age"].append(round(int(age) / 1e9, 3))
    if until > held.at_ns[-1]:
        result["t"].append(_at(ledger, until))
        result["age"].append(round((until - int(newest[-1])) / 1e9, 3))
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


def _network(found: HostUsage) -> float | None:
    if found.received_bytes is None or found.sent_bytes is None:
        return None
    return (found.received_bytes + found.sent_bytes) / max(1, found.steps)


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Iterable[float | None]) -> float | None:
    known = _known(values)
    return round(fmean(known), 6) if known else None


def _most(values: Iterable[float | None]) -> float | None:
    return max(_known(values), default=None)


_COLUMNS: dict[str, Callable[[Values], float | None]] = {
    "busy": lambda some: _mean(one.busy for one in some),
    "busy_most": lambda some: _most(one.busy for one in some),
    "cpu_s": lambda some: _mean(one.cpu_ns / max(1, one.steps) / 1e9 for one in some),
    "memory_bytes": lambda some: _mean(one.memory_bytes for one in some),
    "memory_most_bytes": lambda some: _most(one.memory_bytes for one in some),
    "network_bytes": lambda some: _mean(map(_network, some)),
    "network_most_bytes": lambda some: _most(map(_network, some)),
    "gpu_busy": lambda some: _mean(share for one in some for share in one.gpu_busy),
    "gpu_busy_least": lambda some: min((share for one in some for share in one.gpu_busy), default=None),
    "gpu_memory_bytes": lambda some: _mean(size for one in some for size in one.gpu_memory_bytes),
    "gpu_memory_most_bytes": lambda some: _most(size for one in some for size in one.gpu_memory_bytes),
}


def usage_columns(ledger: Ledger, at: Callable[[int], float]) -> dict[str, list[float | None]]:
    """Columns over ``t``, in seconds since the run began (``at``); a null row where an attempt ends.

    ``cpu_s`` and ``network_bytes`` are of one host in one step.
    """
    usages = [timed for timed in ledger.events if timed.event.kind == HostUsage.kind]
    result: dict[str, list[float | None]] = {name: [] for name in ("t", *_COLUMNS)}
    if not usages:
        return result
    width = max(1, (usages[-1].t_ns - usages[0].t_ns) // _USAGE_POINTS)
    parts: dict[tuple[int, int], list[tuple[int, HostUsage]]] = {}
    for timed in usages:
        key = timed.event.attempt, (timed.t_ns - usages[0].t_ns) // width
        parts.setdefault(key, []).append((timed.t_ns, timed.event.read(HostUsage)))
    last = 0
    for (attempt, _), part in sorted(parts.items()):
        if last not in (0, attempt):
            for name, column in result.items():
                column.append(at(part[0][0]) if name == "t" else None)
        last = attempt
        result["t"].append(at(part[-1][0]))
        for name, value in _COLUMNS.items():
            result[name].append(value([found for _, found in part]))
    return result
