"""A machine that should get no new work, as Slurm's operators say it; jobs that run there go on."""

from __future__ import annotations

from muster.backends.slurm.commands import Slurm


def drain(node: str, reason: str, slurm: Slurm | None = None) -> str:
    """Set ``node`` to drain; what is so now. One that is drained or down stays as it is: somebody gave a reason.

    Raises:
        AccessError: this user may not (operators and administrators may).
        BackendError: Slurm does not answer, knows no such node, or has no commands here.
    """
    slurm = slurm or Slurm()
    state = slurm.node_state(node)
    if any(word in state for word in ("DRAIN", "DOWN", "FAIL")):
        return f"Slurm has {node} as {state.lower()} already"
    slurm.drain(node, reason)
    return f"Slurm gives {node} no new jobs: it drains (scontrol update nodename={node} state=resume ends that)"
