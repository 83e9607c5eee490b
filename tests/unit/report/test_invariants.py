"""The judge of histories can fail: a sound history holds, and each way of breaking one is named."""

import json
import sys
from pathlib import Path

import pytest
from book import LAYOUT, SECOND, Book, line_of, sound
from check_invariants import main
from hypothesis import given, settings
from hypothesis import strategies as st
from imported import imports

from muster.report.audit import history, invariants
from muster.report.audit.history import Finding
from muster.report.audit.invariants import broken, check


@pytest.fixture
def book(tmp_path):
    return sound(tmp_path / "run")


def test_a_sound_history_holds(book):
    found = check(book.write())
    assert broken(found) == []
    assert {name for name, each in found.items() if not each.checked} == {"I4"}, "I4 wants a reference"
    assert check(book.folder, reference=book.folder)["I4"].checked == 7


def test_no_code_is_shared_with_what_wrote_the_history():
    """Two rules are, with every other reader: which files may be opened, and which lines of a damaged one count."""
    for module in (history, invariants):
        for name, _, _ in imports(Path(module.__file__)):
            lines = module is history and name in ("muster.core.event_log", "muster.core.typed_json")
            rule = lines or name == "muster.core.processes"
            here = rule or name in ("muster.report.audit.history", "xxhash")
            assert here or name.split(".")[0] in sys.stdlib_module_names, name


def expect(book, invariant, word, **options):
    problems = broken(check(book.write(), **options))
    assert any(problem.startswith(f"{invariant}: ") and word in problem for problem in problems), problems


def test_a_missing_step(book):
    book.files["host-0.2.jsonl"].pop(1)
    expect(book, "I1", "missing")


def test_a_gap_between_attempts(book):
    book.files["host-0.1.jsonl"].pop()
    line_of(book, "attempt.started", 1)["detail"]["resume_step"] = -1
    expect(book, "I1", "begins at step 4")


def test_a_step_whose_numbers_died_with_its_rank_is_no_gap_where_its_state_lives(book):
    book.files["host-0.1.jsonl"].pop()
    expect(book, "I1", "begins at step 4")
    line_of(book, "attempt.started", 1)["detail"]["tier"] = "memory"
    assert broken(check(book.write())) == []


def test_a_resume_that_is_not_where_it_was_said(book):
    line_of(book, "attempt.started", 1)["detail"]["resume_step"] = 2
    expect(book, "I1", "resumed from step 2")


@pytest.mark.parametrize("change", [{"loss": 4.7000001}, {"state_hash": "b"}])
def test_a_step_with_two_results(book, change):
    line_of(book, "step", 2)["detail"]["state_hash"] = "a"
    book.files["host-0.2.jsonl"].insert(0, book.step(1.01, 3, attempt=2, **({"state_hash": "a"} | change)))
    book.files["host-0.2.jsonl"].pop()
    line_of(book, "attempt.started", 1)["detail"]["resume_step"] = 2
    expect(book, "I1", "step 3 has two")


def test_another_layout_may_differ_in_the_last_bits_and_no_more(book):
    book.files["host-0.2.jsonl"].insert(0, book.step(1.01, 3, attempt=2, loss=4.7000001))
    book.files["host-0.2.jsonl"].pop()
    line_of(book, "attempt.started", 1)["detail"] |= {"resume_step": 2, "layout": LAYOUT | {"dp_shard": 1}}
    assert broken(check(book.write())) == []
    book.files["host-0.2.jsonl"][0]["detail"]["loss"] = 4.71
    expect(book, "I1", "step 3 has two")
    book.files["host-0.2.jsonl"][0]["detail"]["loss"] = 4.7000001
    book.spec["training"]["exact"] = True
    expect(book, "I1", "step 3 has two")


