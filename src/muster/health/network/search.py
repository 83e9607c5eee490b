"""Which host is slow, from bus bandwidths of pairs: the host is named, not the pair.

A pair is as fast as its slower member (or the path between the two), times noise. All sound hosts have one level; a
slow one is below it by ``detectable`` or more. Rounds measure disjoint pairs at once: first a rotation, so that each
host meets others; then undecided hosts meet hosts that are sound, until the figures decide. A decision needs a
likelihood ratio of ``e^(DECIDED / 2)``; a host between the limits is reported as undecided, never as slow.

The level is the fastest that explains the figures, so slow hosts may be the majority; two sound hosts are needed. With
fewer nothing sound is accused, but the fastest of the slow ones are taken for sound.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import TypeAlias

#: Relative noise of one figure, at least.
LEAST_NOISE = 0.03
#: A smaller loss is not looked for; nor is one below this many times the noise.
LEAST_LOSS, LOSS_IN_NOISE = 0.10, 3.5
#: What a decision needs: twice the logarithm of the likelihood ratio.
DECIDED = 26.0
#: A path between two sound hosts may be slow: its figures cost a hypothesis this much at most (else every slow path
#: would make one of its ends slow).
_PATH = 60.0
#: Per slow host of a hypothesis.
_PENALTY = 4.0
#: Rounds after the rotation.
_MORE = 30
#: What a collective that failed or did not end is taken for, as share of any figure.
_FAILED = 0.001

Pair: TypeAlias = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measurement of a pair. ``busbw`` in GB/s; None: it failed, or did not end. ``spread``: the relative standard
    deviation of its repeats."""

    pair: Pair
    busbw: float | None
    spread: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Assessment:
    """What the figures say so far."""

    level: float
    """Of a pair of sound hosts, GB/s; 0: nothing was measured."""
    noise: float
    detectable: float
    """The share of the level that a host must lack to be named."""
    sound: frozenset[str] = frozenset()
    slow: Mapping[str, float] = field(default_factory=dict)
    """Host -> its loss, as share of the level."""
    paths: Mapping[Pair, float] = field(default_factory=dict)
    """Pairs that are slow although both hosts are sound -> the loss."""
    undecided: frozenset[str] = frozenset()
    open_paths: frozenset[Pair] = frozenset()


# ------------------------------------------------------------ rounds


