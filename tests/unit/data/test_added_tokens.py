"""Tokens that a chat template adds are the same ids for Muster and for every class of tokenizer in transformers."""

import json

import pytest
from fakes.hub_tokenizer import CLASSES, make_hub_tokenizer

from muster.data.chat.template import Template
from muster.data.tokenizer import Encoder, find_template, install_template, list_added_tokens

pytest.importorskip("transformers")

CHAT = [{"role": "user", "content": "The user asks"}, {"role": "assistant", "content": "the answer"}]


@pytest.fixture(params=CLASSES)
def base(request, tmp_path):
    return make_hub_tokenizer(tmp_path / "base", request.param)


def loaded_is_trained(encoder):
    """Whether AutoTokenizer gives a chat the ids of training."""
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(encoder.folder)
    text = Template(encoder.chat_template, encoder.template_variables, "2026-01-01").render(CHAT, [], {}, prompt=False)
    same = loaded(text, add_special_tokens=False)["input_ids"] == encoder.encode([text])[0]
    return same and len(loaded) == encoder.vocab_size and loaded.eos_token_id == encoder.eos_id


@pytest.mark.parametrize("template", ["chatml", "llama3"])
def test_every_class_of_transformers_knows_them(base, template):
    before = Encoder(base).vocab_size
    assert install_template(base, find_template(template)) == Encoder(base).vocab_size - before > 0
    assert loaded_is_trained(Encoder(base))
    config = json.loads((base / "tokenizer_config.json").read_text())
    added = Encoder(base).fast.get_added_tokens_decoder()
    listed = config["added_tokens_decoder"]
    assert {int(number): token["content"] for number, token in listed.items()} == {
        number: token.content for number, token in added.items()
    }


def test_a_folder_of_an_older_version_is_completed_and_a_complete_one_stays(base):
    complete = (base / "tokenizer_config.json").read_bytes()
    list_added_tokens(base)
    assert (base / "tokenizer_config.json").read_bytes() == complete
    install_template(base, find_template("llama3"))
    config = json.loads((base / "tokenizer_config.json").read_text())
    older = {**config, "added_tokens_decoder": json.loads(complete)["added_tokens_decoder"]}
    (base / "tokenizer_config.json").write_text(json.dumps(older))
    opens_the_file = config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert loaded_is_trained(Encoder(base)) is opens_the_file
    list_added_tokens(base)
    assert loaded_is_trained(Encoder(base))


def test_a_list_does_not_hide_what_another_file_says(tmp_path):
    """Where tokenizer_config.json has a list of added tokens, transformers does not open special_tokens_map.json."""
    from transformers import AutoTokenizer

    base = make_hub_tokenizer(tmp_path / "base", "Qwen2Tokenizer")
    config = json.loads((base / "tokenizer_config.json").read_text())
    roles = {key: config.pop(key) for key in ("eos_token", "pad_token", "bos_token", "unk_token")}
    del config["added_tokens_decoder"]
    (base / "tokenizer_config.json").write_text(json.dumps(config))
    (base / "special_tokens_map.json").write_text(json.dumps({**roles, "mask_token": "<mask>"}))
    list_added_tokens(base)
    loaded = AutoTokenizer.from_pretrained(base)
    assert (loaded.eos_token, loaded.mask_token) == (roles["eos_token"], "<mask>")
