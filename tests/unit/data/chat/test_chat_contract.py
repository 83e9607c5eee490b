"""The contract of chats: ids before an answer are ``apply_chat_template(history)``, its last one is a stop token."""

import re
from itertools import groupby
from pathlib import Path

import pytest

from muster.data.tokenise import tokenise_rows

transformers = pytest.importorskip("transformers")

NAMES = sorted(path.stem for path in Path(__file__).with_name("templates").iterdir())
STOPS = {
    "phi3_5": ("<|end|>",), "glm4": ("<|user|>", "<|observation|>"), "gpt_oss": ("<|return|>", "<|call|>"),
    "llama3": ("<|eot_id|>",), "gemma2": ("<end_of_turn>",), "gemma3": ("<end_of_turn>",),
    "deepseek_r1": ("<｜end▁of▁sentence｜>",), "deepseek_v3_1": ("<｜end▁of▁sentence｜>",),
}  # fmt: skip
TODAY = "2025-03-04"


def user(number):
    return {"role": "user", "content": f"Question {number}?\n"}


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


SYSTEM = {"role": "system", "content": "Be short."}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": {}}}]
ANSWERS = ["Oslo.", "\n\n  padded\n", "'s it: <b>世界</b> 🚀", "{\"a\": 1}"]  # fmt: skip
PLAIN = [turn for number, text in enumerate(ANSWERS) for turn in (user(number), said(text))]
CASES = {
    "one": (PLAIN[:2], None),
    "system": ([SYSTEM, *PLAIN[:2]], None),
    "turns": (PLAIN, None),
    "system and turns": ([SYSTEM, *PLAIN], None),
    "thinking": (
        [user(1), said("One.", reasoning_content="Think 1."), user(2), said("Two.", reasoning_content="Think 2.")],
        None,
    ),
    "thinking inline": (
        [user(1), said("<think>\nThink 1.\n</think>\n\nOne."), user(2), said("<think>\nThink 2.\n</think>\n\nTwo.")],
        None,
    ),
    "thinking at times": ([user(1), said("One."), user(2), said("Two.", reasoning_content="Think 2.")], None),
    "call": (
        [
            user(1),
            said(
                "",
                tool_calls=[
                    {
                        "id": "call00001",
                        "type": "function",
                        "function": {"name": "weather", "arguments": {"city": "Oslo", "days": 2}},
                    }
                ],
            ),
            {"role": "tool", "content": "sun", "tool_call_id": "call00001", "name": "weather"},
            said("Sun."),
        ],
        TOOLS,
    ),
}
#: (template, case) -> answers that are refused, with a word of the reason.
REFUSED = {
    **{(name, "call"): "does not write calls" for name in ("smollm3", "olmo2", "phi3_5", "phi4", "deepseek_r1")},
    **{(name, "call"): "does not write calls" for name in ("gemma2", "gemma3")},
    **{("gemma2", case): "System role" for case in ("system", "system and turns")},
    **{("deepseek_r1", case): "opens <think>" for case in ("one", "system", "turns", "system and turns")},
}
#: (template, case) -> the answers that are learned; the reason of the others is counted.
IN_PART = {("deepseek_r1", "thinking at times"): [3]}


def learned(tokens):
    """(ids before, learned ids) of every answer."""
    result = []
    at = 0
    for length in tokens.lengths.tolist():
        ids, mask = tokens.ids[at : at + length].tolist(), tokens.supervised[at : at + length].tolist()
        at += length
        place = 0
        for flag, run in groupby(mask):
            count = len(list(run))
            if flag:
                result.append((ids[:place], ids[place : place + count]))
            place += count
    return result


def thinks(turn):
    return bool(turn.get("reasoning_content")) or "</think>" in turn["content"]


def asked(tokenizer, messages, tools, turn, monkeypatch):
    """The prompt's ids by transformers."""
    from transformers.utils import chat_template_utils

    class Day(chat_template_utils.datetime):
        @classmethod
        def now(cls):
            return cls.fromisoformat(TODAY)

    monkeypatch.setattr(chat_template_utils, "datetime", Day)
    options = {
        name: thinks(messages[turn])
        for name in ("enable_thinking", "thinking")
        if re.search(rf"(?<![.\w]){name} is", tokenizer.chat_template)
    }
    history = messages[:turn]
    if "arguments + " in tokenizer.chat_template:
        history = [as_text(message) for message in history]
    return tokenizer.apply_chat_template(
        history, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False, **options
    )


def as_text(message):
    import json

    if "tool_calls" not in message:
        return message
    call = message["tool_calls"][0]
    arguments = json.dumps(call["function"]["arguments"])
    return {**message, "tool_calls": [{**call, "function": {**call["function"], "arguments": arguments}}]}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES)