def rotation(hosts: Sequence[str], number: int) -> list[Pair]:
    """Round ``number`` (from 0) of the tournament in which everyone meets everyone (circle method).

    With an odd count one host rests, another in each round.
    """
    if len(hosts) < 2:
        return []
    seats: list[str | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    turn = number % max(1, len(seats) - 1)
    circle = seats[1:][turn:] + seats[1:][:turn]
    around = [seats[0], *circle]
    half = len(around) // 2
    pairs = zip(around[:half], reversed(around[half:]), strict=True)
    return [(one, other) for one, other in pairs if one is not None and other is not None]


def rotation_rounds(hosts: int) -> int:
    """Rounds before the first look: the binary logarithm; one more for an odd number of hosts, as one rests."""
    return max(1, math.ceil(math.log2(max(2, hosts)))) + hosts % 2


def next_round(hosts: Sequence[str], figures: Sequence[Figure], number: int) -> list[Pair]:
    """Disjoint pairs to measure in round ``number`` (from 0); none: everything is decided, or will not be."""
    first = rotation_rounds(len(hosts))
    if len(hosts) < 2 or number >= first + _MORE or (len(hosts) == 2 and number):
        return []
    able = [host for host in hosts if not _given_up(host, figures)]
    if number < first:
        return rotation(able, number)
    if not any(figure.busbw for figure in figures):
        return []
    seen = assess(hosts, figures)
    open_hosts = [host for host in hosts if host in seen.undecided]
    if not open_hosts and not seen.open_paths:
        return []
    free = [host for host in hosts if host in seen.sound]
    if len(free) < len(open_hosts) or len(hosts) <= 4:
        return rotation(able, number)
    chosen: list[Pair] = []
    for one, other in sorted(seen.open_paths):
        if one in free and other in free and len(free) - 2 >= len(open_hosts):
            chosen.append((one, other))
            free = [host for host in free if host not in (one, other)]
    met: dict[Pair, int] = defaultdict(int)
    for figure in figures:
        met[figure.pair] += 1
        met[figure.pair[::-1]] += 1
    for place, host in enumerate(open_hosts):
        turned = free[place:] + free[:place]  # at equal counts each host prefers another one
        partner = min(turned, key=lambda one, host=host: met[one, host])  # type: ignore[misc]
        free.remove(partner)
        chosen.append((host, partner))
    return chosen


def _given_up(host: str, figures: Sequence[Figure]) -> bool:
    """Two failures and no success: each more would cost a limit's time in the rotation. If that does not decide it (its
    partners failed with others, too), it meets sound hosts later."""
    own = [figure.busbw for figure in figures if host in figure.pair]
    return len(own) >= 2 and not any(own)


# ------------------------------------------------------------ what the figures say


@dataclass(frozen=True)
class _Cell:
    """The figures of one pair: how many, and the mean of their logarithms."""

    count: int
    mean: float


@dataclass(frozen=True)
class _Model:
    """A hypothesis: the level, and the slow hosts with theirs (logarithms)."""

    cost: float
    level: float
    slow: Mapping[str, float]


class _Table:
    def __init__(self, figures: Sequence[Figure]) -> None:
        values: dict[Pair, list[float]] = defaultdict(list)
        top = max((figure.busbw or 0.0 for figure in figures), default=0.0)
        for figure in figures:
            value = max(figure.busbw or 0.0, _FAILED * top)
            values[min(figure.pair, figure.pair[::-1])].append(math.log(value))
        self.cells = {pair: _Cell(len(them), fmean(them)) for pair, them in values.items()}
        self.figures = {pair: tuple(them) for pair, them in values.items()}
        self.of: dict[str, dict[str, _Cell]] = defaultdict(dict)
        for (one, other), cell in self.cells.items():
            self.of[one][other] = self.of[other][one] = cell


def assess(hosts: Sequence[str], figures: Sequence[Figure]) -> Assessment:
    """What is decided. ``hosts``: all, measured or not."""
    noise = max(LEAST_NOISE, median([figure.spread for figure in figures] or [0.0]))
    if not any(figure.busbw for figure in figures):
        return Assessment(level=0.0, noise=noise, detectable=_detectable(noise), undecided=frozenset(hosts))
    table = _Table(figures)
    for _ in range(3):  # noise shows in what a model leaves unexplained: then look again, less sure
        models = _models(hosts, table, noise)
        rest = _unexplained(table, models[0])
        if rest <= 1.5 * noise:
            break
        noise = rest
    return _decide(hosts, table, models, noise)


def _detectable(noise: float) -> float:
    return max(LEAST_LOSS, 1 - math.exp(-LOSS_IN_NOISE * noise))


def _models(hosts: Sequence[str], table: _Table, noise: float) -> list[_Model]:
    """The hypotheses worth comparing, the likeliest first: from several guesses of the level, each made consistent."""
    ordered = sorted(cell.mean for cell in table.cells.values())
    last = len(ordered) - 1
    guesses = {ordered[round(share * last)] for share in (0.25, 0.5, 0.7, 0.85, 1.0)}
    found: dict[frozenset[str], _Model] = {}
    for guess in guesses:
        level = guess
        for _ in range(4):
            slow = _slow_at(hosts, table, level, noise)
            inside = [
                value
                for (one, other), values in table.figures.items()
                if one not in slow and other not in slow
                for value in values
            ]
            if not inside:
                break
            again = median(inside)
            model = _model(table, again, _slow_levels(table, again, slow, noise), noise)
            key = frozenset(slow)
            if key not in found or model.cost < found[key].cost:
                found[key] = model
            if abs(again - level) < 1e-9:
                break
            level = again
    return sorted(found.values(), key=lambda model: model.cost)


def _slow_at(hosts: Sequence[str], table: _Table, level: float, noise: float) -> set[str]:
    """Who is slow if sound hosts have this level: the clearest case first, whose pairs then say nothing of others."""
    slow: set[str] = set()
    gains = {host: _gain(table, host, slow, level, noise) for host in hosts}
    while len(gains) > 2:
        host = max(gains, key=lambda one: gains[one])
        if gains.pop(host) <= _PENALTY:
            break
        slow.add(host)
        gains |= {other: _gain(table, other, slow, level, noise) for other in table.of[host] if other in gains}
    return slow


def _gain(table: _Table, host: str, without: set[str] | frozenset[str], level: float, noise: float) -> float:
    """How much likelier the host's figures are if it is slow, of pairs with others than ``without``. Each pair counts
    at most what a slow path costs."""
    cells = [cell for other, cell in table.of[host].items() if other not in without]
    if not cells:
        return 0.0
    own = _own_level(cells, level, noise)
    return sum(
        _misfit(cell.mean - level, cell.count, noise) - _misfit(cell.mean - own, cell.count, noise) for cell in cells
    )


def _own_level(cells: Sequence[_Cell], level: float, noise: float) -> float:
    """A slow host's: the weighted median, which one slow path more does not move."""
    half, passed = sum(cell.count for cell in cells) / 2, 0
    middle = level
    for cell in sorted(cells, key=lambda cell: -cell.mean):
        middle, passed = cell.mean, passed + cell.count
        if passed >= half:
            break
    near = [cell for cell in cells if abs(cell.mean - middle) < 4 * noise]
    total = sum(cell.count for cell in near)
    mean = sum(cell.mean * cell.count for cell in near) / total if total else middle
    return min(mean, level + math.log(1 - _detectable(noise)))


def _misfit(difference: float, count: int, noise: float) -> float:
    """Of a pair's figures from what they should be. Paths can be slow; no path is faster than its hosts."""
    value = count * (difference / noise) ** 2
    return min(value, _PATH) if difference < 0 else value


def _slow_levels(table: _Table, level: float, slow: set[str], noise: float) -> dict[str, float]:
    levels = {}
    for host in slow:
        here = [cell for other, cell in table.of[host].items() if other not in slow] or [*table.of[host].values()]
        levels[host] = _own_level(here, level, noise) if here else level
    return levels


def _model(table: _Table, level: float, slow: Mapping[str, float], noise: float) -> _Model:
    cost = _PENALTY * len(slow)
    for (one, other), cell in table.cells.items():
        cost += _misfit(cell.mean - min(slow.get(one, level), slow.get(other, level)), cell.count, noise)
    return _Model(cost, level, slow)


def _unexplained(table: _Table, model: _Model) -> float:
    """The noise that the model leaves: the median of what its figures are off, slow paths and all."""
    off = [
        abs(value - min(model.slow.get(one, model.level), model.slow.get(other, model.level)))
        for (one, other), values in table.figures.items()
        for value in values
    ]
    return 1.4826 * median(off) if len(off) > 3 else 0.0


def _decide(hosts: Sequence[str], table: _Table, models: Sequence[_Model], noise: float) -> Assessment:
    best = models[0]
    slow = frozenset(best.slow)
    doubtful: set[str] = set()
    for other in models[1:]:
        if other.cost - best.cost < DECIDED:
            doubtful |= slow ^ frozenset(other.slow)

    def evidence(host: str, without: frozenset[str]) -> float:
        """For being slow. That the level is itself measured is what comparing models is for."""
        return _gain(table, host, without, best.level, noise)

    alone = len(hosts) == 2
    sound = {host for host in hosts if host not in slow | doubtful and not alone and -evidence(host, slow) >= DECIDED}
    named = {
        host: 1 - math.exp(own - best.level)
        for host, own in best.slow.items()
        if host not in doubtful and evidence(host, frozenset(hosts) - sound) >= DECIDED
    }
    paths, open_paths = _paths(table, sound, best.level, noise)
    undecided = frozenset() if alone else frozenset(hosts) - sound - set(named)
    return Assessment(
        level=math.exp(best.level), noise=noise, detectable=_detectable(noise), sound=frozenset(sound), slow=named,
        paths=paths, undecided=undecided, open_paths=frozenset(open_paths),
    )  # fmt: skip


def _paths(table: _Table, sound: set[str], level: float, noise: float) -> tuple[dict[Pair, float], set[Pair]]:
    """(slow paths between sound hosts with their loss, those to be measured again)."""
    paths, again = dict[Pair, float](), set[Pair]()
    for pair, cell in _between(table, sound):
        own = min(cell.mean, level + math.log(1 - _detectable(noise)))
        gain = cell.count * ((cell.mean - level) ** 2 - (cell.mean - own) ** 2) / noise**2
        if gain >= DECIDED and cell.count > 1:
            paths[pair] = 1 - math.exp(cell.mean - level)
        elif gain > DECIDED / 3:
            again.add(pair)
    return paths, again


def _between(table: _Table, sound: set[str]) -> Iterator[tuple[Pair, _Cell]]:
    return ((pair, cell) for pair, cell in table.cells.items() if sound.issuperset(pair))
