"""``recover`` answers once its supervisor holds the run, or says why it does not: whatever clock, boot or version."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from verbs import RUN_FILE, Shell
from waiting import eventually

from muster.core import processes
from muster.protocol.lease import read_lease, write_lease
from muster.protocol.version import Version
from muster.storage.run_registry import RunDir, existing_id

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    found = Shell(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN_FILE)
    yield found
    found.run("down", "there")


def submitted(shell: Shell, steps: int) -> RunDir:
    shell.run("submit", "run.yaml", f"run_dir={shell.folder}/there", f"training.steps={steps}")
    run = RunDir(path=shell.folder / "there", run_id=existing_id(shell.folder / "there") or "")
    assert read_lease(run.lease.read_bytes(), me="this test").pid, "its supervisor holds it when submit returns"
    return run


def test_after_a_reboot_with_the_clock_behind_under_an_older_version_one_of_four_recovers_wins(shell: Shell) -> None:
    run = submitted(shell, 300)
    shell.wait_for_step(20)
    while left := shell.left(run.run_id):
        processes.send(left, signal.SIGKILL)
    lease = read_lease(run.lease.read_bytes(), me="this test")
    rebooted = {"boot_id": "of the boot before", "expires_wall_ns": time.time_ns() + 3600 * 10**9}
    run.lease.write_bytes(write_lease(replace(lease, version=Version(protocol=2, muster="0.1.9"), **rebooted)))
    four = [shell.start("recover", "there") for _ in range(4)]
    words = [process.communicate(timeout=100)[1] for process in four]
    lost = [said for process, said in zip(four, words, strict=True) if process.returncode]
    assert len(lost) == 3, words
    assert all("command is starting" in said or "a supervisor holds" in said for said in lost), lost
    assert "muster down" not in str(lost)
    eventually(lambda: shell.status("there")["state"] == "succeeded", 90)


def test_a_supervisor_that_ends_at_once_is_repeated_and_the_good_end_stays(shell: Shell) -> None:
    run = submitted(shell, 100_000)
    shell.wait_for_step(3)
    shell.run("stop", "there", code=0)
    assert (before := shell.status("there"))["state"] == "stopped"
    done = threading.Event()
    lease = read_lease(run.lease.read_bytes(), me="this test")

    def renew() -> None:
        """Another machine that shares the folder."""
        while not done.wait(0.5):
            ahead = {"machine": "elsewhere", "pid": 7, "address": ("127.0.0.1", 1)}
            held = replace(lease, expires_wall_ns=time.time_ns() + 10**10, expires_mono_ns=2**62, **ahead)
            half = run.lease.with_suffix(".half")
            half.write_bytes(write_lease(held))
            os.replace(half, run.lease)

    (thread := threading.Thread(target=renew)).start()
    try:
        eventually(lambda: json.loads(run.lease.read_bytes())["machine"] == "elsewhere", 5)
        refused = shell.start("recover", "there")
        _, said = refused.communicate(timeout=100)
    finally:
        done.set()
        thread.join()
    assert refused.returncode != 0
    assert "error: the supervisor ended at once: a supervisor (pid 7 on elsewhere) holds this run" in said
    assert not shell.left(run.run_id) and (after := shell.status("there"))
    assert after["state"] == "stopped" and after["reason"].startswith(before["reason"])
