"""How one attempt's steps cover time, and which category each nanosecond of a step belongs to."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

import numpy as np

from muster.report.ledger.file_log import Flags, Ints
from muster.report.ledger.lineage import Steps
from muster.report.ledger.reference_rate import Reference

_PARTS = ("productive", "checkpoint", "data_wait", "straggler", "degraded", "redone")


def split(steps: Steps, reference: Reference | None) -> dict[str, Ints]:
    """The nanoseconds of whole steps by category; they sum to each one's length."""
    length = steps.length_ns
    stall = np.minimum(length, np.maximum(0, steps.counts("stall_ns")))
    wait = np.minimum(length - stall, np.maximum(0, steps.counts("data_wait_ns")))
    compute = length - stall - wait
    straggler = degraded = np.zeros_like(length)
    if reference is not None:
        ideal = reference.ideal_ns(steps.tokens, steps.world_size)
        smaller = steps.world_size < reference.world_size
        degraded = np.where(smaller, np.maximum(0, compute - ideal), 0)
        straggler = np.where(~smaller & (compute > ideal * reference.slow_beyond), compute - ideal, 0)
    parts = {
        "productive": compute - straggler - degraded,
        "checkpoint": stall,
        "data_wait": wait,
        "straggler": straggler,
        "degraded": degraded,
    }
    for ns in parts.values():
        ns[~steps.final] = 0
    return {**parts, "redone": np.where(steps.final, 0, length)}


class Coverage:
    """The steps of one attempt, ready for questions about any span of time."""

    def __init__(self, steps: Steps, chosen: Ints, splits: dict[str, Ints], reference: Reference | None) -> None:
        # ``chosen``: positions of the attempt's steps. ``splits``: of all of ``steps``.
        self._begins, self._ends = steps.begin_ns[chosen], steps.end_ns[chosen]
        self._final = steps.final[chosen]
        self.steps, self.steps_kept = len(chosen), int(self._final.sum())
        self._runs = _runs(self._begins, self._ends, self._final)
        self._run_ends = [end for _, end, _ in self._runs]
        self._sums = {part: np.cumsum(np.append(0, splits[part][chosen])) for part in _PARTS}
        self._ideal = None if reference is None else reference.ideal_ns(steps.tokens, steps.world_size)[chosen]

    @property
    def first_begin_ns(self) -> int | None:
        return int(self._begins[0]) if len(self._begins) else None

    @property
    def last_end_ns(self) -> int | None:
        return int(self._ends[-1]) if len(self._ends) else None

    def pieces(self, begin_ns: int, end_ns: int) -> Iterator[tuple[int, int, bool | None]]:
        """Cut the span into (begin, end, final): True and False for steps kept and lost, None for gaps."""
        at = begin_ns
        for run_begin, run_end, final in self._runs[bisect_right(self._run_ends, begin_ns) :]:
            if run_begin >= end_ns:
                break
            lower, upper = max(at, run_begin), min(end_ns, run_end)
            if lower > at:
                yield at, lower, None
            if upper > lower:
                yield lower, upper, final
            at = max(at, upper)
        if at < end_ns:
            yield at, end_ns, None

    def spent(self, begin_ns: int, end_ns: int) -> dict[str, int]:
        """A span that steps cover without a gap, by category; sums to its length."""
        result = dict.fromkeys(_PARTS, 0)
        first = int(np.searchsorted(self._begins, begin_ns))
        last = int(np.searchsorted(self._ends, end_ns, "right"))
        if first < last:
            for part, sums in self._sums.items():
                result[part] += int(sums[last] - sums[first])
        for position in {first - 1, last}:
            if 0 <= position < len(self._begins) and not first <= position < last:
                self._partly(position, begin_ns, end_ns, result)
        return result

    def _partly(self, position: int, begin_ns: int, end_ns: int, result: dict[str, int]) -> None:
        begin, end = int(self._begins[position]), int(self._ends[position])
        length = min(end_ns, end) - max(begin_ns, begin)
        if length <= 0:
            return
        rest = "productive" if self._final[position] else "redone"
        whole = {part: int(sums[position + 1] - sums[position]) for part, sums in self._sums.items()}
        scaled = {part: ns * length // (end - begin) for part, ns in whole.items() if part != rest}
        for part, ns in scaled.items():
            result[part] += ns
        result[rest] += length - sum(scaled.values())

    def ideal_ns(self, begin_ns: int, end_ns: int) -> int | None:
        """What the steps in this span would take at the reference rate; None without one."""
        if self._ideal is None:
            return None
        total = 0
        position = int(np.searchsorted(self._ends, begin_ns, "right"))
        while position < len(self._begins) and self._begins[position] < end_ns:
            begin, end = int(self._begins[position]), int(self._ends[position])
            if self._final[position] and end > begin:
                inside = min(end_ns, end) - max(begin_ns, begin)
                total += int(self._ideal[position]) * inside // (end - begin)
            position += 1
        return total


def _runs(begins: Ints, ends: Ints, final: Flags) -> list[tuple[int, int, bool]]:
    """(begin, end, final) of steps that follow each other without a gap, all kept or all lost."""
    length = np.flatnonzero(ends > begins)
    begins, ends, final = begins[length], ends[length], final[length]
    cuts = np.flatnonzero((ends[:-1] != begins[1:]) | (final[:-1] != final[1:])) + 1
    pieces = zip((0, *cuts.tolist()), (*cuts.tolist(), len(begins)), strict=True) if len(begins) else ()
    return [(int(begins[first]), int(ends[last - 1]), bool(final[first])) for first, last in pieces]
