"""When the training state is saved, and whether there is time for it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from muster.checkpoint.exchange import gather
from muster.checkpoint.handover import Handover
from muster.checkpoint.saver import Saver
from muster.checkpoint_format.fences import nonces_of, unbound
from muster.checkpoint_format.manifest import HELDOUT_LOSS
from muster.config.spec import CheckpointSpec, RunSpec
from muster.core import intervals
from muster.protocol.ranks import AgentClient, Command, RankContext
from muster.storage.store import open_store
from muster.train.distributed.process_setup import World
from muster.train.state.training_state import TrainingState

#: ``auto`` never saves more often than this. The first save comes after it, and measures stall and drain.
SHORTEST_INTERVAL_S = 60.0
#: A save is assumed to take this many times as long as the last one.
SAFETY = 1.5
#: A failed save is repeated after this time, unless one is due earlier: by the step count it could be an hour.
RETRY_S = 60.0


@dataclass
class Saves:
    """The run's checkpoints, for the loop. All calls are collective."""

    saver: Saver
    spec: CheckpointSpec
    state: TrainingState
    extra: Mapping[str, Any]
    """Small values that a later run checks before it resumes."""
    rate: intervals.FailureRate
    """Of the whole run, as known when this attempt started."""
    to_disk: float = 1.0
    """Share of failures that destroy every snapshot, so that only a save has the state."""
    last_saved: int = -1
    """Step of the newest save that was started or restored."""
    deferred: bool = False
    """A save was due while the previous one was in progress."""
    seconds: float = 0.0
    """From the start to the commit of this rank's last save; ``committed`` sets it."""
    _stall_s: float = 0.0
    _began: float = field(default_factory=lambda: time.monotonic())
    _since: float = field(default_factory=lambda: time.monotonic())
    _interval_s: float | None = None
    _failed_at: float | None = None

    def due(self, step: int) -> bool:
        """Whether a save is due by the step count."""
        every = self.spec.every_steps
        return isinstance(every, int) and every > 0 and step % every == 0

    def due_by_clock(self) -> bool:
        """``auto``: the optimal interval of ``core.intervals`` (measured stall and drain, failure rate) has passed.

        Always: the retry of a failed save is due.
        """
        if self._failed_at is not None and time.monotonic() - self._failed_at > RETRY_S:
            return True
        if self.spec.every_steps != "auto":
            return False
        return time.monotonic() - self._since > (self._interval_s or SHORTEST_INTERVAL_S)

    def next_interval_s(self) -> float:
        """Seconds to the next save by the clock, by the current measurements."""
        running_s = time.monotonic() - self._began
        rate = self.rate.observed(seconds=running_s)
        tier = intervals.Tier(
            stall_s=self._stall_s,
            drain_s=self.seconds if self.spec.asynchronous else 0.0,
            mtbf_s=rate.mtbf_s / self.to_disk,
        )
        if self._interval_s is None:
            return intervals.automatic(tier, shortest_s=SHORTEST_INTERVAL_S)
        since_restart_s = running_s if self.rate.failures else math.inf
        return intervals.adapt(self._interval_s, tier, since_restart_s=since_restart_s, shortest_s=SHORTEST_INTERVAL_S)

    def fits(self, command: Command, group: dist.ProcessGroup | None) -> bool:
        """Whether the command asks for a save, and leaves time for the slowest rank's. Collective."""
        if not command.save:
            return False
        if command.deadline_s is None:
            return True
        slowest_s: float = max(gather(self.seconds, group))
        return slowest_s * SAFETY < command.deadline_s

    def save(self, step: int, *, heldout_loss: float | None = None) -> None:
        """Write the state after ``step``; asynchronous saves return when the bytes are staged. ``heldout_loss``: of it,
        where it was evaluated."""
        if step == self.last_saved:
            return
        began = time.monotonic()
        evaluated = {} if heldout_loss is None else {HELDOUT_LOSS: heldout_loss}
        self.saver.save(step, self.state.sharded(), {**self.extra, **evaluated})
        self._stall_s = time.monotonic() - began
        self._since = time.monotonic()
        self.last_saved, self.deferred, self._failed_at = step, False, None

    def defer(self, step: int) -> None:
        """``step`` is due while a save is in progress (a slow disk, a bucket that does not answer): save after it."""
        self.deferred = True
        self.saver.defer(step)

    def failed(self) -> None:
        """A save failed."""
        self._failed_at = time.monotonic()

    def committed(self, seconds: float) -> None:
        """A save was committed, ``seconds`` after its start, which decides when the next one is due."""
        self.seconds = seconds
        self._interval_s = self.next_interval_s()

    def prepare(self) -> None:
        """Allocate the staging memory before the first save, if there will be one. Collective."""
        if self.spec.every_steps != 0:
            self.saver.prepare(self.state.sharded())


def open_saver(
    context: RankContext, spec: CheckpointSpec, group: dist.ProcessGroup | None, on_event: Callable[..., None]
) -> Saver:
    """The run's checkpoint folder, ready to write to. ``group``: gloo over all ranks. Collective."""
    directory = spec.uri(context.run_dir)
    return Saver(
        directory,
        run_id=context.run_id,
        attempt=context.attempt,
        layout=context.layout,
        keep_last=spec.keep_last,
        keep_best=spec.keep_best,
        nonce_of=unbound if context.host_memory is None else nonces_of(context.run_dir),  # None: no supervisor
        asynchronous=spec.asynchronous,
        group=group,
        store=open_store(),
        on_event=on_event,
        handover=Handover.on_this_host(
            host_memory=context.host_memory, run_dir=context.run_dir, directory_uri=directory
        ),
    )


def open_saves(
    spec: RunSpec,
    context: RankContext,
    state: TrainingState,
    world: World,
    *,
    extra: Mapping[str, Any],
    agent: AgentClient,
) -> Saves:
    """The run's checkpoints, and when the next one is due. Collective."""

    def on_event(kind: str, *, step: int | None = None, **detail: Any) -> None:
        if kind == "checkpoint.committed" and "duration_ns" in detail:
            saves.committed(detail["duration_ns"] / 1e9)
        elif kind == "checkpoint.failed":
            saves.failed()
        if world.rank == 0:
            agent.emit(kind, step=step, **detail)

    saves = Saves(
        saver=open_saver(context, spec.checkpoint, world.checkpoint, on_event),
        spec=spec.checkpoint,
        state=state,
        extra=extra,
        rate=intervals.FailureRate.at_scale(context.world_size).observed(
            seconds=context.observed_s, failures=context.failures
        ),
        to_disk=intervals.disk_share(
            memory=context.snapshot_dir is not None and spec.checkpoint.snapshot_every_steps != 0,
            peer=context.replicate_snapshots,
        ),
    )
    return saves
