"""The judge of histories is not taken in by a wall clock that somebody stepped, and still sees what is broken."""

import pytest
from book import SECOND, sound

from muster.report.audit.invariants import broken, check

HOUR = 3600 * SECOND


@pytest.fixture
def book(tmp_path):
    found = sound(tmp_path)
    found.boss(0.15, "clock.offset", attempt=0, offset_ns=0, error_ns=1000)
    found.files["supervisor.1.jsonl"].sort(key=lambda line: line["mono_ns"])
    return found


def step_clock(book, *files, by, from_s=0.0):
    for name in files:
        for line in book.files[name]:
            line["wall_ns"] += by if line["mono_ns"] >= from_s * SECOND else 0


@pytest.mark.parametrize("by", [HOUR, -HOUR])
def test_a_stepped_clock_breaks_nothing(book, by):
    step_clock(book, "host-0.1.jsonl", "host-0.2.jsonl", by=by, from_s=0.7)
    assert broken(check(book.write())) == []
    step_clock(book, "supervisor.1.jsonl", by=by, from_s=0.85)
    assert broken(check(book.write())) == []


@pytest.mark.parametrize("by", [HOUR, -HOUR])
def test_a_dead_attempts_step_is_seen_whatever_its_clock_says(book, by):
    book.step(1.05, 4, loss=4.6)
    step_clock(book, "host-0.1.jsonl", by=by, from_s=0.7)
    assert any("after attempt 2 had begun" in problem for problem in broken(check(book.write())))


def test_a_successor_whose_clock_was_set_back_is_a_successor(book):
    book.files["supervisor.1.jsonl"] = [
        line for line in book.files["supervisor.1.jsonl"] if line["mono_ns"] < 1.9 * SECOND
    ]
    book.boss(2.5, "supervisor.started", term=2, attempt=2)["detail"] = {"term": 2, "pid": 2}
    book.boss(2.6, "run.finished", term=2, attempt=2, outcome="succeeded", exit_code=0, reason="done")
    book.boss(2.6, "host.released", term=2, attempt=2, reason="succeeded")
    assert broken(check(book.write())) == []
    step_clock(book, "supervisor.2.jsonl", by=-HOUR)
    assert broken(check(book.write())) == []
