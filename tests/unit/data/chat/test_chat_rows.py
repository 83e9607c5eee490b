"""Rows of chats are put in order before they are rendered, and every change is counted."""

import json
from collections import Counter

import pytest

from muster.core.errors import UsageError
from muster.data.chat.rows import RowRefusal, conversation, spoken

QUESTION = {"role": "user", "content": "Q"}


def ordered(*turns, **columns):
    changes = Counter()
    text_arguments = columns.pop("text_arguments", False)
    return conversation({"messages": [*turns], **columns}, changes, text_arguments=text_arguments), changes


def call(arguments):
    return {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": arguments}}]}


def arguments_of(found):
    return found.messages[0]["tool_calls"][0]["function"]["arguments"]


def test_parts_are_joined_and_other_kinds_refused_by_name():
    parts = [{"type": "text", "text": "a", "image_url": None}, {"type": "text", "text": " b"}, "c"]
    found, changes = ordered({"role": "user", "content": parts})
    assert found.messages == [{"role": "user", "content": "a bc"}] and changes.total() == 1
    for kind in ("image_url", "input_audio"):
        with pytest.raises(RowRefusal, match=f"part of kind '{kind}'"):
            ordered({"role": "user", "content": [{"type": kind, kind: "x"}]})
    with pytest.raises(RowRefusal, match="content of kind 'int'"):
        ordered({"role": "user", "content": 3})


@pytest.mark.parametrize(
    ("given", "role"),
    [
        ("human", "user"), ("Human", "user"), ("gpt", "assistant"), ("chatgpt", "assistant"), ("bot", "assistant"),
        ("model", "assistant"), ("bard", "assistant"), ("User", "user"), ("observation", "tool"), ("system", "system"),
    ],
)  # fmt: skip
def test_roles_by_other_names(given, role):
    for turn, plain in (
        ({"from": given, "value": "x"}, {"human", "gpt", "observation"}),
        ({"role": given, "content": "x"}, set()),
    ):
        found, changes = ordered(turn)
        assert found.messages == [{"role": role, "content": "x"}]
        assert list(changes) == ([] if given in {role, *plain} else [f"turns of role {given!r} read as {role!r}"])


def test_unknown_roles_are_named():
    with pytest.raises(RowRefusal, match="unknown role 'narrator'"):
        ordered({"from": "narrator", "value": "x"})
    found, changes = ordered({"role": "narrator", "content": "x"})
    assert found.messages[0]["role"] == "narrator"
    assert list(changes) == ["turns of role 'narrator', which is not known"]


def test_arguments_of_calls_in_the_form_the_template_takes():
    found, changes = ordered(call('{"city": "Oslo", "unit": null}'))
    assert arguments_of(found) == {"city": "Oslo", "unit": None} and "decoded" in next(iter(changes))
    assert arguments_of(ordered(call({"city": "Oslo", "unit": None, "more": {"a": None}}))[0]) == {
        "city": "Oslo", "more": {},
    }  # fmt: skip
    assert arguments_of(ordered(call('{"a":1}'), text_arguments=True)[0]) == '{"a":1}'
    assert json.loads(arguments_of(ordered(call({"a": "é"}), text_arguments=True)[0])) == {"a": "é"}
    assert arguments_of(ordered(call(""))[0]) == {}
    with pytest.raises(RowRefusal, match="not JSON"):
        ordered(call("city=Oslo"))


def test_null_keys_and_null_content():
    turn = {"role": "assistant", "content": "x", "tool_calls": None, "name": None, "reasoning_content": None}
    found, changes = ordered(turn, {"role": "user", "content": None})
    assert found.messages == [{"role": "assistant", "content": "x"}, {"role": "user", "content": ""}]
    assert changes == {"null content read as empty text": 1}
    found, changes = ordered(call({}) | {"content": None})
    assert "content" not in found.messages[0] and not changes
    schema = {"function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}, "b": None}}}}
    for tools in ([schema], json.dumps([schema]), [json.dumps(schema)]):
        (tool,) = ordered(QUESTION, tools=tools)[0].tools
        assert tool["function"]["parameters"]["properties"] == {"a": {"type": "string"}}


def test_a_conversation_as_json_text():
    found, changes = ordered(QUESTION)
    as_text = conversation({"messages": json.dumps([QUESTION])}, changes)
    assert as_text.messages == found.messages and changes == {"conversations given as JSON text": 1}


@pytest.mark.parametrize("mark", [
    {"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": False},
    {"weight": "0"}, {"train": "false"}, {"loss": False},
])  # fmt: skip
def test_turns_that_are_context(mark):
    found, _ = ordered(
        QUESTION, {"role": "assistant", "content": "A", **mark}, {"role": "assistant", "content": "B", "weight": 1}
    )
    assert found.untrained == {1}
    assert found.messages[1] == {"role": "assistant", "content": "A"}
    assert found.messages[2] == {"role": "assistant", "content": "B"}


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_under_any_of_its_names(name):
    (message,) = ordered({"role": "assistant", "content": "x", name: "T"})[0].messages
    assert message["reasoning_content"] == message["thinking"] == "T"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": []}, "at least one turn"),
        ({"messages": "hi"}, "must be a list"),
        ({"messages": [{"role": "user"}]}, "'role' and 'content'"),
        ({"messages": ["hi"]}, "'role' and 'content'"),
        ({"messages": [QUESTION], "tools": "{"}, "'tools' is not JSON"),
        ({"messages": [QUESTION], "tools": {"a": 1}}, "'tools' must be a list"),
    ],
)
def test_what_is_no_conversation(row, message):
    with pytest.raises(UsageError, match=message):
        conversation(row, Counter())


def test_what_a_tokenizer_is_trained_on():
    row = {"conversations": [{"from": "human", "value": "a"}, {"from": "narrator", "value": "b"}]}
    assert spoken(row) == [("user", "a")]


def test_weights_that_are_neither_0_nor_1_are_counted():
    found, changes = ordered(QUESTION, {"role": "assistant", "content": "A", "weight": 0.5})
    assert not found.untrained and changes == {"turns of another weight than 0 and 1, which count whole": 1}


def test_a_system_text_in_a_column_of_its_own():
    found, changes = ordered(QUESTION, system="Be kind.")
    assert found.messages == [{"role": "system", "content": "Be kind."}, QUESTION] and changes.total() == 1
    own = {"role": "system", "content": "Own."}
    assert ordered(own, QUESTION, system="Be kind.")[0].messages == [own, QUESTION]


def test_the_older_form_of_a_call():
    turn = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}}
    found, changes = ordered(turn)
    assert arguments_of(found) == {"a": 1} and changes["function_call read as a call of a tool"] == 1


def test_of_two_columns_the_one_with_turns_is_taken():
    assert conversation({"messages": None, "conversations": [QUESTION]}, Counter()).messages == [QUESTION]
