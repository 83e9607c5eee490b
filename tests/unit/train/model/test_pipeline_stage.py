"""A model cut into stages is the model: every family that may be cut, bit for bit; names, refusals."""

from types import SimpleNamespace

import pytest
import torch
from fakes.small_model import CPU, LLAMA, build, process_group, spec_of

from muster.core.errors import UsageError
from muster.core.layout import FAMILIES
from muster.core.types import Layout
from muster.train.data_feed.batch import make_batch
from muster.train.distributed.device_mesh import make_meshes
from muster.train.distributed.pipeline_order import Schedule
from muster.train.model.attention_isolation_check import Proof
from muster.train.model.causal_lm import on_meta, read_config
from muster.train.model.pipeline_stage import cut, tied_gradient
from muster.train.model.sharding import decoder_layers

CONFIG = {**LLAMA, "num_hidden_layers": 4, "pad_token_id": 0}
FOUR = {"head_dim": 8}


def link(stage, stages):
    return SimpleNamespace(stage=stage, stages=stages)


def whole_and_stages(config, stages, chunks=1, *, v=False):
    """The model on the CPU, and its stages with the same values."""
    from transformers import AutoModelForCausalLM

    spec = spec_of(config)
    read = read_config(spec, None, 50)
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(read, attn_implementation="eager", dtype=torch.float32)
    values, buffers = whole.state_dict(), dict(whole.named_buffers())
    parts = []
    for stage in range(stages):
        model = on_meta(read_config(spec, None, 50), torch.float32)
        schedule = Schedule(stages, chunks, split_backward=v, v=v)
        found = cut(model, decoder_layers(model), link(stage, stages), schedule)
        model.to_empty(device=CPU)
        if found.tied is not None and found.has_head:
            model.tie_weights()
        model.load_state_dict({name: value for name, value in values.items() if name in model.state_dict()})
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
        parts.append((model, found))
    return whole.eval(), parts


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_stages_in_turn_are_the_model_bit_for_bit(family):
    whole, parts = whole_and_stages({**CONFIG, **FOUR, "model_type": family}, 3)
    tokens = torch.arange(3, 23).reshape(2, 10)
    positions = torch.arange(10).repeat(2, 1)
    with torch.no_grad():
        expected = whole(input_ids=tokens, position_ids=positions, use_cache=False).logits
        hidden = parts[0][0].eval().base_model(input_ids=tokens, position_ids=positions, use_cache=False)[0]
        hidden = parts[1][0].eval().base_model(inputs_embeds=hidden, position_ids=positions, use_cache=False)[0]
        logits = parts[2][0].eval()(inputs_embeds=hidden, position_ids=positions, use_cache=False).logits
    assert torch.equal(logits, expected)


def pass_through(whole, parts, places):
    """Rows through ``places`` (stage, chunk) come out as they do of the whole model."""
    tokens = torch.arange(3, 23).reshape(2, 10)
    given = {"input_ids": tokens}
    with torch.no_grad():
        expected = whole(input_ids=tokens, use_cache=False).logits
        for place, chunk in places:
            model, stage = parts[place]
            with stage.only(model, chunk):
                if stage.ends(chunk):
                    logits = model.eval()(**given, use_cache=False).logits
                else:
                    given = {"inputs_embeds": model.eval().base_model(**given, use_cache=False)[0]}
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("tied", [False, True])
def test_chunks_in_turn_are_the_model_bit_for_bit(tied):
    whole, parts = whole_and_stages({**CONFIG, "num_hidden_layers": 5, "tie_word_embeddings": tied}, 2, chunks=2)
    assert [stage.chunks for _, stage in parts] == [(range(0, 2), range(3, 4)), (range(2, 3), range(4, 5))]
    assert [stage.layers for _, stage in parts] == [[0, 1, 3], [2, 4]]
    held = [{name for name, _ in model.named_parameters()} for model, _ in parts]
    pass_through(whole, parts, [(0, 0), (1, 0), (0, 1), (1, 1)])
    assert [{name for name, _ in model.named_parameters()} for model, _ in parts] == held, "all layers are back"


