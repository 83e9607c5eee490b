"""Where a run is, for people and for the verbs of another terminal. Pure."""

from __future__ import annotations

from typing import Any

from muster.supervise.recovery.state import Phase, State
from muster.supervise.recovery.state_machine import RecoveryStateMachine


def status(machine: RecoveryStateMachine) -> dict[str, Any]:
    """Phase, step, attempt and hosts, as a message."""
    state = machine.state
    return {
        "phase": state.phase.value,
        "reason": sentence(machine),
        "attempt": state.attempt,
        "step": state.last_applied_step,
        "hosts": {
            name: {
                "connected": host.connected,
                "ready": host.ready,
                "active": name in state.active,
                "ranks": [rank for rank, on in state.ranks.items() if on == name],
            }
            for name, host in state.hosts.items()
        },
        "verdict": list(state.final_result) if state.final_result else None,
    }


def _save_failed(state: State) -> str:
    """A full disk or an unreachable bucket; training continues."""
    if state.save_failed is None:
        return ""
    newest = f"the newest checkpoint is of step {state.committed_step}" if state.committed_step else "there is none yet"
    return f"; the last save failed ({state.save_failed[:200]}); {newest}"


def sentence(machine: RecoveryStateMachine) -> str:
    """Why the run is where it is, for people."""
    state = machine.state
    if state.phase is Phase.RUN and not state.stepped:
        return f"attempt {state.attempt} is starting: no step yet"
    missing = [host.name for host in state.hosts.values() if host.connected and not host.ready]
    failure = state.final_result[1] if state.final_result else ""
    sentences = {
        Phase.STARTING: f"waiting for hosts: {', '.join(missing) or 'none has connected'} not ready",
        Phase.ADOPT: "a new supervisor waits for the hosts to answer",
        Phase.RUN: f"training: step {state.last_applied_step} of attempt {state.attempt}{_save_failed(state)}",
        Phase.DRAINING: "recovering: ranks are being replaced",
        Phase.WAIT: "waiting for a host to return",
        Phase.STOPPING: "saving before it ends",
        Phase.FLUSH: "ending: hosts write what only their memory holds",
        Phase.HELD_AFTER_FAILURE: f"failed; hosts are held for muster restart: {failure}",
        Phase.ENDED: "ended",
    }
    return sentences[state.phase]
