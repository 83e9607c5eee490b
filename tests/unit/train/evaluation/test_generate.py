"""Greedy generation on one rank against a loop that forgets everything between tokens."""

from types import SimpleNamespace

import pytest
import torch
from fakes.small_model import LLAMA, build, process_group, spec_of, whole

from muster.train.evaluation import evaluate
from muster.train.evaluation import generate as generating
from muster.train.evaluation.evaluate import Evaluator
from muster.train.evaluation.evaluated_model import TorchModel
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
    found = generate(built.module, PROMPTS, max_new_tokens=6, stop_ids=(), pad_id=0)
    assert found == [slow(built, prompt, 6) for prompt in PROMPTS]
    assert found[0] == found[3]


def test_the_end_token_ends_and_is_left_out(built):
    whole = generate(built.module, [PROMPTS[0]], max_new_tokens=6, stop_ids=(), pad_id=0)[0]
    end = whole[3]
    found = generate(built.module, [PROMPTS[0]], max_new_tokens=6, stop_ids=(10**6, end), pad_id=0)[0]
    assert found == whole[: whole.index(end)]


def test_generation_stops_at_the_models_longest_position(built):
    prompt = [1] * 60
    assert len(generate(built.module, [prompt], max_new_tokens=50, stop_ids=(), pad_id=0)[0]) == 4
    assert generate(built.module, [[1] * 64], max_new_tokens=5, stop_ids=(), pad_id=0) == [[]]


def test_nothing_to_do(built):
    assert generate(built.module, [], max_new_tokens=5, stop_ids=(1,), pad_id=0) == []
    assert len(generate(built.module, [[]], max_new_tokens=2, stop_ids=(), pad_id=0)[0]) == 2


def test_the_model_is_left_as_it_was(built):
    built = build(spec_of(dtype="bfloat16"))  # in FSDP: its weights are cast
    built.module.train()
    before = built.module.model.config._attn_implementation
    generate(built.module, PROMPTS, max_new_tokens=2, stop_ids=(), pad_id=0)
    assert built.module.training
    assert built.module.model.config._attn_implementation == before == "muster_document"
    held = built.module.model.model.embed_tokens.weight
    assert type(held.data).__name__ == "DTensor", "units are sharded again"


GIB = 1 << 30


def gpu_with(monkeypatch, *, free_gib, unused_gib):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_gib * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: (unused_gib + 5) * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5 * GIB)


def on_gpu(gib):
    """A model of so much memory in bfloat16, in shards on a GPU."""
    parameter = SimpleNamespace(numel=lambda: gib * GIB // 2, device=torch.device("cuda", 0))
    return SimpleNamespace(parameters=lambda: iter([parameter]), compute_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("free_gib", "unused_gib", "size", "whole"),
    [(30, 0, 16, True), (20, 0, 16, False), (10, 20, 16, True), (150, 0, 64, True), (150, 0, 140, False)],
)
def test_a_model_is_gathered_for_generation_only_where_the_gpu_has_room(monkeypatch, free_gib, unused_gib, size, whole):
    gpu_with(monkeypatch, free_gib=free_gib, unused_gib=unused_gib)
    assert fits(on_gpu(size)) is whole


def test_a_model_that_cannot_be_gathered_on_gpus_answers_nothing_and_says_why(monkeypatch):
    """Instead of being gathered whole for every token."""
    gpu_with(monkeypatch, free_gib=60, unused_gib=0)
    monkeypatch.setattr(generating, "groups_of", lambda module: ["both"])
    asked = []
    monkeypatch.setattr(generating, "agreed", lambda value, groups, operation: asked.append((value, groups)) or value)
    assert generating.objection(on_gpu(16)) is None
    reason = generating.objection(on_gpu(140))
    assert reason is not None and "150.3 GB" in reason and "45.1 GB" in reason
    assert asked == [(1, ["both"]), (0, ["both"])], "all ranks decide alike"
    said = []
    evaluator = Evaluator(
        spec=spec_of(training={}), prepared=SimpleNamespace(tokenizer_dir="there"), model=TorchModel(on_gpu(140)),
        groups=None, data_rank=0, data_ranks=2, world=SimpleNamespace(rank=0), device=torch.device("cuda", 0),
        agent=SimpleNamespace(emit=lambda kind, **detail: said.append((kind, detail["text"]))),
    )  # fmt: skip
    monkeypatch.setattr(evaluate, "heldout_questions", lambda *_: ["a question"])
    assert evaluator._answer(5, final=False) == {} and said == [("run.message", reason)]


def test_on_the_cpu_a_large_model_is_answered_in_shards(built):
    assert generating.objection(built.module) is None
