"""Whatever becomes of those who look on, a run goes on to its own end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import subprocess
import termios
import threading
from collections.abc import Iterator

import pytest
from verbs import MUSTER, Shell
from waiting import eventually
from watched import Watched

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]

CTRL_S = b"\x13"


def in_a_terminal(shell: Shell, *words: str) -> tuple[subprocess.Popen[bytes], int]:
    """The command as the leader of a terminal's session, and the terminal's other end."""
    primary, secondary = pty.openpty()
    process = subprocess.Popen(
        [*MUSTER, *words], cwd=shell.folder, env={**shell.env, "TERM": "xterm"}, stdin=secondary, stdout=secondary,
        stderr=secondary, start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(secondary)
    return process, primary


@contextlib.contextmanager
def looked_at(primary: int) -> Iterator[None]:
    """Somebody reads what the terminal shows."""
    blind = threading.Event()

    def read() -> None:
        with contextlib.suppress(OSError):
            while not blind.is_set():
                if select.select([primary], [], [], 0.1)[0]:  # a read that waits would keep the terminal open
                    os.read(primary, 1 << 16)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    yield
    blind.set()
    reader.join()


def goes_on(shell: Shell) -> None:
    shell.wait_for_step(Watched(shell.folder / "there").step() + 5)


def serves_on(shell: Shell) -> None:
    """The supervisor's loop, which renews its lease, is not held up: ranks would step on for a while without it."""
    lease = shell.folder / "there" / "lease.json"
    for _ in range(2):
        before = lease.read_bytes()
        eventually(lambda before=before: lease.read_bytes() != before, 60)


def messages(shell: Shell) -> str:
    return "\n".join(str(event.detail["text"]) for event in Watched(shell.folder / "there").events("run.message"))


def test_a_terminal_that_is_stopped_then_closed(shell: Shell) -> None:
    train, primary = in_a_terminal(shell, "train", "run.yaml", "run_dir=there")
    with looked_at(primary):
        shell.wait_for_step(3)
        os.write(primary, CTRL_S)
    serves_on(shell)
    goes_on(shell)
    assert train.poll() is None and len(Watched(shell.folder / "there").events("supervisor.started")) == 1
    os.close(primary)
    eventually(lambda: "the run goes on; muster stop" in messages(shell), 60)  # SIGHUP, or what writing says
    goes_on(shell)
    assert train.poll() is None
    shell.run("stop", "there")
    assert train.wait(120) == 130
    assert shell.status("there")["state"] == "stopped"
    log = (shell.folder / "there" / "logs" / "supervisor.log").read_text()
    assert "the run goes on; muster stop" in log and log.splitlines()[-1].startswith("stopped: ")


def test_a_pipe_that_is_full_then_closed(shell: Shell) -> None:
    """``| less`` that is left alone, then quit."""
    steps = 250
    read_end, write_end = os.pipe()
    fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 4096)
    train = subprocess.Popen(
        [*MUSTER, "train", "run.yaml", "run_dir=there", f"training.steps={steps}"],
        cwd=shell.folder, env=shell.env, stdout=write_end, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    os.close(write_end)
    eventually(lambda: (shell.folder / "there" / "run_id").exists())
    shell.wait_for_step(100)  # 8 kB of lines
    os.close(read_end)
    _, said = train.communicate(timeout=180)
    assert train.returncode == 0, said
    assert "stdout takes no more (Broken pipe): the run goes on; muster logs -f" in said and "done: " in said
    assert "Broken pipe" in messages(shell)
    assert shell.status("there")["step"] == steps


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_nobody_reads_the_last_lines(shell: Shell, kind: str) -> None:
    """The run's code is the exit code, and the process does not wait for a reader who never comes."""
    steps = 150
    words = ("train", "run.yaml", "run_dir=there", f"training.steps={steps}")
    if kind == "terminal":
        train, other = in_a_terminal(shell, *words)
        with looked_at(other):
            eventually(lambda: (shell.folder / "there" / "run_id").exists())
            os.write(other, CTRL_S)
    else:
        other, write_end = os.pipe()
        fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 4096)
        train = subprocess.Popen([*MUSTER, *words], cwd=shell.folder, env=shell.env, stdout=write_end, stderr=write_end)
        os.close(write_end)
    try:
        assert train.wait(180) == 0
    finally:
        os.close(other)
    assert shell.status("there")["state"] == "succeeded"
    assert (shell.folder / "there" / "logs" / "supervisor.log").read_text().splitlines()[-1].startswith("succeeded: ")
