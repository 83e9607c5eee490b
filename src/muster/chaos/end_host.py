"""``python -m muster.chaos.end_host RUN_ID HOST``: ends the host's programs on this machine as a crash would (SIGKILL).

The first process of a container does not receive that signal from within; it then acts as after a crash of what it
started.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from signal import SIGKILL

from muster.core import processes


def end_host(run_id: str, host: str) -> int:
    """How many there were: watchdog, agent, and everything below them."""
    above = processes.ancestors()
    living = [one for one in processes.labelled(run_id) if one.pid not in above]
    doomed = {one.pid for one in living if ("--host", host) in zip(one.argv, one.argv[1:], strict=False)}
    while more := {one.pid for one in living if one.pid not in doomed and _parent(one.pid) in doomed}:
        doomed |= more
    for pid in doomed:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, SIGKILL)
    return len(doomed)


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0


if __name__ == "__main__":
    count = end_host(sys.argv[1], sys.argv[2])
    print(f"{count} processes of {sys.argv[2]} killed")
    sys.exit(0 if count else 1)
