"""Building a model on one rank: what it is, what it refuses, what its self-test catches."""

import json

import pytest
import torch
from fakes.small_model import CPU, LLAMA, build, spec_of

from muster.config.spec import Training
from muster.core.errors import RunFailed, UsageError
from muster.core.types import Layout
from muster.train.data_feed.batch import make_batch
from muster.train.distributed.device_mesh import make_meshes
from muster.train.model import attention
from muster.train.model.attention_isolation_check import prove_isolation
from muster.train.model.causal_lm import on_meta, read_config
from muster.train.model.compile import check_compiler, compiles, missing
from muster.train.model.loss import loss_sum
from muster.train.model.sharding import decoder_layers

pytestmark = pytest.mark.usefixtures("group")

NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def batch(vocab=50):
    ids = torch.arange(32).remainder(vocab).view(1, 32)
    positions = torch.cat([torch.arange(20), torch.arange(12)]).view(1, 32)
    return make_batch(ids, ids.roll(-1, 1), positions, [20, 12], CPU)


@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        {**LLAMA, "model_type": "qwen3", "head_dim": 8},
        {**LLAMA, "model_type": "gemma2", "head_dim": 8, "sliding_window": 16, "final_logit_softcapping": 5.0},
        {**LLAMA, "model_type": "granite", "logits_scaling": 4.0},
        {**LLAMA, "model_type": "cohere", "logit_scale": 0.25},
        {**LLAMA, "model_type": "phi3", "pad_token_id": 0},
        {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **NO_DROPOUT},
        {"model_type": "gpt_neox", **{k: v for k, v in LLAMA.items() if k != "model_type"}},
    ],
    ids=lambda config: config["model_type"],
)
def test_architectures_train_and_keep_documents_apart(config):
    built = build(spec_of(config))
    proof = built.proof
    assert proof.own_head, "the chunked head gives the model's own logits"
    assert proof.leak <= 1e-3 * proof.control
    loss = loss_sum(built.module, batch(), chunk_tokens=7, scale=1.0 / 31)
    loss.backward()
    lacking = [name for name, parameter in built.named_trainable().items() if parameter.grad is None]
    assert not lacking
    with torch.no_grad():
        logits = built.module(batch(), want="model_logits")
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch().labels.flatten())
    assert float(loss.detach()) == pytest.approx(float(expected) * 32 / 31, rel=1e-5)
    assert len(decoder_layers(built.module.model)) == 2


def test_counts_and_vocabulary():
    built = build(spec_of(), vocab_size=50)
    assert built.config.vocab_size == 50, "a config without one takes the tokenizer's"
    assert built.num_parameters == built.num_trainable == sum(p.numel() for p in built.module.parameters())
    assert built.shape is not None and built.shape.layers == 2
    assert build(spec_of({**LLAMA, "vocab_size": 64}), vocab_size=50).config.vocab_size == 64
    with pytest.raises(UsageError, match="the tokenizer has 50 tokens, the model's vocabulary 49"):
        build(spec_of({**LLAMA, "vocab_size": 49}), vocab_size=50)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**LLAMA, "model_type": "no_such"}, "no_such"),
        ({key: value for key, value in LLAMA.items() if key != "model_type"}, "model_type"),
        ({**LLAMA, "model_type": "t5"}, "T5Config"),
        ("/nowhere/config.json", "/nowhere/config.json"),
        ({**LLAMA, "num_attention_heads": 3}, "not a multiple"),
    ],
)
def test_configs_that_are_none(config, said):
    with pytest.raises(UsageError, match=said) as caught:
        build(spec_of(config))
    assert "\n" not in str(caught.value)


def test_a_kernel_that_mixes_documents_gets_one_a_row(monkeypatch):
    def mixing(query, key, value, cu_seqlens, scale):
        whole = torch.tensor([0, query.shape[0]], dtype=torch.int32)
        return original(query, key, value, whole, scale)

    original = attention.document_attention
    monkeypatch.setattr(attention, "document_attention", mixing)
    built = build(spec_of())
    assert "llama does not keep documents in a row apart with attention document" in built.proof.unpacked
    assert str(built.attention).endswith("; one document a row)")


def test_a_model_that_sees_the_future_is_refused(monkeypatch):
    def both_ways(query, key, value, cu_seqlens, scale):
        heads = (each.transpose(0, 1) for each in (query, key, value))
        return torch.nn.functional.scaled_dot_product_attention(*heads, scale=scale).transpose(0, 1)

    monkeypatch.setattr(attention, "document_attention", both_ways)
    with pytest.raises(UsageError, match="LlamaForCausalLM is not causal"):
        build(spec_of())