def shrunk(book, **detail):
    """Attempt 2 has one rank; attempt 3 has two again and takes step 5 anew, from the state after step 4."""
    line_of(book, "attempt.started", 1)["detail"]["layout"] = LAYOUT | {"dp_shard": 1}
    for name in ("run.finished", "host.released"):
        line_of(book, name)["wall_ns"] = line_of(book, name)["mono_ns"] = 3 * SECOND
    book.boss(2.0, "attempt.started", attempt=3, world_size=2, layout=LAYOUT, hosts={"host-0": [0, 1]}, resume_step=4)
    book.files["supervisor.1.jsonl"].sort(key=lambda line: line["wall_ns"])
    return book.step(2.1, 5, attempt=3, **detail)


def test_a_layout_in_between_promises_the_same_bits_up_to_it_alone(book):
    """Step 4 came from one rank in attempt 2; the same layout as in attempt 1 does not make step 5 comparable."""
    again = shrunk(book, state_hash="b", loss=4.5 + 1e-7)
    line_of(book, "step", 4)["detail"]["state_hash"] = "a"
    assert broken(check(book.write())) == []
    again["detail"]["loss"] = 4.6
    expect(book, "I1", "step 5 has two losses")


def test_with_exact_sums_every_layout_has_one_state(book):
    shrunk(book, state_hash="b")
    line_of(book, "step", 4)["detail"]["state_hash"] = "a"
    book.spec["training"]["exact"] = True
    expect(book, "I1", "step 5 has two states")


def test_a_state_without_a_hash_is_compared_by_its_loss(book):
    shrunk(book, state_hash=None)
    line_of(book, "step", 4)["detail"]["state_hash"] = "a"
    book.spec["training"]["exact"] = True
    assert broken(check(book.write())) == []


def test_8_bit_moments_promise_no_bits_across_a_restore(book):
    book.files["host-0.2.jsonl"].insert(0, book.step(1.01, 3, attempt=2, loss=4.7000001))
    book.files["host-0.2.jsonl"].pop()
    line_of(book, "attempt.started", 1)["detail"]["resume_step"] = 2
    book.spec["training"]["optimizer"] = {"name": "adamw_8bit"}
    assert broken(check(book.write())) == []


def test_other_samples(book):
    line_of(book, "step", 4)["detail"]["rows"] = 3
    expect(book, "I2", "took 3 sequences")


def test_a_step_taken_again_with_other_tokens(book):
    book.files["host-0.2.jsonl"].insert(0, book.step(1.01, 3, attempt=2, tokens=41))
    book.files["host-0.2.jsonl"].pop()
    line_of(book, "attempt.started", 1)["detail"]["resume_step"] = 2
    expect(book, "I2", "tokens 40 and again with 41")


def test_an_attempt_number_used_twice(book):
    line_of(book, "attempt.started", 1)["attempt"] = 1
    expect(book, "I3", "do not rise")


def second_leader(book, at_s):
    book.boss(at_s, "supervisor.started", term=2, attempt=2)["detail"] = {"term": 2, "pid": 2}


def test_a_leader_that_acts_after_its_successor_took_over(book):
    second_leader(book, 0.95)
    expect(book, "I3", "term 1 acted after")


def test_a_term_used_twice(book):
    second_leader(book, 1.6)
    line_of(book, "supervisor.started", 1)["detail"]["term"] = 1
    expect(book, "I3", "terms of the lease")


def test_a_decision_carried_out_twice(book):
    book.boss(1.5, "attempt.started", attempt=3, world_size=2, layout=LAYOUT, hosts={}, resume_step=6, cause="i1")
    expect(book, "I3", "because of i1: more than once")


def test_two_decisions_on_one_incident(book):
    book.boss(0.95, "incident.decided", incident_id="i1", action="stop", reason="again")
    expect(book, "I3", "incident.decided of i1: more than once")


def test_a_decision_on_nothing(book):
    book.boss(0.95, "incident.decided", incident_id="i9", action="ignore", reason="?")
    expect(book, "I3", "not an incident")


def test_work_after_the_end(book):
    book.step(4.5, 7, attempt=2)
    expect(book, "I3", "after the run's end")


def test_another_course_than_the_reference(book, tmp_path):
    book.write()
    other = Book(tmp_path / "other")
    other.files, other.spec = json.loads(json.dumps(book.files)), book.spec
    line_of(other, "step", 4)["detail"]["loss"] += 1e-9
    assert any(each.startswith("I4: step 5") for each in broken(check(book.folder, reference=other.write())))


