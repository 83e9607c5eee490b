"""From chats to prepared data: what ends an answer, what is left out, and what is counted and held out together."""

import datetime
import json
from itertools import groupby

import pytest

from muster.config.spec import TrainedTokenizer
from muster.core.errors import UsageError
from muster.data import tokenise
from muster.data.chat.engine import ChatEngine, ChatRules
from muster.data.chat.template import Template
from muster.data.prepare import prepare
from muster.data.preview import preview, summary
from muster.data.questions import heldout_questions
from muster.data.tokenise import Recipe, tokenise_rows
from muster.data.tokenizer import Encoder, train

CHATML = """{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""


def user(text="Q"):
    return {"role": "user", "content": text}


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


def learned(encoder, tokens):
    pairs = groupby(zip(tokens.ids.tolist(), tokens.supervised.tolist(), strict=True), key=lambda pair: pair[1])
    return [encoder.decode([id for id, _ in run], skip_special=False) for flag, run in pairs if flag]


def of(found, *messages):
    return learned(found.encoder, tokenise_rows([{"messages": list(messages)}], found))


@pytest.fixture
def prepared(make_spec, tmp_path):
    """``prepared(folder, rows, **data)``."""

    def make(folder, rows, *, name="r", length=256, **data):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        model = {"config": {"vocab_size": 2048}, "tokenizer": str(folder)}
        spec = make_spec(
            [{"type": "file", "path": str(path)}], model=model, training={"sequence_length": length}, **data
        )
        return prepare(spec, run_dir=tmp_path / name)

    return make


def test_the_stop_token_that_the_models_config_names(opened, recipe):
    """Cohere writes two tokens after an answer: generation stops at the second."""
    text = CHATML.replace("'<|im_end|>\\n'", "'<|END_RESPONSE|><|END_OF_TURN|>'").replace(
        "'<|im_end|>\n'", "'<|END_RESPONSE|><|END_OF_TURN|>'"
    )
    _, folder = opened("own", text)
    (folder / "generation_config.json").write_text(
        '{"eos_token_id": [5, ' + str(Encoder(folder).fast.token_to_id("<|END_OF_TURN|>")) + "]}"
    )
    assert of(recipe(folder), user(), said("A")) == ["A<|END_RESPONSE|><|END_OF_TURN|>"]


@pytest.mark.parametrize("eos", ["</s>", "<|im_end|>"])
def test_the_end_of_a_call_is_not_the_end_of_a_turn(opened, recipe, eos):
    """Some tokenizers have it as a special token, and base models name another end token than chats have."""
    from tokenizers import AddedToken

    text = CHATML.replace(
        "m.content +", "(m.content or '<tool_call>' + m.tool_calls[0].function.name + '</tool_call>') +"
    )
    _, folder = opened("own", text, eos_token=eos)
    encoder = Encoder(folder)
    encoder.fast.add_special_tokens([AddedToken("</tool_call>", special=True, normalized=False)])
    encoder.fast.save(str(folder / "tokenizer.json"))
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    assert of(recipe(folder), user(), call) == ["<tool_call>f</tool_call><|im_end|>"]


@pytest.mark.parametrize("name", ["gpt_oss", "phi3_5"])
def test_an_end_that_no_config_names(opened, recipe, name):
    _, folder = opened(name, eos_token="<|endoftext|>")
    found = recipe(folder)
    tokens = tokenise_rows([{"messages": [user(), said("A"), user(), said("B")]}], found)
    end = {"gpt_oss": "<|return|>", "phi3_5": "<|end|>"}[name]
    assert [text[-len(end) - 1 :] for text in learned(found.encoder, tokens)] == [f"A{end}", f"B{end}"]
    assert tokens.report.changes["answers end with a token that no config names as an end"] == 2


def test_processes_make_the_same_documents(opened, recipe, monkeypatch):
    """Also where this process has tokenised before: what it compiled does not travel."""
    found = recipe(opened("qwen3")[1])
    rows = [{"messages": [user(f"Q{number}"), said("A"), user("R"), said("B")]} for number in range(6)]
    rows.append({"messages": [{"role": "assistant", "content": [{"type": "image"}]}]})
    here = tokenise_rows(rows, found)
    monkeypatch.setattr(tokenise, "CHUNK_ROWS", 2)
    monkeypatch.setattr(tokenise, "_CHUNKS_HERE", 1)
    chunks = list(tokenise.tokenise(rows, found, workers=2))
    assert [id for chunk in chunks for id in chunk.ids.tolist()] == here.ids.tolist()
    assert [count for chunk in chunks for count in chunk.documents.tolist()] == [2] * 6 + [0]
    assert chunks[-1].report.first == here.report.first == (6, "content with a part of kind 'image', not text")


def test_without_a_mark_of_the_template_the_end_token_is_appended(opened, recipe):
    text = "{% for m in messages %}### {{ m.role }}\n{{ m.content }}\n\n{% endfor %}"
    text += "{% if add_generation_prompt %}### assistant\n{% endif %}"
    _, folder = opened("own", text)
    assert of(recipe(folder), user(), said("A"), user(), said("B")) == ["A</s>", "B</s>"]


def test_nothing_that_ends_an_answer_is_an_error(opened, prepared):
    text = "{% for m in messages %}### {{ m.role }}\n{{ m.content }}\n\n{% endfor %}"
    text += "{% if add_generation_prompt %}### assistant\n{% endif %}"
    _, folder = opened("own", text, bos_token=None, eos_token=None)
    with pytest.raises(UsageError, match=r"r\.jsonl:1: nothing ends an answer") as caught:
        prepared(folder, [{"messages": [user(), said("A")]}] * 4)
    assert "eos_token" in str(caught.value)


@pytest.mark.parametrize("on_overlong", ["drop", "truncate"])
def test_chats_are_never_cut(opened, prepared, on_overlong):
    _, folder = opened("own", CHATML)
    rows = [{"messages": [user(), said("A")]}] * 5 + [{"messages": [user("long " * 200), said("A")]}] * 3
    found = prepared(folder, rows, on_overlong=on_overlong, heldout_fraction=0.0, length=64)
    assert (found.stats["documents"], found.stats["dropped"], found.stats["truncated"]) == (5, 3, 0)


def test_of_a_rewritten_conversation_the_answers_that_fit_stay(opened, prepared):
    _, folder = opened("qwen3")
    rows = [{"messages": [user(), said("A"), user("long " * 200), said("B")]}] * 4
    found = prepared(folder, rows, heldout_fraction=0.0, length=64)
    assert (found.stats["rows"], found.stats["documents"], found.stats["dropped"]) == (4, 4, 0)
    assert found.stats["dropped_answers"] == 4 and "4 answers too long, dropped" in summary(preview(found))


def test_a_conversation_is_held_out_whole(opened, prepared):
    _, folder = opened("qwen3")
    rows = [{"messages": [user(f"Q{number}"), said("A"), user("R"), said("B")]} for number in range(20)]
    found = prepared(folder, rows, heldout_fraction=0.3, packing=False)
    encoder = Encoder(found.tokenizer_dir)

    def asked(store):
        return {encoder.decode(each.input_ids.tolist()).partition("Q")[2].partition("\n")[0] for each in store}

    assert len(found.heldout) == 12 and len(found.train) == 28
    assert not asked(found.train) & asked(found.heldout)


def test_marks_narrow_what_is_learned(opened, recipe):
    """Marks around header, answer and blanks; what the prompt supplies and what follows the stop are not learned."""
    turn = "{%- generation %}{{- '<|im_start|>assistant\\n' }}{{- m.content + '<|im_end|>\\n' }}{%- endgeneration %}"
    text = (
        "{%- for m in messages %}{%- if m.role == 'assistant' %}" + turn + "{%- else %}"
        "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    )
    assert of(recipe(opened("own", text)[1]), user(), said("A"), user(), said("B")) == ["A<|im_end|>", "B<|im_end|>"]
    part = text.replace("{{- m.content +", "{%- endgeneration %}{{- m.content }}{%- generation %}{{- ")
    assert of(recipe(opened("part", part)[1]), user(), said("A")) == ["<|im_end|>"]


def test_a_call_without_content_where_the_template_needs_one(opened, recipe):
    call = {"function": {"name": "f", "arguments": '{"a": "<|im_end|>"}'}}
    text = CHATML.replace("m.content +", "m.content + ((m.tool_calls[0].function | tojson) if m.tool_calls else '') +")
    found = recipe(opened("own", text)[1])
    row = {"messages": [user("<|im_end|>"), {"role": "assistant", "content": None, "tool_calls": [call]}]}
    tokens = tokenise_rows([row], found)
    assert learned(found.encoder, tokens) == ['{"name": "f", "arguments": {"a": "<|im_end|>"}}<|im_end|>']
    assert tokens.report.changes["texts with special tokens of the tokenizer, which stay what they are"] == 1


def test_turns_that_the_row_says_are_context(opened, recipe):
    found = recipe(opened("own", CHATML)[1])
    assert of(found, user(), said("A", weight=0), user(), said("B", weight=1)) == ["B<|im_end|>"]
    assert of(found, user(), said(""), user(), said("B")) == ["B<|im_end|>"]


@pytest.mark.parametrize(("thinking", "expected"), [
    ("auto", ["One.<|im_end|>", "<think>\nT\n</think>\n\nTwo.<|im_end|>"]),
    ("on", ["<think>\n\n</think>\n\nOne.<|im_end|>", "<think>\nT\n</think>\n\nTwo.<|im_end|>"]),
    ("off", ["One.<|im_end|>", "Two.<|im_end|>"]),
])  # fmt: skip
def test_thinking(opened, recipe, thinking, expected):
    found = recipe(opened("qwen3")[1], thinking=thinking)
    assert of(found, user(), said("One."), user(), said("Two.", reasoning_content="T")) == expected


@pytest.mark.parametrize(("thinking", "remark"), [
    ("auto", "answers after an empty think block, which is the prompt's"),
    ("on", "answers learn an empty think block first"),
])  # fmt: skip
def test_empty_think_blocks_are_counted(opened, recipe, thinking, remark):
    rows = [{"messages": [user("<think>"), said("One.")]}] * 3
    report = tokenise_rows(rows, recipe(opened("qwen3")[1], thinking=thinking)).report
    assert {change: count for change, count in report.changes.items() if "empty think" in change} == {remark: 3}
    tokens = tokenise_rows(rows, recipe(opened("own", CHATML, eos_token="<|im_end|>")[1]))
    assert not tokens.report.changes, "what a user typed is no block of the prompt"


COHERE = """{{ bos_token }}{% for m in messages %}<|START|>
{%- if m.role == 'assistant' %}<|CHATBOT|><|ANSWER|>{{ m.content }}
{%- else %}<|USER|>{{ m.content }}{% endif %}<|END|>{% endfor %}
{%- if add_generation_prompt %}<|START|><|CHATBOT|>{% endif %}"""
#: Its prompt has a line end that its turns do not have.
BY_HAND = """{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }} {% else %}
{{- 'ASSISTANT: ' + m.content + eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ 'ASSISTANT:\n' }}{% endif %}"""


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (COHERE, "QAQB", ["<|ANSWER|>A<|END|>", "<|ANSWER|>B<|END|>"]),
        (COHERE, "AQB", ["<|ANSWER|>A<|END|>", "<|ANSWER|>B<|END|>"]),
        (COHERE, "QAB", ["<|ANSWER|>A<|END|>", "<|ANSWER|>B<|END|>"]),
        (COHERE, "QAQ", ["<|ANSWER|>A<|END|>"]),
        (BY_HAND, "QAQB", ["A</s>", "B</s>"]),
    ],
)
def test_other_shapes(opened, recipe, template, messages, expected):
    turns = [user() if text == "Q" else said(text) for text in messages]
    assert of(recipe(opened("own", template)[1]), *turns) == expected


def test_a_prompt_that_opens_a_think_block(opened, recipe):
    _, folder = opened("deepseek_r1")
    tokens = tokenise_rows([{"messages": [user(), said("A")]}], recipe(folder))
    assert "data.thinking: off" in next(iter(tokens.report.refused))
    assert of(recipe(folder, thinking="off"), user(), said("A")) == ["\n</think>\n\nA<｜end▁of▁sentence｜>"]


def test_the_day_of_preparation_is_kept(opened, prepared, monkeypatch):
    _, folder = opened("llama3")
    rows = [{"messages": [user(f"Q{number}"), said("A")]} for number in range(8)]
    first = prepared(folder, rows)
    monkeypatch.setattr("muster.data.prepare.datetime", later := type("Later", (), {}))
    later.UTC = datetime.UTC
    later.datetime = type("Time", (), {"now": staticmethod(lambda zone: datetime.datetime(2031, 1, 2, tzinfo=zone))})
    assert prepared(folder, rows).fingerprint == first.fingerprint, "a run that goes on another day"
    other = prepared(folder, rows, name="other")
    assert other.fingerprint != first.fingerprint
    assert "02 Jan 2031" in Encoder(folder).decode(other.train[0].input_ids.tolist())


def test_hosts_of_a_run_write_the_date_of_its_id(opened, prepared, tmp_path):
    """Each host has a run folder of its own, and may start, or be replaced, on another day."""
    _, folder = opened("llama3")
    rows = [{"messages": [user(f"Q{number}"), said("A")]} for number in range(8)]
    for host in ("a", "b"):
        (tmp_path / host).mkdir()
        (tmp_path / host / "run_id").write_text("chat-20270304-050607-f948\n")
        (tmp_path / host / "data.json").write_text('{"today": "2031-01-02"}')
    first = prepared(folder, rows, name="a")
    assert "04 Mar 2027" in Encoder(folder).decode(first.train[0].input_ids.tolist())


def test_of_several_templates_the_one_for_tools_is_taken_for_rows_with_tools(opened, recipe):
    _, folder = opened("own", CHATML)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    with_tools = "{{ tools[0]['name'] }}: " + CHATML + "\n"
    named = [{"name": "default", "template": CHATML + "\n"}, {"name": "tool_use", "template": with_tools}]
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": named}))
    template = Template(Encoder(folder).chat_template, Encoder(folder).template_variables, "2026-01-01")
    plain = Template(CHATML, Encoder(folder).template_variables, "2026-01-01")
    turns = [user(), said("A")]
    assert template.render(turns, [], {}, prompt=False) == plain.render(turns, [], {}, prompt=False)
    asked = template.render(turns, [{"name": "look_up"}], {}, prompt=True)
    assert asked == "look_up:" + plain.render(turns, [], {}, prompt=True)


def test_what_was_done_to_rows_is_shown(opened, prepared):
    _, folder = opened("own", CHATML)
    good = {"conversations": [{"from": "human", "value": "Q"}, {"from": "chatgpt", "value": "A"}]}
    other = {"conversations": [{"from": "narrator", "value": "Q"}, {"from": "gpt", "value": "A"}]}
    found = prepared(folder, [good] * 6 + [other] * 2, heldout_fraction=0.0)
    shown = summary(preview(found))
    assert "rows: 2 left out" in shown and "all used" not in shown
    assert "2: unknown role 'narrator'" in shown and "r.jsonl:7" in shown
    assert "6 turns of role 'chatgpt' read as 'assistant'" in shown
    with pytest.raises(UsageError, match=r"w\.jsonl:1: unknown role 'narrator'.* no row can be used \(4: "):
        prepared(folder, [other] * 4, name="w")


def test_a_question_is_asked_as_training_showed_it(opened, make_spec, tmp_path):
    """The prompt's ids are those before a held-out answer, and the answer is the assistant's turn."""
    path = tmp_path / "a.jsonl"
    row = {"messages": [user(), said("A"), user("R"), said("SELECT 1")], "query": "SELECT 2", "sql": "SELECT 3"}
    path.write_text((json.dumps(row) + "\n") * 4)
    source = {"type": "file", "path": str(path), "heldout_path": str(path)}
    model = {"config": {"vocab_size": 2048}, "tokenizer": str(opened("qwen3")[1])}
    spec = make_spec([source], model=model, training={"sequence_length": 256}, packing=False)
    found = prepare(spec, run_dir=tmp_path / "r")
    questions = heldout_questions(spec, found, 4)
    assert [each.gold for each in questions] == ["SELECT 1"] * 4
    assert questions[0].score("<think>\n\n</think>\n\nSELECT 1").correct and not questions[0].score("SELECT 2").correct
    starts = {tuple(each.input_ids[: int((each.labels != -100).argmax()) + 1].tolist()) for each in found.heldout}
    assert {each.prompt_ids for each in questions} <= starts


def test_a_tokenizer_that_puts_a_blank_before_a_text(tmp_path):
    """Metaspace: a prompt that ends within a word of the joint text is tokenised apart, without a blank more."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(["USER: What is it? ASSISTANT: Oslo is it"] * 20, trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special[:3]])
    saved = json.loads(tokenizer.to_str())
    saved["added_tokens"] = [token for token in saved["added_tokens"] if not token["content"].startswith("<0x")]
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>", "bos_token": "<s>"}')
    text = "{% for m in messages %}{{ 'USER: ' if m.role == 'user' else 'ASSISTANT: ' }}{{ m.content }}"
    text += "{{ eos_token if m.role == 'assistant' else '\n' }}{% endfor %}"
    text += "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
    (tmp_path / "chat_template.jinja").write_text(text)
    found = Recipe(tmp_path, "chat", None, ChatRules(stop_ids=Encoder(tmp_path).stop_ids))
    for answer in ("Oslo", " Oslo", "\n\nOslo", "世"):
        tokens = tokenise_rows([{"messages": [user("What is it?"), said(answer)]}], found)
        prompt = found.encoder.encode(["USER: What is it?\nASSISTANT: "])[0]
        assert tokens.ids[: len(prompt)].tolist() == prompt and tokens.ids[-1] == found.encoder.eos_id
        assert not tokens.supervised[: len(prompt)].any() and tokens.supervised[len(prompt) :].all()
        whole = found.encoder.decode(tokens.ids.tolist())
        joint = found.encoder.encode([f"USER: What is it?\nASSISTANT: {answer}</s>"])[0]
        assert whole == found.encoder.decode(joint)