def test_a_self_test_that_cannot_fail_is_no_test(monkeypatch):
    monkeypatch.setattr(attention, "document_attention", lambda query, *_: torch.zeros_like(query))
    with pytest.raises(RunFailed, match="inconclusive"):
        build(spec_of())


def test_a_head_with_its_own_arithmetic_is_left_to_the_model(monkeypatch):
    built = build(spec_of())
    forward = built.module.model.forward

    def doubled(**arguments):
        found = forward(**arguments)
        found.logits = found.logits * 2.0
        return found

    monkeypatch.setattr(built.module.model, "forward", doubled)
    own = loss_sum(built.module, batch(), chunk_tokens=8, scale=1.0).detach()
    assert not prove_isolation(built.module, CPU, sequence_length=32).own_head
    models = loss_sum(built.module, batch(), chunk_tokens=8, scale=1.0).detach()
    assert not torch.isclose(own, models, rtol=1e-3)


def test_a_forward_pass_without_gradients_leaves_no_stale_parameters():
    built = build(spec_of(dtype="bfloat16"))  # in FSDP, which gathers
    with torch.no_grad():
        before = loss_sum(built.module, batch(), chunk_tokens=8, scale=1.0)
        for parameter in built.module.parameters():
            parameter.to_local().mul_(0.5)
        after = loss_sum(built.module, batch(), chunk_tokens=8, scale=1.0)
    assert not torch.equal(before, after)


def test_meshes_refuse_a_layout_of_another_size():
    with pytest.raises(UsageError, match="needs 2 ranks, there are 1"):
        make_meshes(Layout(dp_shard=2), "cpu")


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    missing.cache_clear()
    yield
    missing.cache_clear()


def test_a_missing_compiler_is_said_before_training(no_compiler):
    with pytest.raises(UsageError, match="no C\\+\\+ compiler"):
        check_compiler(CPU)


@pytest.mark.parametrize(
    ("written", "steps", "device", "compiled"),
    [
        ("auto", 50, "cuda", True),
        ("auto", None, "cuda", True),
        ("auto", 49, "cuda", False),
        ("auto", 5000, "cpu", False),
        (True, 10, "cpu", True),
        (False, 5000, "cuda", False),
    ],
)
def test_layers_are_compiled_on_a_gpu_unless_the_run_is_short(monkeypatch, written, steps, device, compiled):
    monkeypatch.setattr("muster.train.model.compile.missing", lambda device: None)
    training = Training(compile=written, steps=steps, epochs=None if steps else 1.0)
    assert compiles(training, torch.device(device)) is compiled


def test_auto_goes_without_a_compiler_that_is_not_there(no_compiler, capsys):
    training = Training(steps=1000)
    assert training.compile == "auto" and training.compiles_on("cuda")
    assert not compiles(training, torch.device("cuda"))
    assert "auto compiles nothing: " in capsys.readouterr().err
    assert compiles(training.model_copy(update={"compile": True}), CPU), "asked for: refused later, by name"


@pytest.mark.parametrize("written", ["here", "in a file"])
def test_an_unknown_model_type_is_one_line_with_the_nearest_known(tmp_path, written):
    """transformers itself answers with the names of all that it knows: thousands of characters."""
    config = {**LLAMA, "model_type": "lama"}
    if written == "in a file":
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError) as caught:
        read_config(spec_of(config if written == "here" else str(tmp_path / "config.json")), None, 50)
    assert str(caught.value) == "model: transformers knows no model_type 'lama'"
    assert caught.value.hint is not None and "did you mean llama" in caught.value.hint and len(caught.value.hint) < 80


@pytest.mark.parametrize("kind", ["config", "model"])
def test_code_that_comes_with_a_model_is_not_run_and_nobody_is_asked(tmp_path, monkeypatch, kind):
    """transformers asks at the terminal where it is not told, and runs it after a y."""
    asked = []
    monkeypatch.setattr("builtins.input", lambda text="": asked.append(text) or "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    here = tmp_path / "model"
    here.mkdir()
    ran = tmp_path / "ran"
    for name in ("configuration_theirs", "modeling_theirs"):
        (here / f"{name}.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    theirs = {"AutoConfig": "configuration_theirs.Config", "AutoModelForCausalLM": "modeling_theirs.Model"}
    known = {} if kind == "config" else {"model_type": "t5"}  # one that transformers has, and no such model of it
    (here / "config.json").write_text(json.dumps({**LLAMA, "model_type": "theirs", "auto_map": theirs, **known}))
    with pytest.raises(UsageError) as caught:
        on_meta(read_config(spec_of(None, source=str(here)), here, 50), torch.float32)
    assert not ran.exists() and asked == [] and "\n" not in str(caught.value)
