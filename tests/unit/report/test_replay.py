"""Which runs can be replayed, and as what; the replaying itself is done in tests/live/test_replay_live.py."""

import sys
from pathlib import Path

import pytest
import replay
from book import LAYOUT, Book, line_of, sound
from check_invariants import main
from imported import imports
from replay import CannotReplay, plan


@pytest.fixture
def book(tmp_path):
    return sound(tmp_path / "run")


def test_it_shares_no_code_with_the_supervisor():
    for name, _, _ in imports(Path(replay.__file__)):
        assert name == "muster.report.audit.history" or name.split(".")[0] in sys.stdlib_module_names, name


def test_a_killed_run_is_replayed_as_it_began(book):
    """On the first layout, up to the last applied step, with nothing beside the training."""
    book.spec |= {"output": {"peak_tflops": 5.0}, "evaluation": {"num_questions": 9}, "limits": {"max_hours": 1.0}}
    line_of(book, "attempt.started")["detail"]["hosts"] = {"host-0": [0], "host-1": [1]}
    found = plan(book.write())
    assert (found.last_step, found.ranks_of_hosts, found.fingerprints) == (6, (1, 1), frozenset())
    assert found.spec["parallelism"] == LAYOUT
    assert found.spec["training"] == book.spec["training"] | {"state_hash_every_steps": 1, "profile": {}}
    assert found.spec["checkpoint"]["dir"] is None and found.spec["evaluation"]["num_questions"] == 0
    assert found.spec["output"]["peak_tflops"] == 5.0 and found.spec["limits"] == {"max_hours": 1.0}


def test_exact_sums_may_be_replayed_after_a_resize_and_on_any_number_of_ranks(book, tmp_path):
    line_of(book, "attempt.started", 1)["detail"]["layout"] = LAYOUT | {"dp_shard": 1}
    refused(book, "it ran on 2 layouts without training.exact")
    with pytest.raises(CannotReplay, match="another number of ranks gives other bits"):
        plan(sound(tmp_path / "other").write(), ranks=3)
    book.spec["training"] = {"exact": True}
    assert plan(book.write()).spec["parallelism"] == LAYOUT
    found = plan(book.write(), ranks=3)
    assert found.spec["parallelism"] == LAYOUT | {"dp_shard": 3} and found.ranks_of_hosts == (3,)


def refused(book, words):
    with pytest.raises(CannotReplay, match=words) as caught:
        plan(book.write())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"training": {}}, "not promised to repeat"),
        ({"training": {"deterministic": True, "optimizer": {"name": "adamw_8bit"}}}, "not promised to repeat"),
        ({"command": ["script.py"]}, "it ran a `command:`"),
    ],
)
def test_run_files_that_promise_no_repetition(book, changes, words):
    book.spec |= changes
    refused(book, words)


@pytest.mark.parametrize(
    ("detail", "words"),
    [
        ({"batch_schedule": [{"first_step": 4, "global_batch_size": 8}]}, "its policy changed batch or learning rate"),
        ({"skip_steps": [5]}, "it left out the updates"),
    ],
)
def test_runs_whose_faults_changed_the_numbers(book, detail, words):
    line_of(book, "attempt.started", 1)["detail"].update(detail)
    refused(book, words)


def test_a_run_file_that_was_changed_on_the_way(book):
    for at_s in (0.0, 0.8):
        book.add("client.0.jsonl", at_s, "run.submitted", attempt=0, spec_digest="a", backend="local", version="1")
        plan(book.write())
    line_of(book, "run.submitted", 1)["detail"]["spec_digest"] = "b"
    refused(book, "its run file was changed on the way")


def test_a_record_that_is_not_whole(book, tmp_path):
    refused(Book(tmp_path / "empty"), "no attempt or no step")
    del book.files["host-0.1.jsonl"]
    refused(book, "its record begins at step 4")
    with pytest.raises(CannotReplay, match=r"it has no resolved\.json"):
        plan(tmp_path / "absent")


def test_the_command_refuses_in_one_line(book):
    said, told = [], []
    book.spec["training"] = {}
    assert main(["--replay", str(book.write())], said.append, told.append) == 2
    assert said == [] and len(told) == 1
    assert told[0].startswith(f"error: cannot replay {book.folder}: its numbers are not promised to repeat")


@pytest.mark.parametrize("words", [["--ranks", "2"], ["--replay", "--ranks", "0"], ["--replay", "--reference", "x"]])
def test_a_command_line_that_contradicts_itself(book, words, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*words, str(book.folder)])
    assert ended.value.code == 2
