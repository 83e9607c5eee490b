"""Where a rank's state comes from: in-memory snapshots, the newest committed checkpoint, or neither."""

from __future__ import annotations

import time

from muster.checkpoint.load import load_newest
from muster.checkpoint_format.manifest import Manifest
from muster.config.spec import RunSpec
from muster.core.errors import CheckpointError
from muster.protocol.ranks import AgentClient, RankContext
from muster.storage.store import open_store
from muster.train.distributed.process_setup import World
from muster.train.state.saving import Saves
from muster.train.state.snapshot_restore import restored
from muster.train.state.training_state import TrainingState


def restore(
    spec: RunSpec, context: RankContext, state: TrainingState, saves: Saves, world: World, agent: AgentClient
) -> None:
    """Load the newest available version into ``state``; ``state.step`` is its step. Collective.

    From snapshots it is not: a rank that returns may have read what another is about to find damaged. The ranks meet
    in ``open_together``, before the first step, and one that has failed is missing there.

    Raises:
        CheckpointError: the snapshots to restore cannot be read, or the checkpoint is of other data.
    """
    began = time.monotonic_ns()
    if context.kept_rank is not None and context.restore is not None and state.step == context.restore.step:
        return  # this process was retained and has it
    if context.restore is not None:
        tensors, fetched = restored(context, context.restore, state.writable, elsewhere=state.elsewhere)
        state.load(context.restore.step, tensors)
        tier: str = context.restore.tier
        uri = context.snapshot_dir or ""
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    else:
        saves.saver.claimed()  # from now on older attempts cannot commit; also reports a folder that cannot be used
        if not spec.checkpoint.resume:
            return
        sharded = state.writable()
        loaded = load_newest(
            open_store(),
            saves.saver.directory,
            sharded,
            lambda uri, reason: agent.emit("checkpoint.rejected", uri=uri, reason=reason),
            group=world.checkpoint,
            elsewhere=state.elsewhere,
        )
        if loaded is None:
            return
        (manifest, size), fetched = loaded, 0
        check_same_data(saves, manifest)
        state.loaded(manifest.step, sharded)
        saves.last_saved = manifest.step
        tier, uri = saves.saver.tier, manifest.uri
    if state.joined_from is not None and state.local_steps is not None:
        met, other = int(state.local_steps.met.max()), state.joined_from
        text = f"replica {state.replica} begins with the outer parameters and the moments of replica {other}"
        lost = f"steps of its own since the meeting after step {met} are lost, if there were any"
        agent.emit("run.message", step=state.step, text=f"{text}: {lost}")
    agent.emit(
        "checkpoint.restored",
        step=state.step,
        tier=tier,
        uri=uri,
        bytes=size,
        fetched_bytes=fetched,
        duration_ns=time.monotonic_ns() - began,
    )


def check_same_data(saves: Saves, manifest: Manifest) -> None:
    """Raise CheckpointError if a checkpoint is of other data: its steps would mean other batches."""
    for key, value in saves.extra.items():
        if key in manifest.extra and manifest.extra[key] != value:
            raise CheckpointError(
                f"{manifest.uri} was made with another {key.replace('_', ' ')}: "
                f"{manifest.extra[key]}, here it is {value}",
                hint="set another checkpoint.dir, or checkpoint.resume: false to start from step 0",
            )
