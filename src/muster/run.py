"""Calls for a training loop of your own, started by ``command:`` in the run file.

::

    import muster.run as muster

    state = {"model": model, "optimizer": optimizer}
    step = muster.restore(state)                     # 0: nothing to restore
    while step < steps and not muster.should_stop():
        train_one_step()
        step += 1
        muster.save(step, state)
        muster.heartbeat(step, tokens=..., loss=...)
    muster.finish(step, state)                       # after a stop: saves and exits

Outside Muster (plain torchrun, a notebook) every call does nothing: ``restore`` returns 0, ``should_stop`` False.
Calls are collective: every rank makes the same ones, after ``torch.distributed.init_process_group`` if there are
several ranks.

They provide in-memory snapshots after every step (a killed rank costs no applied step), checkpoints on disk or in
a bucket, the step watchdog, the ledger, and a stop that saves. The state may hold objects with ``state_dict`` and
``load_state_dict``, and plain tensors; other values in them (step counts, flags) are saved as JSON. What differs
between ranks needs a name that says whose it is: ``state[f"rank{dist.get_rank()}.loader"] = loader``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.checkpoint_format.shards import owner_of
from muster.config.spec import RunSpec
from muster.core import resolved_file
from muster.core.errors import UsageError
from muster.protocol.ranks import RESIZE_EXIT_CODE, AgentClient, Command, RankContext, Restore
from muster.train.user_state import (
    State,
    Stateful,
    copy_tensors,
    fill_optimizers,
    first_difference,
    flatten,
    refuse_difference,
    unflatten,
)

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor

    from muster.checkpoint.saver import Saver
    from muster.train.distributed.step_consensus import StepConsensus
    from muster.train.measurement.live_trace import LiveTrace
    from muster.train.state.snapshot import Snapshots

__all__ = [
    "State",
    "Stateful",
    "context",
    "enter",
    "finish",
    "heartbeat",
    "progress",
    "restore",
    "save",
    "should_stop",
]

#: How long the wait for a save's bytes counts as progress.
SAVE_LIMIT_S = 1800.0


@dataclass
class _Rank:
    """This process as a rank of a run."""

    context: RankContext
    agent: AgentClient
    spec: RunSpec
    step_ns: int | None = None
    last_beat: int = -1
    snapshots: Snapshots | None = None
    consensus: StepConsensus | None = None
    consensus_started: bool = False
    """It was started, and its result has not been read yet."""
    consensus_step: int | None = None
    command: Command | None = None
    saver: Saver | None = None
    saving_group: dist.ProcessGroup | None = None
    compared: bool = False
    """Values that must be equal on every rank were found to be."""
    difference_reported: bool = False
    trace: LiveTrace | None = None
    """Once one was asked for."""
    saved_step: int = -1
    save_deferred: bool = False

    @property
    def stopping(self) -> Command | None:
        """The stop that all ranks agreed on, if any."""
        return self.command if self.command is not None and self.command.kind == "stop" else None


_rank: _Rank | None = None
"""Set by the fork server before the script runs; None outside Muster."""


def enter(context: RankContext, agent: AgentClient) -> None:
    """Called by the fork server: from now on this process is a rank of a run."""
    global _rank
    spec = RunSpec.model_validate_json(resolved_file.read(Path(context.run_dir), patient=True))
    _rank = _Rank(context, agent, spec)


def context() -> RankContext | None:
    """This rank's place in the world; None outside Muster."""
    return None if _rank is None else _rank.context


def heartbeat(step: int, *, tokens: int | None = None, loss: float | None = None, **metrics: float) -> None:
    """Report that ``step`` was applied. ``tokens``: of the global batch, for tokens/s and the ledger.

    Best called after ``save(step, ...)``: a step that was reported is then in memory as well.
    """
    if _rank is None:
        return
    _start_consensus(_rank, step)
    now = time.monotonic_ns()
    if _rank.step_ns is None:
        _rank.agent.emit("phase.changed", phase="train", step=step)
    if _rank.context.rank == 0:
        step_ns = now - _rank.step_ns if _rank.step_ns is not None else 0
        tokens = None if tokens is None else int(tokens)  # a script may count in floats; events hold whole tokens
        detail: dict[str, Any] = {"tokens_per_s": tokens / step_ns * 1e9} if tokens and step_ns else {}
        if _rank.snapshots is not None:
            detail |= _rank.snapshots.newest_steps()
        _rank.agent.emit(
            "step",
            step=step,
            loss=loss,
            grad_norm=metrics.get("grad_norm"),
            learning_rate=metrics.get("learning_rate"),
            step_ns=step_ns,
            tokens=tokens,
            supervised_tokens=tokens,
            padding_tokens=0,
            **detail,
        )
    _rank.step_ns = now
    _beat(_rank, step)
    _trace(_rank, step)