def test_rendering_equals_transformers(opened, templates):
    """Our environment and theirs write the same."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"a": ["é", 1, None]}}}]
    for name in templates:
        tokenizer, folder = opened(name)
        template = ChatEngine(Encoder(folder), ChatRules()).template
        if "strftime_now" in template.text:
            continue
        for prompt in (True, False):
            messages = [user("é <b>"), said("  A "), user("R")]
            expected = tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=prompt, tokenize=False
            )
            assert template.render(messages, tools, {}, prompt=prompt) == expected, name


def test_a_trained_tokenizer_learns_the_end(tmp_path, prepared):
    folder = train(lambda: ["user assistant Q A"], TrainedTokenizer(kind="bpe", vocab_size=300), tmp_path / "t").folder
    found = prepared(folder, [{"messages": [user(), said("A")]}] * 4, chat_template="chatml", heldout_fraction=0.0)
    assert preview(found).examples[0][-1].text == "A<|im_end|>" and found.eos_id in found.stop_ids


def test_a_look_at_rows_counts_every_document(opened, tmp_path):
    """Qwen3's template makes two of a conversation with two answers."""
    from muster.app.planning.draft import look

    path = tmp_path / "a.jsonl"
    row = {"messages": [user("Q" * 50), said("A"), user("R"), said("B")]}
    path.write_text((json.dumps(row) + "\n") * 10)
    tokens = {}
    for name in ("qwen2_5", "qwen3"):
        found = Recipe(opened(name)[1], "chat", None, ChatRules())
        tokens[name] = look(str(path), found.encoder).tokens
        assert tokens[name] == pytest.approx(10 * len(tokenise_rows([row], found).ids))
    assert tokens["qwen3"] > 1.2 * tokens["qwen2_5"]


