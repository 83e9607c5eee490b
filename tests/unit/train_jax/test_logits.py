"""The JAX model's logits against transformers' own, document by document, for each family."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import Array
from transformers import AutoConfig, AutoModelForCausalLM

from muster.core.errors import UsageError
from muster.train_jax.architecture import architecture_of
from muster.train_jax.arrays import leaves_of, to_device
from muster.train_jax.host_model import HostModel, rotary_of
from muster.train_jax.layout import mesh_of
from muster.train_jax.model import Model, hidden_states, last_logits

SIZES = dict(
    vocab_size=300, hidden_size=96, intermediate_size=160, num_hidden_layers=3, num_attention_heads=6,
    num_key_value_heads=2, max_position_embeddings=512,
)  # fmt: skip
LLAMA31 = dict(
    rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)  # fmt: skip
FAMILIES = {
    "llama": dict(model_type="llama", **SIZES),
    "llama-3.1 rotary": dict(model_type="llama", **SIZES, rope_parameters=LLAMA31),
    "qwen2": dict(model_type="qwen2", **SIZES, tie_word_embeddings=True),
    "qwen3": dict(model_type="qwen3", **SIZES, head_dim=32),
    "mistral": dict(model_type="mistral", **SIZES, sliding_window=9, head_dim=16),
    "gemma": dict(model_type="gemma", **SIZES, head_dim=24),
}
DOCUMENTS = [(20, 28), (7, 41)]


def made(keys):
    torch.manual_seed(0)
    config = AutoConfig.for_model(**keys)
    config._attn_implementation = "eager"
    module = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)  # norms and biases that matter
    return HostModel(module, config, None)


def jax_logits(host, ids, positions, documents) -> Array:
    named = dict(host.module.named_parameters())
    parameters = to_device(leaves_of(named, mesh_of()), named)
    frequencies, factor = rotary_of(host)
    model = Model(architecture_of(host.config), frequencies, factor, jnp.dtype("float32"))
    hidden = hidden_states(model, parameters, *(jnp.asarray(part.numpy()) for part in (ids, positions, documents)))
    return last_logits(model, parameters, hidden)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logits_are_those_of_each_document_alone(family):
    host = made(FAMILIES[family])
    ids = torch.randint(0, SIZES["vocab_size"], (2, 48))
    documents = torch.stack([torch.repeat_interleave(torch.arange(2), torch.tensor(cut)) for cut in DOCUMENTS])
    positions = torch.stack([torch.cat([torch.arange(length) for length in cut]) for cut in DOCUMENTS])
    wanted = torch.zeros(2, 48, SIZES["vocab_size"])
    with torch.no_grad():
        for row, cut in enumerate(DOCUMENTS):
            start = 0
            for length in cut:
                alone = ids[row : row + 1, start : start + length]
                wanted[row, start : start + length] = host.module(input_ids=alone).logits[0]
                start += length
    found = np.asarray(jax_logits(host, ids, positions, documents))
    assert np.abs(found - wanted.numpy()).max() <= 1e-6 * float(wanted.abs().max())


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (dict(model_type="gpt2"), "gpt2"),
        (dict(model_type="gemma2", **SIZES), "gemma2"),
        (dict(model_type="llama", **SIZES, mlp_bias=True), "mlp_bias"),
        (dict(model_type="llama", **SIZES, attention_dropout=0.1), "attention_dropout"),
        (dict(model_type="qwen2", **SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1), "several"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(keys, named):
    with pytest.raises(UsageError, match=named):
        architecture_of(AutoConfig.for_model(**keys))
