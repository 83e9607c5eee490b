"""Whether one rank comes last too often for chance: a sequential test, which every rank makes of the same news.

Where no rank is slower than the others, each comes last equally often: in one of ``ranks`` steps, for any
distribution of the noise. A slow one does so in most. Each rank's steps are bets on that (a CUSUM of log likelihoods,
Page 1954); looked at after every step, for as long as the run lasts, it accuses a rank on average less than once in
``FALSE_ALARM_STEPS`` steps in which no rank is slower (Lorden 1971: less than once in e^h steps for each of the ranks).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

#: Steps without a slow rank in which at most one false accusation is expected.
FALSE_ALARM_STEPS = 10_000
#: Share of steps in which a slow rank comes last: of two ranks one that is 10 % slow, where steps vary by 5 %.
SLOW_SHARE = 0.9


@dataclass
class LastArrivals:
    """Evidence against each rank of ``ranks`` (two or more), and the one that is accused."""

    ranks: int
    _evidence: dict[int, float] = field(default_factory=dict, init=False)
    """Of the ranks that have any."""

    @property
    def limit(self) -> float:
        return math.log(self.ranks * FALSE_ALARM_STEPS)

    def add(self, last: int) -> None:
        """``last`` came last to one more step."""
        for_it, against = math.log(SLOW_SHARE * self.ranks), math.log((1 - SLOW_SHARE) / (1 - 1 / self.ranks))
        kept = {rank: now + against for rank, now in self._evidence.items() if rank != last and now + against > 0}
        kept[last] = min(self.limit, self._evidence.get(last, 0.0) + for_it)  # more would only be slower to forget
        self._evidence = kept

    def accused(self) -> int | None:
        """The rank that comes last too often for chance."""
        rank = max(self._evidence, key=lambda one: self._evidence[one], default=None)
        return rank if rank is not None and self._evidence[rank] >= self.limit else None
