"""Tokenizers: trained ones are deterministic and round-trip, folders are read as they are, vocabularies must fit."""

import contextlib
import json

import pytest

from muster.config.spec import Model, TrainedTokenizer
from muster.core.errors import UsageError
from muster.data.chat.engine import ChatEngine, ChatRules
from muster.data.tokenizer import Encoder, check_vocabulary, locate, model_vocab_size, train
from muster.tasks.text2sql.generator import examples

TEXTS = ["table shop : price , name | how many shop ?", " SELECT COUNT(*) FROM shop WHERE price > 17", "a\nb  c _x1"]


@pytest.mark.parametrize("kind", ["word", "bpe"])
def test_known_text_comes_back_exactly(tmp_path, kind):
    found = train(lambda: TEXTS, TrainedTokenizer(kind=kind, vocab_size=400), tmp_path / "t")
    for text, ids in zip(TEXTS, found.encode(TEXTS), strict=True):
        assert found.decode(ids) == text
    assert found.eos_id is not None and found.eos_id != found.pad_id
    assert {"<pad>", "<s>", "</s>", "<unk>"} <= set(found.fast.get_vocab())


@pytest.mark.parametrize("kind", ["word", "bpe"])
def test_training_is_deterministic(tmp_path, kind):
    texts = [found.prompt + found.completion for found in examples(3, 200, 0)]
    files = []
    for name in ("a", "b"):
        train(lambda: iter(texts), TrainedTokenizer(kind=kind, vocab_size=500), tmp_path / name)
        files.append((tmp_path / name / "tokenizer.json").read_bytes())
    assert files[0] == files[1]


def test_words_beyond_the_vocabulary_are_unknown_and_the_commonest_stay(tmp_path):
    texts = ["aa " * 5 + f"rare{number}" for number in range(200)]
    found = train(lambda: texts, TrainedTokenizer(vocab_size=64), tmp_path / "t")
    assert found.vocab_size == 64
    assert found.decode(found.encode([" aa"])[0]) == " aa"
    assert found.fast.token_to_id("<unk>") in found.encode([" never"])[0]


def test_bytes_are_never_unknown(tmp_path):
    found = train(lambda: TEXTS, TrainedTokenizer(kind="bpe", vocab_size=300), tmp_path / "t")
    strange = "Grüße, 世界 🚀 \x00\t"
    assert found.decode(found.encode([strange])[0]) == strange


def test_bpe_needs_room_for_its_bytes(tmp_path):
    with pytest.raises(UsageError, match="too small for bpe") as caught:
        train(lambda: TEXTS, TrainedTokenizer(kind="bpe", vocab_size=100), tmp_path / "t")
    assert "260" in caught.value.hint


def test_special_tokens_of_the_folder_are_used(tmp_path):
    train(lambda: TEXTS, TrainedTokenizer(vocab_size=100), tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "special_tokens_map.json").unlink()
    config |= {"eos_token": {"content": "<|end|>"}, "pad_token": None, "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = Encoder(tmp_path)
    # A token that the vocabulary lacks is added behind it; padding falls back on the end token.
    assert found.fast.id_to_token(found.eos_id) == "<|end|>" and found.eos_id == found.vocab_size - 1
    assert found.pad_id == found.eos_id
    assert found.prefix == (found.fast.token_to_id("<s>"),)
    assert found.encode_prompt("table")[0] == found.prefix[0]


def test_no_chat_template_is_said(tmp_path):
    found = train(lambda: TEXTS, TrainedTokenizer(vocab_size=100), tmp_path)
    with pytest.raises(UsageError, match="no chat template"):
        ChatEngine(found, ChatRules())


def test_saving_keeps_what_matters(tmp_path):
    found = train(lambda: TEXTS, TrainedTokenizer(vocab_size=100), tmp_path / "a")
    (tmp_path / "a" / "chat_template.jinja").write_text("{{ messages }}")
    found.save(tmp_path / "b")
    assert Encoder(tmp_path / "b").fingerprint() == Encoder(tmp_path / "a").fingerprint()
    assert Encoder(tmp_path / "b").chat_template == "{{ messages }}"


def test_broken_folders_are_named(tmp_path):
    with pytest.raises(UsageError, match="has no tokenizer"):
        locate(Model(source=str(tmp_path)))
    with pytest.raises(UsageError, match="does not exist"):
        locate(Model(source="./no/such/folder"))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UsageError, match="not a readable tokenizer"):
        Encoder(locate(Model(source=str(tmp_path)))).encode(["a"])


def test_the_models_vocabulary_size(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"vocab_size": 77}))
    assert model_vocab_size(Model(config=str(path))) == 77
    assert model_vocab_size(Model(source=str(tmp_path))) == 77
    assert model_vocab_size(Model(config={"text_config": {"vocab_size": 5}})) == 5
    assert model_vocab_size(Model(config={})) is None
    with pytest.raises(UsageError, match="does not exist"):
        model_vocab_size(Model(config=str(tmp_path / "none.json")))
    path.write_text("nonsense")
    with pytest.raises(UsageError, match="not readable JSON"):
        model_vocab_size(Model(config=str(path)))


def test_a_tokenizer_may_not_have_more_tokens_than_the_model():
    assert check_vocabulary(100, 128, "it") == 128
    assert check_vocabulary(100, None, "it") == 100
    with pytest.raises(UsageError, match="it has 129 tokens, the model's config 128"):
        check_vocabulary(129, 128, "it")


def test_code_that_comes_with_a_tokenizer_is_not_run_and_nobody_is_asked(tmp_path, monkeypatch):
    """transformers asks at the terminal where it is not told, and runs it after a y."""
    asked = []
    monkeypatch.setattr("builtins.input", lambda text="": asked.append(text) or "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder, ran = tmp_path / "theirs", tmp_path / "ran"
    train(lambda: TEXTS, TrainedTokenizer(vocab_size=400), folder)
    (folder / "tokenization_theirs.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Theirs"}
    (folder / "tokenizer.json").unlink()  # with it transformers is not asked at all
    config["auto_map"] = {"AutoTokenizer": ["tokenization_theirs.Slow", "tokenization_theirs.Theirs"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with contextlib.suppress(UsageError):
        assert Encoder(folder).fast
    assert not ran.exists() and asked == []
