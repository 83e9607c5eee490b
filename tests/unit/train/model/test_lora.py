"""Adapters: what is trained, where they start, in which precision."""

from types import SimpleNamespace

import pytest
import torch
from fakes.small_model import CPU, LLAMA, build, spec_of, whole
from torch.distributed.tensor import DTensor

from muster.app.planning.model_shape import unfit
from muster.core.errors import UsageError
from muster.core.types import Layout
from muster.train.data_feed.batch import make_batch
from muster.train.model import sharding
from muster.train.model.loss import loss_sum

pytestmark = pytest.mark.usefixtures("group")


def batch():
    ids = torch.arange(32).view(1, 32)
    return make_batch(ids, ids.roll(-1, 1), ids, [32], CPU)


def test_a_model_with_adapters_starts_as_its_base():
    plain, adapted = build(spec_of()), build(spec_of(lora={"rank": 4}))
    losses = [loss_sum(built.module, batch(), chunk_tokens=8, scale=1.0) for built in (plain, adapted)]
    assert torch.equal(*losses)
    assert adapted.num_parameters == plain.num_parameters, "adapters are counted apart"
    assert 0 < adapted.num_trainable < plain.num_trainable


def test_only_adapters_are_trained_and_not_on_the_head():
    built = build(spec_of(lora={"rank": 4, "targets": ["q_proj", "down_proj"]}))
    names = list(built.named_trainable())
    assert len(names) == 2 * 2 * 2
    assert all((".q_proj." in name or ".down_proj." in name) and ".lora_" in name for name in names)
    assert built.lora_config.r == 4
    assert not any("lm_head" in name for name in build(spec_of(lora={})).named_trainable())


def test_a_is_kaiming_uniform_and_b_zero():
    parameters = {name: whole(p) for name, p in build(spec_of(lora={"rank": 16})).named_trainable().items()}
    for name, value in parameters.items():
        if ".lora_B." in name:
            assert torch.count_nonzero(value) == 0, name
        else:
            bound = value.shape[1] ** -0.5
            assert 0.9 * bound < float(value.detach().abs().max()) <= bound, name


@pytest.mark.parametrize("master", ["float32", "bfloat16"])
def test_the_frozen_base_is_held_in_the_compute_dtype_and_adapters_in_float32(master):
    built = build(spec_of(LLAMA, dtype="bfloat16", master_dtype=master, lora={"rank": 2}))
    for name, parameter in built.module.model.named_parameters():
        assert parameter.dtype == (torch.float32 if parameter.requires_grad else torch.bfloat16), name
    loss_sum(built.module, batch(), chunk_tokens=8, scale=1.0).backward()
    for name, parameter in built.named_trainable().items():
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32, name


def test_targets_that_are_not_there():
    with pytest.raises(UsageError, match="no_such_proj") as caught:
        build(spec_of(lora={"targets": ["no_such_proj"]}))
    assert "\n" not in str(caught.value)


def test_frozen_weights_of_a_lone_rank_stay_outside_fsdp_and_change_no_bit(monkeypatch):
    """FSDP copies what it gathers even where one rank holds all of it."""
    found = []
    for outside in (sharding.kept_outside, lambda root, mesh: set()):
        monkeypatch.setattr(sharding, "kept_outside", outside)
        built = build(spec_of(lora={"rank": 4}, dtype="bfloat16"))
        for name, parameter in built.named_trainable().items():
            if ".lora_B." in name:
                torch.nn.init.constant_(parameter, 0.01)
        loss = loss_sum(built.module, batch(), chunk_tokens=8, scale=1.0)
        loss.backward()
        gradients = {name: whole(p.grad) for name, p in built.named_trainable().items()}
        frozen = [p for p in built.module.model.parameters() if not p.requires_grad]
        found.append((loss.detach(), gradients, {isinstance(p, DTensor) for p in frozen}))
    (loss, gradients, kinds), (same_loss, same_gradients, all_in_fsdp) = found
    assert kinds == {False} and all_in_fsdp == {True}
    assert torch.equal(loss, same_loss)
    assert gradients.keys() == same_gradients.keys()
    assert all(torch.equal(gradient, same_gradients[name]) for name, gradient in gradients.items())
    assert any(gradient.abs().max() > 0 for gradient in gradients.values())


def test_only_frozen_weights_that_nobody_shares_stay_outside(monkeypatch):
    root = torch.nn.Linear(2, 2)
    root.bias.requires_grad_(False)
    for layout, outside in [
        ({}, {root.bias}),
        ({"dp_replicate": 2}, {root.bias}),
        ({"dp_shard": 2}, set()),
        ({"tp": 2}, set()),
        ({"cp": 2}, set()),
    ]:
        assert sharding.kept_outside(root, SimpleNamespace(layout=Layout(**layout))) == outside


def test_dora_starts_as_the_base_and_trains_the_length_of_each_row():
    plain, adapted = build(spec_of()), build(spec_of(lora={"rank": 4, "dora": True}))
    losses = [loss_sum(built.module, batch(), chunk_tokens=8, scale=1.0) for built in (plain, adapted)]
    torch.testing.assert_close(*losses)
    losses[1].backward()
    weights = {name: whole(parameter) for name, parameter in plain.named_trainable().items()}
    lengths = {name: p for name, p in adapted.named_trainable().items() if ".lora_magnitude_vector." in name}
    assert len(lengths) == 2 * 7
    for name, length in lengths.items():
        weight = weights[name.partition(".lora_")[0] + ".weight"]
        torch.testing.assert_close(whole(length), weight.norm(dim=1))
        assert length.dtype == torch.float32 and whole(length.grad).abs().max() > 0
    shape = adapted.shape
    assert adapted.num_trainable == shape.lora_parameters(4, dora=True)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {**LLAMA, "model_type": "mixtral", "num_local_experts": 4},
            "model.lora.dora does not go with a mixture of experts: .*dense linear layers",
        ),
        ({"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2}, "linear layers, and the model has a Conv1D"),
    ],
)
def test_dora_is_refused_for_what_it_does_not_compute(config, words):
    with pytest.raises(UsageError, match=words):
        build(spec_of(config, lora={"dora": True}))
    problems = [(problem.key, problem.message) for problem in unfit(spec_of(config, lora={"dora": True}))]
    assert [key for key, _ in problems] == (["model.lora.dora"] if "mixtral" in config["model_type"] else [])
    assert not unfit(spec_of(config, lora={}))
