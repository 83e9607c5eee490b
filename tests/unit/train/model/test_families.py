"""Families of transformers beyond the plain decoders: they begin with transformers' own values, and no document reaches
another's loss, in rows of one document where nothing else separates them."""

import pytest
import torch
from fakes.small_model import CPU, LLAMA, build, process_group, spec_of, whole

from muster.core.types import Layout
from muster.train.data_feed.batch import make_batch
from muster.train.distributed.device_mesh import make_meshes
from muster.train.model import weights
from muster.train.model.attention_isolation_check import Proof, border, rotary_border
from muster.train.model.attention_needs import needs_of
from muster.train.model.causal_lm import on_meta, read_config
from muster.train.model.loss import logit_rule, loss_sum

BASE = {key: value for key, value in LLAMA.items() if key != "model_type"}
MIXTURE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR = {
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
#: Family -> (its own keys, whether documents may share a row).
FAMILIES = {
    "mamba": ({"state_size": 4}, False),
    "qwen3_5_text": (LINEAR, False),
    "qwen3_next": ({**LINEAR, **MIXTURE, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 1}, False),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, False),
    "falcon_h1": ({"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4}, False),
    "gpt_oss": ({**MIXTURE, "head_dim": 8, "sliding_window": 4}, True),
    "falcon": ({"alibi": True}, False),
    "llama4_text": ({**MIXTURE, "head_dim": 8, "intermediate_size_mlp": 48, "attention_chunk_size": 8}, False),
    "apertus": ({}, True),
    "doge": ({}, True),
    "gemma4_text": (
        {
            **{"head_dim": 8, "global_head_dim": 16, "sliding_window": 8, "hidden_size_per_layer_input": 8},
            **{"vocab_size_per_layer_input": 50, "num_kv_shared_layers": 0},
            "layer_types": ["sliding_attention", "full_attention"],
        },
        True,
    ),
}


def spec(family):
    return spec_of({**BASE, "model_type": family, "vocab_size": 50, "pad_token_id": 0, **FAMILIES[family][0]})


@pytest.fixture
def group():
    with process_group():
        yield


def rows(ids, lengths):
    """Each document of ``ids`` in a row of its own, with its real length."""
    result, start = [], 0
    for length in lengths:
        result.append(ids[start : start + length])
        start += length
    return result


@pytest.mark.parametrize("family", FAMILIES)
def test_its_loss_is_that_of_transformers_on_each_document_alone(family, group):
    from transformers import AutoModelForCausalLM

    built = build(spec(family))
    assert (built.proof.unpacked is None) == FAMILIES[family][1]
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in built.module.parameters():  # without ties between experts or in a mask
            parameter.add_(torch.randn(parameter.shape, generator=random) * 0.1)
    lengths, width = (13, 19), 24
    ids = torch.randint(3, 50, (32,), generator=random)
    documents = rows(ids, lengths)
    if built.proof.unpacked is None:
        labels = torch.cat([torch.cat([each[1:], torch.tensor([-100])]) for each in documents])
        positions = torch.cat([torch.arange(length) for length in lengths])
        batch = make_batch(ids[None], labels[None], positions[None], lengths, CPU)
    else:
        given = torch.zeros(2, width, dtype=torch.int64)
        labels = torch.full((2, width), -100)
        positions = torch.stack([torch.cat([torch.arange(n), torch.arange(width - n)]) for n in lengths])
        for row, each in enumerate(documents):
            given[row, : len(each)], labels[row, : len(each) - 1] = each, each[1:]
        batch = make_batch(given, labels, positions, [13, 11, 19, 5], CPU)
    loss = loss_sum(built.module.eval(), batch, chunk_tokens=8, scale=1.0)
    loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in built.named_trainable().values())
    plain = AutoModelForCausalLM.from_config(built.config, attn_implementation="eager").eval()
    plain.load_state_dict({name: whole(value) for name, value in built.module.model.state_dict().items()})
    with torch.no_grad():
        alone = [plain(input_ids=each[None], use_cache=False).logits[0, :-1] for each in documents]
    expected = sum(
        float(torch.nn.functional.cross_entropy(logits, each[1:], reduction="sum"))
        for logits, each in zip(alone, documents, strict=True)
    )
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_first_values_are_transformers_own_where_those_are_not_random(family, group):
    from transformers import AutoModelForCausalLM

    built = build(spec(family)).module.model
    made = [AutoModelForCausalLM.from_config(built.config) for _ in range(2)]
    ours, first, second = (
        {name: whole(value) for name, value in (*model.named_parameters(), *model.named_buffers())}
        for model in (built, *made)
    )
    assert ours.keys() == first.keys()
    for name, value in ours.items():
        assert not value.is_floating_point() or value.isfinite().all(), name
        if torch.equal(first[name], second[name]):  # otherwise it is random
            assert torch.equal(value, first[name]), name


def test_a_module_initialises_those_inside_it(group):
    model = build(spec("mamba")).module.model
    mixer = model.backbone.layers[0].mixer
    assert float(mixer.dt_proj.bias.min()) < -1.0, "the inverse of softplus of small steps, and not 0"
    again = build(spec("mamba")).module.model.backbone.layers[0].mixer
    assert torch.equal(mixer.dt_proj.bias, again.dt_proj.bias) and torch.equal(
        mixer.out_proj.weight, again.out_proj.weight
    )


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_a_residual_stream_in_float32_reaches_a_head_in_bfloat16(lora, group):
    config = {**BASE, "model_type": "mamba", "state_size": 4}
    built = build(spec_of(config, dtype="bfloat16", lora=lora))
    ids = torch.arange(3, 19)[None]
    batch = make_batch(ids, ids.roll(-1, 1), torch.arange(16)[None], [16], CPU)
    loss_sum(built.module, batch, chunk_tokens=8, scale=1.0).backward()
    trained = built.named_trainable()
    assert trained and all(value.dtype == torch.float32 and value.grad is not None for value in trained.values())
    assert not any(f".{name}.lora_" in each for name in ("out_proj", "dt_proj") for each in trained)


def test_a_layer_with_a_buffer_begins_alike_in_fsdp(monkeypatch):
    """A wrapped layer cannot be copied, and on each rank the values are parts of the same ones."""
    proof = Proof(leak=0.0, control=1.0, own_head=True)
    monkeypatch.setattr("muster.train.model.causal_lm.prove_isolation", lambda *_, **__: proof)
    parts = []
    for rank in range(2):
        with process_group(2, rank):
            meshes = make_meshes(Layout(dp_shard=2), "cpu")
            model = build(spec("gemma4_text"), meshes=meshes).module.model
            name = "model.layers.0.per_layer_projection.weight"
            parts.append(dict(model.named_parameters())[name].to_local().detach().clone())
            assert float(model.model.layers[0].layer_scalar) == 1.0
    with process_group():
        assert torch.equal(
            torch.cat(parts), whole(dict(build(spec("gemma4_text")).module.model.named_parameters())[name])
        )


def test_what_transformers_does_not_initialise_is_an_error(group, monkeypatch):
    model = build(spec_of()).module.model
    monkeypatch.setattr(type(model), "_init_weights", lambda self, module: None)
    monkeypatch.setattr(type(model.model), "_init_weights", lambda self, module: None)
    monkeypatch.setattr(weights, "_arguments", lambda *_: {})
    with pytest.raises(weights.BackendError, match=r"model.layers.0.input_layernorm.weight cannot be initialised"):
        weights.initialise(model, seed=0, device=CPU)


def observed(config):
    spec = spec_of(config)
    return needs_of(on_meta(read_config(spec, None, 50), torch.float32), 32)


def test_needs_are_what_the_layers_ask_of_a_kernel():
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    assert observed({"model_type": "gpt2", **sizes}).dropout, "its config has attn_pdrop"
    assert observed({"model_type": "gpt_bigcode", **sizes}).dropout
    assert observed({**BASE, "model_type": "doge"}).own_mask
    assert not observed({**BASE, "model_type": "nemotron"}).takes_arguments
    latent = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
    needs = observed({**BASE, "model_type": "youtu", "num_key_value_heads": 4, **latent})
    assert (needs.head_dim, needs.value_dim) == (12, 8)
    inkling = observed({**BASE, **MIXTURE, "model_type": "inkling_text", "head_dim": 8})
    assert inkling.own_mask and inkling.own_kernels, "its layers add a position_bias to their scores"
    assert not observed({**BASE, "model_type": "gptj"}).own_kernels, "its attention calls none"
    plain = observed(LLAMA)
    assert not plain.own_mask and plain.value_dim is None and plain.takes_arguments and plain.head_dim == 8


def test_a_cap_of_the_logits_is_known_by_each_of_its_names():
    """At a run's first, small logits the self-test sees none."""
    for family, key in (("gemma2", "final_logit_softcapping"), ("xlstm", "output_logit_soft_cap")):
        config = read_config(spec_of({"model_type": family, "hidden_size": 32, key: 5.0}), None, 50)
        assert logit_rule(config).cap == 5.0


def test_borders_by_the_place_in_a_row(group):
    config = build(spec("llama4_text")).config
    assert border(config, 32) == "llama4_text counts attention_chunk_size = 8 from the start of the row"
    assert border(config, 8) is None and border(build(spec_of()).config, 32) is None
    doge = build(spec_of({**BASE, "model_type": "doge", "keep_window_size": 16})).config
    assert border(doge, 32) == "doge counts keep_window_size = 16 from the start of the row" and not border(doge, 16)


@pytest.mark.parametrize(("kind", "length"), [("longrope", 16), ("dynamic", 20)])
def test_rotary_embeddings_that_look_at_a_whole_batch(kind, length):
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 16}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4} if kind == "longrope" else {}
    config = read_config(spec_of({**LLAMA, "max_position_embeddings": 20, "rope_parameters": rope}), None, 50)
    found = rotary_border(config, 32)
    assert found is not None and (found.kind, found.length) == (kind, length)
    assert rotary_border(config, length) is None
