"""What becomes of a step: kept, redone, fenced, or not restorable at the end."""

import random

import pytest
from faulty_run import SECOND
from random_runs import Pen

from muster.report.ledger import figures
from muster.report.ledger.fold import fold

STEP = {
    "loss": 1.0, "grad_norm": 1.0, "learning_rate": 0.1, "step_ns": SECOND, "tokens": 100, "supervised_tokens": 1,
    "padding_tokens": 0,
}  # fmt: skip


class Run:
    """A short way to write attempts and steps of one host."""

    def __init__(self):

        self.pen = Pen(random.Random(0))
        self.t = 0
        self.pen.add("supervisor", 0, "host.allocated", host="h", detail={"gpus": 1, "role": "active"})

    def attempt(self, number, *, resume=None, of=None, cause=None):
        self.t += SECOND
        detail = {"world_size": 1, "layout": {}, "hosts": {"h": [0]}, "resume_step": resume, "cause": cause}
        detail["resume_attempt"] = of
        self.pen.add("supervisor", self.t, "attempt.started", attempt=number, detail=detail)
        return self

    def steps(self, attempt, first, last, tokens=100):
        for step in range(first, last + 1):
            self.t += SECOND
            self.step(attempt, step, tokens)
        return self

    def step(self, attempt, step, tokens=100):
        detail = {**STEP, "tokens": tokens}
        self.pen.add("h", self.t, "step", attempt=attempt, rank=0, step=step, detail=detail)

    def event(self, kind, attempt=0, step=None, **detail):
        self.t += 1
        self.pen.add("supervisor", self.t, kind, attempt=attempt, step=step, detail=detail)
        return self

    def kept(self):
        steps = fold(self.pen.files).lineage.steps
        return [(int(steps.attempt[at]), int(steps.step[at])) for at in steps.in_lineage]


def span(attempt, first, last):
    return [(attempt, step) for step in range(first, last + 1)]


def test_a_restart_keeps_what_it_starts_from():
    run = Run().attempt(1).steps(1, 1, 10).attempt(2, resume=6).steps(2, 7, 12)
    assert run.kept() == span(1, 1, 6) + span(2, 7, 12)


def test_a_second_restart_from_a_newer_state_brings_steps_back():
    """Attempt 2 stepped back to 4 and died at once; attempt 3 found the state of step 9 after all."""
    run = Run().attempt(1).steps(1, 1, 10).attempt(2, resume=4).steps(2, 5, 5).attempt(3, resume=9).steps(3, 10, 11)
    assert run.kept() == span(1, 1, 9) + span(3, 10, 11)


def test_a_restart_of_a_restart_rests_on_the_newest_chain():
    run = Run().attempt(1).steps(1, 1, 10).attempt(2, resume=5).steps(2, 6, 8).attempt(3, resume=7).steps(3, 8, 9)
    assert run.kept() == span(1, 1, 5) + span(2, 6, 7) + span(3, 8, 9)


def test_an_attempt_that_never_held_a_state_loses_nothing():
    run = Run().attempt(1).steps(1, 1, 10).attempt(2, resume=-1)
    assert run.kept() == span(1, 1, 10)


def test_a_rollback_within_an_attempt_counts_each_step_once():
    run = Run().attempt(1).steps(1, 1, 6).steps(1, 4, 8)
    assert [step for _, step in run.kept()] == list(range(1, 9))


def test_steps_of_a_replaced_attempt_are_fenced():
    run = Run().attempt(1).steps(1, 1, 5).attempt(2, resume=5).steps(2, 6, 7)
    run.step(1, 6, tokens=10**9)
    ledger = fold(run.pen.files)
    assert ledger.lineage.fenced == 1
    assert figures.tokens(ledger).final_lineage == 700
    assert any("fenced" in note for note in ledger.notes)


