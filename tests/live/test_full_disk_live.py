"""The disk of a run's folder is full for a while: nothing ends, and everything is there once there is room."""

from __future__ import annotations

import os
import re
import signal

import pytest
from fakes.chains import check_directory
from verbs import Shell
from waiting import eventually
from watched import Watched

from muster.chaos.network import Disk

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]


def now(shell: Shell) -> tuple[int, int]:
    """Attempt and step as the supervisor tells them: its log waits in memory."""
    found = re.search(r"step (\d+) of attempt (\d+)", shell.status("disk")["now"] or "")
    return (int(found[2]), int(found[1])) if found else (0, 0)


def test_a_full_disk_ends_nobody(disk: Disk, shell: Shell) -> None:
    """Progress goes to a file on that disk; a rank is killed and started again while it is full."""
    folder = disk.folder
    run_id = shell.run("submit", "run.yaml", "run_dir=disk").stdout.strip()
    eventually(lambda: Watched(folder).step() >= 3, 120)
    supervisor = Watched(folder).events("supervisor.started")[0].detail["pid"]
    log = folder / "logs" / "supervisor.log"
    eventually(disk.fill)
    size, (_, step) = log.stat().st_size, now(shell)
    eventually(lambda: now(shell) > (1, step + 100), 120, every_s=0.3)  # more than the rest of a page of lines
    os.kill(Watched(folder).ranks()[1][0], signal.SIGKILL)
    eventually(lambda: now(shell) > (2, step + 100), 120, every_s=0.3)
    assert log.stat().st_size - size < 8192
    disk.free()
    eventually(lambda: "bytes of output are lost: No space left on device" in log.read_text(), 30)
    shell.run("stop", run_id)
    assert shell.status(run_id)["state"] == "stopped"
    seen = Watched(folder)
    assert [event.detail["pid"] for event in seen.events("supervisor.started")] == [supervisor]
    assert sorted(seen.losses()) == list(range(1, seen.step() + 1)), "no event is lost"
    assert all(file.problem is None for file in check_directory(folder / "events", run_id=run_id).values())
    eventually(lambda: not shell.left(run_id), 15)
