"""Where a run is, for a person and for the verbs of another terminal. Pure."""

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
    """The alarm of a full disk or a bucket that is away; training goes on."""
    if state.save_failed is None:
        return ""
    stands = f"step {state.committed_step} stands" if state.committed_step else "none stands"
    return f"; the last save failed ({state.save_failed[:200]}), {stands}"


def sentence(machine: RecoveryStateMachine) -> str:
    """Why the run is where it is, for a person."""
    state = machine.state
    if state.phase is Phase.RUN and not state.stepped:
        return f"attempt {state.attempt} is starting: no step yet"
    missing = [host.name for host in state.hosts.values() if host.connected and not host.ready]
    sentences = {
        Phase.STARTING: f"waiting for hosts: {', '.join(missing) or 'none has connected'} not ready",
        Phase.ADOPT: "a new supervisor waits for the hosts to answer",
        Phase.RUN: f"training: step {state.last_applied_step} of attempt {state.attempt}{_save_failed(state)}",
        Phase.DRAINING: "recovering: ranks are being replaced",
        Phase.WAIT: "waiting for a host to return",
        Phase.STOPPING: "saving before it leaves",
        Phase.FLUSH: "ending: hosts write what only their memory holds",
        Phase.HELD_AFTER_FAILURE: f"failed; hosts are held for muster restart: {state.final_result[1] if state.final_result else ''}",
        Phase.ENDED: "ended",
    }
    return sentences[state.phase]
