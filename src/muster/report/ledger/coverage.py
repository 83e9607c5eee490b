"""How one attempt's steps cover time, and which category each nanosecond of a step belongs to."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from muster.report.ledger.lineage import Step
from muster.report.ledger.reference_rate import Reference

_PARTS = ("productive", "checkpoint", "data_wait", "straggler", "degraded", "redone")


def split(step: Step, reference: Reference | None) -> dict[str, int]:
    """A whole step's nanoseconds by category; they sum to its length."""
    length = step.length_ns
    if not step.final:
        return {"redone": length}
    stall = min(length, max(0, step.detail.stall_ns or 0))
    wait = min(length - stall, max(0, step.detail.data_wait_ns or 0))
    compute = length - stall - wait
    straggler = degraded = 0
    if reference is not None:
        ideal = reference.ideal_ns(step.tokens, step.world_size)
        if step.world_size < reference.world_size:
            degraded = max(0, compute - ideal)
        elif compute > ideal * reference.slow_beyond:
            straggler = compute - ideal
    return {
        "productive": compute - straggler - degraded,
        "checkpoint": stall,
        "data_wait": wait,
        "straggler": straggler,
        "degraded": degraded,
    }


class Coverage:
    """The steps of one attempt, ready for questions about any span of time."""

    def __init__(self, steps: Sequence[Step], reference: Reference | None) -> None:
        self.steps = sorted(steps, key=lambda step: step.end_ns)
        self._reference = reference
        self._begins = [step.begin_ns for step in self.steps]
        self._ends = [step.end_ns for step in self.steps]
        self._runs = _runs(self.steps)
        self._run_ends = [end for _, end, _ in self._runs]
        splits = [split(step, reference) for step in self.steps]
        self._sums = {part: list(accumulate((result.get(part, 0) for result in splits), initial=0)) for part in _PARTS}

    @property
    def first_begin_ns(self) -> int | None:
        return self._begins[0] if self.steps else None

    @property
    def last_end_ns(self) -> int | None:
        return self._ends[-1] if self.steps else None

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
        first = bisect_left(self._begins, begin_ns)
        last = bisect_right(self._ends, end_ns)
        if first < last:
            for part, sums in self._sums.items():
                result[part] += sums[last] - sums[first]
        for position in {first - 1, last}:
            if 0 <= position < len(self.steps) and not first <= position < last:
                self._partly(self.steps[position], begin_ns, end_ns, result)
        return result

    def _partly(self, step: Step, begin_ns: int, end_ns: int, result: dict[str, int]) -> None:
        length = min(end_ns, step.end_ns) - max(begin_ns, step.begin_ns)
        if length <= 0:
            return
        whole = split(step, self._reference)
        rest = "productive" if step.final else "redone"
        scaled = {part: ns * length // step.length_ns for part, ns in whole.items() if part != rest}
        for part, ns in scaled.items():
            result[part] += ns
        result[rest] += length - sum(scaled.values())

    def ideal_ns(self, begin_ns: int, end_ns: int) -> int | None:
        """What the steps in this span would take at the reference rate; None without one."""
        if self._reference is None:
            return None
        total = 0
        position = bisect_right(self._ends, begin_ns)
        while position < len(self.steps) and self._begins[position] < end_ns:
            step = self.steps[position]
            inside = min(end_ns, step.end_ns) - max(begin_ns, step.begin_ns)
            if step.final and step.length_ns:
                total += self._reference.ideal_ns(step.tokens, step.world_size) * inside // step.length_ns
            position += 1
        return total


def _runs(steps: Sequence[Step]) -> list[tuple[int, int, bool]]:
    """(begin, end, final) of steps that follow each other without a gap, all kept or all lost."""
    result: list[tuple[int, int, bool]] = []
    for step in steps:
        if result and result[-1][1] == step.begin_ns and result[-1][2] == step.final:
            result[-1] = (result[-1][0], step.end_ns, step.final)
        elif step.length_ns:
            result.append((step.begin_ns, step.end_ns, step.final))
    return result