def test_ids_before_an_answer_are_those_of_its_prompt_and_its_last_ends_generation(
    name, case, opened, recipe, monkeypatch
):
    messages, tools = CASES[case]
    tokenizer, folder = opened(name)
    row = {"messages": messages, **({"tools": tools} if tools else {})}
    tokens = tokenise_rows([row], recipe(folder))
    if (name, case) in REFUSED:
        assert tokens.documents.tolist() == [0] and tokens.report.refused.total() == 1
        assert REFUSED[name, case] in next(iter(tokens.report.refused))
        return
    assert not tokens.report.refused
    turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    left_out = len(turns) - len(IN_PART.get((name, case), turns))
    assert sum(count for what, count in tokens.report.changes.items() if "left out: " in what) == left_out
    turns = IN_PART.get((name, case), turns)
    answers = learned(tokens)
    assert len(answers) == len(turns)
    for turn in turns:
        prompt = asked(tokenizer, messages, tools, turn, monkeypatch)
        text = next(tokenizer.decode(ids) for before, ids in answers if before == prompt)
        final = messages[turn]["content"].rpartition("</think>")[2].strip()
        assert final in text and (not messages[turn].get("tool_calls") or "weather" in text)
        assert "Question" not in text and text.count("Oslo") <= 1
    stops = STOPS.get(name, (tokenizer.eos_token,))
    ends = {tokenizer.convert_ids_to_tokens(ids[-1]) for _, ids in answers}
    assert ends <= set(stops) and not any(
        token in stops for _, ids in answers for token in tokenizer.convert_ids_to_tokens(ids[:-1])
    )
    assert ends == {tokenizer.convert_ids_to_tokens(id) for id in tokens.report.stops}


ROWS_FOR_FOUR = {
    "qwen2_5": 1, "llama3": 1, "phi3_5": 1, "phi4": 1, "glm4": 1, "gemma3": 1, "olmo2": 1,
    "qwen3": 4, "gpt_oss": 4, "mistral": 4,
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS_FOR_FOUR)
def test_a_row_for_each_answer_only_where_history_is_rewritten(name, opened, recipe):
    answers = [said(text) for text in ("One.", "Two.", "Three.", "Four.")]
    turns = [turn for number, answer in enumerate(answers) for turn in (user(number), answer)]
    tokens = tokenise_rows([{"messages": [SYSTEM, *turns]}], recipe(opened(name)[1]))
    assert tokens.documents.tolist() == [ROWS_FOR_FOUR[name]]


QWEN3 = [f"<think>\nThink {count}.\n</think>\n\n{text}.<|im_end|>" for count, text in ((1, "One"), (2, "Two"))]
R1 = [f"Think {count}.\n</think>\n\n{text}.<｜end▁of▁sentence｜>" for count, text in ((1, "One"), (2, "Two"))]
V3_1 = [f"Think {count}.</think>{text}.<｜end▁of▁sentence｜>" for count, text in ((1, "One"), (2, "Two"))]


@pytest.mark.parametrize(
    ("name", "case", "expected"),
    [
        ("qwen3", "one", ["Oslo.<|im_end|>"]),
        ("qwen3", "thinking", QWEN3),
        ("gpt_oss", "one", ["<|channel|>final<|message|>Oslo.<|return|>"]),
        ("gpt_oss", "call", [
            ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Oslo", "days": 2}<|call|>',
            "<|channel|>final<|message|>Sun.<|return|>",
        ]),
        ("glm4", "one", ["\nOslo.<|user|>"]),
        ("glm4", "call", ['weather\n{"city": "Oslo", "days": 2}<|observation|>', "\nSun.<|user|>"]),
        ("deepseek_r1", "thinking", R1),
        ("deepseek_r1", "thinking inline", R1),
        ("deepseek_v3_1", "thinking", V3_1),
        ("deepseek_v3_1", "one", ["Oslo.<｜end▁of▁sentence｜>"]),
        ("phi3_5", "one", ["Oslo.<|end|>"]),
        ("mistral", "system", ["Oslo.</s>"]),
        ("smollm3", "one", ["Oslo.<|im_end|>"]),
    ],
)  # fmt: skip
def test_what_is_learned(name, case, expected, opened, recipe):
    messages, tools = CASES[case]
    tokenizer, folder = opened(name)
    found = tokenise_rows([{"messages": messages, "tools": tools}], recipe(folder))
    texts = [tokenizer.decode(ids) for _, ids in learned(found)]
    if name == "mistral":
        texts = [text.removeprefix(" ") for text in texts]
    assert texts == expected


def generation(body):
    return "{%- generation %}" + body + "{%- endgeneration %}"


#: What TRL's training variants mark: the turn, with its header where the template writes it at once.
MARKED = {
    "olmo2": "{{- '<|assistant|>\\n' + m.content + eos_token }}",
    "gpt_oss": "{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}",
    "smollm3": None,
}


@pytest.mark.parametrize("name", MARKED)
@pytest.mark.parametrize("case", ["one", "system"])
def test_learned_is_what_marks_say_but_for_the_prompt_and_what_follows_the_stop(
    name, case, opened, recipe, templates, monkeypatch
):
    """transformers' mask of assistant tokens, which TRL's ``assistant_only_loss`` learns."""
    body = MARKED[name]
    text = templates[name] if body is None else templates[name].replace(body, generation(body))
    tokenizer, folder = opened(name, text)
    messages, _ = CASES[case]
    prompt = asked(tokenizer, messages, None, len(messages) - 1, monkeypatch)
    theirs = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, enable_thinking=False
    )
    assert sum(theirs["assistant_masks"])
    tokens = tokenise_rows([{"messages": messages}], recipe(folder))
    ids, mask = tokens.ids.tolist(), tokens.supervised.tolist()
    last = max(place for place, flag in enumerate(mask) if flag)
    expected = [
        int(flag and len(prompt) <= place <= last)
        for place, flag in enumerate(theirs["assistant_masks"][: len(ids)])
    ]  # fmt: skip
    assert ids == theirs["input_ids"][: len(ids)] and mask == expected and ids[last] in recipe(folder).chat.stop_ids
