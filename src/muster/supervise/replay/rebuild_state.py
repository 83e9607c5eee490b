"""From a run's event log to the state in which a new supervisor continues."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from muster.core import event_log
from muster.core.errors import UsageError
from muster.core.events import Event
from muster.core.incidents import traits_of
from muster.core.layout import Layout
from muster.supervise.recovery import error_history
from muster.supervise.recovery.hosts import clear_notice
from muster.supervise.recovery.state import Ending, Host, Phase, State, StopRequest


@dataclass
class EventReplay:
    """What a run's event files hold: read what is there before the lease is taken (weeks of events take longer than a
    lease lasts), and afterwards what its former holder still wrote meanwhile."""

    directory: Path
    _files: dict[str, list[Event]] = field(default_factory=dict)

    def read_new_events(self) -> None:
        """Read what the files hold beyond what was read before."""
        known = {name: len(events) for name, events in self._files.items()}
        for name, event in event_log.read(self.directory, after=known):
            self._files.setdefault(name, []).append(event)

    def in_order(self) -> list[Event]:
        """All of it, with wall times by a clock that is never stepped."""
        return event_log.on_one_clock(self._files)


def rebuild_state(events: Iterable[Event]) -> State:
    """The state after ``events`` (in each file's order; files in any order).

    A run that has ended, or never started an attempt, begins at STARTING with the attempt counter where it
    was: numbers are never used twice. One that was under way begins at ADOPT, where the hosts' own reports
    (who runs what) decide. What the run has learned of errors and hosts is kept: hosts' failures are ages
    (nanoseconds before the last event, negative), which ``RecoveryStateMachine.start`` puts on its own clock.
    """
    state = State()
    ordered = sorted(events, key=lambda event: event.wall_ns)
    now_ns = ordered[-1].wall_ns if ordered else 0
    for event in ordered:
        if event.kind == "attempt.started":
            if event.attempt >= state.attempt:
                _start(state, event)
        elif event.kind == "attempt.ended" and event.attempt == state.attempt:
            state.phase = Phase.STARTING if not state.ranks else Phase.ADOPT
        elif event.kind in ("step", "incident.resolved") and event.step is not None:
            state.add_step_time(event.detail)
            state.stepped = state.stepped or event.attempt == state.attempt
            if event.step > state.last_applied_step:
                state.last_applied_step = event.step
                state.restarts_without_progress = 0
        elif event.kind == "checkpoint.committed":
            state.add_checkpoint({"step": event.step, "detail": event.detail})
        elif event.kind == "checkpoint.failed":
            state.save_failed = str(event.detail["reason"])
        elif event.kind == "incident.detected":
            _incident(state, event, now_ns)
        elif event.kind == "incident.decided":
            state.skip_steps |= {int(step) for step in event.detail.get("skip_steps", ())}
        elif event.kind == "run.restarted":
            error_history.forget(state)
        elif event.kind == "termination.notice" and "exit_code" in event.detail:
            source, save = str(event.detail["source"]), bool(event.detail.get("save", True))
            state.stop_before = StopRequest(source=source, exit_code=int(event.detail["exit_code"]), save=save)
        elif event.kind == "run.ending":
            outcome, reason = str(event.detail["outcome"]), str(event.detail["reason"])
            state.ending = Ending(outcome=outcome, exit_code=int(event.detail["exit_code"]), reason=reason)
        elif event.kind == "run.finished":
            state = State(
                attempt=state.attempt,
                next_incident=state.next_incident,
                last_applied_step=0,
                batch_schedule=state.batch_schedule,
                skip_steps=state.skip_steps,
            )
        else:
            _host(state, event)
    return state


def _start(state: State, event: Event) -> None:
    if state.attempt and event.detail.get("cause"):
        state.restarts_without_progress += 1
    state.attempt = event.attempt
    state.phase = Phase.ADOPT
    state.exited, state.stepped = {}, False
    state.layout = Layout.of(event.detail["layout"])
    state.batch_schedule = [dict(change) for change in event.detail.get("batch_schedule", ())]
    state.skip_steps |= {int(step) for step in event.detail.get("skip_steps", ())}
    state.active = list(event.detail["hosts"])
    state.ranks = {int(rank): host for host, ranks in event.detail["hosts"].items() for rank in ranks}
    resumed = (event.detail.get("resume_step"), event.detail.get("resume_attempt"))
    state.resumed = None if None in resumed else (int(resumed[0]), int(resumed[1]))  # type: ignore[arg-type]


def _incident(state: State, event: Event, now_ns: int) -> None:
    """Count it as the supervisor that logged it did."""
    number = str(event.detail.get("incident_id", "i0"))[1:]
    if number.isdigit():
        state.next_incident = max(state.next_incident, int(number) + 1)
    if event.detail.get("unreadable_snapshot"):
        step, attempt = event.detail["unreadable_snapshot"]
        state.unreadable_snapshots.add((int(step), int(attempt)))
    try:
        traits = traits_of(str(event.detail.get("incident", "")))
    except UsageError:
        return  # of a later version, or of a package that is no longer installed
    host = event.host if event.host in state.hosts else None
    if host is not None and traits.blames_host:
        state.hosts[host].failures_ns.append(event.wall_ns - now_ns)
    key = error_history.key_of(state, traits, event.step, event.detail, str(event.detail.get("evidence", "")))
    error_history.count(state, key, host)


def _host(state: State, event: Event) -> None:
    """An event of a host's life."""
    if event.kind == "host.allocated":
        state.hosts.setdefault(event.host, Host(name=event.host)).allocated = True
    elif event.kind == "host.quarantined":
        host = state.hosts.setdefault(event.host, Host(name=event.host))
        host.quarantined = True
        host.hold_off_s = float(event.detail.get("for_s", 0.0))
        host.until_return = bool(event.detail.get("until_return"))
        host.quarantined_for_error = event.detail.get("quarantined_for_error")
    elif event.host not in state.hosts:
        return
    elif event.kind == "host.readmitted":
        error_history.readmit_host(state, event.host)
    elif event.kind == "termination.notice":
        state.hosts[event.host].preemption_grace_s = float(event.detail.get("grace_s", 0.0))
    elif event.kind == "host.lost":
        clear_notice(state.hosts[event.host])  # if it connects, it has left and rejoined
    elif event.kind == "host.released":
        state.hosts[event.host].allocated = False
