"""What a micro-batch must not do: make the host wait for the device, or compile once more."""

from collections import Counter

import pytest
import torch
from fakes.small_model import CPU, build, spec_of
from torch.utils._python_dispatch import TorchDispatchMode

from muster.train.data_feed.batch import make_batch
from muster.train.distributed.fixed_point import FixedPointReducer
from muster.train.distributed.reduce import FloatReducer, ReduceGroups
from muster.train.model import compile as compile_module
from muster.train.model import loss
from muster.train.model.loss import loss_sum

pytestmark = pytest.mark.usefixtures("group")

#: Operators whose result's value or size the host needs.
WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique", "item")
LORA = {"lora": {"rank": 4}}


class Waits(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator.overloadpacket.__name__
        if name in WAITS:
            self.found[name] += 1
        return operator(*args, **(kwargs or {}))


def batch(lengths, *, static_shapes=False):
    ids = torch.arange(sum(lengths)).remainder(50)[None]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return make_batch(ids, ids.roll(-1, 1), positions, lengths, CPU, static_shapes=static_shapes)


@pytest.mark.parametrize("exact", [False, True], ids=["float", "exact"])
@pytest.mark.parametrize("model", [{}, LORA], ids=["full", "lora"])
def test_the_host_never_waits_for_the_device_in_a_micro_batch(model, exact):
    built = build(spec_of(**model))
    reducer = (
        FixedPointReducer(built.module, ReduceGroups())
        if exact
        else FloatReducer(built.module, ReduceGroups(), accumulate_locally=True)
    )
    given = [batch(lengths) for lengths in ([20, 12], [32])]
    reducer.begin(micro_batches=2)
    with Waits() as waits:
        for number, part in enumerate(given, start=1):
            reducer.before_forward(last=number == 2)
            total = loss_sum(built.module, part, chunk_tokens=16, scale=0.01)
            total.backward()
            reducer.add_loss(total)
    assert not waits.found
    with waits:
        float(reducer.finish()[0])
    assert waits.found["_local_scalar_dense"] == 1, "the counter counts"


def test_layers_are_compiled_once_for_any_number_of_documents(monkeypatch):
    """Far below torch's limit of eight, after which layers run eagerly. Adapters make one graph more, since the first
    layer's input needs no gradient."""
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def compiled(layers, device):
        for layer in layers:
            layer.forward = torch.compile(layer.forward, dynamic=False, backend=count)

    monkeypatch.setattr("muster.train.model.causal_lm.compile_layers", compiled)
    torch._dynamo.reset()
    built = build(spec_of(training={"compile": True}))
    assert not graphs, "the self-test runs eagerly"

    def step(lengths, *, train=True):
        built.module.train(train)
        with torch.set_grad_enabled(train):
            total = loss_sum(built.module, batch(lengths, static_shapes=True), chunk_tokens=16, scale=0.01)
            if train:
                total.backward()
        return len(graphs)

    assert step([20, 12]) == 1
    assert {step(lengths) for lengths in ([32], [1] * 32, [30, 2])} == {1}
    assert step([20, 12], train=False) == 2
    assert step([32], train=False) == step([7, 25]) == 2
    torch._dynamo.reset()


def test_the_loss_is_compiled_once_for_any_number_of_tokens_and_any_scale(monkeypatch):
    """And once more for its evaluation; its bits may differ from the uncompiled one's, by rounding alone."""
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    real = torch.compile
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", lambda function, **options: real(function, backend=count, **options))
    kernel = loss.compiled_kernel()
    rule = loss.LogitRule(factor=0.5, cap=30.0)
    for tokens, scale in ((16, 0.01), (7, 0.02), (16, 0.03), (5, 0.01), (16, 0.07)):
        logits = torch.randn(tokens, 50)
        labels = torch.arange(tokens).where(torch.arange(tokens) != 3, -100)
        for gradient in (True, False):
            wanted = loss.cross_entropy_and_gradient(logits.clone(), labels, scale, rule, gradient=gradient)
            torch.testing.assert_close(kernel(logits.clone(), labels, scale, rule, gradient=gradient), wanted)
    assert len(graphs) == 2
    torch._dynamo.reset()


def test_what_is_compiled_is_static_but_for_the_documents(monkeypatch):
    asked = []
    monkeypatch.setattr(compile_module, "check_compiler", lambda device: None)
    monkeypatch.setattr(torch, "compile", lambda function, **options: asked.append(options) or function)
    compile_module.compile_layers([torch.nn.Linear(2, 2)], CPU)
    assert asked == [{"dynamic": False}]
