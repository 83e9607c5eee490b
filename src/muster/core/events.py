"""The event schema: the only record of a run, from which everything else is read.

An event is one JSON object on one line. ``KINDS`` lists every kind with the keys of its ``detail``;
``docs/events.md`` is generated from it. Times are integer nanoseconds. ``mono_ns`` never steps back but
compares only within one host and boot; ``wall_ns`` is for people; the supervisor logs each host's
``clock.offset`` so that a reader can put hosts on one axis.

One writer has one file per attempt (``events/<writer>.<attempt>.jsonl``) and one chain: ``prev`` is the
SHA-256 of the line before, so that an edited line is found and a torn last line is tolerated. Writers are
``client`` (the command that submitted), ``supervisor`` (its ``attempt`` in the file name is its term,
the generation of its lease) and each host's agent, which writes its ranks' events too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SCHEMA_VERSION = 1

#: What a rank (or host) spends its time on. ``phase`` events mark the moment it changes; the ledger turns
#: the gaps into host-seconds. The order is that of a healthy life.
PHASES = (
    "queue",  # wanted but not held: wall time, costs nothing
    "provision",  # bought, not yet running our agent
    "start",  # processes, imports, rendezvous
    "restore",  # weights or state are being read
    "warmup",  # compile and the first, slow step
    "train",
    "eval",
    "checkpoint",  # training waits for a save
    "detect",  # broken, not yet noticed (set by the ledger, from the incident)
    "restart",  # noticed, not yet stepping again
    "wait",  # for capacity
    "spare",  # held for an emergency
    "hold",  # kept warm after the user's own failure
    "idle",  # the tail: finished, not yet released
)


@dataclass(frozen=True)
class Kind:
    """One kind of event: what it means and what its ``detail`` holds."""

    doc: str
    required: Mapping[str, str] = field(default_factory=dict)
    """Key -> meaning and unit."""
    optional: Mapping[str, str] = field(default_factory=dict)
    open: bool = False
    """Further keys are allowed (free-form detail)."""


_END = {
    "outcome": "succeeded, failed, stopped or preempted",
    "exit_code": "process exit code",
    "reason": "the verdict, one sentence",
}
_COST = {"usd_per_hour": "price of the whole host; absent: unknown"}
#: A loop of the user's own (``command:``) may leave any of these but ``step_ns`` null: unknown, never zero.
_STEP = {
    "loss": "mean over the step's supervised tokens, all ranks",
    "grad_norm": "global norm before clipping",
    "learning_rate": "as applied",
    "step_ns": "wall time of the step, the previous step's end to this one's",
    "tokens": "tokens of the global batch, padding excluded",
    "supervised_tokens": "tokens that count in the loss",
    "padding_tokens": "positions without a document, zero-weight rounds included",
}
_STEP_OPTIONAL = {
    "data_wait_ns": "time the loop waited for its batch",
    "stall_ns": "time a snapshot or save held the loop",
    "tokens_per_s": "tokens / step time, all ranks",
    "model_flops": "FLOPs of the step by the CAUSAL convention (docs/mfu.md)",
    "mfu": "model_flops / (step time x peak x ranks)",
    "tflops_per_rank": "model_flops / step time / ranks / 1e12",
    "memory_bytes": "peak on this rank: CUDA allocator, or resident set on CPU",
    "rows": "sequences of the global batch",
    "padding_rounds": "zero-weight micro-batches of this step, all ranks",
    "skipped": "true: its update was left out on every rank; tokens are 0, loss and norm null",
    "skipped_tokens": "tokens of the batch that was left out",
    "state_hash": "64 bits over the state after this step, equal in any layout, where asked for; null: a peer was lost",
    "replica_hashes": "one hash a replica, where they are not all `state_hash`: silent corruption of a copy",
    "snapshot_step": "newest step that the hosts' own memory holds",
    "peer_step": "newest step of which every rank knows that another host's memory holds it too",
}

KINDS: Mapping[str, Kind] = {
    # -------- life of a run (client, supervisor)
    "run.submitted": Kind(
        "The intent, written before anything is done about it.",
        {"spec_digest": "SHA-256 of the resolved run file", "backend": "name", "version": "of Muster"},
        optional={"argv": "command line, secrets removed", "name": "of the run", "plan": "the chosen plan"},
    ),
    "run.message": Kind("Informational message; nothing is read back from it.", {"text": "one sentence"}, open=True),
    "run.restarted": Kind(
        "`muster restart` with a corrected run file: errors and restarts are counted from zero again.",
        {"reason": "one sentence"},
    ),
    "run.ending": Kind("It will end so, once the hosts have written what only their memory holds.", _END),
    "run.finished": Kind(
        "The end: nothing of this run acts after it.", _END, optional={"final_step": "last applied step"}
    ),
    # -------- hardware
    "host.requested": Kind("Asked for; the queue begins.", {"count": "hosts"}, open=True),
    "host.allocated": Kind(
        "Bought: from here a host costs money.",
        {"gpus": "on this host (CPU: ranks)", "role": "active or spare"},
        optional={**_COST, "machine": "type", "location": "zone", "peak_flops": "per rank"},
    ),
    "host.released": Kind("Given back: costs nothing from here.", optional={"reason": "why"}),
    "host.lost": Kind("Gone or silent.", {"evidence": "what was seen"}),
    "host.reset": Kind(
        "Its GPUs were reset between two attempts.",
        {"gpus": "their numbers on the host", "ok": "whether it worked"},
        optional={"evidence": "what the tool said"},
    ),
    "host.quarantined": Kind(
        "Not used again, or not for now.",
        {"reason": "why"},
        optional={
            "for_s": "seconds of quarantine",
            "until_return": "until the host has left and rejoined",
            "quarantined_for_error": "error (step and words) that is looked for on another host",
        },
    ),
    "host.readmitted": Kind("No longer quarantined: it may be used again.", {"reason": "why"}),
    "clock.offset": Kind(
        "A host's monotonic clock against the supervisor's, by round trips.",
        {"offset_ns": "add to the host's mono_ns", "error_ns": "half the best round trip"},
    ),
    # -------- supervisor and agents
    "supervisor.started": Kind(
        "A supervisor took the lease.",
        {"term": "lease generation, rises by one", "pid": "process id"},
        optional={"heads": "writer -> SHA-256 of the last line seen", "address": "host:port"},
    ),
    "supervisor.ended": Kind("It gave the lease back.", {"reason": "why"}),
    "log.hash_heads": Kind("The supervisor cites the other writers' chains.", {"heads": "writer -> SHA-256"}),
    "agent.started": Kind(
        "An agent is ready.",
        {"pid": "process id", "ranks": "ranks it can run"},
        optional={"boot_id": "kernel's", "adopted": "ranks found alive"},
        open=True,
    ),
    "agent.ended": Kind("An agent leaves.", {"reason": "why"}),
    # -------- attempts and ranks
    "attempt.started": Kind(
        "A world of ranks is formed. `attempt` is the fence from here on.",
        {"world_size": "ranks", "layout": "axis -> size", "hosts": "host -> its ranks"},
        optional={
            "resume_step": "last applied step it starts from, -1: none",
            "tier": "where from",
            "resume_attempt": "the attempt that took the snapshots",
            "cause": "incident id",
            "kept": "ranks whose processes continue from the previous attempt",
            "skip_steps": "steps whose update is left out: their batch is never finite",
            "batch_schedule": "changes of batch and learning rate since step 1, by the policy",
        },
    ),
    "attempt.ended": Kind("Its ranks are gone.", {"reason": "why"}),
    "rank.started": Kind(
        "A rank's process exists, or continues in a new attempt.",
        {"pid": "process id"},
        optional={"standby": "was warm", "kept": "it ran in the attempt before"},
    ),
    "rank.exited": Kind(
        "A rank's process is gone.",
        {"exit_code": "negative: the signal"},
        optional={"reason": "last words", "exception": "class name", "traceback": "last lines"},
    ),
    "phase.changed": Kind("From here on this rank (or host) is in `phase`.", optional={"reason": "why"}),
    # -------- training (rank 0 unless stated)
    "data.prepared": Kind(
        "Tokens are ready.",
        {"fingerprint": "of the prepared data", "tokens": "in it", "sequences": "in it", "cached": "was there already"},
        open=True,
    ),
    "model.ready": Kind(
        "What will train.",
        {"parameters": "count", "trainable_parameters": "count", "attention": "kernel chosen and why"},
        optional={
            "flops_per_token": "CAUSAL, fwd+bwd",
            "peak_flops": "per rank that MFU divides by",
            "peak_source": "where from",
        },
        open=True,
    ),
    "step": Kind("An optimizer step was applied by every rank.", _STEP, optional=_STEP_OPTIONAL),
    "baseline_rate": Kind(
        "The rate of these ranks with fault tolerance off and no checkpoints: what goodput divides by.",
        {"tokens_per_s": "all ranks, median of the steps", "world_size": "ranks", "steps": "measured after warm-up"},
        optional={
            "spread": "robust standard deviation / median",
            "mfu": "of the median step",
            "first_step": "first step without fault tolerance; `step` is the last",
        },
    ),
    "eval": Kind(
        "Held-out figures after `step`.",
        optional={
            "loss": "held-out, mean per supervised token",
            "execution_accuracy": "share of questions whose rows equal the gold query's",
            "query_match": "share of queries equal to gold after normalising",
            "questions": "asked",
            "baseline_accuracy": "majority-template baseline on the same questions",
            "duration_ns": "time it took",
            "timeouts": "queries stopped",
        },
        open=True,
    ),
    "generation": Kind(
        "One generation, shown.",
        {"prompt": "text", "completion": "text"},
        optional={"expected": "gold text", "correct": "bool", "rows": "what it returned"},
    ),
    # -------- checkpoints
    "checkpoint.begun": Kind("Bytes start to move.", {"tier": "memory, peer, disk, bucket", "uri": "where"}),
    "checkpoint.committed": Kind(
        "The commit marker is written: this version can be restored.",
        {"tier": "memory, peer, disk, bucket", "uri": "where", "bytes": "all ranks"},
        optional={"duration_ns": "begun to committed", "stall_ns": "training held up"},
    ),
    "checkpoint.failed": Kind("Not written; training continues.", {"tier": "which", "uri": "where", "reason": "why"}),
    "checkpoint.rejected": Kind(
        "A checkpoint that exists but is not usable.",
        {"uri": "where", "reason": "incomplete, truncated, foreign..."},
    ),
    "checkpoint.restored": Kind(
        "Training state was read.",
        {"tier": "which", "uri": "where"},
        optional={"bytes": "read by this rank", "duration_ns": "time it took"},
    ),
    "checkpoint.removed": Kind("Beyond keep_last.", {"uri": "where"}),
    # -------- incidents
    "incident.detected": Kind(
        "Something went wrong.",
        {
            "incident_id": "unique in the run",
            "incident": "kind: a row of muster.core.incidents",
            "evidence": "one sentence with values",
        },
        optional={"since_ns": "earliest moment (supervisor's mono_ns) it can have begun"},
        open=True,
    ),
    "incident.decided": Kind(
        "What will be done; written before it is.",
        {"incident_id": "which", "action": "Action", "reason": "one sentence"},
        open=True,
    ),
    "incident.resolved": Kind(
        "The first step beyond the last applied one before the incident.",
        {"incident_id": "which", "lost_ns": "L: from the fault's detection to this step's end"},
        optional={"redone_steps": "applied steps taken again", "stages_ns": "stage -> time"},
    ),
    "termination.notice": Kind(
        "Announced in advance: preemption, maintenance, a time limit, a user's stop.",
        {"notice": "preemption, maintenance, time_limit, stop", "source": "signal, endpoint..."},
        optional={
            "grace_s": "time given",
            "exit_code": "of a stop: what the run will answer",
            "save": "of a stop: whether the ranks save first",
        },
    ),
}


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that happened, once."""

    run_id: str
    attempt: int
    seq: int
    mono_ns: int
    wall_ns: int
    host: str
    kind: str
    rank: int | None = None
    phase: str | None = None
    step: int | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The JSON object of the line; absent fields are left out."""
        result = {**vars(self), "detail": dict(self.detail) or None}
        return {name: value for name, value in result.items() if value is not None}

    @classmethod
    def from_json(cls, result: Mapping[str, Any]) -> Event:
        """Read one line's object. Raises ValueError on a missing or unknown field."""
        given = {key: value for key, value in result.items() if key != "prev"}
        if unknown := given.keys() - cls.__dataclass_fields__.keys():
            raise ValueError(f"unknown event field {sorted(unknown)[0]!r}")
        try:
            return cls(**given)
        except TypeError as error:
            raise ValueError(f"not an event: {error}") from error


def check(event: Event) -> None:
    """Raise ValueError where an event does not fit the schema: our own bug, caught at the writer."""
    kind = KINDS.get(event.kind)
    if kind is None:
        raise ValueError(f"unknown event kind {event.kind!r}")
    if event.phase is not None and event.phase not in PHASES:
        raise ValueError(f"unknown phase {event.phase!r}")
    if missing := [key for key in kind.required if key not in event.detail]:
        raise ValueError(f"event {event.kind} lacks detail {missing}")
    extra = [key for key in event.detail if key not in kind.required and key not in kind.optional]
    if extra and not kind.open:
        raise ValueError(f"event {event.kind} has unknown detail {extra}")


def encode(result: Mapping[str, Any]) -> bytes:
    """Canonical bytes of one line, newline included: sorted keys, no spaces, finite numbers only."""
    text = json.dumps(result, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode() + b"\n"