def copy_of(book, folder):
    other = Book(folder)
    other.files, other.spec = json.loads(json.dumps(book.files)), book.spec
    return other


def test_another_state_than_the_reference_at_the_same_loss(book, tmp_path):
    other = copy_of(book, tmp_path / "other")
    line_of(book, "step", 4)["detail"]["state_hash"] = "a"
    line_of(other, "step", 4)["detail"]["state_hash"] = "b"
    book.write()
    assert broken(check(book.folder, reference=other.write())) == ["I4: step 5 has two states: b and a"]


def test_the_reference_promises_bits_up_to_the_first_other_layout(book, tmp_path):
    """A run that shrinks after step 3 is held to the bit until then, and to the tolerance from there on."""
    other = copy_of(book, tmp_path / "other").write()
    line_of(book, "attempt.started", 1)["detail"]["layout"] = LAYOUT | {"dp_shard": 1}
    line_of(book, "step", 4)["detail"]["loss"] += 1e-9
    assert broken(check(book.write(), reference=other)) == []
    line_of(book, "step", 1)["detail"]["loss"] += 1e-9
    assert any(each.startswith("I4: step 2") for each in broken(check(book.write(), reference=other)))


def test_a_step_that_the_reference_has_and_the_run_lacks(book, tmp_path):
    other = copy_of(book, tmp_path / "other").write()
    book.files["host-0.1.jsonl"].pop()
    line_of(book, "attempt.started", 1)["detail"]["tier"] = "memory"
    assert broken(check(book.write(), reference=other)) == [], "its numbers died with a rank, its state lives"
    book.files["host-0.2.jsonl"].pop()
    assert any(each.startswith("I4: 4 steps here") for each in broken(check(book.write(), reference=other)))


@pytest.mark.parametrize("how", ["rot", "tear", "lose"])
def test_a_checkpoint_that_is_not_whole(book, how):
    path = book.checkpoint(4)
    if how == "lose":
        path.unlink()
    else:
        path.write_bytes(b"w3ights" if how == "rot" else b"weig")
    expect(book, "I5", "step-00000004.json")
    book.boss(0.3, "checkpoint.rejected", uri=f"{book.folder}/checkpoints/step-00000004.a1", reason="rotten")
    assert broken(check(book.write())) == [], "found and passed over: as it should be"


def test_an_older_state_was_preferred(book):
    book.add("host-0.1.jsonl", 0.85, "checkpoint.committed", step=3, uri="x", tier="disk", bytes=1)
    book.add("host-0.2.jsonl", 1.05, "checkpoint.restored", attempt=2, step=2, uri="x", tier="disk")
    expect(book, "I5", "restored step 2")


def test_a_step_of_a_fenced_attempt(book):
    book.step(1.2, 4, attempt=1)
    expect(book, "I6", "attempt 1 applied step 4")


def test_a_commit_of_a_fenced_attempt(book):
    book.add("host-0.1.jsonl", 1.2, "checkpoint.committed", step=3, uri="x", tier="disk", bytes=1)
    expect(book, "I6", "attempt 1 committed step 3")


def test_seconds_counted_twice(book):
    for line in book.files["host-0.2.jsonl"]:
        line["detail"]["step_ns"] = SECOND
    expect(book, "I7", "claim")


def test_a_host_that_is_never_let_go(book):
    book.files["supervisor.1.jsonl"] = [x for x in book.files["supervisor.1.jsonl"] if x["kind"] != "host.released"]
    expect(book, "I7", "never released")


def test_a_recovery_beyond_its_bound(book):
    expect(book, "I8", "cost 0.50 s", bound_s=0.4)


def test_an_incident_without_an_end(book):
    keep = ("incident.resolved", "run.finished", "host.released")
    book.files["supervisor.1.jsonl"] = [x for x in book.files["supervisor.1.jsonl"] if x["kind"] not in keep]
    expect(book, "I8", "nothing followed")


