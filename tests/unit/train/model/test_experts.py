"""Mixtures of experts against transformers' own forward pass and losses."""

import copy
from dataclasses import replace

import pytest
import torch
from fakes.small_model import CPU, LLAMA, build, process_group, spec_of, whole

from muster.train.data_feed.batch import make_batch
from muster.train.model import lora
from muster.train.model.causal_lm import on_meta, read_config
from muster.train.model.loss import loss_sum
from muster.train.model.mixtures import experts
from muster.train.model.weights import recompute_buffers

BASE = {key: value for key, value in LLAMA.items() if key != "model_type"}
MIXTURE = {
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    "num_experts_per_tok": 2, "moe_intermediate_size": 16,
}  # fmt: skip
MLA = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}
FAMILIES = {
    "mixtral": {},
    "qwen3_moe": {},
    "qwen2_moe": {"shared_expert_intermediate_size": 24},
    "deepseek_v3": {**MLA, "num_key_value_heads": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    "gpt_oss": {"head_dim": 8, "sliding_window": 8},
    "olmoe": {},
}


def keys(family, **more):
    return {**BASE, **MIXTURE, "model_type": family, "vocab_size": 50, "pad_token_id": 0, **FAMILIES[family], **more}


@pytest.fixture
def group():
    with process_group():
        yield


def with_noise(module):
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():  # without ties between experts
            parameter.add_(torch.randn(parameter.shape, generator=random) * 0.1)


def own(family, built, **more):
    """transformers' model with the weights of ``built``, its experts computed by its own loop."""
    model = on_meta(read_config(spec_of(keys(family, **more)), None, 50), torch.float32)
    model.to_empty(device="cpu")
    recompute_buffers(model, persistent=True)
    state = built.module.model.state_dict()
    model.load_state_dict({name: whole(value) for name, value in state.items()}, strict=False)
    model.set_experts_implementation("eager")
    return model.train()


def ids_and_batch(padding=0):
    ids = torch.randint(3, 50, (1, 32), generator=torch.Generator().manual_seed(5))
    labels = ids.roll(-1, 1).clone()
    labels[0, 31 - padding :] = -100
    lengths = [32 - padding, *([padding] if padding else [])]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return ids, labels, replace(make_batch(ids, labels, positions, lengths, CPU), tokens=(32 - padding,))


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_transformers_own(family, group):
    """The auxiliary loss counts with a large coefficient, over tokens that are no padding."""
    more = {"router_aux_loss_coef": 0.7}
    built = build(spec_of(keys(family, **more)))
    with_noise(built.module)
    padding = 0 if built.proof.unpacked else 9
    model = own(family, built, **more)
    ids, labels, batch = ids_and_batch(padding)
    scale = 1.0 / int(batch.supervised)
    loss = loss_sum(built.module, batch, chunk_tokens=8, scale=scale)
    loss.backward()
    length = 32 - padding
    output = model(
        ids[:, :length], labels=ids[:, :length], output_router_logits=True, attention_mask=torch.ones(1, length).long()
    )
    cross_entropy = torch.nn.functional.cross_entropy(output.logits[0, :-1], labels[0, : length - 1])
    has_loss = built.module.mixture.balance > 0
    assert has_loss == (family not in ("deepseek_v3",))
    (cross_entropy + (0.7 * output.aux_loss if has_loss else 0.0)).backward()
    assert float(loss) == pytest.approx(float(cross_entropy), abs=1e-5), "what is reported is cross-entropy"
    expected = {name: p.grad for name, p in model.named_parameters()}
    for name, parameter in built.named_trainable().items():
        assert torch.allclose(whole(parameter.grad), expected[name], atol=2e-5), name


@pytest.mark.parametrize("kind", ["none", "selective", "full"])
def test_load_counts_each_token_once_and_no_padding(kind, group):
    built = build(spec_of(keys("mixtral"), training={"activation_checkpointing": kind}))
    mixture = built.module.mixture
    mixture.begin_step(CPU)
    for _ in range(2):
        loss_sum(built.module, ids_and_batch(9)[2], chunk_tokens=8, scale=1.0).backward()
    with torch.no_grad():
        loss_sum(built.module, ids_and_batch(9)[2], chunk_tokens=8, scale=1.0)
    assert mixture.loads.view(2, 4).sum(1).tolist() == [2 * 23 * 2] * 2
    even = torch.full_like(mixture.loads, 3.0)
    mixture.loads = even
    assert mixture.figures().tolist() == pytest.approx([1.0, 0.0, 1.0])
    mixture.loads = torch.tensor([4.0, 0, 0, 0] * 2)
    assert mixture.figures().tolist() == pytest.approx([4.0, 0.75, 0.0])


def test_z_loss(group):
    def router_gradient(z):
        built = build(spec_of(keys("mixtral", router_aux_loss_coef=0.0), training={"router_z_loss": z}))
        _, _, batch = ids_and_batch(9)
        loss_sum(built.module, batch, chunk_tokens=8, scale=1 / batch.supervised).backward()
        return whole(built.module.model.model.layers[1].mlp.gate.weight.grad), built, batch

    without, built, batch = router_gradient(0.0)
    model = own("mixtral", built)
    output = model(batch.input_ids[:, :23], output_router_logits=True)
    z = torch.stack([each.logsumexp(-1).square() for each in output.router_logits]).mean()
    z.backward()
    gradient = model.model.layers[1].mlp.gate.weight.grad
    assert torch.allclose(router_gradient(2.0)[0] - without, 2.0 * gradient, atol=1e-5)


def test_biases_follow_the_load_from_random_weights_only(group):
    built = build(spec_of(keys("deepseek_v3")))
    mixture = built.module.mixture
    assert mixture.moves_bias
    mixture.loads = torch.tensor([10.0, 0.0, 5.0, 1.0], dtype=torch.float64)
    bias = mixture.routers[0].e_score_correction_bias
    before = bias.clone()
    mixture.move_biases(torch.tensor(1.0))
    assert torch.equal(bias, before), "a step that is skipped moves none"
    mixture.move_biases(torch.tensor(0.0))
    assert torch.allclose(bias - before, 1e-3 * torch.tensor([-1.0, 1.0, -1.0, 1.0]))
    model = on_meta(read_config(spec_of(keys("deepseek_v3")), None, 50), torch.float32)
    assert not experts.prepare(model, trains_all=True, from_random=False).moves_bias


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_of_experts_merge_and_never_adapt_routers(family, group):
    settings = spec_of(keys(family), lora={"rank": 4, "alpha": 12, "rslora": True}).model.lora
    built = build(spec_of(keys(family), lora={"rank": 4, "alpha": 12, "rslora": True}))
    with_noise(built.module)
    names = [lora.adapted_name(name) for name in built.named_trainable()]
    assert not any(part in name for name in names for part in ("gate.", "router.", "lm_head", "shared_expert_gate"))
    assert sum(".experts." in name for name in names) == 2 * 2 * len(built.module.mixture.experts)
    state = {name: whole(p).detach().clone() for name, p in built.module.model.named_parameters()}
    _, _, batch = ids_and_batch()
    adapted = loss_sum(built.module.eval(), batch, chunk_tokens=8, scale=1.0)
    plain = build(spec_of(keys(family)))
    scale = 12 / 2.0
    with torch.no_grad():
        for name, parameter in plain.module.model.named_parameters():
            owner, _, leaf = name.rpartition(".")
            if (a := f"{owner}.lora_A.{leaf}") in state:
                transposed = plain.module.model.get_submodule(owner).is_transposed
                b = state[f"{owner}.lora_B.{leaf}"]
                value = experts.merged(state[name], state[a], b, scale, is_transposed=transposed)
            elif (base := f"{owner}.base_layer.{leaf}") in state:
                value = state[base]
                if leaf == "weight":
                    a, b = (state[f"{owner}.lora_{each}.default.weight"] for each in "AB")
                    value = value + scale * b @ a
            else:
                value = state[name]
            parameter.copy_(value)
        for name, buffer in built.module.model.named_buffers():
            plain.module.model.get_buffer(name.replace(".base_layer", "")).copy_(buffer)
    assert lora.scale_of(settings) == scale
    merged = loss_sum(plain.module.eval(), batch, chunk_tokens=8, scale=1.0)
    assert float(adapted) == pytest.approx(float(merged), rel=1e-5)


def test_products_that_no_grouped_kernel_takes():
    random = torch.Generator().manual_seed(0)
    rows, weight = torch.randn(6, 5, generator=random), torch.randn(3, 5, 7, generator=random)
    ends = torch.tensor([4, 4, 6], dtype=torch.int32)
    expected = torch.cat([rows[:4] @ weight[0], rows[4:] @ weight[2]])
    assert torch.allclose(experts.grouped(rows, weight, ends), expected)
    wide, even = torch.randn(6, 8, generator=random), torch.randn(3, 8, 4, generator=random)
    expected = torch.cat([wide[:4] @ even[0], wide[4:] @ even[2]])
    assert torch.allclose(experts.grouped(wide, even, ends), expected)


def test_pipeline_stages_refuse_the_auxiliary_loss():
    from muster.core.errors import UsageError
    from muster.core.types import Layout

    with process_group(2), pytest.raises(UsageError, match="stages of a pipeline"):
        build(spec_of(keys("mixtral")), layout=Layout(pp=2))


def test_a_copied_layer_keeps_the_mixture(group):
    built = build(spec_of(keys("mixtral")))
    layer = copy.deepcopy(built.module.model.model.layers[0])
    assert layer.mlp.experts.mixture is built.module.mixture


@pytest.mark.parametrize("family", [*FAMILIES, "deepseek_v2"])
def test_parameters_are_counted_as_transformers_has_them(family):
    """The whole model, and the adapters of all linear layers."""
    from muster.core.flops import ModelShape

    more = {**MLA, "num_key_value_heads": 4, "first_k_dense_replace": 1, "num_hidden_layers": 3, "head_dim": 16}
    given = {**BASE, **MIXTURE, "model_type": family, "vocab_size": 50, "pad_token_id": 0}
    given |= more if family.startswith("deepseek") else FAMILIES[family]
    config = read_config(spec_of(given), None, 50)
    model, shape = on_meta(config, torch.float32), ModelShape.from_config(config.to_dict())
    assert shape.parameters == model.num_parameters()
    settings = spec_of(given, lora={"rank": 2}).model.lora
    lora.add_adapters(model, settings, torch.float32)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert shape.lora_parameters(2) == trained
