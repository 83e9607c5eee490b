"""``muster.hf`` in a real Trainer: a restored step goes on with the rows that an undisturbed run has there."""

import pytest
import torch
import transformers

import muster.run
from muster.hf import MusterCallback

ROWS, STEPS = 10, 12


class Recorded(torch.nn.Module):
    """A model that records the rows it is given."""

    def __init__(self):
        super().__init__()
        self.weight, self.base = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.ones(1))
        self.base.requires_grad = False
        self.rows = []

    def forward(self, row, labels=None):
        self.rows.append(row.tolist())
        return {"loss": (self.weight * row).mean() + torch.rand(())}


def train(folder, monkeypatch, *, restored=0, accumulate=1):
    """(rows of each micro-batch, losses by reported step, names saved by step) of a run that begins at ``restored``."""
    losses, saved = {}, []
    monkeypatch.setattr(muster.run, "restore", lambda state: restored)
    monkeypatch.setattr(muster.run, "save", lambda step, state: saved.append((step, *state["model"].state_dict())))
    monkeypatch.setattr(muster.run, "heartbeat", lambda step, loss=None, **_: losses.update({step: loss}))
    model = Recorded()
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=2, gradient_accumulation_steps=accumulate,
        use_cpu=True, save_strategy="no", report_to="none", disable_tqdm=True, logging_steps=3,
    )  # fmt: skip
    rows = [{"row": torch.tensor(float(row)), "labels": 0} for row in range(ROWS)]
    transformers.Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[MusterCallback()]).train()
    return model.rows, losses, saved


@pytest.mark.parametrize("accumulate", [1, 5])
@pytest.mark.parametrize("restored", [1, 4, 5, 7, STEPS])
def test_the_rows_that_come_next(tmp_path, monkeypatch, restored, accumulate):
    whole, losses, _ = train(tmp_path, monkeypatch, accumulate=accumulate)
    assert len({tuple(map(tuple, whole[first : first + 5])) for first in range(0, len(whole), 5)}) > 1, "shuffled anew"
    assert sorted(losses) == list(range(1, STEPS + 1))
    rest, reported, _ = train(tmp_path, monkeypatch, restored=restored, accumulate=accumulate)
    assert rest == whole[restored * accumulate :]
    assert sorted(reported) == list(range(restored + 1, STEPS + 1))


def test_the_first_mean_loss_is_of_the_steps_that_were_made(tmp_path, monkeypatch):
    monkeypatch.setattr(transformers.Trainer, "compute_loss", lambda self, model, inputs, **_: model.weight.sum() + 3)
    _, losses, _ = train(tmp_path, monkeypatch, restored=4)
    assert (losses[5], losses[6]) == (None, pytest.approx(3, abs=0.01))


def test_frozen_weights_are_not_saved(tmp_path, monkeypatch):
    _, _, saved = train(tmp_path, monkeypatch)
    assert saved == [(step, "weight") for step in range(1, STEPS + 1)]
