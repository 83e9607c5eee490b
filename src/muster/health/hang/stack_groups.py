"""Ranks that do the same, by the stacks of their main threads: of a thousand ranks a few groups are left to read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from muster.core.typed_json import Record
from muster.health.hang.evidence import RankEvidence
from muster.health.hang.stacks import Frame, main_thread

#: Most groups reported, the largest first: where every rank differs a reader cannot use all.
MOST_GROUPS = 64


@dataclass(frozen=True, kw_only=True)
class StackGroup(Record):
    """``frames``: the innermost first. Without frames nothing was seen of these ranks."""

    ranks: tuple[int, ...]
    hosts: tuple[str, ...] = ()
    process: str = ""
    """What the kernel says of these processes, in words; empty where they run or wait as usual."""
    frames: tuple[Frame, ...] = ()
    holds_gil: bool = False
    """Python's lock, while it does not run: code in C that waits."""

    @property
    def title(self) -> str:
        """One line: which ranks, on how many hosts, in which state."""
        count = len(self.ranks)
        where = self.hosts[0] if len(self.hosts) == 1 else f"{len(self.hosts)} hosts"
        of = f"rank {self.ranks[0]}" if count == 1 else f"ranks {ranges(self.ranks)} ({count})"
        state = f": {self.process}" if self.process else ""
        lock = ", holds Python's lock" if self.holds_gil else ""
        return f"{of} on {where}{state}{lock}" if self.hosts else f"{of}{state}{lock}"


def grouped(ranks: Iterable[RankEvidence]) -> tuple[StackGroup, ...]:
    """By state and identical stack of the main thread, line by line; the largest group first, then by rank."""
    found: dict[tuple[str, tuple[Frame, ...], bool], list[RankEvidence]] = {}
    for one in ranks:
        main = main_thread(one.threads or ())
        process = _unusual(one)
        frames = main.frames if main is not None else ()
        found.setdefault((process, frames, main is not None and main.blocked_in_c), []).append(one)
    groups = [
        StackGroup(
            ranks=tuple(sorted(one.rank for one in members)),
            hosts=tuple(sorted({one.host for one in members if one.host})),
            process=process,
            frames=frames,
            holds_gil=holds_gil,
        )
        for (process, frames, holds_gil), members in found.items()
    ]
    return tuple(sorted(groups, key=lambda group: (-len(group.ranks), group.ranks)))


def _unusual(one: RankEvidence) -> str:
    """Not whether it runs or sleeps: that differs from one moment to the next among ranks that do the same."""
    return one.process.words if one.process is not None and one.process.state not in ("R", "S", "I") else ""


def ranges(numbers: Iterable[int]) -> str:
    """``0-3, 7``: rising numbers, neighbours as one range."""
    runs: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
