"""What hosts used, over time: over all hosts the mean, and the one that is furthest from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

from muster.core.event_details.hosts import HostUsage
from muster.report.ledger.fold import Ledger

#: Points of a curve.
_POINTS = 400

Values = Sequence[HostUsage]


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
    width = max(1, (usages[-1].t_ns - usages[0].t_ns) // _POINTS)
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
