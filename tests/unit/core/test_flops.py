"""FLOP conventions against the published values of common models, and shapes against known parameter counts."""

import pytest

from muster.core.errors import UsageError
from muster.core.flops import Convention, ModelShape, flops_per_token, lora_factor, step_flops


def llama(layers, hidden, heads, kv, intermediate, tied=False, vocab=128256, **more):
    return ModelShape.from_config(
        {
            "model_type": "llama",
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": kv,
            "intermediate_size": intermediate,
            "vocab_size": vocab,
            "tie_word_embeddings": tied,
            **more,
        }
    )


LLAMA = {
    "1B": llama(16, 2048, 32, 8, 8192, tied=True, head_dim=64),
    "3B": llama(28, 3072, 24, 8, 8192, tied=True, head_dim=128),
    "8B": llama(32, 4096, 32, 8, 14336),
    "70B": llama(80, 8192, 64, 8, 28672),
    "405B": llama(126, 16384, 128, 8, 53248),
}


@pytest.mark.parametrize(
    ("name", "total", "matmul"),
    # Exact totals as the hub shows them; P from the reference's table.
    [
        ("1B", 1_235_814_400, 1.236e9),
        ("3B", 3_212_749_824, 3.213e9),
        ("8B", 8_030_261_248, 7.505e9),
        ("70B", 70_553_706_496, 69.50e9),
        ("405B", 405_853_388_800, 403.75e9),
    ],
)
def test_parameters(name, total, matmul):
    assert LLAMA[name].parameters == total
    assert LLAMA[name].matmul_parameters == pytest.approx(matmul, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "causal_4k", "causal_8k"),
    [("1B", 8.22e9, 9.0e9), ("3B", 21.4e9, 23.5e9), ("8B", 48.25e9, 51.5e9), ("70B", 433.1e9, 449.2e9)],
)
def test_causal(name, causal_4k, causal_8k):
    assert flops_per_token(LLAMA[name], 4096) == pytest.approx(causal_4k, rel=3e-3)
    assert flops_per_token(LLAMA[name], 8192) == pytest.approx(causal_8k, rel=3e-3)


def test_conventions_differ_as_published():
    shape = LLAMA["8B"]
    full = flops_per_token(shape, 8192, Convention.FULL)
    assert full - 6 * shape.matmul_parameters == pytest.approx(12.88e9, rel=1e-3)
    assert full / flops_per_token(shape, 8192) == pytest.approx(1.125, abs=2e-3)
    assert flops_per_token(LLAMA["70B"], 4096, "n6") == 6 * LLAMA["70B"].parameters


def test_lora_needs_two_thirds():
    assert flops_per_token(LLAMA["8B"], 4096) * lora_factor() == pytest.approx(32.2e9, rel=2e-3)
    adapters = LLAMA["8B"].lora_parameters(16)
    assert adapters == 41_943_040  # PEFT prints the same for rank 16 on all linear layers
    assert lora_factor(LLAMA["8B"], adapters) == pytest.approx((2 + adapters / 7.5047e9) / 3, rel=1e-4)
    assert LLAMA["8B"].lora_parameters(16, ["q_proj", "v_proj"]) == 6_815_744
    assert LLAMA["8B"].lora_parameters(16, ["q_proj", "v_proj"], dora=True) == 6_815_744 + 32 * (4096 + 1024)


def test_packed_documents_cost_less_attention_than_one_long_one():
    shape = LLAMA["8B"]
    whole, packed = step_flops(shape, [4096]), step_flops(shape, [1024] * 4)
    attention = whole - 6 * shape.matmul_parameters * 4096
    assert whole - packed == pytest.approx(attention * 3 / 4)


def test_a_window_bounds_attention():
    shape = llama(4, 64, 4, 4, 128, vocab=100)
    windowed = ModelShape.from_config(
        {"model_type": "mistral", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4,
         "intermediate_size": 128, "vocab_size": 100, "sliding_window": 8}
    )  # fmt: skip
    assert windowed.windowed_layers == 4
    assert step_flops(windowed, [8]) == step_flops(shape, [8])
    # A window of 8 in 32 tokens: pairs seen = sum of min(i, 8), here doubled by the s^2 convention.
    seen = 2 * (32 * 8 - 8 * 8 / 2)
    assert step_flops(windowed, [32]) == 6 * shape.matmul_parameters * 32 + 6 * 4 * 64 * seen


def test_families():
    qwen = ModelShape.from_config(
        {"model_type": "qwen2", "num_hidden_layers": 28, "hidden_size": 3584, "num_attention_heads": 28,
         "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064, "sliding_window": 131072,
         "use_sliding_window": False}
    )  # fmt: skip
    assert qwen.parameters == 7_615_616_512 and qwen.windowed_layers == 0
    qwen3 = ModelShape.from_config(
        {"model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 4096, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936}
    )  # fmt: skip
    assert qwen3.parameters == 8_190_735_360
    gemma = ModelShape.from_config(
        {"model_type": "gemma2", "num_hidden_layers": 42, "hidden_size": 3584, "num_attention_heads": 16,
         "num_key_value_heads": 8, "head_dim": 256, "intermediate_size": 14336, "vocab_size": 256000,
         "sliding_window": 4096}
    )  # fmt: skip
    assert gemma.parameters == 9_241_705_984 and gemma.windowed_layers == 21 and gemma.tied
    gpt2 = ModelShape.from_config(
        {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
    )
    assert gpt2.parameters == 124_439_808


def test_mixtures_count_all_and_active_parameters():
    """As Mistral AI and Qwen state them: 46.7B, 12.9B active; 30.5B, 3.3B active."""
    mixtral = ModelShape.from_config(
        {"model_type": "mixtral", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
         "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000, "num_local_experts": 8,
         "num_experts_per_tok": 2}
    )  # fmt: skip
    assert mixtral.parameters == 46_702_792_704
    assert mixtral.matmul_parameters + mixtral.embedding_parameters == pytest.approx(12.88e9, rel=1e-3)
    assert flops_per_token(mixtral, 4096) == pytest.approx(6 * mixtral.matmul_parameters + 6 * 32 * 4096 * 4096)
    qwen = ModelShape.from_config(
        {"model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32,
         "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
         "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8}
    )  # fmt: skip
    assert qwen.parameters == 30_532_122_624
    assert qwen.matmul_parameters == pytest.approx(3.04e9, rel=5e-3)
    assert qwen.lora_parameters(8) > 10 * qwen.lora_parameters(8, active=True)
    assert [stage.layers for stage in qwen.stages(2)] == [24, 24]


def test_what_is_not_modelled_is_refused():
    with pytest.raises(UsageError, match="mixture of experts"):
        ModelShape.from_config({"model_type": "jamba", "num_experts": 8})
    with pytest.raises(UsageError, match="not modelled"):
        ModelShape.from_config({"model_type": "mamba"})
    with pytest.raises(UsageError, match="hidden_size"):
        ModelShape.from_config({"model_type": "llama"})
