"""What a Workload's condition ``QuotaReserved`` means: does the run wait, or can its queue never take it? Pure.

Kueue tries each pod set on each flavour of the queue and names, sorted, what was wrong with each. From 0.17.6, 0.18.2
and 0.19.0 on it tries hosts on the supervisors' flavour too, so that every run that waits for GPUs has a phrase that
fits no waiting run: only what every flavour refuses for good is for good (pkg/scheduler/flavorassigner).
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

_POD_SET = re.compile(r"(?:^|; )(couldn't assign flavors to pod set \S+: )")
_NEXT_PHRASE = re.compile(r", (?=insufficient |untolerated taint |flavor |resource )")
_FLAVOR = re.compile(r"\bflavor ([a-z0-9.-]*[a-z0-9])")
_TOO_LARGE = "> maximum capacity"
_NOT_OFFERED = "> maximum capacity (0)"
_OTHER_NODES = ("untolerated taint", "doesn't match node affinity")


class QuotaVerdict(NamedTuple):
    """``message``: Kueue's own, without the flavours that decide nothing."""

    kind: Literal["waits", "too large", "not covered", "other nodes"]
    message: str


def judge(message: str) -> QuotaVerdict:
    """The first pod set that can never be admitted decides; without one the run waits."""
    head, *rest = _POD_SET.split(message)
    pod_sets = list(zip(rest[::2], rest[1::2], strict=True)) if rest else [("", head)]
    waiting = []
    for opening, said in pod_sets:
        phrases = _NEXT_PHRASE.split(said)
        if uncovered := [phrase for phrase in phrases if "unavailable in ClusterQueue" in phrase]:
            return QuotaVerdict("not covered", opening + ", ".join(uncovered))
        never = {flavor for phrase in phrases if _is_for_good(phrase) and (flavor := _flavor(phrase))}
        if possible := [phrase for phrase in phrases if _flavor(phrase) not in never]:
            waiting.append(opening + ", ".join(possible))
            continue
        large = {_flavor(phrase) for phrase in phrases if _TOO_LARGE in phrase}
        offering = large - {_flavor(phrase) for phrase in phrases if _NOT_OFFERED in phrase}
        kept = ", ".join(phrase for phrase in phrases if _flavor(phrase) in (offering or large or never))
        return QuotaVerdict("too large" if large else "other nodes", opening + kept)
    return QuotaVerdict("waits", "; ".join(waiting))


def _is_for_good(phrase: str) -> bool:
    return _TOO_LARGE in phrase or any(words in phrase for words in _OTHER_NODES)


def _flavor(phrase: str) -> str | None:
    found = _FLAVOR.search(phrase)
    return found[1] if found else None
