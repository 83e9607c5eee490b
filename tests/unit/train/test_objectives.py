"""Objectives on preferences: equal to TRL's trainers, and the same in packed rows, small micro-batches and pieces."""

import json
import math
from pathlib import Path

import pytest
import torch
from fakes.preferences import rows_of, run_steps, spec_of

from muster.config.spec import Objective as Settings
from muster.train.data_feed.batch import Units
from muster.train.model.loss import LogitRule, token_log_probs
from muster.train.objectives.base import Values, make_objective

pytestmark = pytest.mark.reads("tests/unit/train/trl_objectives.json")
#: What TRL gave, by tests/oracles/trl_objectives.py, with its version and date.
TRL = json.loads((Path(__file__).parent / "trl_objectives.json").read_text())
OBJECTIVES = {
    "hinge": {"name": "dpo", "loss": "hinge"},
    "robust": {"name": "dpo", "loss": "robust", "label_smoothing": 0.1},
    "apo_zero": {"name": "dpo", "loss": "apo_zero"},
    "sigmoid_norm": {"name": "dpo", "loss": "sigmoid_norm"},
    "dpo-lora": "dpo",
}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", sorted(TRL["cases"]))
def test_twenty_steps_equal_trl(case, tmp_path):
    theirs = TRL["cases"][case]
    ours = run_steps(spec_of(tmp_path, OBJECTIVES.get(case, case), lora=case == "dpo-lora"), tmp_path)
    assert len(theirs) == len(ours) == 20
    for step, (one, other) in enumerate(zip(ours, theirs, strict=True), start=1):
        for name, value in other.items():
            # Rewards are differences of log-probabilities of about 50: float32 leaves them 1e-5.
            rel, least = (1e-4, 0.0) if name == "loss" else (1e-3, 1e-4)
            assert one.get(name, 0.0) == pytest.approx(value, rel=rel, abs=least), f"step {step}: {name}"
    assert len({round(each["loss"], 6) for each in ours}) > 10  # it learns something


def test_packing_and_small_micro_batches_change_nothing(tmp_path):
    """The mean is over a step's pairs, however they share rows and rounds."""
    whole = run_steps(spec_of(tmp_path, "dpo"), tmp_path, steps=4)
    small = run_steps(spec_of(tmp_path, "dpo", micro_batch_size=3), tmp_path, steps=4)
    for one, other in zip(whole, small, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["norm"] == pytest.approx(other["norm"], rel=1e-4) and one["accuracy"] == other["accuracy"]
    packed = spec_of(tmp_path, "dpo", packing=True, sequence_length=96)
    steps = run_steps(packed, tmp_path, steps=2)
    assert all(each["units"] > 4 for each in steps)
    assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)  # policy and reference are one model


def test_a_pair_is_worth_as_much_packed_as_alone(tmp_path):
    """One step over all pairs: the same loss, norm and figures in any number of rows."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in rows_of(labelled=False, count=12)))
    results = []
    for packing, sequences in ((False, 12), (True, None)):
        spec = spec_of(tmp_path, "orpo", packing=packing, sequence_length=96)
        if sequences is None:
            from muster.data.prepare import prepare

            sequences = len(prepare(spec, run_dir=tmp_path / "run").train)
            assert sequences < 12
        training = spec.training.model_copy(update={"global_batch_size": sequences, "micro_batch_size": 2})
        results.append(run_steps(spec.model_copy(update={"training": training}), tmp_path, steps=1)[0])
    alone, packed = results
    assert alone["units"] == packed["units"] == 12
    for name in alone:
        assert packed[name] == pytest.approx(alone[name], rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("rule", [LogitRule(), LogitRule(factor=0.5, cap=4.0)])
def test_log_probabilities_and_their_gradients_are_autograds(rule):
    draw = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(50, 16, generator=draw), torch.randn(37, 16, generator=draw)
    labels, out = torch.randint(0, 37, (50,), generator=draw), torch.randn(50, generator=draw)
    results = []
    for chunked in (True, False):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if chunked:
            log_probs = token_log_probs(h, w, None, labels, chunk_tokens=16, rule=rule)
        else:
            logits = h @ w.t() * rule.factor
            logits = logits if rule.cap is None else torch.tanh(logits / rule.cap) * rule.cap
            log_probs = logits.log_softmax(1).gather(1, labels[:, None])[:, 0]
        (log_probs * out).sum().backward()
        results.append((log_probs.detach(), h.grad, w.grad))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_label_smoothing_of_sigmoid_is_conservative_dpo():
    """TRL no longer has it there: the formula is Mitchell's, ``-(1-e) log s(x) - e log s(-x)``."""
    objective = make_objective(Settings(name="dpo", beta=0.5, label_smoothing=0.2))
    ratios = torch.tensor([3.0, 1.0])
    units = Units(torch.tensor([1, 1]), torch.tensor([1, 1]), torch.tensor([0.0]))
    losses, rewards = objective.losses(Values(ratios, ratios, units.counts), units)
    ahead = 0.5 * 2.0
    assert float(losses[0]) == pytest.approx(0.8 * math.log1p(math.exp(-ahead)) + 0.2 * math.log1p(math.exp(ahead)))
    assert rewards.tolist() == [1.5, 0.5]
