"""Chat templates: what is learned is exactly the assistant's words and their end token, on every template."""

import json
from itertools import groupby

import pytest

from muster.config.spec import TrainedTokenizer
from muster.core.errors import UsageError
from muster.data.chat.engine import ChatRules
from muster.data.prepare import prepare
from muster.data.preview import preview
from muster.data.text import templates
from muster.data.tokenise import Recipe, tokenise_rows
from muster.data.tokenizer import Encoder, find_template, install_template, train

pytest.importorskip("transformers")

WORDS = ["ONE", "\nstarts a line", "two  \n words", "世界 🚀 é", "  led by blanks", "ends in blanks \n\n", "a <b> |c|"]
ZEPHYR = """{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""
TURNS = """{{ bos_token }}{% for m in messages %}{% set who = 'model' if m.role == 'assistant' else m.role %}
{{- '<start_of_turn>' + who + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
INSTRUCT = """{{ bos_token }}{% for m in messages %}
{%- if m.role == 'assistant' %}{{ m.content + eos_token }}{% else %}{{ '[INST]' + m.content + '[/INST]' }}{% endif %}
{%- endfor %}"""


@pytest.fixture(params=["chatml", "llama3", "zephyr", "turns", "instruct"])
def installed(request, tmp_path):
    """A trained tokenizer with one of the templates."""
    own = {"zephyr": ZEPHYR, "turns": TURNS, "instruct": INSTRUCT}
    name = request.param
    if name in own:
        (tmp_path / "own.jinja").write_text(own[name])
        name = str(tmp_path / "own.jinja")
    encoder = train(
        lambda: [*WORDS, "user\nassistant\n\n"], TrainedTokenizer(kind="bpe", vocab_size=320), tmp_path / "t"
    )
    install_template(encoder.folder, find_template(name))
    return Encoder(encoder.folder)


def recipe(encoder, train_on="completions"):
    return Recipe(encoder.folder, "chat", None, ChatRules(train_on, stop_ids=encoder.stop_ids))


def learned(encoder, row, train_on="completions"):
    """The runs of supervised tokens, decoded."""
    tokens = tokenise_rows([row], recipe(encoder, train_on))
    pairs = groupby(zip(tokens.ids.tolist(), tokens.supervised.tolist(), strict=True), key=lambda pair: pair[1])
    return [encoder.decode([id for id, _ in run], skip_special=False) for flag, run in pairs if flag]


def chat(words, *more):
    turns = [{"role": "user", "content": f"Q{number}"} for number in range(len(words))]
    answers = [{"role": "assistant", "content": text} for text in words]
    return {"messages": [turn for pair in zip(turns, answers, strict=True) for turn in pair], **dict(more)}


def test_exactly_the_assistants_words_and_their_end(installed):
    trims = "trim" in installed.chat_template
    expected = [(text.strip() if trims else text) + installed.special["eos"] for text in WORDS]
    assert sorted(learned(installed, chat(WORDS))) == sorted(expected)
    for text, wanted in zip(WORDS, expected, strict=True):
        assert learned(installed, chat([text])) == [wanted]


@pytest.mark.parametrize("name", templates.SHIPPED)
def test_calls_of_tools_are_learned_and_what_they_are_is_not(tmp_path, name):
    encoder = train(lambda: WORDS, TrainedTokenizer(kind="bpe", vocab_size=320), tmp_path / "t")
    install_template(encoder.folder, find_template(name))
    encoder = Encoder(encoder.folder)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    schema = {"type": "function", "function": {"name": "add", "description": "adds"}}
    turns = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "It is 2."},
    ]
    wanted = ['<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "It is 2."]
    for tools in ([schema], json.dumps([schema]), [json.dumps(schema)]):
        row = {"messages": turns, "tools": tools}
        assert learned(encoder, row) == [text + encoder.special["eos"] for text in wanted]
        assert "adds" in encoder.decode(tokenise_rows([row], recipe(encoder, "all")).ids.tolist())


def test_a_conversation_that_the_assistant_begins(tmp_path):
    encoder = train(lambda: WORDS, TrainedTokenizer(kind="bpe", vocab_size=320), tmp_path / "t")
    install_template(encoder.folder, find_template("chatml"))
    row = {"conversations": [{"from": "gpt", "value": "Hi."}, {"from": "human", "value": "Q"}]}
    assert learned(Encoder(encoder.folder), row) == ["Hi.<|im_end|>"]


def test_what_transformers_loads_has_the_tokens_and_the_end(installed):
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(installed.folder)
    assert loaded.eos_token == installed.special["eos"] and len(loaded) == installed.vocab_size
    text = loaded.apply_chat_template(chat(WORDS[:1])["messages"], tokenize=False)
    assert loaded(text, add_special_tokens=False)["input_ids"] == installed.encode([text])[0]


def test_from_another_model(tmp_path):
    encoder = train(lambda: WORDS, TrainedTokenizer(kind="bpe", vocab_size=320), tmp_path / "instruct")
    install_template(encoder.folder, find_template("llama3"))
    found = find_template(f"from {encoder.folder}")
    assert set(found.tokens) == {"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"}
    assert found.text == templates.LLAMA3
    plain = train(lambda: WORDS, TrainedTokenizer(kind="bpe", vocab_size=320), tmp_path / "plain")
    with pytest.raises(UsageError, match="has no chat template"):
        find_template(f"from {plain.folder}")
    with pytest.raises(UsageError, match="chatmk") as caught:
        find_template("chatmk")
    assert "chatml" in caught.value.hint


def test_own_chats_with_a_trained_tokenizer(tmp_path, make_spec):
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(chat([f"answer {number}"])) + "\n" for number in range(30)))
    source = [{"type": "file", "path": str(path)}]
    model = {"config": {"model_type": "llama"}, "tokenizer": {"kind": "bpe", "vocab_size": 300}}
    with pytest.raises(UsageError, match="no chat template") as caught:
        prepare(make_spec(source, model=model), run_dir=tmp_path / "run")
    assert "data.chat_template: chatml" in caught.value.hint
    prepared = prepare(make_spec(source, model=model, chat_template="chatml"), run_dir=tmp_path / "run")
    assert prepared.vocab_size == 300
    shown = preview(prepared).examples[0]
    assert shown[-1].supervised and shown[-1].text.endswith("<|im_end|>")
    other = prepare(make_spec(source, model=model, chat_template="llama3"), run_dir=tmp_path / "run2")
    assert other.fingerprint != prepared.fingerprint


def test_a_base_model_grows_by_the_templates_tokens_and_by_no_others(tmp_path, make_spec):
    encoder = train(lambda: WORDS, TrainedTokenizer(kind="bpe", vocab_size=300), tmp_path / "base")
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(chat([f"answer {number}"])) + "\n" for number in range(30)))
    source, model = [{"type": "file", "path": str(path)}], {"source": str(encoder.folder)}
    config = encoder.folder / "config.json"
    for room, expected in ((0, encoder.vocab_size + 2), (64, encoder.vocab_size + 64)):
        config.write_text(json.dumps({"vocab_size": encoder.vocab_size + room}))
        prepared = prepare(make_spec(source, model=model, chat_template="chatml"), run_dir=tmp_path / f"run{room}")
        assert prepared.vocab_size == expected
    config.write_text(json.dumps({"vocab_size": encoder.vocab_size - 1}))
    with pytest.raises(UsageError, match="vocabulary mismatch"):
        prepare(make_spec(source, model=model, chat_template="chatml"), run_dir=tmp_path / "other")