def _trace(rank: _Rank, step: int) -> None:
    """What ``muster profile`` asks for: a step ends here, and the next one begins."""
    if rank.trace is None:
        from muster.train.measurement.live_trace import LiveTrace

        rank.trace = LiveTrace(rank.agent, directory=Path(rank.context.run_dir) / "traces", rank=rank.context.rank)
    rank.trace.end(step)
    rank.trace.begin(step + 1)


def progress() -> None:
    """Report progress in something other than a step (an evaluation): restarts the step watchdog."""
    if _rank is not None:
        _rank.agent.progress()


def should_stop() -> bool:
    """Whether the run is to end now, the same on every rank: leave the loop, then ``finish`` saves and exits."""
    if _rank is None:
        return False
    if not _rank.consensus_started:
        _start_consensus(_rank, None)
    _read_consensus(_rank)
    return _rank.stopping is not None


def finish(step: int, state: State) -> None:
    """The loop has ended. Complete the saves; after a stop save ``state`` and exit (code 130 or 75)."""
    if _rank is None:
        return
    if _rank.trace is not None:
        _rank.trace.close()
    stop = _rank.stopping
    if stop is not None and stop.save and _rank.saved_step != step:
        _write(_rank, step, flatten(state))
    if stop is not None and stop.exit_code == RESIZE_EXIT_CODE:
        if _rank.snapshots is not None:  # the resized world continues from this step
            _rank.snapshots.save_if_newer(step, _local_parts(flatten(state)))
    elif _rank.saver is not None:
        _rank.agent.progress(for_s=SAVE_LIMIT_S)
        _rank.saver.finish()
        _rank.agent.progress()
    if stop is not None:
        sys.exit(stop.exit_code)


def save(step: int, state: State) -> None:
    """Snapshot into the host's memory; every ``checkpoint.every_steps`` to disk as well.

    Raises:
        UsageError: at the first call, if ranks hold different values under one name; the same on every rank.
    """
    if _rank is None:
        return
    tensors = flatten(state)
    if not _rank.compared:
        refuse_difference(tensors, _consensus(_rank).group)
        _open_snapshots(_rank, tensors)
        _rank.compared = True
    _start_consensus(_rank, step)
    every = _rank.spec.checkpoint.snapshot_every_steps
    if _rank.snapshots is not None and step % (1 if every == "auto" else every) == 0:
        # Read only after the whole step: the last copy has had that long to reach the peer.
        copies_arrived = _consensus(_rank).copies_arrived()
        _rank.snapshots.save(step, _local_parts(tensors), copies_arrived=copies_arrived)
    _beat(_rank, step + 1)  # only now: to the replicator it means that the snapshot is complete
    _save_to_disk(_rank, step, tensors)


def restore(state: State) -> int:
    """Load the newest version, in memory or on disk, into ``state``, and return its step (0: none).

    A rank that did not exist when it was written keeps its own (``rank<N>.``) values as they are.

    Raises:
        CheckpointError: the version does not fit this state.
        UsageError: several ranks, and no process group yet.
    """
    if _rank is None:
        return 0
    start_ns = time.monotonic_ns()
    fill_optimizers(state)
    tensors = flatten(state)
    saver = _saver(_rank)  # from now on older attempts cannot write to the folder
    if _rank.context.restore is not None:
        step, tier, uri = _from_memory(_rank, _rank.context.restore, tensors)
    else:
        saver.claimed()
        step, tier, uri = _from_disk(_rank, saver, tensors)
    if tier:
        unused = unflatten(state, tensors)
        if unused:
            problem = f"{unused[0]} was saved and is not in this state ({len(unused)} such values)"
            _rank.agent.emit("run.message", step=step, text=f"rank {_rank.context.rank}: {problem}")
        duration_ns = time.monotonic_ns() - start_ns
        _rank.agent.emit("checkpoint.restored", step=step, tier=tier, uri=uri, duration_ns=duration_ns)
    _beat(_rank, step + 1)
    return step


# ---------------------------------------------------------------- below


def _local_parts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    from muster.train.distributed.reduce import local

    return {name: local(tensor) for name, tensor in tensors.items()}


def _from_memory(rank: _Rank, restore: Restore, tensors: Mapping[str, Tensor]) -> tuple[int, str, str]:
    """Collective: what one rank has read another may find damaged, so none goes on before all have what they need."""
    from muster.checkpoint import exchange
    from muster.train.state.snapshot_restore import restored

    context = rank.context
    world_size = restore.layout.world_size
    held = {name: tensor for name, tensor in tensors.items() if (owner_of(name) or 0) < world_size}
    copy_tensors(restored(context, restore, lambda: held)[0], held, step=restore.step)
    exchange.gather(None, rank.saving_group)
    return restore.step, restore.tier, context.snapshot_dir or ""


