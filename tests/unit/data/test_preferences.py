"""Rows of preferences: the layouts of public data sets, how they become tokens, and what is refused in one line."""

import json
from collections import Counter

import numpy as np
import pytest
from fakes.preferences import spec_of

from muster.config.sections.sources import FileSource
from muster.config.spec import Objective
from muster.core.errors import UsageError
from muster.data import tokenise
from muster.data.chat.engine import ChatReport
from muster.data.chat.preferences import layout_of, preference
from muster.data.chat.rows import RowRefusal, conversation
from muster.data.formats import choose_format
from muster.data.prepare import prepare
from muster.data.tokenizer import Encoder

USER, GOOD, BAD = (
    {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."},
    {"role": "assistant", "content": "No."},
)  # fmt: skip
SYSTEM = {"role": "system", "content": "Be kind."}
HUMAN = "\n\nHuman: Why?\n\nAssistant: "
#: Columns of a data set's row -> prompt, better and worse answer.
LAYOUTS = {
    "trl text": ({"prompt": "Why? ", "chosen": "Because.", "rejected": "No."}, "Why? ", "Because.", "No."),
    "trl turns": ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, [USER], [GOOD], [BAD]),
    "implicit turns": ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, [USER], [GOOD], [BAD]),
    "implicit text": ({"chosen": "Why? Because.", "rejected": "Why? No."}, "Why?", " Because.", " No."),
    "ultrafeedback": (
        {"prompt": "Why?", "prompt_id": "a", "chosen": [USER, GOOD], "rejected": [USER, BAD],
         "messages": [USER, GOOD], "score_chosen": 8.0, "score_rejected": 2.0},
        [USER], [GOOD], [BAD],
    ),
    "hh-rlhf": ({"chosen": f"{HUMAN}Because.", "rejected": f"{HUMAN}No."}, [USER], [GOOD], [BAD]),
    "orca": ({"system": "Be kind.", "question": "Why?", "chosen": "Because.", "rejected": "No."},
             [USER], [GOOD], [BAD]),
    "distilabel": ({"system": "", "input": "Why?", "chosen": "Because.", "rejected": "No."}, [USER], [GOOD], [BAD]),
    "truthy": ({"system": "Be kind.", "prompt": "Why?", "chosen": "Because.", "rejected": "No."},
               [USER], [GOOD], [BAD]),
    "text and turns": ({"prompt": "Why?", "chosen": [GOOD], "rejected": [BAD]}, [USER], [GOOD], [BAD]),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "Why?"}], "chosen": {"from": "gpt", "value": "Because."},
         "rejected": {"from": "gpt", "value": "No."}},
        [{"from": "human", "value": "Why?"}], [{"from": "gpt", "value": "Because."}], [{"from": "gpt", "value": "No."}],
    ),
    "helpsteer3": ({"context": [USER], "response1": "No.", "response2": "Because.", "overall_preference": 2},
                   [USER], [GOOD], [BAD]),
    "safe-rlhf": ({"prompt": "Why?", "response_0": "Because.", "response_1": "No.", "better_response_id": 0},
                  "Why?", "Because.", "No."),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_the_hub(name):
    row, prompt, chosen, rejected = LAYOUTS[name]
    layout = layout_of(list(row))
    assert layout is not None and layout.rows == "pairs"
    found = preference(row, "pairs", Counter())
    assert (found.prompt, found.answers) == (prompt, (chosen, rejected))
    assert found.grades == (2.0 if name == "helpsteer3" else 0.0,)
    good, bad = preference(row, "labelled", Counter()).grades
    assert (good, bad) == (1.0, -1.0)


