"""Where a run is, for people and for the verbs of another terminal. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from muster.protocol.client import HostStatus, SupervisorStatus, Verdict
from muster.supervise.recovery.phases import (
    Adopting,
    Draining,
    Ended,
    Flushing,
    Held,
    Phase,
    Running,
    Starting,
    Stopping,
    Waiting,
)
from muster.supervise.recovery.state import State
from muster.supervise.recovery.state_machine import RecoveryStateMachine


def status(machine: RecoveryStateMachine) -> SupervisorStatus:
    """Phase, step, attempt and hosts, as a message."""
    state = machine.state
    return SupervisorStatus(
        phase=state.phase.name,
        reason=sentence(machine),
        attempt=state.attempt,
        step=state.last_applied_step,
        hosts={
            name: HostStatus(
                connected=host.connected,
                ready=host.readiness.ready,
                active=name in state.active,
                ranks=tuple(state.ranks_on(name)),
            )
            for name, host in state.hosts.items()
        },
        verdict=_verdict(state),
    )


def _save_failed(state: State) -> str:
    """A full disk or an unreachable bucket; training continues."""
    if state.saves.failed is None:
        return ""
    step = state.saves.committed_step
    newest = f"the newest checkpoint is of step {step}" if step else "there is none yet"
    return f"; the last save failed ({state.saves.failed[:200]}); {newest}"


def _verdict(state: State) -> Verdict | None:
    """Of a run that will end."""
    phase = state.phase
    decided = phase if isinstance(phase, Held) else phase.end if isinstance(phase, Flushing) else None
    return Verdict(exit_code=decided.exit_code, reason=decided.reason) if decided is not None else None


def sentence(machine: RecoveryStateMachine) -> str:
    """Why the run is where it is, for people."""
    state, phase = machine.state, machine.state.phase
    if isinstance(phase, Starting):
        missing = [host.name for host in state.hosts.values() if host.connected and not host.readiness.ready]
        return f"waiting for hosts: {', '.join(missing) or 'none has connected'} not ready"
    if isinstance(phase, Running) and not state.progress.stepped:
        return f"attempt {state.attempt} is starting: no step yet"
    if isinstance(phase, Running):
        return f"training: step {state.last_applied_step} of attempt {state.attempt}{_save_failed(state)}"
    if isinstance(phase, Waiting):
        here = [state.hosts[name] for name in phase.next.hosts if name in state.hosts and state.hosts[name].connected]
        slow = [host.name for host in here if not host.readiness.ready or host.machine.store is None]
        return f"waiting for {', '.join(slow)} to get ready" if slow else "waiting for a host to return"
    if isinstance(phase, Held):
        return f"failed; hosts are held for muster restart: {phase.reason}"
    return _SENTENCES[type(phase)]


_SENTENCES: Mapping[type[Phase], str] = {
    Adopting: "a new supervisor waits for the hosts to answer",
    Draining: "recovering: ranks are being replaced",
    Stopping: "saving before it ends",
    Flushing: "ending: hosts write what only their memory holds",
    Ended: "ended",
}
