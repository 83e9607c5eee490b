"""I1 fails where the replicas of a run did not hold one state: silent corruption of one of them."""

import pytest
from book import sound

from muster.report.audit.invariants import broken, check


@pytest.fixture
def book(tmp_path):
    return sound(tmp_path / "run")


def hashed(book, *numbers, others):
    for line in book.files["host-0.2.jsonl"]:
        if line["kind"] == "step" and line["step"] in numbers:
            line["detail"] |= {"state_hash": "a", "replica_hashes": ["a", *others]}


def test_replicas_that_differ_break_it_from_their_first_step_on(book):
    hashed(book, 5, 6, others=["b"])
    assert broken(check(book.write())) == [
        "I1: attempt 2: after step 5 (and after 1 more) the replicas hold two states (0: a, 1: b)"
    ]


def test_replicas_that_agree_do_not(book):
    hashed(book, 5, 6, others=["a", "a"])
    assert broken(check(book.write())) == []