def _from_disk(rank: _Rank, saver: Saver, tensors: Mapping[str, Tensor]) -> tuple[int, str, str]:
    """All ranks choose the same version, and each reads what it needs of it. Collective."""
    from muster.checkpoint.load import load_into, newest_valid
    from muster.storage.store import open_store

    def rejected(uri: str, reason: str) -> None:
        rank.agent.emit("checkpoint.rejected", uri=uri, reason=reason)

    if not rank.spec.checkpoint.resume:
        return 0, "", ""
    newest = newest_valid(open_store(), saver.directory, rejected, group=rank.saving_group)
    if newest is None:
        return 0, "", ""
    load_into(newest, tensors)
    return newest.step, saver.tier, newest.uri


def _open_snapshots(rank: _Rank, tensors: Mapping[str, Tensor]) -> None:
    from muster.train.state.snapshot_tiers import open_together

    every, group = rank.spec.checkpoint.snapshot_every_steps, _consensus(rank).group
    rank.snapshots = open_together(rank.context, lambda: tensors, every_steps=every, group=group, agent=rank.agent)


def _save_to_disk(rank: _Rank, step: int, tensors: Mapping[str, Tensor]) -> None:
    """If one is due; deferred while another is in progress, the same on every rank."""
    every = rank.spec.checkpoint.every_steps
    due = isinstance(every, int) and bool(every) and step % every == 0
    if rank.saver is not None:
        rank.saver.poll()
        if _consensus(rank).any_rank_saving():
            if due:
                rank.saver.defer(step)
            rank.save_deferred = rank.save_deferred or due
            return
    if due or rank.save_deferred:
        _write(rank, step, tensors)
        rank.save_deferred = False


def _write(rank: _Rank, step: int, tensors: Mapping[str, Tensor]) -> None:
    """Start a checkpoint; collective. Reports values that differ between ranks, because only one rank's is written."""
    if not rank.difference_reported:
        exact = {name: tensor for name, tensor in tensors.items() if not tensor.is_floating_point()}
        difference = first_difference(exact, _consensus(rank).group)
        if difference is not None:
            rank.difference_reported = True
            hint = "rank<N>. names keep what is a rank's own"
            text = f"{difference}: the checkpoint of step {step} holds one of them; {hint}"
            rank.agent.emit("run.message", step=step, text=text)
    rank.agent.progress(for_s=SAVE_LIMIT_S)
    _saver(rank).save(step, tensors, {})
    rank.agent.progress()
    rank.saved_step = step


def _saver(rank: _Rank) -> Saver:
    if rank.saver is None:
        from muster.train.state.saving import open_saver

        rank.saving_group = _new_group(rank)
        rank.saver = open_saver(rank.context, rank.spec.checkpoint, rank.saving_group, rank.agent.emit)
    return rank.saver


def _consensus(rank: _Rank) -> StepConsensus:
    if rank.consensus is None:
        from muster.train.distributed.step_consensus import StepConsensus

        rank.consensus = StepConsensus(rank.agent, _new_group(rank))
    return rank.consensus


def _new_group(rank: _Rank) -> dist.ProcessGroup | None:
    """A gloo group over all ranks; None at world size 1. Collective."""
    import torch.distributed as dist

    if rank.context.world_size == 1:
        return None
    if not dist.is_initialized():
        raise UsageError(
            f"{rank.context.world_size} ranks and no process group: the calls of muster.run are collective",
            hint='call torch.distributed.init_process_group("gloo") or ("nccl") before the first of them',
        )
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    return group


def _start_consensus(rank: _Rank, step: int | None) -> None:
    """Start to agree with all ranks on commands, saves and copies; once a step, by whichever call comes first."""
    if step is not None and step == rank.consensus_step:
        return
    if rank.consensus_started:
        _read_consensus(rank)
    copy_is_pending = rank.snapshots is not None and rank.snapshots.copy_is_pending()
    saving = rank.saver is not None and bool(rank.saver.busy)
    _consensus(rank).start(copy_is_pending=copy_is_pending, saving=saving)
    rank.consensus_started = True
    rank.consensus_step = rank.consensus_step if step is None else step


def _read_consensus(rank: _Rank) -> None:
    """Take the command that the ranks have agreed on, if any."""
    rank.command = _consensus(rank).command() or rank.command
    rank.consensus_started = False


def _beat(rank: _Rank, step: int) -> None:
    """``step`` is in progress. Never decreases, in any order of calls of ``save`` and ``heartbeat``."""
    rank.last_beat = max(rank.last_beat, step)
    rank.agent.beat(rank.last_beat)
