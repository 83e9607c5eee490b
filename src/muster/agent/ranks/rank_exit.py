"""What is reported of a rank whose process has ended."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from muster.agent.ranks.rank_process import Worker
from muster.protocol.to_supervisor import RankExit
from muster.protocol.values import LastWords

#: Of a rank's log, its end, in which a library says why it aborts the process.
TAIL_BYTES = 16 << 10
#: Lines of the GPU's and the network's libraries: torch's watchdog of NCCL, a C++ exception that nobody caught.
_LIBRARY = re.compile(r"CUDA error|NCCL|Xid")


def last_words(worker: Worker, run_dir: Path) -> LastWords | None:
    """Why it ended, as it said itself; of one that a library aborted, what that wrote to its log."""
    if worker.last is not None or worker.exit_code != -signal.SIGABRT:
        return worker.last
    try:
        with (run_dir / "logs" / f"rank-{worker.rank}.a{worker.attempt}.log").open("rb") as log:
            log.seek(max(0, log.seek(0, 2) - TAIL_BYTES))
            tail = log.read().decode(errors="replace")
    except OSError:
        return None
    lines = [line.strip() for line in tail.splitlines() if _LIBRARY.search(line)]
    return LastWords(exception="SIGABRT", message="\n".join(lines[-8:])) if lines else None


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
