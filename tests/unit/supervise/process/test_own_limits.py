"""What the supervisor says of limits that it may not put back."""

from collections import deque

import pytest

from muster.core import processes
from muster.supervise.process.limits import AGAIN_S, OwnLimits


def test_what_cannot_be_put_back_is_said_now_and_then_and_tried_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    said, now, low, tries = deque[str](), [1000.0], ["RLIMIT_NOFILE of process 7 was lowered from 20000 to 16"], [0]

    def restore(before: object) -> str:
        tries[0] += 1
        return low[0]

    monkeypatch.setattr(processes, "restore_limits", restore)
    limits = OwnLimits(said, now_s=lambda: now[0])
    for _ in range(3):
        limits.keep("run-1")
        now[0] += AGAIN_S / 3
    assert len(said) == 1 and low[0] in said[0]
    assert "prlimit --pid" in said[0] and "muster down run-1, then muster recover run-1" in said[0]
    limits.keep("run-1")
    assert len(said) == 2
    low[0] = ""
    limits.keep("run-1")
    low[0] = "RLIMIT_AS of process 7 was lowered from unlimited to 9"
    limits.keep("run-1")
    assert len(said) == 3 and tries[0] == 6, "another one, at once"
