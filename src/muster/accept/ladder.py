"""A ladder of levels that cost more and more: it stops at the first that fails, and never passes its budget.

A level begins only where its longest time at its price, and the clearing up after it, still fit; what waits looks at
the meter each time. Clearing up follows in every case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from muster.core.errors import MusterError
from muster.core.protocols import Clock

CLEARING_S = 1800.0
"""What exists is paid for so long beyond the moment at which it is given up: removing machines takes minutes."""
LOOK_S = 5.0
PASSED, FAILED, SKIPPED, BUDGET = "passed", "failed", "skipped", "budget"
Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Unit:
    """What a budget is counted in."""

    key: str
    """In a record: ``usd``."""
    form: str

    def __call__(self, amount: float) -> str:
        return self.form.format(amount)


DOLLARS = Unit(key="usd", form="${:.2f}")
HOST_HOURS = Unit(key="host_hours", form="{:.2f} host-hours")
"""Where no price is known: the budget is kept all the same."""


class OverBudget(MusterError):
    """The next level, or the next look, might cost more than is left."""


class NotHere(Exception):
    """A level that does not apply to this place; the reason."""


@dataclass(kw_only=True)
class Meter:
    """Spent since the beginning, at most: the price of what exists, by this clock."""

    budget: float
    clock: Clock
    unit: Unit = DOLLARS
    spent: float = 0.0
    per_hour: float = 0.0
    _since_ns: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        self._since_ns = self.clock.monotonic_ns()

    def read(self) -> float:
        """Spent until now."""
        now_ns = self.clock.monotonic_ns()
        self.spent += self.per_hour * (now_ns - self._since_ns) / 3.6e12
        self._since_ns = now_ns
        return self.spent

    def runs_at(self, per_hour: float) -> None:
        """From now on that much exists."""
        self.read()
        self.per_hour = per_hour

    def allow(self, what: str, *, per_hour: float, for_s: float) -> None:
        """Raises OverBudget: so much for so long, and the clearing up, might be too dear."""
        worst = self.read() + per_hour * (for_s + CLEARING_S) / 3600.0
        if worst > self.budget:
            raise OverBudget(
                f"{what} may come to {self.unit(worst)} in all ({self.unit(per_hour)} an hour, {for_s / 60:.0f} "
                f"minutes and {CLEARING_S / 60:.0f} to clear up), and the budget is {self.unit(self.budget)}",
                hint="a larger --budget, or a cheaper machine",
            )

    def wait(
        self, condition: Callable[[], object], awaited: str, limit_s: float, why: Callable[[], str] = lambda: ""
    ) -> None:
        """Raises MusterError: not in time; with what ``why`` says then. OverBudget: the budget is used up first."""
        until_ns = self.clock.monotonic_ns() + int(limit_s * 1e9)
        while not condition():
            self.allow(f"waiting for {awaited}", per_hour=self.per_hour, for_s=LOOK_S)
            if self.clock.monotonic_ns() > until_ns:
                reason = why()
                raise MusterError(f"no {awaited} within {limit_s:.0f} s" + (f": {reason}" if reason else ""))
            self.clock.sleep(LOOK_S)


@dataclass(frozen=True, kw_only=True)
class Level:
    name: str
    title: str
    act: Callable[[Meter], str]
    """Returns what was seen, in a sentence. Raises MusterError, NotHere."""
    per_hour: float = 0.0
    """Of what exists while it is climbed."""
    limit_s: float = 600.0


@dataclass(frozen=True, kw_only=True)
class Climbed:
    """One level's outcome."""

    name: str
    title: str
    outcome: str
    said: str
    seconds: float
    spent: float
    """By its end, in all."""


def climb(levels: Sequence[Level], clear_up: Level, meter: Meter, tell: Tell) -> list[Climbed]:
    """Every level in order, until one fails; then ``clear_up`` in any case."""
    climbed: list[Climbed] = []
    try:
        for level in levels:
            tell(f"{level.name}: {level.title}")
            climbed.append(_climb(level, meter))
            tell(f"{level.name}: {climbed[-1].outcome}: {climbed[-1].said}")
            if climbed[-1].outcome not in (PASSED, SKIPPED):
                break
    finally:
        tell(f"{clear_up.name}: {clear_up.title}")
        climbed.append(_climb(clear_up, meter, in_any_case=True))
        meter.runs_at(0.0)
        tell(f"{clear_up.name}: {climbed[-1].outcome}: {climbed[-1].said}")
    return climbed


def _climb(level: Level, meter: Meter, *, in_any_case: bool = False) -> Climbed:
    began_ns = meter.clock.monotonic_ns()
    try:
        if not in_any_case:
            meter.allow(level.title, per_hour=max(level.per_hour, meter.per_hour), for_s=level.limit_s)
            meter.runs_at(max(level.per_hour, meter.per_hour))
        outcome, said = PASSED, level.act(meter)
    except NotHere as reason:
        outcome, said = SKIPPED, str(reason)
    except OverBudget as error:
        outcome, said = BUDGET, str(error)
    except MusterError as error:
        outcome, said = FAILED, str(error)
    seconds = (meter.clock.monotonic_ns() - began_ns) / 1e9
    return Climbed(name=level.name, title=level.title, outcome=outcome, said=said, seconds=seconds, spent=meter.read())
