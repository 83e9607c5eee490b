"""One rank's run: the values that the loop names, and what happens around a step."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from muster.config.spec import RunSpec
from muster.core.batch_schedule import BatchSchedule
from muster.protocol.ranks import AgentClient, Command, RankContext
from muster.train.baseline import BaselineWindow
from muster.train.data_feed.batch_reader import ReadAhead, StepWork
from muster.train.distributed.pause_consensus import PauseConsensus
from muster.train.distributed.process_setup import World
from muster.train.distributed.reduce import GradientReducer
from muster.train.distributed.step_consensus import StepConsensus
from muster.train.evaluation.evaluate import Evaluator
from muster.train.metrics import Pending, Phases, StepLog, StepTimes
from muster.train.optim.nonfinite import failure, find_bad_micro_batch
from muster.train.optim.optimizer import ShardOptimizer
from muster.train.profiling import Collector, Profiler
from muster.train.state.saving import Saves
from muster.train.state.state_hash import PendingHash, StateHashes
from muster.train.state.training_state import TrainingState

#: The wait for a save's bytes counts as progress for so long: another process writes them, and says that it lives.
SAVE_LIMIT_S = 1800.0


class Paused(Exception):
    """This rank is to leave its world between two updates, and to go on in another."""


class Snapshot(Protocol):
    """Where in-memory snapshots go."""

    def save(self, step: int, local_tensors: dict[str, Tensor], *, agreed: bool = False) -> object:
        """Copy the tensors; returns when they may change again. ``agreed``: no rank was behind."""
        ...

    def behind(self) -> bool:
        """Whether another host still lacks the snapshot that was ordered last."""
        ...

    def keep(self, step: int, local_tensors: dict[str, Tensor]) -> None:
        """Save unless that step's snapshot is the newest already."""
        ...

    def held(self) -> dict[str, int]:
        """The newest step that is held, by where (detail of the ``step`` event)."""
        ...


@dataclass
class StepResult:
    """A step that was taken, and whose numbers may still be on the device."""

    work: StepWork
    losses: Sequence[Tensor]
    numbers: Pending | None
    """None: its update was left out."""
    learning_rate: float
    state_hash: PendingHash | None = None


