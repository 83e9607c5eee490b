"""The small API for a training loop of your own, started by ``command:`` in the run file.

::

    import muster.run as muster

    state = {"model": model, "optimizer": optimizer}
    step = muster.restore(state)                     # 0: nothing to restore
    while step < steps and not muster.should_stop():
        train_one_step()
        step += 1
        muster.save(step, state)
        muster.heartbeat(step, tokens=..., loss=...)
    muster.finish(step, state)                       # saves and leaves, where a stop was asked for

Outside Muster (plain torchrun, a notebook) every call does nothing useful and harms nothing:
``restore`` answers 0, ``should_stop`` False. Calls are collective: every rank makes the same ones, after
``torch.distributed.init_process_group`` where there are several.

What it gives: in-memory snapshots after every step (a killed rank costs no applied step), checkpoints on
disk or in a bucket, the step watchdog, the ledger, a stop that saves. Objects with ``state_dict`` and
``load_state_dict`` and plain tensors are taken; what is no tensor in them (step counts, flags) goes along
as JSON. What differs between ranks goes under names that say whose it is:
``state[f"rank{dist.get_rank()}.loader"] = loader``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.checkpoint_format.shards import owner_of
from muster.config.spec import RunSpec
from muster.core.errors import UsageError
from muster.protocol.ranks import RESIZE_EXIT_CODE, AgentClient, Command, RankContext
from muster.train.user_state import (
    State,
    Stateful,
    fill_optimizers,
    first_difference,
    flatten,
    local,
    refuse_difference,
    take,
    unflatten,
)

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor

    from muster.train.distributed.step_consensus import StepConsensus
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

#: The wait for a save's bytes counts as progress for so long.
SAVE_LIMIT_S = 1800.0


class _Here:
    """This process's place, set by the fork server before the script runs."""

    context: RankContext | None = None
    agent: AgentClient | None = None
    spec: RunSpec | None = None
    step_ns: int | None = None
    beaten: int = -1
    snapshots: Snapshots | None = None
    consensus: StepConsensus | None = None
    order: Command | None = None
    asking: bool = False
    """The ranks' agreement was begun, and nobody has looked at its orders yet."""
    asked_step: int | None = None
    saver: Any = None
    saving_group: dist.ProcessGroup | None = None
    compared: bool = False
    """What must be the same on every rank was found to be."""
    differs: bool = False
    """It was later found not to be, and that was said."""
    saved_step: int = -1
    owed: bool = False


def enter(context: RankContext, agent: AgentClient) -> None:
    """Called by the fork server: from here on this process is a rank of a run."""
    _Here.context, _Here.agent = context, agent
    _Here.spec = RunSpec.model_validate_json((Path(context.run_dir) / "resolved.json").read_text())


def context() -> RankContext | None:
    """This rank's place in the world; None outside Muster."""
    return _Here.context


def heartbeat(step: int, *, tokens: int | None = None, loss: float | None = None, **metrics: float) -> None:
    """Say that ``step`` was applied. ``tokens``: of the global batch, for tokens/s and the ledger.

    Best called after ``save(step, ...)``: what was said to be applied is then held in memory as well.
    """
    if _Here.agent is None or _Here.context is None:
        return
    _ask(step)
    now = time.monotonic_ns()
    if _Here.step_ns is None:
        _Here.agent.emit("phase.changed", phase="train", step=step)
    if _Here.context.rank == 0:
        took = now - _Here.step_ns if _Here.step_ns is not None else 0
        detail: dict[str, Any] = {"tokens_per_s": tokens / took * 1e9} if tokens and took else {}
        if _Here.snapshots is not None:
            detail |= _Here.snapshots.held()
        _Here.agent.emit(
            "step",
            step=step,
            loss=loss,
            grad_norm=metrics.get("grad_norm"),
            learning_rate=metrics.get("learning_rate"),
            step_ns=took,
            tokens=tokens,
            supervised_tokens=tokens,
            padding_tokens=0,
            **detail,
        )
    _Here.step_ns = now
    _beat(step)


def progress() -> None:
    """Say that something long that is no step (an evaluation) goes on: the step watchdog waits for the next call."""
    if _Here.agent is not None:
        _Here.agent.progress()


def should_stop() -> bool:
    """Whether the run is to end now, the same on every rank: leave the loop, then ``finish`` saves and exits."""
    if _Here.agent is None:
        return False
    if not _Here.asking:
        _ask(None)
    _answer()
    return _Here.order is not None and _Here.order.kind == "stop"


