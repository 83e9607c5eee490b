"""Where a rank's state comes from: in-memory snapshots, the newest committed checkpoint, or neither."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from muster.checkpoint.load import load_newest
from muster.checkpoint_format.manifest import Manifest
from muster.checkpoint_format.snapshot_ring import Ring
from muster.config.spec import Optimizer, RunSpec
from muster.core.errors import CheckpointError
from muster.core.typed_json import Json, JsonObject, whole
from muster.protocol.ranks import AgentClient, RankContext, Restore
from muster.storage.store import open_store
from muster.train.distributed.process_setup import World
from muster.train.optim.learning_rate import learning_rate
from muster.train.state.saving import Saves
from muster.train.state.snapshot import own_path
from muster.train.state.snapshot_restore import restored
from muster.train.state.training_state import TrainingState

#: In a save's ``extra``.
SCHEDULE = "learning_rate"


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
        extra = snapshot_extra(context, context.restore) if world.rank == 0 else {}
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
            on_conversion=lambda text: agent.emit("run.message", text=text),
        )
        if loaded is None:
            return
        (manifest, size), fetched = loaded, 0
        check_same_data(saves, manifest)
        state.loaded(manifest.step, sharded)
        saves.last_saved = manifest.step
        tier, uri, extra = saves.saver.tier, manifest.uri, manifest.extra
    if world.rank == 0 and (jump := rate_jump(extra.get(SCHEDULE), saves.extra.get(SCHEDULE), after=state.step)):
        agent.emit("run.message", step=state.step, text=jump)
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


def snapshot_extra(context: RankContext, restore: Restore) -> JsonObject:
    """``extra`` of the snapshots that were restored, from one in this host's memory; empty where none is."""
    for path in (own_path(context), *(Path(source.path) for source in restore.sources.values())):
        with suppress(CheckpointError, OSError):
            return Ring.open(path).shard_header().extra
    return {}


def check_same_data(saves: Saves, manifest: Manifest) -> None:
    """Raise CheckpointError if a checkpoint is of other data: its steps would mean other batches."""
    for key, value in saves.extra.items():
        if key != SCHEDULE and key in manifest.extra and manifest.extra[key] != value:
            raise CheckpointError(
                f"{manifest.uri} was made with another {key.replace('_', ' ')}: "
                f"{manifest.extra[key]}, here it is {value}",
                hint="set another checkpoint.dir, or checkpoint.resume: false to start from step 0",
            )


def schedule_extra(settings: Optimizer, total_steps: int) -> JsonObject:
    """What a save says of the learning rate: all that makes it a function of the step."""
    keys = {"learning_rate", "schedule", "warmup_steps", "min_lr_fraction"}
    return {SCHEDULE: {"steps": total_steps, **settings.model_dump(mode="json", include=keys)}}


def rate_jump(before: Json, here: Json, *, after: int) -> str | None:
    """What a resume after a step changes in the learning rate, by ``schedule_extra`` of the save and of this run."""
    if not isinstance(before, Mapping) or not isinstance(here, Mapping) or before == here:
        return None
    planned, at_next = _rate(before, after + 1), _rate(here, after + 1)
    last = _rate(before, after)
    if math.isclose(planned, at_next, rel_tol=1e-3) or last == 0:
        return None
    return (
        f"the learning rate jumps {at_next / last:.2g} times, from {last:.3g} at step {after} to {at_next:.3g}: its "
        f"schedule was of {before['steps']} steps and a peak of {before['learning_rate']:g}, and is of {here['steps']} "
        f"and {here['learning_rate']:g}"
    )


def _rate(schedule: JsonObject, step: int) -> float:
    settings = {key: value for key, value in schedule.items() if key != "steps"}
    return learning_rate(Optimizer.model_validate(settings), step=step, total_steps=whole(schedule, "steps"))
