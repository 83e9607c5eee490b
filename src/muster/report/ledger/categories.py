"""Where a host-second can go, in the words of the ledger. ``docs/explanation/goodput.md`` explains each."""

from __future__ import annotations

#: Category -> one sentence. The order is that of reports. Every purchased host-nanosecond is in exactly one.
CATEGORIES: dict[str, str] = {
    "productive": "training steps that the final state rests on",
    "provision": "bought, our agent not up there yet",
    "start": "preparing data, processes, imports, rendezvous of the first attempt",
    "restore": "weights or training state being read",
    "warmup": "compilation and what the first steps took beyond a normal one",
    "data_wait": "the loop waited for its batch",
    "checkpoint": "training paused for a snapshot or a save",
    "straggler": "steps far slower than the median: the excess",
    "degraded": "fewer ranks than the reference: what a step cost per rank beyond its share",
    "eval": "evaluation on held-out data",
    "detect": "something was broken and not noticed yet",
    "restart": "noticed, not yet stepping again: ending, deciding, restarting",
    "wait": "held, waiting for enough hosts to go on",
    "unfinished": "work of a step that was never applied (or is still in flight)",
    "redone": "applied steps that were lost: repeated, or not restorable at the end",
    "spare": "kept as a spare",
    "out": "lost, quarantined or returned, not in use, still paid for",
    "hold": "kept warm after the user's own failure",
    "idle": "the tail: ranks finished, host not yet released",
    "other": "between steps and phases: logging, callbacks, housekeeping",
    "unattributed": "the log has no explanation",
}

#: What an interruption costs. Host-seconds in these that follow a fault belong to its incident.
RECOVERY = ("detect", "restart", "restore", "warmup", "wait", "unfinished", "redone")

#: Steps at the start of each attempt that are warm-up, never reference.
WARMUP_STEPS = 2
#: Fewer clean steps than this give no reference.
MIN_CLEAN_STEPS = 5
