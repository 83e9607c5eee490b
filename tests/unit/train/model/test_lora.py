"""Adapters: what is trained, where they start, in which precision."""

import pytest
import torch
from fakes.small_model import CPU, LLAMA, build, spec_of

from muster.core.errors import UsageError
from muster.train.data_feed.batch import make_batch
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
    parameters = {name: p.full_tensor() for name, p in build(spec_of(lora={"rank": 16})).named_trainable().items()}
    for name, value in parameters.items():
        if ".lora_B." in name:
            assert torch.count_nonzero(value) == 0, name
        else:
            bound = value.shape[1] ** -0.5
            assert 0.9 * bound < float(value.detach().abs().max()) <= bound, name


def test_the_frozen_base_is_held_in_the_compute_dtype_and_adapters_in_float32():
    built = build(spec_of(LLAMA, dtype="bfloat16", lora={"rank": 2}))
    for name, parameter in built.module.model.named_parameters():
        assert parameter.dtype == (torch.float32 if parameter.requires_grad else torch.bfloat16), name
    loss_sum(built.module, batch(), chunk_tokens=8, scale=1.0).backward()
    for name, parameter in built.named_trainable().items():
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32, name


def test_targets_that_are_not_there():
    with pytest.raises(UsageError, match="no_such_proj") as caught:
        build(spec_of(lora={"targets": ["no_such_proj"]}))
    assert "\n" not in str(caught.value)
