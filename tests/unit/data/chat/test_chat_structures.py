"""Rows that share a structure: put together from it, they are what the template writes of each."""

import dataclasses
import json
import random
from pathlib import Path

import pytest

from muster.data.chat.engine import ChatEngine, ChatRules
from muster.data.tokenizer import Encoder

NAMES = sorted(path.stem for path in Path(__file__).with_name("templates").iterdir())
ODD = [
    "Oslo.", "  padded \n", "\n\nx", "</think>x", "<think>a</think>b", "<tool_response>x</tool_response>", "/no_think",
    '{"a": "\\n"}', "<|im_end|>", "x" * 300, "<|channel|>analysis", "é 你 🚀", "[INST] x", " ",
    "\u00a0y", "<s>", "5718281", "a\u2028b", "{{ x }}", "assistant", "don't <b>&amp;",
]  # fmt: skip


def engine(folder, *, exact, rules=None):
    result = ChatEngine(Encoder(folder), rules or ChatRules(today="2025-03-04"))
    if exact:
        result.template.__dict__["is_traceable"] = False
    return result


def odd_rows(count):
    rng = random.Random(7)

    def row():
        turns = [{"role": "system", "content": rng.choice(ODD)}] if rng.random() < 0.2 else []
        for _ in range(rng.choice((1, 1, 2, 3))):
            thought = {"reasoning_content": rng.choice(ODD)} if rng.random() < 0.3 else {}
            turns += [
                {"role": "user", "content": rng.choice(ODD) + str(rng.randrange(9))},
                {"role": "assistant", "content": rng.choice((rng.choice(ODD), "Yes.")), **thought},
            ]
        return {"messages": turns}

    return [row() for _ in range(count)]


SCHEMA = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}
TOOLS = json.dumps([{"type": "function", "function": SCHEMA}])


def rows_with_calls(count):
    rng = random.Random(8)

    def row(number):
        arguments = {
            "x": rng.choice(ODD),
            "type": rng.choice(ODD),
            "n": rng.choice((1, 2.5, None)),
            "y": {"z": ["a", rng.choice(ODD)]},
        }
        call = {
            "id": f"call{number:05}",
            "type": "function",
            "function": {"name": rng.choice("fg"), "arguments": arguments},
        }
        turns = [
            {"role": "user", "content": rng.choice(ODD)},
            {"role": "assistant", "content": rng.choice((None, "Calls.", rng.choice(ODD))), "tool_calls": [call]},
            {"role": "tool", "content": rng.choice(ODD), "tool_call_id": call["id"], "name": "f"},
            {"role": "assistant", "content": rng.choice(ODD)},
        ]
        return {"messages": turns, "tools": rng.choice((TOOLS, None))}

    return [row(number) for number in range(count)]


@pytest.mark.parametrize("name", NAMES)
def test_calls_of_tools_give_what_rendering_each_row_gives(name, opened):
    folder, rows = opened(name)[1], rows_with_calls(200)
    documents, report = engine(folder, exact=False).documents(rows)
    expected, exact_report = engine(folder, exact=True).documents(rows)
    assert documents == expected and report.to_json() == exact_report.to_json()


@pytest.mark.parametrize("name", NAMES)
def test_odd_words_give_what_rendering_each_row_gives(name, opened):
    folder, rows = opened(name)[1], odd_rows(200)
    documents, report = engine(folder, exact=False).documents(rows)
    expected, exact_report = engine(folder, exact=True).documents(rows)
    assert documents == expected
    assert report.to_json() == {**exact_report.to_json(), "changes": report.to_json()["changes"]}
    assert +report.changes == +exact_report.changes


FAST = {
    "qwen2_5",
    "qwen3",
    "llama3",
    "phi3_5",
    "mistral",
    "gpt_oss",
    "gemma2",
    "gemma3",
    "smollm3",
    "olmo2",
    "phi4",
    "glm4",
}


@pytest.mark.parametrize("name", sorted(FAST))
def test_plain_rows_are_not_rendered_one_by_one(name, opened, monkeypatch):
    made = engine(opened(name)[1], exact=False)
    roles = ("user", "assistant") * 2
    rows = [{"messages": [{"role": role, "content": f"{role} {row}"} for role in roles]} for row in range(300)]
    made.documents(rows[:16])
    count = 0
    render = made.template.render

    def counted(*args, **kwargs):
        nonlocal count
        count += 1
        return render(*args, **kwargs)

    monkeypatch.setattr(made.template, "render", counted)
    documents, _ = made.documents(rows)
    assert all(documents) and count < 300


def test_a_structure_whose_text_differs_is_rendered_in_full_from_its_first_row(opened, monkeypatch):
    folder = opened("qwen2_5")[1]
    rows = [
        {"messages": [{"role": "user", "content": f"Q{n}"}, {"role": "assistant", "content": "A" * (n % 7 + 1)}]}
        for n in range(40)
    ]
    made = engine(folder, exact=False)
    learned = made._structures._learned

    def wrong(found, leaves):
        structure = learned(found, leaves)
        structure.questions.clear()
        skeleton = structure.skeletons[0]
        structure.skeletons[:] = [dataclasses.replace(skeleton, form=skeleton.form[:-1])]
        return structure

    monkeypatch.setattr(made._structures, "_learned", wrong)
    assert made.documents(rows)[0] == engine(folder, exact=True).documents(rows)[0]


@pytest.mark.parametrize(
    ("template", "is_traceable"),
    [
        ("{{ messages[0].content ~ 'x' }}", False),
        ("{{ '%s' % messages[0].content }}", False),
        ("{% if messages[0].content in x %}{% endif %}", False),
        ("{{ messages[0].content | urlize }}", False),
        ("{{ ''.join(messages[0].content) }}", False),
        (
            "{% if loop.index0 % 2 == 0 and 'x' in messages[0].content %}{{ messages[0].content | trim }}{% endif %}",
            True,
        ),
    ],
)
def test_templates_whose_use_of_words_cannot_be_followed(template, is_traceable):
    from muster.data.chat.template import Template

    assert Template(template, {}, "2025-03-04").is_traceable == is_traceable
