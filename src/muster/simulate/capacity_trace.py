"""Recorded spot capacity: how many hosts one could hold, over time.

Format of skypilot-org/spot-traces (Wu et al., NSDI'24): ``{"metadata": {"gap_seconds": 300}, "data": [16, 15, ...]}``,
a count every so many seconds. ``data`` counts hosts that ran (``preemption_*``) or could be had (``availability_*``).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from muster.core.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Capacity as steps: from ``times_s[i]`` on, ``counts[i]`` hosts."""

    name: str
    times_s: tuple[float, ...]
    counts: tuple[int, ...]
    hours: float

    @property
    def drops_per_day(self) -> float:
        """How often capacity is taken away."""
        drops = sum(after < before for before, after in zip(self.counts, self.counts[1:], strict=False))
        return drops / (self.hours / 24)


def read(path: str | Path) -> Trace:
    """The trace of a file; runs of equal counts are one step.

    Raises:
        UsageError: no such file, or not a trace.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        gap_s, data = float(content["metadata"]["gap_seconds"]), [int(value) for value in content["data"]]
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    # int() of an infinite count overflows; brackets can be deeper than Python goes.
    except (ValueError, OverflowError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(
            f"{path} is not a capacity trace: {type(error).__name__}: {error}",
            hint='wanted: {"metadata": {"gap_seconds": 300}, "data": [16, 15, ...]}',
        ) from error
    if not data or not 0 < gap_s < math.inf or min(data) < 0:
        raise UsageError(f"{path} is not a capacity trace: {len(data)} counts, gap {gap_s:g} s, all counts at least 0")
    changes = [index for index, value in enumerate(data) if index == 0 or value != data[index - 1]]
    return Trace(
        name=Path(path).stem,
        times_s=tuple(index * gap_s for index in changes),
        counts=tuple(data[index] for index in changes),
        hours=len(data) * gap_s / 3600,
    )
