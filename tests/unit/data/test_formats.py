"""Rows to text with a mask: templates, chat turns by prefixes, and what is refused."""

from types import SimpleNamespace

import pytest

from muster.config.sections.sources import PromptTemplate
from muster.core.errors import UsageError
from muster.data.formats import Segment, choose_format, completions, document, fill, prompt_and_completion

CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "ONE"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "TWO"},
]


def render(messages, add_generation_prompt):
    """A template that only appends, without any mark for generation."""
    text = "".join(f"<{each['role']}>{each['content']}</>" for each in messages)
    return text + ("<assistant>" if add_generation_prompt else "")


def chat(train_on, messages=CHAT, by=render):
    return document({"messages": messages}, "chat", None, train_on, by)


def supervised(found):
    return [segment.text for segment in found.segments if segment.supervised]


def test_a_completion_may_be_a_list_of_acceptable_ones():
    template = PromptTemplate(prompt="{q}", completion="{a}: {b}!")
    assert completions({"q": "?", "a": ["1", "2"], "b": ["x", "y"]}, template) == ("1: x!", "2: y!")
    assert completions({"q": "?", "a": ["1", "2"], "b": "x"}, template) == ("1: x!", "2: x!")
    assert prompt_and_completion({"q": ["?"], "a": "1", "b": ["x", "y"]}, template) == ("['?']", "1: x!")
    assert completions({"q": "?", "a": [], "b": "x"}, template) == (": x!",)
    assert completions({"prompt": "?", "completion": ["1", "2"]}, None) == ("1", "2")
    assert completions({"prompt": "?", "completion": []}, None) == ("",)
    with pytest.raises(UsageError, match="the lists in 'a', 'b' have 1, 2 items"):
        completions({"q": "?", "a": ["1"], "b": ["x", "y"]}, template)
    with pytest.raises(UsageError, match="column 'completion' must be text, got list"):
        completions({"prompt": "?", "completion": [1]}, None)


def test_only_the_assistants_words_count():
    found = chat("completions")
    assert supervised(found) == ["ONE</>", "TWO</>"]
    assert found.text == render(CHAT, False)
    assert not found.ends


def test_chosen_roles_count():
    assert supervised(chat(("user",))) == ["<user>one</>", "<user>two</>"]
    assert supervised(chat(("user", "assistant"))) == ["<user>one</>", "ONE</>", "<user>two</>", "TWO</>"]
    assert supervised(chat("all")) == [render(CHAT, False)]
    assert supervised(chat(("nobody",))) == []


def test_a_template_that_rewrites_earlier_turns_is_refused():
    def forgetful(messages, add_generation_prompt):
        """Keeps the thoughts of the last assistant turn only, as some reasoning templates do."""
        last = len(messages) - 1
        thoughts = [
            "(thinks) " * (place == last and each["role"] == "assistant") for place, each in enumerate(messages)
        ]
        text = "".join(
            f"<{each['role']}>{thought}{each['content']}</>" for each, thought in zip(messages, thoughts, strict=True)
        )
        return text + ("<assistant>" if add_generation_prompt else "")

    with pytest.raises(UsageError, match=r"renders turn 3 \(assistant\) differently"):
        chat("completions", by=forgetful)
    # With one answer at the end nothing is rewritten.
    assert supervised(chat("completions", CHAT[:3], by=forgetful)) == ["(thinks) ONE</>"]


def test_the_template_is_never_asked_for_the_whole_without_its_last_turn():
    """A header that differs from what the turn really begins with is no prefix: an error, never a wrong mask."""

    def other_header(messages, add_generation_prompt):
        return render(messages, False) + ("<assistant><think>" if add_generation_prompt else "")

    with pytest.raises(UsageError, match="differently"):
        chat("completions", by=other_header)


def test_prompt_and_completion():
    row = {"prompt": "2 + 2 =", "completion": " 4"}
    found = document(row, "prompt_completion", None, "completions", render)
    assert found.segments == (Segment("2 + 2 =", False), Segment(" 4", True)) and found.ends
    assert all(each.supervised for each in document(row, "prompt_completion", None, "all", render).segments)


def test_templates_take_columns_only():
    template = PromptTemplate(prompt="{{q}}: {question}", completion=" {sql}")
    row = {"question": "how many {x}", "sql": "SELECT 1"}
    found = document(row, "prompt_completion", template, "completions", render)
    assert [each.text for each in found.segments] == ["{q}: how many {x}", " SELECT 1"]
    for bad in ("{missing}", "{question.__class__}", "{question!r}", "{question:>9}", "{0}", "{}"):
        with pytest.raises(UsageError, match="is not a column"):
            fill(bad, row)
    with pytest.raises(UsageError, match="template"):
        fill("{question", row)


@pytest.mark.parametrize(
    ("row", "format", "message"),
    [
        ({"text": 3}, "text", "'text' must be text, got int"),
        ({"prompt": "a", "completion": None}, "prompt_completion", "'completion' must be text"),
        ({"messages": []}, "chat", "at least one turn"),
        ({"messages": "hi"}, "chat", "list"),
        ({"messages": [{"role": "user"}]}, "chat", "'role' and 'content'"),
    ],
)
def test_rows_that_do_not_fit_are_refused(row, format, message):
    with pytest.raises(UsageError, match=message):
        document(row, format, None, "completions", render)


def test_roles_need_chat():
    with pytest.raises(UsageError, match="chat roles"):
        document({"text": "a"}, "text", None, ("user",), render)


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (["messages", "id"], "chat"),
        (["prompt", "completion", "text"], "prompt_completion"),
        (["text"], "text"),
    ],
)
def test_the_columns_show_the_format(columns, expected):
    assert choose_format(SimpleNamespace(format=None, template=None, type="file"), columns) == expected


def test_unknown_columns_ask_for_a_template():
    with pytest.raises(UsageError, match="'question', 'sql'") as caught:
        choose_format(SimpleNamespace(format=None, template=None, type="file"), ["question", "sql"])
    assert "template" in caught.value.hint
    with pytest.raises(UsageError, match="needs column 'messages'"):
        choose_format(SimpleNamespace(format="chat", template=None, type="file"), ["text"])
