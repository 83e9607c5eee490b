"""From a run's event log to the state in which a new supervisor goes on. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from muster.core.events import Event
from muster.core.nouns import Layout
from muster.supervise.state import Ending, Host, Phase, State


def recover(events: Iterable[Event]) -> State:
    """The state after ``events`` (in each file's order; files in any order).

    A run that has ended, or never started an attempt, begins at BOOT with the attempt counter where it
    was: numbers are never used twice. One that was under way begins at ADOPT, where the hosts' own word
    (who runs what) decides.
    """
    state = State()
    for event in sorted(events, key=lambda event: event.wall_ns):
        if event.kind == "attempt.started":
            if event.attempt >= state.attempt:
                _start(state, event)
        elif event.kind == "attempt.ended" and event.attempt == state.attempt:
            state.phase = Phase.BOOT if not state.ranks else Phase.ADOPT
        elif event.kind == "step" and event.step is not None:
            if event.step > state.last_applied_step:
                state.last_applied_step = event.step
                state.restarts_without_progress = 0
        elif event.kind == "checkpoint.committed":
            state.committed({"step": event.step, "detail": event.detail})
        elif event.kind == "incident":
            number = str(event.detail.get("incident_id", "i0"))[1:]
            if number.isdigit():
                state.next_incident = max(state.next_incident, int(number) + 1)
        elif event.kind == "host.granted":
            state.hosts.setdefault(event.host, Host(name=event.host)).granted = True
        elif event.kind in ("host.released", "host.lost"):
            if event.kind == "host.released" and event.host in state.hosts:
                state.hosts[event.host].granted = False
        elif event.kind == "host.quarantined":
            state.hosts.setdefault(event.host, Host(name=event.host)).quarantined = True
        elif event.kind == "run.ending":
            state.ending = Ending(
                outcome=str(event.detail["outcome"]),
                exit_code=int(event.detail["exit_code"]),
                reason=str(event.detail["reason"]),
            )
        elif event.kind == "run.finished":
            state = State(
                attempt=state.attempt, next_incident=state.next_incident, last_applied_step=0, course=state.course
            )
    return state


def _start(state: State, event: Event) -> None:
    if state.attempt:
        state.restarts_without_progress += 1
    state.attempt = event.attempt
    state.phase = Phase.ADOPT
    state.exited = {}
    axes = event.detail["layout"]
    state.layout = Layout(
        dp_replicate=int(axes["dp_replicate"]), dp_shard=int(axes["dp_shard"]), tp=int(axes.get("tp", 1))
    )
    state.course = [dict(change) for change in event.detail.get("course", ())]
    state.active = list(event.detail["hosts"])
    state.ranks = {int(rank): host for host, ranks in event.detail["hosts"].items() for rank in ranks}
