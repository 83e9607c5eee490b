"""``training.precision: fp8``: refused with one line where it cannot run; emulated, compared with float8 by hand.

What is emulated needs torchao (any 0.18), which is optional; nothing here shows that a GPU runs it.
"""

import copy
import importlib.util
from functools import partial

import pytest
import torch
from fakes.small_model import CPU, build, spec_of
from torch import nn

from muster.config.spec import RunSpec
from muster.config.validation import problems
from muster.core.errors import UsageError
from muster.train.data_feed.batch import make_batch
from muster.train.model import float8
from muster.train.model.loss import loss_sum

torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is optional")


class Layer(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.up = nn.Linear(width, 128, bias=False)
        self.down = nn.Linear(128, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.nn.functional.silu(self.up(x)))


@pytest.mark.parametrize(
    ("device", "capability", "found", "words"),
    [
        ("cpu", None, True, "the device is cpu"),
        ("cuda", (8, 0), True, "this is NVIDIA Played"),
        ("cuda", (9, 0), False, "needs torchao"),
        ("cuda", (9, 0), True, None),
        ("cuda", (10, 0), True, None),
    ],
)
def test_what_is_missing_is_said_in_one_line(monkeypatch, device, capability, found, words):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA Played")
    monkeypatch.setattr(float8.importlib.util, "find_spec", lambda name: object() if found else None)
    if words is None:
        float8.check(torch.device(device))
        return
    with pytest.raises(UsageError, match=words) as error:
        float8.check(torch.device(device))
    assert "\n" not in str(error.value) and error.value.hint


def spec(**changes):
    training = {"steps": 1, "precision": "fp8", "sequence_length": 64, **changes.pop("training", {})}
    model = {"config": {"model_type": "llama"}, **changes.pop("model", {})}
    data = {"sources": [{"type": "random"}]}
    return RunSpec.model_validate({"name": "x", "model": model, "data": data, "training": training, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"resources": {"device": "cpu"}}, "device is cpu"),
        ({"model": {"dtype": "float32"}}, "float32"),
        ({"model": {"lora": {"rank": 8}}}, "lora"),
        ({"parallelism": {"tp": 2}}, "tp = 2"),
        ({"training": {"sequence_length": 40}}, "multiple of 16"),
    ],
)
def test_what_does_not_go_together_is_refused_before_the_start(changes, words):
    said = [str(each) for each in problems(spec(**changes)) if each.key == "training.precision"]
    assert (not said) if words is None else (len(said) == 1 and words in said[0]), said


def in_float8(x):
    """A row at a time: a power of two brings its largest value below float8 e4m3's largest; rounding; back."""
    scale = torch.exp2(torch.floor(torch.log2(448.0 / x.abs().amax(dim=-1, keepdim=True).float())))
    return (x.float() * scale).to(torch.float8_e4m3fn).float() / scale


@torchao
def test_a_product_is_that_of_rows_rounded_to_float8():
    torch.manual_seed(0)
    layer = Layer().bfloat16()
    up = layer.up.weight.detach().clone()
    float8.convert_layers([layer], torch.device("cpu"), emulate=True)
    assert [name for name, _ in layer.named_parameters()] == ["up.weight", "down.weight"]
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    wanted = in_float8(x) @ in_float8(up).t()
    exact = x.float() @ up.float().t()
    got = layer.up(x).float()
    off, rounding = (got - wanted).norm() / wanted.norm(), (exact - wanted).norm() / wanted.norm()
    assert off < 4e-3, "only the result's own rounding to bfloat16"
    assert rounding > 3 * off, "else nothing was rounded to float8"


@torchao
def test_gradients_are_near_those_of_bfloat16():
    torch.manual_seed(0)
    plain = Layer().bfloat16()
    layer = copy.deepcopy(plain)
    float8.convert_layers([layer], torch.device("cpu"), emulate=True)
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    for each in (plain, layer):
        each(x).float().square().mean().backward()
    for name, parameter in layer.named_parameters():
        wanted = plain.get_parameter(name).grad
        off = float((parameter.grad - wanted).norm() / wanted.norm())
        assert 1e-4 < off < 0.1, (name, off)


@torchao
def test_a_rows_result_does_not_depend_on_other_rows():
    torch.manual_seed(0)
    layer = Layer().bfloat16()
    float8.convert_layers([layer], torch.device("cpu"), emulate=True)
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    louder = x.clone()
    louder[16:] *= 1000.0
    assert torch.equal(layer(x)[:16], layer(louder)[:16])


@torchao
def test_an_odd_matrix_is_named():
    with pytest.raises(UsageError, match="up is 40 x 128"):
        float8.convert_layers([Layer(40)], torch.device("cpu"), emulate=True)


@torchao
def test_a_model_trains_in_it_and_keeps_its_documents_apart(group, monkeypatch):
    monkeypatch.setattr(float8, "convert_layers", partial(float8.convert_layers, emulate=True))
    tokens, positions = torch.arange(32)[None] * 7 % 50, torch.arange(16).repeat(2)[None]
    losses, names = {}, {}
    for precision in ("bf16", "fp8"):
        made = build(spec_of(dtype="bfloat16", training={"precision": precision}))
        module = made.module
        names[precision] = list(made.named_trainable())
        loss = loss_sum(module, make_batch(tokens, tokens, positions, (16, 16), CPU), chunk_tokens=16, scale=1 / 32)
        loss.backward()
        losses[precision] = float(loss.detach())
        assert made.proof.leak == 0
        kinds = {type(part).__name__ for part in module.modules()}
        assert ("Float8Linear" in kinds) == (precision == "fp8")
        assert type(module.model.get_output_embeddings()).__name__ == "Linear", "the head stays as it is"
        assert all(p.grad is not None for p in module.parameters())
    assert names["bf16"] == names["fp8"]
    assert losses["fp8"] == pytest.approx(losses["bf16"], rel=0.02) and losses["fp8"] != losses["bf16"]
