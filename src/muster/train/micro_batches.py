"""Forward and backward passes of a step's micro-batches: one after the other, or through the stages of a pipeline."""

from __future__ import annotations

import torch
from torch import Tensor

from muster.train.data_feed.batch_reader import StepWork
from muster.train.distributed.pipeline_order import Kind
from muster.train.model.loss import loss_sum
from muster.train.pipeline import Pipeline
from muster.train.training_run import TrainingRun


def run_micro_batches(run: TrainingRun, work: StepWork) -> list[Tensor]:
    """The losses of this rank's micro-batches; none on a stage before the last. Gradients are complete after it."""
    return in_turn(run, work) if run.pipeline is None else through_stages(run, run.pipeline, work)


def in_turn(run: TrainingRun, work: StepWork) -> list[Tensor]:
    """On a rank that has the whole model, or its share of each matrix."""
    training, losses = run.spec.training, []
    for number, part in enumerate(work.rounds, start=1):
        seed_micro_batch(training.seed, work.step, part.index)
        run.reducer.before_forward(last=number == len(work.rounds))
        loss = loss_sum(run.model, part.batch, chunk_tokens=training.loss_chunk_tokens, scale=part.scale)
        run.pause_consensus.start()
        loss.backward()  # type: ignore[no-untyped-call]
        run.reducer.add_loss(loss)
        losses.append(loss.detach())
        run.agent.beat(work.step)
        run.flush_pending_metrics()  # of the previous step, if they are still on the device
    return losses


def through_stages(run: TrainingRun, pipeline: Pipeline, work: StepWork) -> list[Tensor]:
    """On a stage. The last step's numbers are read first: a stage that stopped at them in mid-step would leave the
    others waiting for it."""
    run.flush_pending_metrics()
    losses = []
    for action, ends in pipeline.actions(work.rounds):
        part = work.rounds[action.micro_batch]
        if action.forward:
            seed_micro_batch(run.spec.training.seed, work.step, part.index)
            loss = pipeline.forward(action, part)
            if loss is not None:
                run.reducer.add_loss(loss)
                losses.append(loss)
            continue
        final = action.micro_batch == len(work.rounds) - 1  # of those that this chunk's gradients are summed over
        run.reducer.before_forward(last=final, ends=ends)
        if action.kind is Kind.WEIGHTS:
            pipeline.weights(action)
        else:
            pipeline.backward(action, last=ends)
        run.agent.beat(work.step)
    return losses


def seed_micro_batch(seed: int, step: int, micro_batch: int) -> None:
    """All randomness of a micro-batch (dropout) follows from its position: there is no generator state to save.

    An odd multiplier keeps neighbouring steps apart; 2**63 - 1 is the largest seed torch takes.
    """
    number = (seed * 1_000_003 + step * 65_537 + micro_batch + 1) % (2**63 - 1)
    # torch.manual_seed would format this thread's stack for each kind of device that is not in use.
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(number)
