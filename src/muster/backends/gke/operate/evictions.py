"""What Kueue says when it keeps a run waiting or evicts it, in words that say what to do and what is billed. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

from muster.core.typed_json import JsonObject, at, child, children, text, whole
from muster.core.types import JobState

REMOVED_SOON = "no pod of it runs, and its nodes stop billing about 10 minutes after the last one"
STILL_ENDING = "its pods are being ended, and its nodes bill"
CONTINUES = "it continues from its checkpoint when it is admitted again"
_TIMER = (
    "waitForPodsReady in ConfigMap kueue-system/kueue-manager-config did it: muster up sets it for its own clusters"
)
_POD_SET = re.compile(r"(?:^|; )(couldn't assign flavors to pod set \S+: )")
_NEXT_PHRASE = re.compile(r", (?=insufficient |untolerated taint |flavor |resource )")
_FLAVOR = re.compile(r"\bflavor ([a-z0-9.-]*[a-z0-9])")
_TOO_LARGE = "> maximum capacity"
_NOT_OFFERED = "> maximum capacity (0)"
_OTHER_NODES = ("untolerated taint", "doesn't match node affinity")


class Explanation(NamedTuple):
    """The state in words that every back end shares, one sentence, and where there is one, the next step."""

    state: JobState
    sentence: str
    hint: str | None = None


class _Reason(NamedTuple):
    sentence: str
    hint: str | None = None


EVICTED: Mapping[str, _Reason] = {
    "Preempted": _Reason("preempted by another workload of the cluster; queued again"),
    "PodsReadyTimeout": _Reason("evicted because not all pods were ready in time; queued again", _TIMER),
    "AdmissionCheck": _Reason("evicted by an admission check; queued again", "another zone or mode may have capacity"),
    "ClusterQueueStopped": _Reason(
        "its cluster queue was stopped; waiting", "set spec.stopPolicy of the ClusterQueue to None"
    ),
    "LocalQueueStopped": _Reason("its queue was stopped; waiting", "set spec.stopPolicy of the LocalQueue to None"),
    "NodeFailures": _Reason(
        "evicted because Kueue found no other node for one that was lost; queued again",
        "Kueue's gates TASFailedNodeReplacement and ...FailFast do it; muster up sets them on its clusters",
    ),
    "FlavorMigration": _Reason("moved to nodes of another kind by Kueue; queued again"),
    "EvictedOnManagerCluster": _Reason("evicted by the cluster that manages this one; queued again"),
}
"""Reason of Kueue's condition ``Evicted`` -> sentence, hint."""
DEACTIVATED: Mapping[str, _Reason] = {
    "AdmissionCheck": _Reason(
        "its admission check was rejected: DWS has no capacity, or the nodes' time is over",
        "muster submit again: the run continues from its checkpoint; another zone or mode may have capacity",
    ),
    "RequeuingLimitExceeded": _Reason("its pods were not ready in time too often", _TIMER),
    "MaximumExecutionTimeExceeded": _Reason(
        "it has run as long as its label kueue.x-k8s.io/max-exec-time-seconds allows", "muster submit again"
    ),
}
"""What follows ``DeactivatedDueTo`` in that reason."""


def deactivated_or_evicted(workload: JsonObject | None) -> Explanation | None:
    """Whether Kueue has taken the run's nodes back, for good or for now; None: it has not."""
    evicted = _condition(workload, "Evicted")
    reason, said = text(evicted, "reason"), text(evicted, "message").strip().rstrip(".")
    money = STILL_ENDING if _condition(workload, "QuotaReserved").get("status") == "True" else REMOVED_SOON
    if at(workload, "spec", "active") is False or (reason.startswith("Deactivated") and evicted["status"] == "True"):
        why = DEACTIVATED.get(reason.removeprefix("DeactivatedDueTo"))
        sentence = "Kueue has deactivated the run and never starts it again"
        parts = [f"{sentence}: {why.sentence}" if why else sentence, said, money if evicted else ""]
        hint = why.hint if why else None
        default = "muster submit again, or set spec.active of the Workload to true"
        return Explanation(JobState.STOPPED, "; ".join(part for part in parts if part), hint or default)
    if evicted.get("status") != "True":
        return None
    known = EVICTED.get(reason) or _Reason(f"evicted by Kueue ({reason}); queued again")
    now = _condition(workload, "QuotaReserved")
    waits = text(now, "message").strip().rstrip(".") if now.get("status") == "False" else ""
    parts = [f"{known.sentence}: {said or 'no reason given'}{asked_again(workload)}", money, CONTINUES]
    if waits and waits != said and text(now, "reason") != reason:
        parts.insert(1, f"it waits for Kueue quota: {judge(waits).message}")
    return Explanation(JobState.WAITING, "; ".join(parts), known.hint)


def asked_again(workload: JsonObject | None) -> str:
    """When Kueue lets the run try again, where it says so."""
    state = child(workload, "status", "requeueState")
    if not text(state, "requeueAt"):
        return ""
    return f"; Kueue tries again at {state['requeueAt']} (try {whole(state, 'count') + 1})"


def _condition(thing: JsonObject | None, kind: str) -> JsonObject:
    return next((row for row in reversed(children(thing, "status", "conditions")) if text(row, "type") == kind), {})


class QuotaVerdict(NamedTuple):
    """``message``: Kueue's own, without the flavours that decide nothing."""

    kind: Literal["waits", "too large", "not covered", "other nodes"]
    message: str


def judge(message: str) -> QuotaVerdict:
    """What a Workload's condition ``QuotaReserved`` means: does the run wait, or can its queue never take it?

    The first pod set that can never be admitted decides; without one the run waits. From 0.17.6, 0.18.2 and 0.19.0 on
    Kueue tries hosts on the supervisors' flavour too, so that each run that waits for GPUs has a phrase that fits no
    waiting run: only what every flavour refuses for good is for good (pkg/scheduler/flavorassigner).
    """
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
