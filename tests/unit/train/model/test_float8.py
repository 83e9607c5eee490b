"""``training.precision`` fp8, mxfp8: refused with one line where it cannot run; emulated, compared with float8 by hand.

What is emulated needs torchao (any 0.18), which is optional; nothing here shows that a GPU runs it.
"""

import copy
import importlib.util
import re
from functools import partial

import pytest
import torch
from fakes.small_model import CPU, LLAMA, build, spec_of
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
    ("precision", "device", "capability", "found", "words"),
    [
        ("fp8", "cpu", None, True, "H100's generation or newer, the device is cpu"),
        ("fp8", "cuda", (8, 0), True, "this is NVIDIA Played"),
        ("fp8", "cuda", (9, 0), False, "fp8 needs torchao"),
        ("fp8", "cuda", (9, 0), True, None),
        ("fp8", "cuda", (10, 0), True, None),
        ("mxfp8", "cpu", None, True, "B200's generation or newer, the device is cpu"),
        ("mxfp8", "cuda", (9, 0), True, "this is NVIDIA Played"),
        ("mxfp8", "cuda", (10, 0), False, "mxfp8 needs torchao"),
        ("mxfp8", "cuda", (10, 0), True, None),
    ],
)
def test_what_is_missing_is_said_in_one_line(monkeypatch, precision, device, capability, found, words):
    compared = []
    monkeypatch.setattr(float8, "check_kernels", compared.append)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA Played")
    monkeypatch.setattr(float8.importlib.util, "find_spec", lambda name: object() if found else None)
    if words is None:
        float8.check(torch.device(device), precision)
        assert len(compared) == (precision == "mxfp8"), "a prototype is compared before it is used"
        return
    with pytest.raises(UsageError, match=words) as error:
        float8.check(torch.device(device), precision)
    assert "\n" not in str(error.value) and error.value.hint and not compared


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
        ({"parallelism": {"pp": 2}}, "pp = 2"),
        ({"training": {"sequence_length": 40}}, "multiple of"),
        ({"parallelism": {"cp": 4}, "training": {"sequence_length": 112}}, "multiple of"),
    ],
)
@pytest.mark.parametrize("precision", ["fp8", "mxfp8"])
def test_what_does_not_go_together_is_refused_before_the_start(changes, words, precision):
    asked = {**changes, "training": {"precision": precision, **changes.get("training", {})}}
    said = [str(each) for each in problems(spec(**asked)) if each.key == "training.precision"]
    assert (not said) if words is None else (len(said) == 1 and words in said[0]), said
    assert all(re.search(rf"\b{precision} (needs|does)", line) for line in said), said


def test_each_kind_names_its_own_multiple():
    for precision, refused, multiple in (("fp8", 72, 16), ("mxfp8", 80, 32)):
        for length, count in ((64, 0), (refused, 1)):
            training = {"precision": precision, "sequence_length": length}
            said = [str(each) for each in problems(spec(training=training)) if each.key == "training.precision"]
            assert len(said) == count and all(f"multiple of {multiple}" in line for line in said), said


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


def in_blocks(x):
    """32 elements of a row at a time: the power of two that brings the largest to 448 or less; rounding; back."""
    blocks = x.float().reshape(x.shape[0], -1, 32)
    scale = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(dim=-1, keepdim=True) / 448.0)))
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).reshape(x.shape)


@torchao
def test_products_of_mxfp8_are_those_of_blocks_rounded_to_float8():
    torch.manual_seed(0)
    layer = Layer().bfloat16()
    up = layer.up.weight.detach().clone()
    float8.convert_layers([layer], torch.device("cpu"), "mxfp8", emulate=True)
    assert [name for name, _ in layer.named_parameters()] == ["up.weight", "down.weight"]
    x = (torch.randn(96, 64) * torch.logspace(-2, 2, 96)[:, None]).bfloat16().requires_grad_()
    gradient = torch.randn(96, 128, dtype=torch.bfloat16)
    layer.up(x).backward(gradient)
    exact = x.detach().float() @ up.float().t()
    wanted = {
        "product": in_blocks(x.detach()) @ in_blocks(up).t(),
        "the input's": in_blocks(gradient) @ in_blocks(up.t()).t(),
        "the weight's": in_blocks(gradient.t()) @ in_blocks(x.detach().t()).t(),
    }
    found = {"product": layer.up(x).detach(), "the input's": x.grad, "the weight's": layer.up.weight.grad}
    off = {name: float((found[name].float() - each).norm() / each.norm()) for name, each in wanted.items()}
    rounding = float((exact - wanted["product"]).norm() / exact.norm())
    assert max(off.values()) < 4e-3, (off, "only the results' own rounding to bfloat16")
    assert rounding > 3 * max(off.values()), "else nothing was rounded to float8"


@torchao
def test_a_loud_block_leaves_the_others_of_its_row_as_they_are():
    """What 32 elements with a scale of their own are for: by rows, the quiet half would be rounded away."""
    torch.manual_seed(0)
    x, off = torch.randn(32, 64, dtype=torch.bfloat16), {}
    x[:, 32:] *= 2.0**17
    for precision in ("fp8", "mxfp8"):
        layer = Layer().bfloat16()
        layer.up.weight.data[:, 32:] = 0.0
        wanted = x.float() @ layer.up.weight.detach().float().t()
        float8.convert_layers([layer], torch.device("cpu"), precision, emulate=True)
        off[precision] = float((layer.up(x).detach().float() - wanted).norm() / wanted.norm())
    assert off["mxfp8"] < 0.05 < 0.3 < off["fp8"], off


