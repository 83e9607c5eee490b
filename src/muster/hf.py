"""A Hugging Face Trainer (TRL's too) that survives: ``Trainer(..., callbacks=[MusterCallback()])``.

For scripts that the run file's ``command:`` starts. After each step the callback keeps trained weights, optimizer and
schedule in memory and reports the step; after a failure it restores them and goes on with the rows that come next, in
the order that the Trainer draws from ``args.seed``. Under plain torchrun it does nothing.

What is exact: weights, optimizer, schedule, rows, and random numbers of the model (dropout), which are drawn again from
(seed, step, rank) at each step. What is not: collators that draw random numbers, ``IterableDataset.set_epoch``, and the
last update of an epoch whose batches ``gradient_accumulation_steps`` does not divide, if a failure comes in that epoch.
An iterable data set is read again from its start, and has to last for the whole run. The Trainer's own first mean loss
after a restart counts steps that it did not make; what is reported to Muster is right.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Sized

import torch
import transformers
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, SeedableRandomSampler
from transformers import TrainerControl, TrainerState, TrainingArguments

import muster.run as muster
from muster.core.errors import CheckpointError

__all__ = ["MusterCallback"]


class MusterCallback(transformers.TrainerCallback):
    """The calls of ``muster.run``, at the Trainer's own events.

    Args:
        tokens_per_step: Of the global batch, for tokens/s and the ledger; not needed where the Trainer counts them
            (``include_num_input_tokens_seen``).
    """

    def __init__(self, tokens_per_step: int | None = None) -> None:
        self._tokens_per_step = tokens_per_step
        self._tokens_seen = 0
        self._held: muster.State = {}
        self._steps_per_epoch: int | None = None
        self._reported = 0
        self._not_logged_before = 0
        """Steps that the Trainer will count into its first mean loss, and that an earlier process made."""

    def on_train_begin(  # type: ignore[override]  # the Trainer passes these parts by name to each event
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: torch.nn.Module,
        optimizer: muster.Stateful,
        lr_scheduler: muster.Stateful,
        train_dataloader: DataLoaderShard | DataLoaderDispatcher,
        **_: object,
    ) -> None:
        """Restore, and put the data where the restored step left it.

        Raises:
            CheckpointError: what was saved is of another model.
        """
        self._held = {"model": _Trained(model), "optimizer": optimizer, "schedule": lr_scheduler}
        step = state.global_step = self._reported = self._not_logged_before = muster.restore(self._held)
        accumulated = args.gradient_accumulation_steps
        if isinstance(train_dataloader.dataset, Sized):
            self._steps_per_epoch = max(1, math.ceil(len(train_dataloader) / accumulated))
        epoch, steps = divmod(step, self._steps_per_epoch) if self._steps_per_epoch else (0, step)
        is_done = step >= state.max_steps  # the Trainer looks only after a step, and would make one more
        train_dataloader.skip_batches = sys.maxsize if is_done else steps * accumulated
        if epoch:
            _begin_with_epoch(train_dataloader, epoch)

    def on_epoch_end(  # type: ignore[override]
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        train_dataloader: DataLoaderShard | DataLoaderDispatcher,
        **_: object,
    ) -> None:
        """Only the first epoch of this process began inside."""
        train_dataloader.skip_batches = 0

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Seed what the model draws: the same in a run that failed and in one that did not."""
        place = muster.context()
        if place is not None:
            text = f"{args.seed} {state.global_step} {place.rank}"
            torch.manual_seed(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest()))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Save; report, unless the Trainer is about to tell the loss of this step."""
        if self._steps_per_epoch:  # the Trainer counts from where this process began
            state.epoch = state.global_step / self._steps_per_epoch
        muster.save(state.global_step, self._held)
        if not control.should_log:
            self._report(state)
        control.should_training_stop |= muster.should_stop()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: object,
    ) -> None:
        """Report the step with the loss that was logged: the mean since the log before."""
        logs = logs or {}
        if "loss" in logs:
            known = {name: logs[name] for name in ("grad_norm", "learning_rate") if name in logs}
            share = 1 - self._not_logged_before / state.global_step
            self._not_logged_before = 0
            self._report(state, loss=logs["loss"] / share, **known)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """An evaluation is progress, too."""
        muster.progress()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Complete the saves; after a stop the process ends here."""
        muster.finish(state.global_step, self._held)

    def _report(self, state: TrainerState, **figures: float) -> None:
        if state.global_step == self._reported:
            return
        self._reported = state.global_step
        seen = int(state.num_input_tokens_seen)
        tokens, self._tokens_seen = seen - self._tokens_seen, seen
        muster.heartbeat(state.global_step, tokens=tokens or self._tokens_per_step, **figures)


class _Trained:
    """A model's state without its frozen parameters (the base under adapters), which every start loads by itself."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in self._model.state_dict().items() if name not in self._frozen}

    def load_state_dict(self, state: dict[str, torch.Tensor], /) -> None:
        """Raises CheckpointError where ``state`` is not that of this model."""
        result = self._model.load_state_dict(state, strict=False)
        wrong = sorted({*result.unexpected_keys, *result.missing_keys} - self._frozen)
        if wrong:
            raise CheckpointError(f"the saved state and this model differ in {wrong[0]} ({len(wrong)} such names)")


def _begin_with_epoch(loader: DataLoaderShard | DataLoaderDispatcher, epoch: int) -> None:
    """The order of rows in this process's first epoch is that of ``epoch``.

    The Trainer counts this process's epochs from 0, and accelerate's sampler shuffles by ``initial_seed + epoch``.
    """
    batches = loader.batch_sampler
    sampler = getattr(getattr(batches, "batch_sampler", batches), "sampler", None)
    if isinstance(sampler, SeedableRandomSampler):
        sampler.initial_seed += epoch
