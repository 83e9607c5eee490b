"""Progress outside of steps: told seldom, passed on seldom, and what resets the step watchdog."""

from types import SimpleNamespace
from typing import Any

from muster.agent.ranks.hang_detector import hanging
from muster.agent.ranks.rank_pool import Crew
from muster.agent.ranks.rank_process import Worker
from muster.rank.agent_connection import ProgressThrottle


def test_many_batches_are_told_twice_a_second() -> None:
    pulse = ProgressThrottle()
    told = [at for at in range(100) if pulse.claimed(at / 10, for_s=0.0)]
    assert told == list(range(0, 100, 5))


def test_nothing_is_told_by_itself_where_nobody_vouched() -> None:
    pulse = ProgressThrottle()
    assert not pulse.goes_on(1.0)
    assert pulse.claimed(1.0, for_s=0.0)
    assert not any(pulse.goes_on(at) for at in (1.0, 2.0, 60.0))


def test_a_save_counts_for_as_long_as_was_said_and_no_longer() -> None:
    pulse = ProgressThrottle()
    pulse.claimed(0.0, for_s=3.0)
    assert [at for at in range(1, 10) if pulse.goes_on(float(at))] == [1, 2]
    pulse.claimed(10.0, for_s=30.0)
    pulse.claimed(11.0, for_s=0.0)  # it is over
    assert not pulse.goes_on(12.0)


# ---------------------------------------------------------------- in the agent


def crew() -> tuple[Crew, list[dict[str, Any]], Worker]:
    told: list[dict[str, Any]] = []
    agent: Any = SimpleNamespace(tell=told.append)
    worker = Worker(pid=1, rank=1, attempt=2, peer=None, pidfd=-1, stepped=True)
    return Crew(agent=agent), told, worker


def stuck(worker: Worker, now_s: float, limit_s: float = 1.0) -> bool:
    return bool(list(hanging([worker], host="h", now_s=now_s, silence_s=60.0, step_s=limit_s)))


def at(monkeypatch: Any, now_s: float) -> None:
    monkeypatch.setattr("muster.agent.ranks.rank_pool.time.monotonic", lambda: now_s)


def test_progress_resets_the_step_watchdog_and_a_beat_does_not(monkeypatch: Any) -> None:
    found, _, worker = crew()
    for now in (0.9, 1.8, 2.7):
        at(monkeypatch, now)
        found.hear(worker, {"t": "progress", "attempt": 2, "rank": 1})
        assert not stuck(worker, now + 0.9)
    for now in (3.0, 3.5, 3.9):
        at(monkeypatch, now)
        found.hear(worker, {"t": "beat", "step": worker.step, "micro": worker.micro})  # alive, and nothing more
    assert stuck(worker, 3.9)


def test_progress_of_an_attempt_that_is_over_says_nothing(monkeypatch: Any) -> None:
    found, told, worker = crew()
    at(monkeypatch, 5.0)
    found.hear(worker, {"t": "progress", "attempt": 1, "rank": 1})
    assert worker.progress_s == 0.0 and told == []


def test_the_supervisor_hears_of_it_once_a_second(monkeypatch: Any) -> None:
    found, told, worker = crew()
    for tenths in range(100, 150, 5):
        at(monkeypatch, tenths / 10)
        found.hear(worker, {"t": "progress", "attempt": 2, "rank": 1})
    assert told == [{"t": "progress", "attempt": 2}] * 5
