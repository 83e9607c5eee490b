"""Greedy generation on one rank against a loop that forgets everything between tokens."""

from types import SimpleNamespace

import pytest
import torch
from fakes.small_model import LLAMA, build, process_group, spec_of, whole

from muster.train.evaluation.generate import fits, generate

PROMPTS = [[5, 6, 7], [9], [8, 7, 6, 5, 4, 3, 2, 1], [5, 6, 7]]


@pytest.fixture(scope="module")
def built():
    with process_group():
        yield build(spec_of({**LLAMA, "model_type": "qwen3", "head_dim": 8}))


def slow(built, prompt, count):
    """No cache, no batch, no padding."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(built.config, attn_implementation="eager")
    model.load_state_dict({name: whole(p) for name, p in built.module.model.named_parameters()})
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model.eval()(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_completions_of_a_padded_batch_come_in_the_order_of_the_prompts(built):
    found = generate(built.module, PROMPTS, max_new_tokens=6, eos_id=None, pad_id=0)
    assert found == [slow(built, prompt, 6) for prompt in PROMPTS]
    assert found[0] == found[3]


def test_the_end_token_ends_and_is_left_out(built):
    whole = generate(built.module, [PROMPTS[0]], max_new_tokens=6, eos_id=None, pad_id=0)[0]
    end = whole[3]
    found = generate(built.module, [PROMPTS[0]], max_new_tokens=6, eos_id=end, pad_id=0)[0]
    assert found == whole[: whole.index(end)]


def test_generation_stops_at_the_models_longest_position(built):
    prompt = [1] * 60
    assert len(generate(built.module, [prompt], max_new_tokens=50, eos_id=None, pad_id=0)[0]) == 4
    assert generate(built.module, [[1] * 64], max_new_tokens=5, eos_id=None, pad_id=0) == [[]]


def test_nothing_to_do(built):
    assert generate(built.module, [], max_new_tokens=5, eos_id=1, pad_id=0) == []
    assert len(generate(built.module, [[]], max_new_tokens=2, eos_id=None, pad_id=0)[0]) == 2


def test_the_model_is_left_as_it_was(built):
    built.module.train()
    before = built.module.model.config._attn_implementation
    generate(built.module, PROMPTS, max_new_tokens=2, eos_id=None, pad_id=0)
    assert built.module.training
    assert built.module.model.config._attn_implementation == before == "muster_document"
    held = built.module.model.model.embed_tokens.weight
    assert type(held.data).__name__ == "DTensor", "units are sharded again"


@pytest.mark.parametrize(
    ("free_gib", "unused_gib", "whole"), [(30, 0, True), (20, 0, False), (10, 20, True), (300, 0, True)]
)
def test_a_model_is_gathered_for_generation_only_where_the_gpu_has_room(monkeypatch, free_gib, unused_gib, whole):
    gib = 1 << 30
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_gib * gib, 80 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: (unused_gib + 5) * gib)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5 * gib)
    parameter = SimpleNamespace(numel=lambda: 8 * gib, device=gpu)
    module = SimpleNamespace(parameters=lambda: iter([parameter]), compute_dtype=torch.bfloat16)
    assert fits(module) is whole, "16 GiB"
    too_large = SimpleNamespace(parameters=lambda: iter([parameter, parameter]), compute_dtype=torch.bfloat16)
    assert fits(too_large) is False, "32 GiB: over the limit whatever is free"
