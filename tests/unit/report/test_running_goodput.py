"""The goodput of the metrics page is the ledger's, folded event by event."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_runs import Files, plausible

from muster.core.event_log.order import merge_by_monotonic_clock
from muster.core.events import Event
from muster.report.exposition import RunningGoodput
from muster.report.ledger.figures import goodput
from muster.report.ledger.fold import fold

STEP = {
    "loss": 2.5, "grad_norm": 1.0, "learning_rate": 0.1, "step_ns": 10**9, "tokens": 10, "supervised_tokens": 10,
    "padding_tokens": 0, "data_wait_ns": 0, "stall_ns": 0,
}  # fmt: skip


def running(files: Files) -> dict[str, float]:
    result, newest = RunningGoodput(), 0
    for _, _, event in merge_by_monotonic_clock(files):
        result.add(event)
        newest = max(newest, event.wall_ns)
    return result.of(newest)


def lives(files: Files) -> Files:
    """Without its end: what a run that failed keeps is known only then."""
    return {name: [event for event in events if event.kind != "run.finished"] for name, events in files.items()}


def with_reference(files: Files, tokens_per_s: float) -> Files:
    """The same run, which has measured its own rate."""
    name = "supervisor.1.jsonl"
    first = files[name][0]
    measured = {"tokens_per_s": tokens_per_s, "world_size": 2, "steps": 200, "spread": 0.01, "first_step": 10}
    more = replace(first, kind="baseline_rate", detail=measured, step=20)
    return {**files, name: [more, *files[name]]}


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**48))
def test_it_is_the_ledgers_where_the_reference_was_measured(seed: int) -> None:
    files = with_reference(lives(plausible(seed)), random.Random(seed).uniform(10, 1e5))
    expected, found = goodput(fold(files)), running(files)
    if expected.purchased is None or not expected.purchased:
        assert not any(found.values())
    else:
        assert found == pytest.approx({"active": expected.active, "purchased": expected.purchased}, rel=1e-6)


def test_by_its_own_clean_steps_it_is_the_ledgers_up_to_the_microseconds_of_writing() -> None:
    compared = 0
    for seed in range(200):
        files = lives(plausible(seed))
        expected, found = goodput(fold(files)), running(files)
        if expected.reference is None or expected.reference.steps < 10 or not expected.purchased:
            continue
        compared += 1
        assert found == pytest.approx({"active": expected.active, "purchased": expected.purchased}, rel=1e-3), seed
    assert compared > 10


def event(kind: str, at_s: float, *, step: int | None = None, host: str = "a", attempt: int = 1, **detail: object):
    return Event(
        run_id="r", seq=0, mono_ns=0, wall_ns=int(at_s * 1e9), host=host, kind=kind, attempt=attempt, step=step,
        detail=detail,
    )  # fmt: skip


def test_steps_taken_again_count_once_and_a_replaced_attempts_never() -> None:
    result = RunningGoodput()
    started = {"world_size": 1, "layout": {}, "hosts": {"a": [0]}}
    result.add(event("host.allocated", 0, gpus=1, role="active"))
    result.add(event("attempt.started", 0, resume_step=0, **started))
    for number in range(1, 11):  # 10 tokens a second
        result.add(event("step", number, step=number, **STEP))
    assert result.of(10 * 10**9) == {"active": 1.0, "purchased": 1.0}
    result.add(event("attempt.started", 12, attempt=2, resume_step=7, **started))
    assert result.of(12 * 10**9)["purchased"] == pytest.approx(70 / 120), "three steps are lost"
    result.add(event("step", 12.5, step=11, **STEP))
    assert result.of(12 * 10**9)["purchased"] == pytest.approx(70 / 120), "of attempt 1: fenced"
    for number in range(8, 11):
        result.add(event("step", number + 6, step=number, attempt=2, **STEP))
    assert result.of(20 * 10**9)["purchased"] == pytest.approx(100 / 200)


def test_nothing_is_said_before_there_is_something_to_compare_with() -> None:
    result = RunningGoodput()
    assert result.of(5) == {}
    result.add(event("host.allocated", 0, gpus=1, role="active"))
    result.add(event("attempt.started", 0, resume_step=0, world_size=1, layout={}, hosts={"a": [0]}))
    for number in range(1, 7):
        result.add(event("step", number, step=number, **STEP))
    assert result.of(6 * 10**9) == {}, "two of six are warm-up"