@pytest.mark.parametrize(("outcome", "kept"), [("succeeded", 10), ("failed", 4), ("stopped", 4)])
def test_a_run_that_ends_without_success_keeps_what_can_be_restored(outcome, kept):
    run = Run().attempt(1).steps(1, 1, 10)
    run.event("checkpoint.committed", attempt=1, step=4, tier="disk", uri="u", bytes=1)
    run.event("checkpoint.committed", attempt=1, step=10, tier="memory", uri="u", bytes=1)
    run.event("run.finished", outcome=outcome, exit_code=0, reason="r")
    assert len(run.kept()) == kept


def test_a_run_taken_up_again_is_not_finished():
    run = Run().attempt(1).steps(1, 1, 10)
    run.event("checkpoint.committed", attempt=1, step=8, tier="disk", uri="u", bytes=1)
    run.event("run.finished", outcome="failed", exit_code=1, reason="r")
    run.attempt(2, resume=8).steps(2, 9, 9)
    ledger = fold(run.pen.files)
    assert ledger.finished is None
    assert run.kept() == span(1, 1, 8) + span(2, 9, 9)


def test_a_resumed_run_starts_from_a_state_of_another_run():
    run = Run().attempt(1, resume=100).steps(1, 101, 105)
    assert run.kept() == span(1, 101, 105)


def test_steps_without_an_event_are_said():
    run = Run().attempt(1).steps(1, 1, 3).steps(1, 6, 8)
    ledger = fold(run.pen.files)
    assert any("2 steps have no event" in note for note in ledger.notes)


def test_a_measured_reference_stands_before_the_median():
    run = Run().attempt(1).steps(1, 1, 20)
    assert fold(run.pen.files).reference.tokens_per_s == pytest.approx(100)
    run.event("baseline_rate", tokens_per_s=125.0, world_size=1, steps=200)
    found = fold(run.pen.files).reference
    assert (found.tokens_per_s, found.source) == (125.0, "measured with fault tolerance off")
    assert fold(run.pen.files, reference_tokens_per_s=200.0).reference.source == "given"
    assert fold(Run().attempt(1).steps(1, 1, 6).pen.files).reference is None  # four clean steps


def notes(run):
    return fold(run.pen.files).notes


def test_a_rank_killed_before_its_steps_event_discards_nothing():
    """The snapshot of step 11 was there, the event of step 11 was not: seen in 1 of 25 plain SIGKILLs."""
    run = Run().attempt(1).steps(1, 1, 10).attempt(2, resume=11, of=1).steps(2, 12, 13)
    assert run.kept() == span(1, 1, 10) + span(2, 12, 13)
    assert any(note.startswith("1 steps have no event") for note in notes(run))


def test_the_attempt_that_took_the_snapshot_is_believed_before_an_older_one_that_reached_the_step():
    run = Run().attempt(1).steps(1, 1, 10).attempt(2, resume=6, of=1).steps(2, 7, 9)
    run.attempt(3, resume=10, of=2).steps(3, 11, 12)
    assert run.kept() == span(1, 1, 6) + span(2, 7, 9) + span(3, 11, 12)


def test_a_lost_tail_and_a_lost_head_leave_the_rest_counted():
    run = Run().attempt(1).steps(1, 1, 4).attempt(2, resume=20, of=1).steps(2, 23, 25)
    assert run.kept() == span(1, 1, 4) + span(2, 23, 25)
    assert any(note.startswith("18 steps have no event") for note in notes(run))
    without = (
        Run().attempt(1).steps(1, 1, 4).attempt(2, resume=-1).steps(2, 21, 22)
    )  # the log of the choice is lost too
    assert without.kept() == span(1, 1, 4) + span(2, 21, 22)


def test_a_whole_log_has_no_such_note():
    run = Run().attempt(1).steps(1, 1, 10).attempt(2, resume=4, of=1).steps(2, 5, 5)
    run.attempt(3, resume=9, of=1).steps(3, 10, 11)
    assert run.kept() == span(1, 1, 9) + span(3, 10, 11) and notes(run) == []