def finish(step: int, state: State) -> None:
    """The loop is over. Complete the saves; after a stop save ``state`` and leave (exit code 130 or 75)."""
    stopping = _Here.order is not None and _Here.order.kind == "stop"
    wanted = stopping and _Here.order is not None and _Here.order.save and _Here.agent is not None
    if wanted and _Here.saved_step != step:
        _write(step, flatten(state))
    if stopping and _Here.order is not None and _Here.order.exit_code == RESIZE_EXIT_CODE:
        if _Here.snapshots is not None:  # a larger world goes on from this very step
            _Here.snapshots.keep(step, {name: local(tensor) for name, tensor in flatten(state).items()})
    elif _Here.saver is not None and _Here.agent is not None:
        _Here.agent.progress(for_s=SAVE_LIMIT_S)
        _Here.saver.finish()
        _Here.agent.progress()
    if stopping and _Here.order is not None:
        sys.exit(_Here.order.exit_code)


def save(step: int, state: State) -> None:
    """Snapshot into the host's memory; every ``checkpoint.every_steps`` to disk as well.

    Raises:
        UsageError: at the first call, where ranks hold different things under one name; the same on every rank.
    """
    if _Here.context is None or _Here.spec is None or _Here.agent is None:
        return
    tensors = flatten(state)
    if not _Here.compared:
        refuse_difference(tensors, _orders().group)
        _open_snapshots(tensors)
        _Here.compared = True
    _ask(step)
    if _Here.snapshots is not None and step % _Here.spec.checkpoint.snapshot_every_steps == 0:
        # Asked for after the whole step: so long the last copy has had to reach the peer.
        agreed = _orders().copies_arrived()
        _Here.snapshots.save(step, {name: local(tensor) for name, tensor in tensors.items()}, agreed=agreed)
    _beat(step + 1)  # only now: the mover takes it for the word that the snapshot lies ready
    _save_to_disk(step, tensors)


def restore(state: State) -> int:
    """Bring ``state`` to the newest version, in memory or on disk, and return its step (0: none).

    A rank that was not there when it was written keeps its own (``rank<N>.``) things as they are.

    Raises:
        CheckpointError: what is there does not fit this state.
        UsageError: several ranks, and no process group yet.
    """
    if _Here.context is None or _Here.spec is None or _Here.agent is None:
        return 0
    began_ns = time.monotonic_ns()
    fill_optimizers(state)
    tensors = flatten(state)
    saver = _saver()  # from here on older attempts lose the folder
    if _Here.context.restore is not None:
        step, tier, uri = _from_memory(tensors)
    else:
        saver.claimed()
        step, tier, uri = _from_disk(tensors)
    if tier:
        left = unflatten(state, tensors)
        if left:
            text = f"rank {_Here.context.rank}: {left[0]} was saved and has no place in this state ({len(left)} such)"
            _Here.agent.emit("run.message", step=step, text=text)
        took_ns = time.monotonic_ns() - began_ns
        _Here.agent.emit("checkpoint.restored", step=step, tier=tier, uri=uri, duration_ns=took_ns)
    _beat(step + 1)
    return step


# ---------------------------------------------------------------- below


def _from_memory(tensors: Mapping[str, Tensor]) -> tuple[int, str, str]:
    from muster.train.state.snapshot import restored

    assert _Here.context is not None and _Here.context.restore is not None
    wanted = _Here.context.restore
    there = {name: tensor for name, tensor in tensors.items() if (owner_of(name) or 0) < wanted.layout.world_size}
    take(restored(_Here.context, wanted, there), there, step=wanted.step)
    return wanted.step, wanted.tier, _Here.context.snapshot_dir or ""


def _from_disk(tensors: Mapping[str, Tensor]) -> tuple[int, str, str]:
    """All ranks take the same version, and each reads what it needs of it. Collective."""
    from muster.checkpoint.load import load_into, newest_valid
    from muster.storage.store import open_store
    from muster.storage.uris import is_local

    assert _Here.spec is not None and _Here.agent is not None
    agent = _Here.agent

    def skipped(uri: str, reason: str) -> None:
        agent.emit("checkpoint.rejected", uri=uri, reason=reason)

    if not _Here.spec.checkpoint.resume:
        return 0, "", ""
    newest = newest_valid(open_store(), _directory(), skipped, group=_Here.saving_group)
    if newest is None:
        return 0, "", ""
    load_into(newest, tensors)
    return newest.step, "disk" if is_local(newest.uri) else "bucket", newest.uri


