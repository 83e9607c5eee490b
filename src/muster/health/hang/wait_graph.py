"""Who waits for whom, from the flight recorders of all ranks.

A rank waits in its oldest unfinished operation, for the members of its group that have not come to it or are still in
an earlier one. A rank that others wait for and that does not wait itself holds the others up; a rank that only waits
is a victim, through however many groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from muster.health.hang.flight_recorder import Group, Operation, Recorder

#: Collectives for which every member gives the same sizes; of the others they may differ from rank to rank.
_EVEN = frozenset(
    {"all_reduce", "allreduce_coalesced", "_all_gather_base", "_reduce_scatter_base", "broadcast", "reduce"}
)


@dataclass(frozen=True, kw_only=True)
class Wait:
    """An operation in which one rank waits for another."""

    operation: Operation
    group: Group
    behind: int | None = None
    """By how many operations of the group the other is behind; None: it may not be counted."""


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Members of one group that called different things at the same number. ``odd``: the fewer, or all of them."""

    group: Group
    number: int
    called: Mapping[int, Operation]
    odd: tuple[int, ...]
    even_split: bool
    """No side has the majority."""


@dataclass
class WaitGraph:
    """``recorders``: of the ranks that have one; ``silent``: ranks without, which may be who is waited for."""

    recorders: Mapping[int, Recorder]
    silent: tuple[int, ...] = ()
    waits: dict[int, dict[int, Wait]] = field(init=False)
    """Rank -> rank that it waits for -> where."""

    def __post_init__(self) -> None:
        self._positions: dict[tuple[int, str], tuple[int, int] | None] = {}
        self._mixed = {one.group for rec in self.recorders.values() for one in rec.operations if one.p2p}
        self.waits = {rank: self._waits_of(rank) for rank in self.recorders}

    def holding_up(self) -> tuple[tuple[int, ...], bool]:
        """The ranks that others wait for and that wait for none.

        True: there are none, and these wait for each other in a ring.
        """
        awaited = {target for waits in self.waits.values() for target in waits}
        last = sorted(rank for rank in awaited if not self.waits.get(rank))
        if last or not awaited:
            return tuple(last), False
        reached = {rank: self._reached_from(rank) for rank in self.waits}
        ring = [rank for rank in sorted(awaited) if rank in reached[rank] and _all_return(rank, reached)]
        return tuple(ring), True

    def awaited_in(self, rank: int) -> Wait | None:
        """Where others wait for it; of several places the one where most do."""
        found = [waits[rank] for waits in self.waits.values() if rank in waits]
        places = Counter((one.operation.group, one.operation.name, one.group.members) for one in found)
        if not places:
            return None
        most = places.most_common(1)[0][0]
        at_most = [one for one in found if (one.operation.group, one.operation.name, one.group.members) == most]
        return max(at_most, key=lambda one: one.behind or 0)

    def mismatch(self) -> Mismatch | None:
        """The first operation that members of one group called differently; None: there is none in the dumps."""
        found: list[tuple[int, Mismatch]] = []
        for group, members in self._groups():
            held = {rank: _collectives(self.recorders[rank], group.name) for rank in members if rank in self.recorders}
            unfinished = [one.number for ops in held.values() for one in ops.values() if not one.done]
            if not unfinished:
                continue
            number = min(unfinished)
            called = {rank: ops[number] for rank, ops in held.items() if number in ops}
            kinds = Counter(_signature(one) for one in called.values())
            if len(kinds) < 2:
                continue
            (most, count), (_, second) = kinds.most_common(2)
            split = count == second
            odd = tuple(rank for rank in sorted(called) if split or _signature(called[rank]) != most)
            since = min(one.created_ns for one in called.values())
            found.append((since, Mismatch(group=group, number=number, called=called, odd=odd, even_split=split)))
        return min(found, key=lambda item: item[0])[1] if found else None

    def _groups(self) -> list[tuple[Group, tuple[int, ...]]]:
        """Every group in which something is unfinished, once, with its members."""
        found: dict[tuple[str, tuple[int, ...]], Group] = {}
        for recorder in self.recorders.values():
            for one in recorder.unfinished:
                group = recorder.groups[one.group]
                found[group.name, self.members(group)] = group
        return [(group, members) for (_, members), group in found.items()]

    def members(self, group: Group) -> tuple[int, ...]:
        """Its ranks; where the dump does not say: all for the default group, else those whose dumps name it."""
        if group.members:
            return group.members
        everybody = tuple(sorted({*self.recorders, *self.silent}))
        if group.description == "default_pg" or group.name in ("", "0"):
            return everybody
        return tuple(rank for rank in everybody if rank in self.silent or group.name in self.recorders[rank].groups)

    def _waits_of(self, rank: int) -> dict[int, Wait]:
        recorder = self.recorders[rank]
        for one in recorder.unfinished:
            group = recorder.groups[one.group]
            waits, ahead = self._p2p(rank, one, group) if one.p2p else self._collective(rank, one, group)
            if waits or ahead:  # others are beyond it: it is stuck in this one itself
                return waits
        return {}

    def _collective(self, rank: int, one: Operation, group: Group) -> tuple[dict[int, Wait], bool]:
        waits: dict[int, Wait] = {}
        silent, ahead = [], False
        by_distance: dict[int, Wait] = {}
        for member in self.members(group):
            position = self._position(member, group.name)
            if member == rank:
                continue
            if position is None:
                silent.append(member)
            elif position[0] < one.number or position[1] < one.number:
                behind = max(1, one.number - position[0])
                if behind not in by_distance:
                    by_distance[behind] = Wait(operation=one, group=group, behind=behind)
                waits[member] = by_distance[behind]
            elif position[0] > one.number:
                ahead = True
        if not waits and not ahead:
            waits = {member: Wait(operation=one, group=group) for member in silent}
        return waits, ahead

    def _position(self, rank: int, name: str) -> tuple[int, int] | None:
        """(the first collective of the group that it has not finished, the last that it has called)."""
        if (rank, name) not in self._positions:  # every other member asks for it
            self._positions[rank, name] = self._find_position(rank, name)
        return self._positions[rank, name]

    def _find_position(self, rank: int, name: str) -> tuple[int, int] | None:
        recorder = self.recorders.get(rank)
        group = recorder.groups.get(name) if recorder is not None else None
        if recorder is None or group is None:
            return None
        called = _collectives(recorder, name)
        unfinished = [one.number for one in called.values() if not one.done]
        counts = name not in self._mixed
        posted = max([*called, *([group.posted] if counts and group.posted is not None else [])], default=None)
        if unfinished:
            return min(unfinished), posted or max(unfinished)
        ended = [group.completed] if counts and group.completed is not None else []
        completed = max([*called, *ended], default=None)
        return None if completed is None else (completed + 1, posted or completed)

    def _p2p(self, rank: int, one: Operation, group: Group) -> tuple[dict[int, Wait], bool]:
        """For a send or receive: the other side has not called its half, or has something older to finish."""
        assert one.peer is not None
        members = self.members(group)
        if one.peer >= len(members) or rank not in members:
            return {}, False
        target, own = members[one.peer], members.index(rank)
        recorder = self.recorders.get(target)
        wait = {target: Wait(operation=one, group=group)}
        if recorder is None:
            return wait, False
        other = "recv" if one.name == "send" else "send"
        halves = [half for half in recorder.unfinished if half.group == group.name and half.peer == own]
        halves = [half for half in halves if half.name == other]
        if len(members) == 2 and halves and halves[0].number != one.number:
            behind = halves[0].number < one.number
            return (wait, False) if behind else ({}, True)
        if halves and halves[0] == recorder.unfinished[0]:
            return {}, False  # both sides are in it
        return wait, False

    def _reached_from(self, rank: int) -> set[int]:
        seen: set[int] = set()
        todo = list(self.waits.get(rank, ()))
        while todo:
            target = todo.pop()
            if target not in seen:
                seen.add(target)
                todo += self.waits.get(target, ())
        return seen


