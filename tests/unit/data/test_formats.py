"""Rows to text with a mask: templates, and what is refused."""

from types import SimpleNamespace

import pytest

from muster.config.sections.sources import PromptTemplate
from muster.core.errors import UsageError
from muster.data.formats import Segment, choose_format, completions, document, fill, prompt_and_completion


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


def test_prompt_and_completion():
    row = {"prompt": "2 + 2 =", "completion": " 4"}
    found = document(row, "prompt_completion", None, "completions")
    assert found.segments == (Segment("2 + 2 =", False), Segment(" 4", True)) and found.ends
    assert all(each.supervised for each in document(row, "prompt_completion", None, "all").segments)


def test_templates_take_columns_only():
    template = PromptTemplate(prompt="{{q}}: {question}", completion=" {sql}")
    row = {"question": "how many {x}", "sql": "SELECT 1"}
    found = document(row, "prompt_completion", template, "completions")
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
    ],
)
def test_rows_that_do_not_fit_are_refused(row, format, message):
    with pytest.raises(UsageError, match=message):
        document(row, format, None, "completions")


def test_roles_need_chat():
    with pytest.raises(UsageError, match="chat roles"):
        document({"text": "a"}, "text", None, ("user",))


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
