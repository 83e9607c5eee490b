"""Flex attention's masks. Its kernels are CUDA's (and it has no backward pass on a CPU): logits only, uncompiled."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.attention.flex_attention
from fakes.small_model import LLAMA, build, spec_of
from test_micro_batch import batch

from muster.train.model import attention, causal_lm
from muster.train.model.loss import loss_sum

pytestmark = pytest.mark.usefixtures("group")

GEMMA = {**LLAMA, "model_type": "gemma2", "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6}
DOCUMENTS = ([20, 12], [32], [1] * 32, [2, 3, 4, 5, 18])


@pytest.fixture
def on_cpu(monkeypatch):
    """Flex attention without a GPU, and every mask that is made."""
    made = []
    real, proof = attention._mask, causal_lm.prove_isolation
    monkeypatch.setattr(
        causal_lm, "prove_isolation", lambda *given, **how: proof(*given, **{**how, "gradients": False})
    )
    monkeypatch.setitem(attention.CONDITIONS, "flex", "flex")
    monkeypatch.setattr(attention, "_mask", lambda *given: made.append(1) or real(*given))
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    torch._dynamo.reset()
    yield made
    torch._dynamo.reset()


@torch.no_grad()
def test_logits_are_those_of_the_dense_kernels(on_cpu):
    with torch.compiler.set_stance("force_eager"):  # C++ takes a minute
        modules = {name: build(spec_of(GEMMA, attention=name)).module for name in ("auto", "flex")}
        assert [module.attention.kernel for module in modules.values()] == ["eager", "flex"]
        on_cpu.clear()
        found = {name: module(batch(DOCUMENTS[0]), want="logits") for name, module in modules.items()}
    torch.testing.assert_close(found["flex"], found["auto"], rtol=1e-4, atol=1e-4)
    assert len(on_cpu) == 2, "one for each kind of layer, however many layers"


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        ({}, None),
        ({"layer_types": ["full_attention"] * 3}, ["full_attention"]),
        ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3},
         ["full_attention", "sliding_attention"]),
    ],
)  # fmt: skip
def test_what_a_layer_sees(config, kinds):
    lengths = [3, 1, 6, 6]
    made = attention.block_masks(batch(lengths), SimpleNamespace(**config))
    document = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    at = torch.arange(16)
    same = (document[:, None] == document) & (at[:, None] >= at)
    for kind in kinds or [None]:
        mask = made if kind is None else made[kind]
        near = at[:, None] - at < (3 if kind == "sliding_attention" else 16)
        seen = mask.mask_mod(torch.tensor(0), torch.tensor(0), at[:, None], at[None])
        assert torch.equal(seen, same & near)


@pytest.mark.parametrize("config", [{"sliding_window": 3}, {"layer_types": ["chunked_attention"]}])
def test_what_is_not_known_here_is_left_to_transformers(config):
    assert attention.block_masks(batch([4]), SimpleNamespace(**config)) is None


@torch.no_grad()
def test_one_graph_for_each_kind_of_layer_whatever_the_documents(on_cpu, monkeypatch):
    """Torch gives up on a function after eight; with transformers' own masks that is the third batch."""
    graphs = []

    def compiled(layers, device):
        for layer in layers:
            layer.forward = torch.compile(layer.forward, dynamic=False, backend=count)

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr("muster.train.model.causal_lm.compile_layers", compiled)
    module = build(spec_of(GEMMA, attention="flex", training={"compile": True})).module
    for lengths in DOCUMENTS:
        loss_sum(module, batch(lengths, static_shapes=True), chunk_tokens=16, scale=0.01)
    assert len(graphs) == 2
