"""A model whose chat template added tokens: where their rows begin, that they are trained, what an export holds."""

import pytest
import torch
from fakes.small_model import LLAMA, build, spec_of, whole
from safetensors.torch import save_file

from muster.core.errors import CheckpointError, UsageError
from muster.train.model.causal_lm import grows

pytestmark = pytest.mark.usefixtures("group")


def grown(spec):
    """``spec`` with a chat template."""
    return spec.model_copy(update={"data": spec.data.model_copy(update={"chat_template": "chatml"})})


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def base(request, tmp_path):
    """A pretrained folder of 50 tokens, and its weights."""
    built = build(spec_of({**LLAMA, "vocab_size": 50, "tie_word_embeddings": request.param}))
    values = {name: whole(value) for name, value in built.named_trainable().items()}
    built.config.save_pretrained(tmp_path)
    save_file(values, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path, values


def test_new_rows_begin_as_the_mean_and_the_others_stay(base):
    folder, values = base
    built = build(grown(spec_of(None, source=str(folder))), vocab_size=52)
    found = {name: whole(value) for name, value in built.named_trainable().items()}
    for name, value in values.items():
        assert torch.equal(found[name][: len(value)], value), name
        if len(found[name]) > len(value):
            assert torch.allclose(found[name][50:], value.mean(0).expand(2, -1), atol=1e-6)
    assert found["model.embed_tokens.weight"].shape[0] == 52
    with pytest.raises(UsageError, match="the tokenizer has 52 tokens"):
        build(spec_of(None, source=str(folder)), vocab_size=52)


def test_a_config_that_does_not_belong_to_the_weights_is_still_refused(base, monkeypatch):
    folder, _ = base
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"vocab_size": 50', '"vocab_size": 60'))
    spec = spec_of(None, source=str(folder))
    assert not grows(spec)
    with pytest.raises(CheckpointError, match="has shape"):
        build(spec, vocab_size=50)


def test_adapters_train_the_embedding_and_the_head_with_a_template_only(base):
    pytest.importorskip("peft")
    folder, values = base
    heads = {"model.embed_tokens.weight", "lm_head.weight"} & values.keys()
    spec = spec_of(None, source=str(folder), lora={"rank": 4})
    assert not heads & build(spec).named_trainable().keys()
    assert heads < build(grown(spec), vocab_size=52).named_trainable().keys()
    frozen = spec_of(None, source=str(folder), lora={"rank": 4, "train_embeddings": False})
    assert not heads & build(grown(frozen), vocab_size=52).named_trainable().keys()
