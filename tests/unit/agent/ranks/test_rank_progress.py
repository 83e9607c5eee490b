"""Progress outside of steps: forwarded seldom, and what resets the step watchdog."""

from typing import Any

from fakes.host import RecordingHost

from muster.agent.rank_pool import RankPool
from muster.agent.ranks.hang_detector import Limits, find_hung_ranks
from muster.agent.ranks.rank_process import Worker
from muster.core.heartbeat_timing import HeartbeatTiming
from muster.protocol.rank_agent import RankBeat, RankProgress
from muster.protocol.to_supervisor import RanksProgress


def pool_of_one() -> tuple[RankPool, RecordingHost, Worker]:
    host = RecordingHost()
    worker = Worker(pid=1, rank=1, attempt=2, peer=None, pidfd=-1, stepped=True)
    return host.rank_pool(), host, worker


def stuck(worker: Worker, now_s: float, limit_s: float = 1.0) -> bool:
    limits = Limits(timing=HeartbeatTiming(60.0), step_s=limit_s)
    return bool(find_hung_ranks([worker], limits, host="h", now_s=now_s))


def at(monkeypatch: Any, now_s: float) -> None:
    monkeypatch.setattr("muster.agent.rank_pool.time.monotonic", lambda: now_s)


def test_progress_resets_the_step_watchdog_and_a_beat_does_not(monkeypatch: Any) -> None:
    pool, _, worker = pool_of_one()
    for now in (0.9, 1.8, 2.7):
        at(monkeypatch, now)
        pool.handle(worker, RankProgress(attempt=2, rank=1))
        assert not stuck(worker, now + 0.9)
    for now in (3.0, 3.5, 3.9):
        at(monkeypatch, now)
        pool.handle(worker, RankBeat(step=worker.step, micro=worker.micro))  # alive, and nothing more
    assert stuck(worker, 3.9)


def test_progress_of_an_attempt_that_is_over_is_ignored(monkeypatch: Any) -> None:
    pool, host, worker = pool_of_one()
    at(monkeypatch, 5.0)
    pool.handle(worker, RankProgress(attempt=1, rank=1))
    assert worker.progress_s == 0.0 and host.sent == []


def test_the_supervisor_is_told_once_a_second(monkeypatch: Any) -> None:
    pool, host, worker = pool_of_one()
    for tenths in range(100, 150, 5):
        at(monkeypatch, tenths / 10)
        pool.handle(worker, RankProgress(attempt=2, rank=1))
    assert host.sent == [RanksProgress(attempt=2)] * 5
