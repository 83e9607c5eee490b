"""What is reported of a rank whose process has ended."""

from __future__ import annotations

from muster.agent.ranks.rank_process import Worker
from muster.protocol.to_supervisor import RankExit
from muster.protocol.values import LastWords


def exit_report(worker: Worker) -> RankExit:
    """For the supervisor; the exit code must be known."""
    assert worker.exit_code is not None
    place = {"attempt": worker.attempt, "rank": worker.rank, "pid": worker.pid}
    return RankExit(**place, code=worker.exit_code, step=worker.step, last=worker.last)


def last_reasons(last: LastWords | None) -> dict[str, str]:
    """A rank's last words as details of its last event; what it did not say is left out."""
    if last is None:
        return {}
    texts = {"exception": last.exception, "reason": last.message[:500], "traceback": last.traceback[-2000:]}
    return {key: text for key, text in texts.items() if text}