@pytest.mark.parametrize(
    ("row", "prompt", "answer"),
    [
        ({"prompt": "Why? ", "completion": "No.", "label": False}, "Why? ", "No."),
        ({"prompt": [USER], "completion": [BAD], "label": False}, [USER], [BAD]),
        ({"messages": [USER, BAD], "label": False}, [USER], [BAD]),
    ],
)
def test_labelled_answers(row, prompt, answer):
    found = preference(row, "labelled", Counter())
    assert (found.prompt, found.answers, found.grades) == (prompt, (answer,), (-1.0,))


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": [USER], "chosen": "Because.", "rejected": "No."},
        {"question": "Why?", "chosen": "Because.", "rejected": "No."},
        {"prompt": "Why?", "chosen": "Because.", "rejected": "No."},
        {"messages": [USER, GOOD], "label": True},
        {"prompt": [USER], "completion": [GOOD], "label": True},
        {"prompt": "Why?", "completion": "Because.", "label": True},
    ],
)
def test_a_system_column_is_put_first(row):
    found = preference({**row, "system": "Be kind."}, "labelled", Counter())
    messages = conversation(found.conversation(0), Counter()).messages
    assert [(turn["role"], turn["content"]) for turn in messages] == [
        ("system", "Be kind."), ("user", "Why?"), ("assistant", "Because."),
    ]  # fmt: skip


PAIR = {"prompt": "Why?", "chosen": "Because.", "rejected": "No."}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rejected": "Because."}, "both answers are the same"),
        ({"rejected": "  "}, "an answer is empty"),
        ({"chosen": [USER, GOOD], "rejected": [SYSTEM, BAD]}, "the conversations differ before their last turns"),
        ({"prompt": None, "chosen": "ab", "rejected": "abc"}, "the texts have no common beginning to be their prompt"),
        ({"chosen": [GOOD], "rejected": [BAD], "prompt": None}, "there is no prompt"),
    ],
)
def test_rows_that_say_nothing_are_left_out(change, message):
    row = {**PAIR, **change}
    with pytest.raises(RowRefusal, match=f"^{message}$"):
        preference(row, "pairs", Counter())


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**PAIR, "chosen": 7, "rejected": 8}, "column 'chosen and rejected' must be text or a list of turns, got int"),
        ({**PAIR, "chosen": []}, "column 'chosen and rejected' must be text or a list of turns, got an empty list"),
        ({"prompt": "a", "completion": "b", "label": True},
         "the row has one labelled answer, and others are pairs: 'prompt', 'completion', 'label'"),
        ({"context": [USER], "response1": "a", "response2": "b", "overall_preference": "1"},
         "column 'overall_preference' must be a number, got '1'"),
    ],
)  # fmt: skip
def test_wrong_types_are_errors_of_one_line(row, message):
    with pytest.raises(UsageError) as caught:
        preference(row, "pairs", Counter())
    assert str(caught.value) == message


def test_a_label_is_true_or_false():
    with pytest.raises(UsageError, match=r"^column 'label' must be true or false, got 'yes'$"):
        preference({"prompt": "a", "completion": "b", "label": "yes"}, "labelled", Counter())


def test_rows_and_objective_go_together():
    source = FileSource(type="file", path="rows.jsonl")
    dpo, kto = Objective(name="dpo"), Objective(name="kto")
    assert choose_format(source, ["chosen", "rejected", "messages"], dpo) == "preference"
    assert choose_format(source, ["chosen", "rejected"], kto) == "preference"
    with pytest.raises(UsageError, match="'messages', 'id'") as caught:
        choose_format(source, ["messages", "id"], dpo)
    assert "dpo" in str(caught.value)
    with pytest.raises(UsageError, match="'completion', 'label' have one answer"):
        choose_format(source, ["prompt", "completion", "label"], dpo)
    with pytest.raises(UsageError, match="'chosen', 'rejected' are preferences"):
        choose_format(source, ["chosen", "rejected"])
    # Who names a format means it: the messages of such rows can be learned by themselves.
    chats = FileSource(type="file", path="rows.jsonl", format="chat")
    assert choose_format(chats, ["chosen", "rejected", "messages"]) == "chat"


def written(tmp_path, rows, objective="dpo", **training):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = spec_of(tmp_path, objective, **training)
    return prepare(spec, run_dir=tmp_path / "run")