def test_an_answer_that_cannot_be_asked_for_leaves_the_others(opened, recipe):
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    turns = [
        {"role": "user", "content": "One?"}, {"role": "assistant", "content": "1."},
        {"role": "user", "content": "Two?"}, {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"}, {"role": "assistant", "content": "2."},
    ]  # fmt: skip
    tokens = tokenise_rows([{"messages": turns}], recipe(opened("phi4")[1]))
    assert tokens.documents.tolist() == [1] and not tokens.report.refused
    (reason,) = (change for change in tokens.report.changes if change.startswith("answers left out"))
    assert "does not write calls" in reason and tokens.report.changes[reason] == 1
    assert tokens.supervised.sum() == len(recipe(opened("phi4")[1]).encoder.encode(["1.<|im_end|>"])[0])


def test_turns_that_the_template_does_not_write_are_named(opened, recipe):
    found = recipe(opened("qwen3")[1])
    tokens = tokenise_rows([{"messages": [{"role": "developer", "content": "d"}, user(), said("A")]}], found)
    assert "turns of role 'developer', which the chat template does not write" in tokens.report.changes
    tokens = tokenise_rows([{"messages": [{"role": "system", "content": "d"}, user(), said("A")]}], found)
    assert not any("does not write" in change for change in tokens.report.changes)


def test_an_empty_think_block_of_the_row_is_the_prompts(opened, recipe):
    assert of(recipe(opened("qwen3")[1]), user(), said("<think>\n\n</think>\n\nA")) == ["A<|im_end|>"]


def test_the_mark_of_a_texts_beginning_is_never_learned(opened, recipe):
    """Mistral's template has no header for the assistant."""
    assert of(recipe(opened("mistral")[1]), said("Hello"), user(), said("A")) == [" A</s>"]
