"""One rank's part of a run: the values that the loop uses, and what happens around a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from muster.config.spec import RunSpec
from muster.core.batch_schedule import BatchSchedule
from muster.core.typed_json import Json
from muster.protocol.ranks import AgentClient, Command, RankContext
from muster.train.baseline import BaselineWindow
from muster.train.data_feed.batch_reader import ReadAhead, StepWork
from muster.train.distributed.arrivals import Arrivals, StepClock
from muster.train.distributed.pause_consensus import PauseConsensus
from muster.train.distributed.process_setup import World
from muster.train.distributed.reduce import GradientReducer
from muster.train.distributed.step_consensus import StepConsensus
from muster.train.evaluation.evaluate import Evaluator
from muster.train.measurement.metrics import Pending, Phases, StepLog, StepTimes
from muster.train.measurement.profiling import Collector, Profiler
from muster.train.model.mixtures.load import EXPERT_FIGURES, Mixture
from muster.train.model.model_with_loss import ModelWithLoss
from muster.train.objectives.base import Objective
from muster.train.optim.nonfinite import find_bad_micro_batch, not_finite_error
from muster.train.optim.optimizer import ShardOptimizer
from muster.train.pipeline import Pipeline
from muster.train.state.saving import Saves
from muster.train.state.snapshot import Snapshots
from muster.train.state.snapshot_pace import SnapshotPace
from muster.train.state.state_hash import PendingHash, StateHashes
from muster.train.state.training_state import TrainingState

#: How long the wait for a save counts as progress: another process writes the bytes, with a heartbeat of its own.
SAVE_LIMIT_S = 1800.0


class Paused(Exception):
    """This rank leaves its world between two updates, to continue in another one."""


@dataclass
class StepResult:
    """A finished step, whose numbers may still be on the device."""

    work: StepWork
    losses: Sequence[Tensor]
    numbers: Pending | None
    """None: its update was skipped."""
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
    snapshots: Snapshots | None
    hashes: StateHashes
    baseline: BaselineWindow
    profiler: Profiler
    collector: Collector
    last_step: int
    batch_schedule: BatchSchedule
    update: Callable[[TrainingRun, StepWork, float], None]
    """Computes and applies one step at a learning rate: ``loop.update``, or another library's."""
    times: StepTimes = field(default_factory=StepTimes)
    pause_consensus: PauseConsensus = field(default_factory=PauseConsensus)
    arrivals: Arrivals = field(default_factory=lambda: Arrivals(StepClock()))
    pipeline: Pipeline | None = None
    """Where the model is cut into stages."""
    pace: SnapshotPace = field(init=False)
    _pending: StepResult | None = None
    _evaluated: tuple[int, float | None] = (-1, None)
    """The step that was evaluated last, and its held-out loss."""

    def __post_init__(self) -> None:
        held = 0 if self.snapshots is None else self.snapshots.size_bytes
        every = self.spec.checkpoint.snapshot_every_steps
        self.log.clock = self.clock if self.device.type == "cpu" else None
        self.pace = SnapshotPace(every, held, mtbf_s=self.saves.rate.mtbf_s)

    @property
    def clock(self) -> StepClock:
        return self.arrivals.clock

    @property
    def mixture(self) -> Mixture | None:
        """The model's experts, where it has some."""
        return self.model.mixture if isinstance(self.model, ModelWithLoss) else None

    @property
    def objective(self) -> Objective | None:
        """What is learned from preferences, if they are what is learned from."""
        return self.model.objective if isinstance(self.model, ModelWithLoss) else None

    def begin_objective(self, work: StepWork) -> None:
        """The step's figures begin, and what its loss needs to know first is taken."""
        if self.objective is None:
            return
        self.objective.begin(self.device)
        others = [(part.index, part.mismatched) for part in work.rounds if part.mismatched is not None]
        if others:
            self.objective.look_at(self.evaluator.model.documents, others, self.evaluator.groups)

    def meet_replicas(self, *, after: int, last: bool = False) -> None:
        """With ``training.local_steps``: the meetings of the replicas that are due after that step. ``last``: of all
        that has moved."""
        steps = self.state.local_steps
        if steps is not None and steps.due(after, last=last):
            self.before_update()
            steps.meet(after, last=last)

    def gradient_share(self, work: StepWork) -> float:
        """What the gradients here are a part of the step's: a replica that steps by itself has those of its own tokens,
        of which it takes the mean. 0 tokens: 1.0, and nothing to divide."""
        return 1.0 if self.state.local_steps is None else work.replica_share or 1.0

    def before_update(self) -> None:
        """The state is about to change."""
        if self.snapshots is not None:
            self.snapshots.before_change()

    def record_step(
        self, work: StepWork, losses: Sequence[Tensor], loss: Tensor, norm: Tensor, fault: Tensor, learning_rate: float
    ) -> None:
        """The update of ``work.step`` was applied: snapshot it, and emit its event once its numbers are on the host.

        On CUDA without a snapshot the host does not wait here but in the next step's first round.
        """
        figures = () if self.mixture is None else self.mixture.figures().unbind()
        if self.objective is not None and self.objective.totals is not None:
            figures = self.objective.totals.unbind()
        self._advance(StepResult(work, losses, Pending((loss, norm, fault, *figures)), learning_rate))

    def record_skipped_step(self, work: StepWork, learning_rate: float) -> None:
        """Count ``work.step`` without its batch, which is not finite each time (``skip_steps``). As on every rank.

        Nothing is computed: only the step number changes.
        """
        self.flush_pending_metrics()
        self.agent.beat(work.step)
        self._advance(StepResult(work, (), None, learning_rate))

    def _advance(self, result: StepResult) -> None:
        work, self._pending = result.work, result
        self.state.step = work.step
        result.state_hash = self.hashes.begin(work.step)
        self.pace.step_ended()
        snapshot_due = self.snapshots is not None and self.pace.due(work.step, self.consensus.snapshot_every)
        snapshot_due = snapshot_due and not self.baseline.covers(work.step)
        news = self.pace.news() if self.snapshots is not None else None
        if news is not None and self.world.rank == 0:
            self.agent.emit("snapshot.interval", step=work.step, every_steps=self.pace.every, reason=news)
        if not snapshot_due and self.device.type == "cuda" and work.step < self.last_step:
            return
        self._check_finite(result)
        if snapshot_due and self.snapshots is not None:
            copies_arrived = self.consensus.copies_arrived()
            self.clock.begin_stall()
            self.snapshots.save(work.step, self.state.local_tensors(), copies_arrived=copies_arrived, overlap=True)
            self.times.stall_ns = self.clock.end_stall()
            held_s = self.times.stall_ns / 1e9 + self.snapshots.overlapped_s
            self.pace.took(held_s, waited_s=self.snapshots.waited_s, takes_s=self.snapshots.takes_s)
        try:
            self.flush_pending_metrics()
        finally:
            if snapshot_due and work.step < self.last_step:
                # The copy starts now, not at the next step's first micro-batch; and with the step's event just before,
                # this wakes the agent once.
                self.agent.beat(work.step + 1)

    def flush_pending_metrics(self) -> None:
        """Read the last update's numbers and emit its event, if that is still to be done.

        Raises:
            NotFinite: it was not applied.
            Paused: this rank is to continue in another world.
        """
        # Ranks that share a replica leave only where they agreed to: elsewhere the others may have gone on, and would
        # wait for this one in the replica's own collectives.
        agreed = self.pause_consensus.result()
        if agreed or (self.agent.pause_requested() and self.context.layout.ranks_per_replica == 1):
            raise Paused
        step = self._emit_pending()
        if step is not None and self.phases.now != "train":
            self.saves.prepare()
            self.phases.enter("train", step=step)
            self.log.restart()

    def pause(self) -> None:
        """The world broke between two updates: emit the last one's event and snapshot it, so that none is lost."""
        if self.state.local_steps is not None:
            self.state.local_steps.undo()
        self._emit_pending(wait_for_hash=False)
        if self.snapshots is not None:
            self.snapshots.save_if_newer(self.state.step, self.state.local_tensors())

    def leave(self) -> None:
        """End this process for a resize: the next world's ranks are new processes, which start from this snapshot."""
        self.flush_pending_metrics()
        if self.snapshots is not None:
            self.snapshots.save_if_newer(self.state.step, self.state.local_tensors())
        self.collector.close()
        self.profiler.close()

    def abandon(self) -> None:
        """Release what belongs to the broken world."""
        self.world.aborter()
        self.reader.close()
        self.collector.close()
        self.profiler.close()
        self.saves.saver.abandon()

    def _emit_pending(self, *, wait_for_hash: bool = True) -> int | None:
        """Emit the last update's event, if that is still to be done; its step."""
        result, self._pending = self._pending, None
        if result is None:
            return None
        loss, norm = self._check_finite(result)
        extra: dict[str, Json] = {} if self.snapshots is None else {**self.snapshots.newest_steps()}
        if result.state_hash is not None:
            agent = self.agent if self.world.rank == 0 else None
            extra |= self.hashes.event_detail(result.state_hash, agent, wait=wait_for_hash)
        if self.mixture is not None and result.numbers is not None:
            extra |= dict(zip(EXPERT_FIGURES, result.numbers.values()[3:], strict=True))
        if self.objective is not None and result.numbers is not None:
            extra |= {"units": result.work.units, **self.objective.figures(result.numbers.values()[3:])}
        if self.world.rank == 0 and (news := self.arrivals.take_news()):
            extra["pace"] = news
        step, rate = result.work.step, result.learning_rate
        detail = self.log.write(result.work, loss=loss, norm=norm, learning_rate=rate, times=self.times, extra=extra)
        self.times = StepTimes()
        rates = self.baseline.add(step, detail) if detail is not None else None
        if rates is not None:
            self.agent.emit("baseline_rate", step=step, phase=None, **rates)
        return step

    def start_consensus(self, work: StepWork, *, skipped: bool = False) -> None:
        """Start to agree with all ranks on commands, saves, whether the requested copies have arrived, and who is late.

        Called once a step, after its micro-batches: that is the time a copy has had.
        """
        if skipped:
            self.arrivals.interrupt()
        figures = self.arrivals.arrive(work.own_tokens)
        copy_is_pending = self.snapshots is not None and self.snapshots.copy_is_pending()
        saving = self.saves.saver.busy
        self.consensus.start(
            save_now=self.wants_save(),
            copy_is_pending=copy_is_pending,
            saving=saving,
            snapshot_every=self.pace.wants(),
            figures=figures,
        )

    def sums_ended(self) -> None:
        """The step's sums have ended, on all ranks: learn who came last to them."""
        if self.state.local_steps is not None:
            self.state.local_steps.keep()
        self.arrivals.released()
        if self.arrivals.active:
            self.arrivals.learn(self.consensus.figures())

    def evaluation_is_due(self, step: int) -> bool:
        every = self.spec.evaluation.every_steps
        return every > 0 and step % every == 0 and step < self.last_step

    def evaluate(self, step: int, *, final: bool = False) -> None:
        """Held-out figures of the state after ``step``; training waits."""
        self.flush_pending_metrics()
        with self._phase("eval", step):
            self._evaluated = (step, self.evaluator.run(step, final=final).get("loss"))

    def checkpoint_is_due(self, step: int) -> bool:
        """By the step count, or because a save was deferred. The same on every rank: training waits for no save."""
        self.saves.saver.poll()
        if step >= self.last_step or self.baseline.covers(step):
            return False
        due = self.saves.due(step)
        if due and self.consensus.any_rank_saving():
            self.saves.defer(step)
        return (due or self.saves.deferred) and not self.consensus.any_rank_saving()

    def wants_save(self) -> bool:
        """Whether rank 0 requests a save by the clock: ``checkpoint.every_steps: auto``, or a retry of a failed one."""
        if self.world.rank != 0 or self.baseline.covers(self.state.step + 1):
            return False
        return self.saves.due_by_clock() and not self.saves.saver.busy

    def save(self, step: int, command: Command | None = None) -> None:
        """Save, unless the command forbids it or leaves too little time."""
        save_only = command is not None and command.kind == "save"
        if save_only and step < self.last_step and self.consensus.any_rank_saving():
            self.saves.defer(step)
            return
        self.flush_pending_metrics()
        if command is not None and not self.saves.fits(command, self.world.control):
            return
        with self._phase("checkpoint", step):
            self.agent.progress(for_s=SAVE_LIMIT_S)
            evaluated, loss = self._evaluated
            self.saves.save(step, heldout_loss=loss if evaluated == step else None)
            self.agent.progress()

    def finish(self) -> None:
        """Complete everything in progress."""
        self.flush_pending_metrics()
        self.reader.close()
        self.collector.close()
        self.profiler.close()
        self.agent.progress(for_s=SAVE_LIMIT_S)
        self.saves.saver.finish()
        self.agent.progress()

    @contextmanager
    def _phase(self, phase: str, step: int) -> Iterator[None]:
        """An evaluation or a save: a phase of its own, whose time counts in no step."""
        before = self.phases.now
        self.phases.enter(phase, step=step)
        self.arrivals.interrupt()
        yield
        if before is not None and 0 < step < self.last_step:
            self.phases.enter(before, step=step)
        self.log.restart()

    def _check_finite(self, result: StepResult) -> tuple[float | None, float | None]:
        """Loss and norm; None if the update was skipped. Raises NotFinite."""
        if result.numbers is None:
            return None, None
        loss, norm, fault = result.numbers.values()[:3]
        if math.isfinite(loss) and math.isfinite(norm) and fault == 0.0:
            return loss, norm
        sequences = [part.sequences for part in result.work.rounds]
        seen = sequences[: len(result.losses)]  # none on a stage that computes no loss
        culprit = find_bad_micro_batch(result.losses, seen, rank=self.world.rank, group=self.world.control)
        error = not_finite_error(
            step=result.work.step,
            loss=loss,
            norm=norm,
            fault=fault,
            culprit=culprit,
            sequences=[row for rows in sequences for row in rows],
        )
        self.agent.emit("run.message", step=result.work.step, text=str(error), sequences=list(error.sequences))
        raise error
