"""The training loop, on one screen. Everything it names is a value of ``TrainingRun`` or a plain function."""

from __future__ import annotations

import time

from muster.protocol.ranks import Command
from muster.train.data_feed.batch_reader import StepWork
from muster.train.micro_batches import run_micro_batches
from muster.train.optim.learning_rate import learning_rate
from muster.train.optim.nonfinite import must_skip
from muster.train.optim.optimizer import clip_scale
from muster.train.training_run import TrainingRun


def train(run: TrainingRun) -> Command | None:
    """Apply every remaining step; returns the command that ended training early, or None after the last step.

    Returns with ``run.state.step`` applied on every rank. Raises NotFinite with the bad update not applied.
    """
    training = run.spec.training
    for step in range(run.state.step + 1, run.last_step + 1):
        waited_from = time.monotonic_ns()
        work = run.reader.take(step)
        run.times.data_wait_ns = time.monotonic_ns() - waited_from
        run.clock.data_ns += run.times.data_wait_ns
        run.profiler.begin(step)
        rate = learning_rate(training.optimizer, step=step, total_steps=run.last_step)
        rate *= run.batch_schedule.at(step).learning_rate_scale
        if step in run.context.skip_steps:
            run.start_consensus(work, skipped=True)
            run.record_skipped_step(work, rate)
        else:
            run.update(run, work, rate)
        run.profiler.end(step)
        run.collector.step(step)
        command = run.consensus.command()
        if run.evaluation_is_due(step):
            run.evaluate(step)
        if command is not None or run.checkpoint_is_due(step):
            run.save(step, command)
        if command is not None and command.kind == "stop":
            return command
    return None


def update(run: TrainingRun, work: StepWork, rate: float) -> None:
    """One step: forward and backward of every micro-batch, the sums over all ranks, the optimizer."""
    training, step = run.spec.training, work.step
    run.meet_replicas(after=step - 1)
    run.reducer.begin(micro_batches=work.micro_batches)
    if run.mixture is not None:
        run.mixture.begin_step(run.device)
    run.begin_objective(work)
    losses = run_micro_batches(run, work)
    run.start_consensus(work)
    total, norm, fault = run.reducer.finish()
    run.sums_ended()
    skip = must_skip(total, norm, fault)
    alone = run.gradient_share(work)
    norm = norm / alone
    scale = clip_scale(norm, training.optimizer.max_grad_norm) / alone
    run.before_update()
    if run.mixture is not None:
        run.mixture.move_biases(skip)
    run.optimizer.step(step=step, learning_rate=rate, scale=scale, skip=skip)
    run.record_step(work, losses, total, norm, fault, rate)