def _all_return(rank: int, reached: Mapping[int, set[int]]) -> bool:
    """Whether each rank reached from ``rank`` waits, in the end, for it: then the cause is within the ring."""
    return all(rank in reached.get(target, ()) for target in reached[rank])


def _collectives(recorder: Recorder, group: str) -> dict[int, Operation]:
    return {one.number: one for one in recorder.operations if one.group == group and not one.p2p}


def _signature(one: Operation) -> tuple[str, str, str]:
    return one.name, one.dtypes, one.sizes if one.name in _EVEN else ""


def describe(one: Operation, group: Group) -> str:
    """``all_reduce number 4 of default_pg (Float 4 -> 4)``."""
    sizes = f" ({shape(one)})" if one.sizes else ""
    return f"{one.name} number {one.number} of {group.words}{sizes}"


def shape(one: Operation) -> str:
    """``Float 4 -> 4``."""
    return f"{one.dtypes.partition(' ')[0]} {one.sizes}".strip()


def ranks_text(ranks: Iterable[int], most: int = 8) -> str:
    """``rank 3``, ``ranks 1, 2 and 7``."""
    shown = [str(rank) for rank in ranks]
    if len(shown) == 1:
        return f"rank {shown[0]}"
    if len(shown) > most:
        return f"ranks {', '.join(shown[:most])} and {len(shown) - most} more"
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"