@dataclass
class TrainingRun:
    """Everything that ``loop.train`` touches."""

    spec: RunSpec
    context: RankContext
    agent: AgentClient
    device: torch.device
    world: World
    model: nn.Module
    state: TrainingState
    optimizer: ShardOptimizer
    reducer: GradientReducer
    reader: ReadAhead
    consensus: StepConsensus
    log: StepLog
    phases: Phases
    evaluator: Evaluator
    saves: Saves
    snapshots: Snapshot | None
    hashes: StateHashes
    reference: BaselineWindow
    profiler: Profiler
    collector: Collector
    last_step: int
    batch_schedule: BatchSchedule
    times: StepTimes = field(default_factory=StepTimes)
    pause_consensus: PauseConsensus = field(default_factory=PauseConsensus)
    _applied: StepResult | None = None

    def applied(
        self, work: StepWork, losses: Sequence[Tensor], loss: Tensor, norm: Tensor, fault: Tensor, learning_rate: float
    ) -> None:
        """The update of ``work.step`` was made: snapshot it, and record it as soon as its numbers are here.

        On CUDA without a snapshot the host does not wait: ``settle`` in the next step's first round does.
        """
        self._advance(StepResult(work, losses, Pending((loss, norm, fault)), learning_rate))

    def record_skipped_step(self, work: StepWork, learning_rate: float) -> None:
        """``work.step`` counts on every rank and its batch does not: it was never finite (``skip_steps``).

        Nothing is computed and no gradient exists, so the state after it is the state before it, one step on.
        """
        self.flush_pending_metrics()
        self.agent.beat(work.step)
        self._advance(StepResult(work, (), None, learning_rate))

    def _advance(self, applied: StepResult) -> None:
        work, self._applied = applied.work, applied
        self.state.step = work.step
        applied.state_hash = self.hashes.begin(work.step)
        every = self.spec.checkpoint.snapshot_every_steps
        wanted = self.snapshots is not None and every > 0 and work.step % every == 0
        wanted = wanted and not self.reference.covers(work.step)
        if not wanted and self.device.type == "cuda" and work.step < self.last_step:
            return
        self._check(applied)
        if wanted and self.snapshots is not None:
            agreed = self.consensus.copies_arrived()
            began = time.monotonic_ns()
            self.snapshots.save(work.step, self.state.local_tensors(), agreed=agreed)
            self.times.stall_ns = time.monotonic_ns() - began
            if work.step < self.last_step:
                self.agent.beat(work.step + 1)  # a copy sets out now, not with the next step's first micro-batch
        self.flush_pending_metrics()

    def flush_pending_metrics(self) -> None:
        """Read the last update's numbers and emit its event, where that has not been done.

        Raises:
            NotFinite: it was not applied.
            Paused: this rank is to go on in another world.
        """
        # Ranks that share a replica leave where they agreed to: here the others may have gone on, and would wait for
        # this one in the replica's own collectives.
        if self.pause_consensus.agreed() or (self.agent.pause_requested() and self.context.layout.ranks_per_replica == 1):
            raise Paused
        step = self._record()
        if step is not None and self.phases.now != "train":
            self.saves.prepare()
            self.phases.enter("train", step=step)
            self.log.restart()

    def pause(self) -> None:
        """The world is broken between two updates: record the last one, so that nothing applied is lost."""
        self._record(wait_for_hash=False)
        if self.snapshots is not None:
            self.snapshots.keep(self.state.step, self.state.local_tensors())

    def leave(self) -> None:
        """This world ends so that a larger one begins, whose ranks are other processes: leave them the last step."""
        self.flush_pending_metrics()
        if self.snapshots is not None:
            self.snapshots.keep(self.state.step, self.state.local_tensors())
        self.collector.close()
        for tracker in self.log.trackers:
            tracker.close()

    def abandon(self) -> None:
        """Let go of what belongs to the world that was."""
        self.world.aborter()
        self.reader.close()
        self.collector.close()
        self.saves.abandon()
        for tracker in self.log.trackers:
            tracker.close()

    def _record(self, *, wait_for_hash: bool = True) -> int | None:
        """The last update's event, where it is still to be written; its step."""
        applied, self._applied = self._applied, None
        if applied is None:
            return None
        loss, norm = self._check(applied)
        more: dict[str, Any] = {} if self.snapshots is None else {**self.snapshots.held()}
        if applied.state_hash is not None:
            agent = self.agent if self.world.rank == 0 else None
            more |= self.hashes.told(applied.state_hash, agent, wait=wait_for_hash)
        step, rate = applied.work.step, applied.learning_rate
        detail = self.log.write(applied.work, loss=loss, norm=norm, learning_rate=rate, times=self.times, more=more)
        self.times = StepTimes()
        reference = self.reference.add(step, detail) if detail is not None else None
        if reference is not None:
            self.agent.emit("baseline_rate", step=step, **reference)
        return step

    def start_consensus(self) -> None:
        """Begin to agree with all ranks on orders, saves, and whether every copy that was ordered has arrived.

        Called once a step, when its micro-batches are done: a copy has had that long to travel.
        """
        self.consensus.begin(
            save_now=self.wants_save(), copy_is_behind=self.copy_is_behind(), saving=self.saves.saver.busy
        )

    def copy_is_behind(self) -> bool:
        """Whether the snapshot that was ordered last is not yet where a lost host's successor would look."""
        return self.snapshots is not None and self.snapshots.behind()

    def evaluation_is_due(self, step: int) -> bool:
        every = self.spec.evaluation.every_steps
        return every > 0 and step % every == 0 and step < self.last_step

    def evaluate(self, step: int, *, final: bool = False) -> None:
        """Held-out figures of the state after ``step``; training stands still."""
        self.flush_pending_metrics()
        with self._phase("eval", step):
            self.evaluator.run(step, final=final)

    def checkpoint_is_due(self, step: int) -> bool:
        """By the step count, or because a save was put off. The same on every rank: training waits for no save."""
        self.saves.poll()
        if step >= self.last_step or self.reference.covers(step):
            return False
        due = self.saves.due(step)
        if due and self.consensus.any_rank_saving():
            self.saves.put_off(step)
        return (due or self.saves.owed) and not self.consensus.any_rank_saving()

    def wants_save(self) -> bool:
        """Rank 0 asks for a save by the clock: ``checkpoint.every_steps: auto``, or the last one failed a while ago."""
        if self.world.rank != 0 or self.reference.covers(self.state.step + 1):
            return False
        return self.saves.due_by_clock() and not self.saves.saver.busy

    def save(self, step: int, order: Command | None = None) -> None:
        """Save, where that makes sense: an order may forbid it, or leave no time for it."""
        if order is not None and order.kind == "save" and step < self.last_step and self.consensus.any_rank_saving():
            self.saves.put_off(step)
            return
        self.flush_pending_metrics()
        if order is not None and not self.saves.fits(order, self.world.control):
            return
        with self._phase("checkpoint", step):
            self.agent.progress(for_s=SAVE_LIMIT_S)
            self.saves.save(step)
            self.agent.progress()

    def finish(self) -> None:
        """Complete what is under way."""
        self.flush_pending_metrics()
        self.reader.close()
        self.collector.close()
        self.agent.progress(for_s=SAVE_LIMIT_S)
        self.saves.finish()
        self.agent.progress()
        for tracker in self.log.trackers:
            tracker.close()

    @contextmanager
    def _phase(self, phase: str, step: int) -> Iterator[None]:
        """Something that is no step: it has a phase of its own, and its time is in no step's."""
        before = self.phases.now
        self.phases.enter(phase, step=step)
        yield
        if before is not None and 0 < step < self.last_step:
            self.phases.enter(before, step=step)
        self.log.restart()

    def _check(self, applied: StepResult) -> tuple[float | None, float | None]:
        """Loss and norm; None where the update was left out. Raises NotFinite."""
        if applied.numbers is None:
            return None, None
        loss, norm, fault = applied.numbers.values()
        if math.isfinite(loss) and math.isfinite(norm) and fault == 0.0:
            return loss, norm
        sequences = [part.sequences for part in applied.work.rounds]
        blame = find_bad_micro_batch(
            applied.losses,
            sequences,
            rank=self.world.rank,
            micro_batch_size=self.spec.training.micro_batch_size,
            group=self.world.control,
        )
        error = failure(
            step=applied.work.step,
            loss=loss,
            norm=norm,
            fault=fault,
            blame=blame,
            everything=[row for rows in sequences for row in rows],
        )
        self.agent.emit("run.message", step=applied.work.step, text=str(error), sequences=list(error.sequences))
        raise error