@pytest.mark.parametrize("tied", [False, True])
def test_chunks_in_a_v_are_the_model_bit_for_bit(tied):
    whole, parts = whole_and_stages({**CONFIG, "num_hidden_layers": 5, "tie_word_embeddings": tied}, 2, 2, v=True)
    assert [stage.chunks for _, stage in parts] == [(range(0, 2), range(4, 5)), (range(2, 3), range(3, 4))]
    ends = {"model.embed_tokens.weight", "model.norm.weight"} | (set() if tied else {"lm_head.weight"})
    names = [{name for name, _ in model.named_parameters() if ".layers." not in name} for model, _ in parts]
    assert names == [ends, set()], "the first stage has both ends of the model"
    assert all(stage.counted_elsewhere == frozenset() for _, stage in parts)
    assert all(tied_gradient(model, stage) is None for model, stage in parts), "it is added to where it is"
    pass_through(whole, parts, [(0, 0), (1, 0), (1, 1), (0, 1)])


@pytest.mark.parametrize("tied", [False, True])
def test_names_stay_the_models(tied):
    whole, parts = whole_and_stages({**CONFIG, "tie_word_embeddings": tied}, 2)
    names = [[name for name, _ in model.named_parameters()] for model, _ in parts]
    everything = {name for name, _ in whole.named_parameters()}
    assert set(names[0]) | set(names[1]) == everything
    assert set(names[0]) & set(names[1]) == ({"model.embed_tokens.weight"} if tied else set())
    for (_, stage), own in zip(parts, names, strict=True):
        assert stage.elsewhere == everything - set(own)
        assert (stage.tied is not None) == tied
    assert [stage.counted_elsewhere for _, stage in parts] == [
        frozenset(), frozenset(("model.embed_tokens.weight",)) if tied else frozenset()
    ]  # fmt: skip


@pytest.mark.parametrize("family", ["granite", "gpt2"])
def test_a_family_whose_forward_pass_does_more_is_refused(family):
    config = {**CONFIG, "model_type": family, **({"n_embd": 32, "n_layer": 4, "n_head": 4} if family == "gpt2" else {})}
    model = on_meta(read_config(spec_of(config), None, 50), torch.float32)
    with pytest.raises(UsageError, match=f"{family} is not known to begin in the middle"):
        cut(model, decoder_layers(model), link(0, 2), Schedule(2))


def test_layers_of_several_kinds_are_refused():
    config = {**CONFIG, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
    model = on_meta(read_config(spec_of(config), None, 50), torch.float32)
    with pytest.raises(UsageError, match="layers of several kinds"):
        cut(model, decoder_layers(model), link(0, 2), Schedule(2))


def test_more_stages_than_layers():
    model = on_meta(read_config(spec_of(CONFIG), None, 50), torch.float32)
    with pytest.raises(UsageError, match="4 layers do not make 5 stages"):
        cut(model, decoder_layers(model), link(0, 5), Schedule(5))
    with pytest.raises(UsageError, match="pp 2 with 3 chunks each: 4 layers do not make 6 stages"):
        cut(model, decoder_layers(model), link(0, 2), Schedule(2, 3))


@pytest.mark.parametrize("rank", range(8))
def test_stages_of_a_replica_read_the_same_data(rank):
    with process_group(4, rank % 4):
        meshes = make_meshes(Layout(dp_replicate=2, pp=2, dp_shard=2), "cpu", replica=rank // 4)
        assert meshes.data_rank == rank // 4 * 2 + rank % 2
        assert meshes.stages is not None and meshes.stages.get_local_rank() == rank // 2 % 2


def test_a_stage_counts_the_whole_model(monkeypatch):
    proof = Proof(leak=0.0, control=1.0, own_head=True)
    monkeypatch.setattr("muster.train.model.causal_lm.prove_isolation", lambda *_, **__: proof)
    with process_group():
        whole = build(spec_of(CONFIG))
    with process_group(2, 1):
        built = build(spec_of(CONFIG), layout=Layout(pp=2))
        assert (built.num_parameters, built.num_multiplied) == (whole.num_parameters, whole.num_multiplied)
        held = {name for name, _ in built.module.model.named_parameters()}
        assert "lm_head.weight" in held and "model.embed_tokens.weight" not in held


def test_hidden_states_have_a_micro_batchs_shape():
    with process_group():
        module = build(spec_of(CONFIG)).module
        tokens = torch.zeros(2, 8, dtype=torch.int64)
        batch = make_batch(tokens, tokens, tokens, (8, 8), CPU)
        assert module.hidden_shape(batch) == [2, 8, 32]
