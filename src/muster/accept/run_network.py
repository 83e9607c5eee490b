"""The network between the hosts of an acceptance's run, by what its ranks measured before the first step."""

from __future__ import annotations

from collections.abc import Sequence

from muster.core.errors import MusterError
from muster.core.event_details.attempts import AttemptStarted
from muster.core.event_details.hosts import AgentStarted
from muster.core.event_details.incidents import IncidentDetected
from muster.core.event_details.network import MEMORY, TIME, NetworkMeasured
from muster.core.event_details.run import RunFinished
from muster.core.events import Event
from muster.health.network.expected import judge_level, unjudged
from muster.health.network.figures import SizeResult
from muster.health.network.judge import judge_values

JUDGED = "all_gather"
"""The collective whose figures are published."""


def found(events: Sequence[Event], *, hosts: int) -> NetworkMeasured | None:
    """What was measured between so many hosts; None: not yet.

    Raises:
        MusterError: it will not be any more: the attempt that measures began with fewer hosts, or was lost, or trains.
    """
    measured = [event.read(NetworkMeasured) for event in events if event.kind == NetworkMeasured.kind]
    if measured:
        if len(set(measured[0].hosts)) < hosts:
            raise MusterError(f"only {', '.join(measured[0].hosts)} measured, and {hosts} hosts were to")
        return measured[0]
    why = "; ".join(event.read(IncidentDetected).evidence for event in events if event.kind == IncidentDetected.kind)
    why = f": {why}" if why else ""
    for event in events:
        if event.kind == AttemptStarted.kind:
            names = [*event.read(AttemptStarted).hosts]
            if event.attempt > 1:
                raise MusterError(f"attempt 1 was lost before its network was measured{why}{_silent(events, hosts)}")
            if len(names) < hosts:
                raise MusterError(f"it began with {', '.join(names)} alone{why}{_silent(events, hosts)}")
        if event.kind == RunFinished.kind:
            raise MusterError(f"the run ended before its network was measured: {event.read(RunFinished).reason}{why}")
        if event.kind == "step":
            raise MusterError("it trains, and no rank has measured the network: is another version on the hosts?")
    return None


def _silent(events: Sequence[Event], hosts: int) -> str:
    heard = dict.fromkeys(event.host for event in events if event.kind == AgentStarted.kind)
    return f" (heard of: {', '.join(heard) or 'no host'}, of {hosts})" if len(heard) < hosts else ""


def waiting(events: Sequence[Event], *, hosts: int, status: str) -> str:
    """Who is waited for."""
    return (status + _silent(events, hosts)).strip()


def judged(measured: NetworkMeasured, *, family: str) -> str:
    """What was measured, in a sentence.

    Raises:
        MusterError: slower than the family's published figure allows, wrong results, no figure at all, or none that can
            be held against the published one; with the figures.
    """
    figures = [
        SizeResult(
            collective=one.collective, size_bytes=one.size_bytes, ranks=measured.ranks, seconds=one.seconds,
            spread=one.spread, wrong=one.wrong,
        )
        for one in measured.figures
    ]  # fmt: skip
    level = max((one for one in figures if one.collective == JUDGED), key=lambda one: one.size_bytes, default=None)
    if level is None or level.busbw <= 0:
        raise MusterError(f"{' and '.join(measured.hosts)} measured no {JUDGED}")
    findings = [
        judge_level(level, hosts=len(set(measured.hosts)), family=family),
        *judge_values({}, sum(one.wrong for one in figures)),
    ]
    more = "".join(
        f", {one.collective} {one.busbw:.3g}" for one in _largest(figures) if one.collective != level.collective
    )
    said = "; ".join(f"{one.message}{f' ({one.expected}; {one.source})' if one.source else ''}" for one in findings)
    said = f"{' and '.join(measured.hosts)}, {measured.library}, {measured.ranks} ranks: {said}{more}"
    if why := _ended(measured):
        said += f"; {why}"
    if why := unjudged(findings, family=family):
        raise MusterError(f"{said}; {why}")
    if any(one.verdict.faulty for one in findings):
        raise MusterError(said)
    return said


def _ended(measured: NetworkMeasured) -> str:
    """Why no larger messages were measured; empty: the usual ones were."""
    end = next((one for one in measured.ends if one.collective == JUDGED), None)
    if end is None:
        return ""
    size = f"{end.next_bytes / 2**20:g} MiB"
    if end.reason == TIME:
        return (
            f"too slow for larger messages: {size} with the repeats would take {end.needed:.0f} s, and "
            f"{end.available:.0f} s is the most"
        )
    if end.reason == MEMORY:
        return (
            f"no memory for larger messages: {size} take {end.needed / 2**30:.3g} GiB, and one rank has "
            f"{end.available / 2**30:.3g} GiB free: what else is on its GPU?"
        )
    return ""


def _largest(figures: Sequence[SizeResult]) -> list[SizeResult]:
    """Each collective's largest."""
    return list({one.collective: one for one in sorted(figures, key=lambda one: one.size_bytes)}.values())
