"""The table of event kinds, in the order of the reference."""

from __future__ import annotations

from collections.abc import Mapping

from muster.core.event_detail import Detail
from muster.core.event_details import attempts, checkpoints, hosts, incidents, network, run, training
from muster.core.events import PHASES, Event

_DETAILS: tuple[type[Detail], ...] = (
    *run.DETAILS, *hosts.DETAILS, *run.SUPERVISOR_DETAILS, *hosts.AGENT_DETAILS, *attempts.DETAILS, *network.DETAILS,
    *training.DETAILS, *checkpoints.DETAILS, *incidents.DETAILS, hosts.TerminationNotice,
)  # fmt: skip
KINDS: Mapping[str, type[Detail]] = {detail.kind: detail for detail in _DETAILS}


def check(event: Event) -> None:
    """Raise ValueError where an event does not fit the schema: our own bug, caught at the writer."""
    kind = KINDS.get(event.kind)
    if kind is None:
        raise ValueError(f"unknown event kind {event.kind!r}")
    if event.phase is not None and event.phase not in PHASES:
        raise ValueError(f"unknown phase {event.phase!r}")
    kind.of(event.detail)