def _open_snapshots(tensors: Mapping[str, Tensor]) -> None:
    """Collective, so that all ranks keep them in the same tiers."""
    assert _Here.context is not None and _Here.spec is not None and _Here.agent is not None
    if _Here.context.snapshot_dir is None or _Here.spec.checkpoint.snapshot_every_steps == 0:
        return
    from muster.train.state.snapshot_tiers import open_together

    agent = _Here.agent
    _Here.snapshots = open_together(
        _Here.context, tensors, group=_orders().group, say=lambda text: agent.emit("run.message", text=text)
    )


def _save_to_disk(step: int, tensors: Mapping[str, Tensor]) -> None:
    """Where one is due; while another is under way it is put off, the same on every rank."""
    assert _Here.spec is not None
    every = _Here.spec.checkpoint.every_steps
    due = isinstance(every, int) and bool(every) and step % every == 0
    if _Here.saver is not None:
        _Here.saver.poll()
        if _orders().any_rank_saving():
            if due:
                _Here.saver.put_off(step)
            _Here.owed = _Here.owed or due
            return
    if due or _Here.owed:
        _write(step, tensors)
        _Here.owed = False


def _write(step: int, tensors: Mapping[str, Tensor]) -> None:
    """Begin a checkpoint; collective. What ranks no longer hold alike is told of: only one rank's is written."""
    assert _Here.agent is not None
    if not _Here.differs:
        few = {name: tensor for name, tensor in tensors.items() if not tensor.is_floating_point()}
        found = first_difference(few, _orders().group)
        if found is not None:
            _Here.differs = True
            text = f"{found}: the checkpoint of step {step} holds one of them; rank<N>. names keep what is a rank's own"
            _Here.agent.emit("run.message", step=step, text=text)
    _Here.agent.progress(for_s=SAVE_LIMIT_S)
    _saver().save(step, tensors, {})
    _Here.agent.progress()
    _Here.saved_step = step


def _directory() -> str:
    assert _Here.spec is not None and _Here.context is not None
    return _Here.spec.checkpoint.dir or str(Path(_Here.context.run_dir) / "checkpoints")


def _saver() -> Any:
    if _Here.saver is None:
        from muster.checkpoint.handover import Handover
        from muster.checkpoint.saver import Saver
        from muster.storage.store import open_store

        assert _Here.context is not None and _Here.spec is not None and _Here.agent is not None
        here, agent, directory = _Here.context, _Here.agent, _directory()
        _Here.saving_group = _new_group()
        _Here.saver = Saver(
            directory,
            run_id=here.run_id,
            attempt=here.attempt,
            layout=here.layout,
            keep_last=_Here.spec.checkpoint.keep_last,
            asynchronous=_Here.spec.checkpoint.asynchronous,
            group=_Here.saving_group,
            store=open_store(),
            on_event=lambda kind, step, **detail: agent.emit(kind, step=step, **detail),
            handover=Handover.on_this_host(
                run_dir=here.run_dir, run_id=here.run_id, host=here.host, directory_uri=directory
            ),
        )
    return _Here.saver


def _orders() -> StepConsensus:
    if _Here.consensus is None:
        from muster.train.distributed.step_consensus import StepConsensus

        assert _Here.agent is not None
        _Here.consensus = StepConsensus(_Here.agent, _new_group())
    return _Here.consensus


def _new_group() -> dist.ProcessGroup | None:
    """A gloo group over all ranks; None at world size 1. Collective."""
    import torch.distributed as dist

    assert _Here.context is not None
    if _Here.context.world_size == 1:
        return None
    if not dist.is_initialized():
        raise UsageError(
            f"{_Here.context.world_size} ranks and no process group: the calls of muster.run are collective",
            hint='call torch.distributed.init_process_group("gloo") or ("nccl") before the first of them',
        )
    found: dist.ProcessGroup = dist.new_group(backend="gloo")
    return found


def _ask(step: int | None) -> None:
    """Begin to agree with all ranks on orders, saves and copies; once a step, by whichever call comes first."""
    if step is not None and step == _Here.asked_step:
        return
    if _Here.asking:
        _answer()
    behind = _Here.snapshots is not None and _Here.snapshots.behind()
    saving = _Here.saver is not None and bool(_Here.saver.busy)
    _orders().begin(copy_is_behind=behind, saving=saving)
    _Here.asking = True
    _Here.asked_step = _Here.asked_step if step is None else step


def _answer() -> None:
    """Take the orders that the ranks have agreed on."""
    _Here.order = _orders().agreed() or _Here.order
    _Here.asking = False


def _beat(step: int) -> None:
    """``step`` is under way. Never goes back, in whatever order ``save`` and ``heartbeat`` are called."""
    assert _Here.agent is not None
    _Here.beaten = max(_Here.beaten, step)
    _Here.agent.beat(_Here.beaten)