@pytest.mark.parametrize("how", ["edit", "drop", "garbage"])
def test_a_file_that_was_touched(book, how):
    path = book.write() / "events" / "host-0.1.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    if how == "edit":
        lines[0] = lines[0].replace(b"4.9", b"4.8")
    elif how == "drop":
        lines.pop(1)
    else:
        lines[1] = b"garbage\n"
    path.write_bytes(b"".join(lines))
    assert any(each.startswith("log: host-0.1.jsonl") for each in broken(check(book.folder)))


def test_a_head_that_was_cited_and_is_gone(book):
    book.boss(2.1, "log.hash_heads", heads={"host-0.2.jsonl": "0" * 64})
    expect(book, "log", "a cited head of host-0.2.jsonl")


def test_a_torn_last_line_is_no_break(book):
    path = book.write() / "events" / "host-0.2.jsonl"
    path.write_bytes(path.read_bytes() + b'{"run_id": "r", "att')
    assert broken(check(book.folder)) == []


def test_the_command_answers_0_or_1_in_words_or_json(book, tmp_path):
    said: list[str] = []
    assert main([str(book.write())], said.append) == 0
    assert "I1  holds" in "\n".join(said)
    line_of(book, "attempt.started", 1)["attempt"] = 1
    said.clear()
    assert main(["--json", str(book.write())], said.append) == 1
    answer = json.loads(said[0])[str(book.folder)]
    assert not answer["holds"] and answer["invariants"]["I3"]["problems"]
    assert main([str(tmp_path)], said.append) == 1, "no history is no pass"


# ---------------------------------------------------------------- a damaged log


def test_a_damaged_line_breaks_the_log_unless_its_writer_says_so(book):
    folder = book.write()
    path = folder / "events" / "host-0.2.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"no event\n", *lines[2:]]))
    assert any(problem.startswith("log: host-0.2.jsonl:2: not an event") for problem in broken(check(folder)))
    said = {"file": path.name, "line": 2, "reason": "line 2 is not an event", "continued_in": "host-0.part2.2.jsonl"}
    book.add(said["continued_in"], 60.0, "log.damaged", attempt=2)["detail"] = said
    del book.files[path.name]
    damaged = path.read_bytes()
    book.write()
    assert path.read_bytes() == damaged and broken(check(folder)) == []


def test_a_changed_line_counts_for_nothing(book):
    folder = book.write()
    path = folder / "events" / "host-0.2.jsonl"
    steps = len(path.read_bytes().splitlines())
    path.write_bytes(path.read_bytes().replace(b'"rows": 4', b'"rows": 5', 1))
    found = Finding()
    lines = history.load(folder, found).files[path.name]
    assert len(lines) == steps - 1 and len(found.problems) == 1


@settings(max_examples=150, deadline=None)
@given(noise=st.binary(max_size=200), number=st.integers(0, 10**6), cut=st.integers(0, 400))
def test_no_bytes_in_a_log_raise(tmp_path_factory, noise, number, cut):
    folder = sound(tmp_path_factory.mktemp("run")).write()
    paths = sorted((folder / "events").glob("*.jsonl"))
    path = paths[number % len(paths)]
    whole = path.read_bytes()
    at = number % (len(whole) + 1)
    path.write_bytes(whole[:at] + noise + whole[at + cut :])
    check(folder, reference=folder)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_values_in_a_log_raise(tmp_path_factory, data):
    """Chains that hold, around details that are none."""
    book = sound(tmp_path_factory.mktemp("run"))
    line = data.draw(st.sampled_from([line for lines in book.files.values() for line in lines]))
    anything = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2)
    place = data.draw(st.sampled_from(sorted(line["detail"]) or ["x"]))
    line["detail"] = {**line["detail"], place: data.draw(anything | st.dictionaries(st.text(max_size=3), anything))}
    if data.draw(st.booleans()):
        line["step"] = data.draw(anything)
    if data.draw(st.booleans()):
        line["detail"].pop(place)
    folder = book.write()
    check(folder, reference=folder)