@torchao
def test_kernels_that_are_wrong_or_missing_are_refused(monkeypatch):
    """The real comparison, with what a GPU would compute played by the emulation."""
    emulated = float8._products
    played = {"product": 1.0}
    state = torch.get_rng_state()

    def products(device, emulate):
        found = emulated(device, True)
        return found if emulate else {name: each * played.get(name.split()[-1], 1.0) for name, each in found.items()}

    monkeypatch.setattr(float8, "_products", products)
    cpu = torch.device("cpu")
    float8.check_kernels(cpu)
    played["product"] = 1.005  # rounding
    float8.check_kernels(cpu)
    assert torch.equal(torch.get_rng_state(), state)
    for name, words in (("product", "the product is 0.05 off"), ("gradient", "gradient is 0.05 off")):
        played.clear()
        played[name] = 1.05
        with pytest.raises(UsageError, match=words) as error:
            float8.check_kernels(cpu)
        assert "\n" not in str(error.value) and error.value.hint

    def missing(device, emulate):
        raise NotImplementedError("needs torchao built for CUDA 12.8\nand so on")

    monkeypatch.setattr(float8, "_products", missing)
    with pytest.raises(UsageError, match=r"kernels do not run here: needs torchao built for CUDA 12\.8$"):
        float8.check_kernels(cpu)


@torchao
@pytest.mark.parametrize("precision", ["fp8", "mxfp8"])
def test_gradients_are_near_those_of_bfloat16(precision):
    torch.manual_seed(0)
    plain = Layer().bfloat16()
    layer = copy.deepcopy(plain)
    float8.convert_layers([layer], torch.device("cpu"), precision, emulate=True)
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    for each in (plain, layer):
        each(x).float().square().mean().backward()
    for name, parameter in layer.named_parameters():
        wanted = plain.get_parameter(name).grad
        off = float((parameter.grad - wanted).norm() / wanted.norm())
        assert 1e-4 < off < 0.1, (name, off)


@torchao
@pytest.mark.parametrize("precision", ["fp8", "mxfp8"])
def test_a_rows_result_does_not_depend_on_other_rows(precision):
    torch.manual_seed(0)
    layer = Layer().bfloat16()
    float8.convert_layers([layer], torch.device("cpu"), precision, emulate=True)
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    louder = x.clone()
    louder[16:] *= 1000.0
    assert torch.equal(layer(x)[:16], layer(louder)[:16])


@torchao
def test_an_odd_matrix_is_named():
    with pytest.raises(UsageError, match="fp8: up is 40 x 128, not multiples of 16"):
        float8.convert_layers([Layer(40)], torch.device("cpu"), emulate=True)
    with pytest.raises(UsageError, match="mxfp8: up is 48 x 128, not multiples of 32"):
        float8.convert_layers([Layer(48)], torch.device("cpu"), "mxfp8", emulate=True)


@torchao
def test_biases_and_what_is_frozen_stay():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64, bias=False)).bfloat16()
    plain[1].requires_grad_(False)
    layer = copy.deepcopy(plain)
    float8.convert_layers([layer], torch.device("cpu"), "mxfp8", emulate=True)
    assert [type(part).__name__ for part in layer] == ["MXFP8Linear"] * 2
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), plain.parameters(), strict=True))
    assert [p.requires_grad for p in layer.parameters()] == [True, True, False]
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    assert float((layer[0](x) - plain[0](x)).detach().norm() / plain[0](x).detach().norm()) < 0.05


@torchao
def test_a_model_trains_in_it_and_keeps_its_documents_apart(group, monkeypatch):
    monkeypatch.setattr(float8, "convert_layers", partial(float8.convert_layers, emulate=True))
    tokens, positions = torch.arange(32)[None] * 7 % 50, torch.arange(16).repeat(2)[None]
    losses, names = {}, {}
    wide = LLAMA | {"hidden_size": 64, "intermediate_size": 96}
    for precision in ("bf16", "fp8", "mxfp8"):
        made = build(spec_of(wide, dtype="bfloat16", training={"precision": precision}))
        module = made.module
        names[precision] = list(made.named_trainable())
        loss = loss_sum(module, make_batch(tokens, tokens, positions, (16, 16), CPU), chunk_tokens=16, scale=1 / 32)
        loss.backward()
        losses[precision] = float(loss.detach())
        assert made.proof.leak == 0
        kinds = {type(part).__name__ for part in module.modules()}
        assert ("Float8Linear" in kinds, "MXFP8Linear" in kinds) == (precision == "fp8", precision == "mxfp8")
        assert type(module.model.get_output_embeddings()).__name__ == "Linear", "the head stays as it is"
        assert all(p.grad is not None for p in module.parameters())
    for precision in ("fp8", "mxfp8"):
        assert names["bf16"] == names[precision]
        assert losses[precision] == pytest.approx(losses["bf16"], rel=0.02) and losses[precision] != losses["bf16"]
