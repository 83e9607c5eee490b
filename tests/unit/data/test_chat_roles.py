"""Masks by role, on every template and on real tokenizers: the words of exactly those turns, and nothing else."""

import shutil
from pathlib import Path

import pytest

from muster.config.spec import TrainedTokenizer
from muster.data.chat.engine import ChatRules
from muster.data.tokenise import Recipe, tokenise_rows
from muster.data.tokenizer import Encoder, find_template, install_template, train

pytest.importorskip("transformers")
SHARED = Path(__file__).parents[3].parent / "shared" / "data"
REAL = {"bpe2k": SHARED / "tokenizers" / "bpe2k", "stories260k": SHARED / "models" / "stories260k"}
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello friend"},
    {"role": "assistant", "content": "Hi. What is it?"},
    {"role": "user", "content": "Once upon\na time"},
    {"role": "assistant", "content": "there was a child 世界."},
]
OWN = """{{ bos_token }}{% for m in messages %}{{- '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


@pytest.fixture(params=["trained", *REAL])
def folder(request, tmp_path):
    if request.param == "trained":
        words = [turn["content"] for turn in TURNS]
        return train(lambda: words, TrainedTokenizer(kind="bpe", vocab_size=320), tmp_path / "t").folder
    if not REAL[request.param].is_dir():
        pytest.skip(f"{REAL[request.param]} is not here")
    return Path(shutil.copytree(REAL[request.param], tmp_path / "t", ignore=shutil.ignore_patterns("*.safetensors")))


@pytest.mark.parametrize("template", ["chatml", "llama3", "own"])
@pytest.mark.parametrize("roles", [["assistant"], ["user"], ["system"], ["user", "assistant"], ["system", "assistant"]])
def test_the_words_of_these_roles(folder, tmp_path, template, roles):
    (tmp_path / "own.jinja").write_text(OWN)
    install_template(folder, find_template(str(tmp_path / "own.jinja") if template == "own" else template))
    encoder = Encoder(folder)
    tokens = tokenise_rows([{"messages": TURNS}], Recipe(folder, "chat", None, ChatRules(tuple(roles))))
    marks = set(map(encoder.fast.token_to_id, encoder.special_tokens))
    parts = {flag: [id for id, mask in pairs(tokens) if mask == flag and id not in marks] for flag in (True, False)}
    for turn in TURNS:
        inside, outside = (encoder.decode(parts[flag]) for flag in (True, False))
        is_learned = turn["role"] in roles
        words = [word for word in turn["content"].split() if len(word) > 3 and word.isascii()]
        assert words
        assert all((word in inside) == is_learned for word in words), (inside, outside)
        assert all(word in outside for word in words) != is_learned
    ends = encoder.fast.token_to_id(encoder.special["eos"])
    learned_ends = sum(id == ends and mask for id, mask in pairs(tokens))
    assert learned_ends == sum(turn["role"] in roles for turn in TURNS), "each turn's end, and no other's"


def pairs(tokens):
    return list(zip(tokens.ids.tolist(), map(bool, tokens.supervised.tolist()), strict=True))