def test_a_pair_is_two_documents_of_one_sequence(tmp_path):
    pair = {"prompt": "w1 w2 ", "chosen": "w3", "rejected": "w4 w5", "margin": 1.5}
    prepared = written(tmp_path, [pair, {**pair, "chosen": "w4 w5"}, {**pair, "rejected": " "}])
    assert len(prepared.train) == 1
    assert prepared.stats["rows_refused"] == 2
    assert "1: both answers are the same" in prepared.stats["rows_refused_why"]
    sequence = prepared.train[0]
    assert sequence.documents.tolist() == [4, 4] and sequence.grades.tolist() == [1.5] and sequence.weight == 1
    assert sequence.input_ids[:8].tolist() == [1, 2, 3, 200, 1, 2, 4, 5]
    assert sequence.labels[:8].tolist() == [-100, 3, 200, -100, -100, 4, 5, 200]
    assert sequence.position_ids[:8].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


def test_pairs_that_do_not_fit_are_dropped_whole(tmp_path):
    long = {"prompt": "w1 ", "chosen": "w2 " * 40, "rejected": "w3"}
    pair = {"prompt": "w1 ", "chosen": "w2", "rejected": "w3"}
    prepared = written(tmp_path, [long, pair], sequence_length=32)
    assert prepared.stats["dropped"] == 1 and len(prepared.train) == 1


def test_mismatched_answers_are_of_the_row_before(tmp_path):
    rows = [{"prompt": f"w{10 * n} ", "completion": f"w{10 * n + 1}", "label": n != 1} for n in range(1, 4)]
    prepared = written(tmp_path, rows, "kto")
    own, other = prepared.train, prepared.train.mismatched
    assert other is not None and len(own) == len(other) == 3
    pairs = {(int(own[n].input_ids[0]), int(other[n].input_ids[1])) for n in range(3)}
    assert pairs == {(10, 31), (20, 11), (30, 21)}
    assert sorted(float(own[n].grades[0]) for n in range(3)) == [-1.0, 1.0, 1.0]


def test_chats_of_a_pair_have_one_prompt(tmp_path):
    from muster.data.chat.engine import ChatRules
    from muster.data.tokenise import Recipe, tokenise_rows

    spec_of(tmp_path, "dpo")
    folder = tmp_path / "tokenizer"
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = (
        "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} </s> {% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    roles = ("user", "assistant", "user")
    turns = [{"role": role, "content": f"w{number}"} for number, role in enumerate(roles, start=1)]
    row = {
        "chosen": [*turns, {"role": "assistant", "content": "w4"}],
        "rejected": [*turns, {"role": "assistant", "content": "w5 w6"}],
    }
    encoder = Encoder(folder)
    rules = ChatRules(stop_ids=encoder.stop_ids)
    tokens = tokenise_rows([row], Recipe(encoder.folder, "preference", None, rules, "pairs"))
    assert len(tokens.lengths) == 1 and tokens.documents.tolist() == [1]
    second = int(tokens.seconds[0])
    halves = [(tokens.ids[part], tokens.supervised[part]) for part in (slice(second), slice(second, None))]
    learned = [ids[mask != 0].tolist() for ids, mask in halves]
    assert learned == [[4, 200], [5, 6, 200]]  # the last answers alone, with what ends them
    prompts = [ids[: int(np.argmax(mask != 0))].tolist() for ids, mask in halves]
    assert prompts[0] == prompts[1] and 2 in prompts[0]


def test_an_answer_of_which_the_tokenizer_drops_everything_is_left_out():
    report = ChatReport()
    documents = {0: ([1, 2], bytearray(b"\0\0")), 1: ([1, 2], bytearray(b"\0\1")), 2: None}
    left = dict(tokenise._with_an_answer(documents, 7, report))
    assert left == {0: None, 1: documents[1], 2: None} and report.first == (7, "an answer is empty")
