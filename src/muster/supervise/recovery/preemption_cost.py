"""What a preemption would cost this run, said before it happens. Pure."""

from __future__ import annotations

from muster.config.spec import RunSpec


def expected_loss(spec: RunSpec, *, num_hosts: int, copied: bool) -> str:
    """One or two sentences for a run on ``num_hosts`` hosts; ``copied``: another host holds each one's state."""
    checkpoint, grace_s = spec.checkpoint, f"{spec.recovery.grace_s:g} s"
    every = checkpoint.every_steps
    since = f"the steps since the last save (every {every} steps)" if isinstance(every, int) and every else (
        "the steps since the last save (every_steps: auto)"
        if every
        else "every step, since nothing is saved on the way"
    )  # fmt: skip
    all_at_once = (
        f"if every host goes at once, the state is saved where a save as long as the last fits into {grace_s}, "
        f"else that costs {since}"
    )
    if num_hosts == 1 and not spec.resources.spare_hosts:
        return f"at a preemption notice the state is saved where a save fits into {grace_s}; else that costs {since}"
    if num_hosts == 1 or not copied:
        alone = "no other host holds its state (checkpoint.replicate_snapshots, dp_replicate)"
        return f"a lost host costs {since}: {alone}; {all_at_once}"
    if spec.resources.spare_hosts:
        goes_on = "a spare takes over"
    elif (spec.resources.min_hosts or num_hosts) < num_hosts:
        goes_on = "the others go on"
    else:
        goes_on = "the run waits for a host"
    return f"a host that is preempted costs no applied step, and {goes_on}; {all_at_once}"
