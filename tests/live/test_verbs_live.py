"""The verbs as a user types them: real processes, real signals, a real terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import time
from pathlib import Path

import pytest
from verbs import MUSTER, Shell
from waiting import eventually

pytestmark = pytest.mark.live


def loss_of(shell: Shell, run: str) -> dict[int, float]:
    lines = shell.run("events", run, "--kind", "step", "--json").stdout.splitlines()
    return {event["step"]: event["detail"]["loss"] for event in map(json.loads, lines)}


def test_a_detached_run_from_submit_to_down(shell: Shell) -> None:
    """Submit from a terminal that is closed; watch and stop it from another; go on; end it."""
    primary, secondary = pty.openpty()
    submit = subprocess.Popen(
        [*MUSTER, "submit", "run.yaml", "run_dir=there"],
        cwd=shell.folder, env=shell.env, stdin=secondary, stdout=secondary, stderr=secondary, start_new_session=True,
    )  # fmt: skip
    os.close(secondary)
    assert submit.wait(60) == 0
    os.close(primary)  # the terminal is gone
    run_id = (shell.folder / "there" / "run_id").read_text().strip()
    shell.wait_for_step(3)
    assert shell.status(run_id)["state"] == "running"
    assert run_id in shell.run("status").stdout
    followed = shell.start("logs", "-f", run_id)
    assert followed.stdout is not None
    eventually(lambda: "step" in followed.stdout.readline())
    assert "processes run" in shell.run("status", run_id).stdout
    assert shell.run("submit", "run.yaml", "run_dir=there").stdout.strip() == run_id, "the same run, not a second one"
    other = shell.run("submit", "run.yaml", "run_dir=there", "training.seed=1", code=1)
    assert "which is running" in other.stderr

    shell.run("stop", run_id)
    stopped = shell.status(run_id)
    assert (stopped["state"], stopped["exit_code"]) == ("stopped", 130)
    followed.communicate(timeout=30)
    assert followed.returncode == 0, "logs -f ends with the run"
    eventually(lambda: not shell.left(run_id), 15)
    committed = json.loads(shell.run("checkpoints", run_id, "--json").stdout)["committed"]
    assert [each["step"] for each in committed] == [stopped["step"]]

    assert shell.run("recover", run_id).stdout.strip() == run_id
    shell.wait_for_step(stopped["step"] + 2)
    assert shell.status(run_id)["attempt"] == 2
    assert "is down" in shell.run("down", run_id).stderr
    assert shell.left(run_id) == []
    assert shell.status(run_id)["state"] == "stopped"
    shell.run("down", run_id)  # absent is success
    assert "had already ended" in shell.run("stop", run_id).stderr


def test_train_in_a_pipe_stops_on_ctrl_c_and_goes_on_bit_for_bit(shell: Shell) -> None:
    train = shell.start("train", "run.yaml", "run_dir=there")
    eventually(lambda: (shell.folder / "there" / "run_id").exists())
    shell.wait_for_step(5)
    os.kill(train.pid, signal.SIGINT)
    out, err = train.communicate(timeout=60)
    assert train.returncode == 130, err
    assert "recover --watch" in err
    assert re.search(r"^step +1/\d+  loss +\d", out, re.MULTILINE)
    assert "\x1b[" not in out, "plain lines in a pipe"
    run_id = (shell.folder / "there" / "run_id").read_text().strip()
    eventually(lambda: not shell.left(run_id), 15)
    before = loss_of(shell, "there")

    last = max(before) + 20
    done = shell.run("train", "run.yaml", "run_dir=there", f"training.steps={last}")
    assert "succeeded" in done.stdout and "after step" in done.stdout
    after = loss_of(shell, "there")
    assert sorted(after) == list(range(1, last + 1)), "every step once, none lost"
    assert {step: after[step] for step in before} == before

    whole = shell.run("train", "run.yaml", "run_dir=whole", f"training.steps={last}")
    assert "succeeded" in whole.stdout
    assert loss_of(shell, "whole") == after, "the same curve as without the stop, bit for bit"

    figures = json.loads(shell.run("report", "there", "--json").stdout)
    for key in ("execution_accuracy", "final_loss", "tokens", "tokens_per_s"):
        assert key in figures, key
    assert figures["final_loss"] == after[last]
    folder = shell.run("export", "there").stdout.strip()
    assert (Path(folder) / "config.json").exists()
    assert "is done" in shell.run("recover", "there", code=2).stderr


def test_sigterm_saves_and_says_75_a_second_signal_leaves_at_once(shell: Shell) -> None:
    train = shell.start("train", "run.yaml", "run_dir=there", output=subprocess.DEVNULL)
    eventually(lambda: (shell.folder / "there" / "run_id").exists())
    shell.wait_for_step(2)
    os.kill(train.pid, signal.SIGTERM)
    assert train.wait(60) == 75
    assert shell.status("there")["state"] == "preempted"
    assert json.loads(shell.run("checkpoints", "there", "--json").stdout)["committed"]

    ended = shell.status("there")["attempt"]
    train = shell.start("train", "run.yaml", "run_dir=there", "recovery.grace_s=600", output=subprocess.DEVNULL)
    eventually(lambda: (found := shell.status("there"))["phase"] == "run" and found["attempt"] > ended, 90, every_s=0.5)
    rank = next(each for each in shell.left(shell.status("there")["run_id"]) if "fork_server" in " ".join(each.argv))
    os.kill(rank.pid, signal.SIGCONT)
    before = time.monotonic()
    for _ in range(20):  # two that arrive before the first is handled are one: a user would press again
        os.kill(train.pid, signal.SIGINT)
        time.sleep(0.5)
        if train.poll() is not None:
            break
    assert train.wait(30) == 130
    assert time.monotonic() - before < 20
    run_id = shell.status("there")["run_id"]
    eventually(lambda: not shell.left(run_id), 15)


def test_a_killed_supervisor_is_replaced_and_the_agents_go_on(shell: Shell) -> None:
    run_id = shell.run("submit", "run.yaml", "run_dir=there").stdout.strip()
    shell.wait_for_step(3)
    record = json.loads((shell.folder / "there" / "job.json").read_text())
    os.kill(record["tasks"]["supervisor"]["pid"], signal.SIGKILL)
    eventually(lambda: "the supervisor is gone" in shell.status(run_id)["reason"])
    step = shell.status(run_id)["step"]
    shell.run("recover", run_id)
    shell.wait_for_step(step + 3)
    assert shell.status(run_id)["attempt"] == 1, "no rank was restarted"
    assert "a supervisor holds" in shell.run("recover", run_id, code=1).stderr
    shell.run("stop", run_id)


def test_a_terminal_shows_progress(shell: Shell) -> None:
    primary, secondary = pty.openpty()
    env = {**shell.env, "TERM": "xterm-256color", "COLUMNS": "140"}
    train = subprocess.Popen(
        [*MUSTER, "train", "run.yaml", "training.steps=20"],
        cwd=shell.folder, env=env, stdin=secondary, stdout=secondary, stderr=secondary, start_new_session=True,
    )  # fmt: skip
    os.close(secondary)
    shown = b""
    until = time.monotonic() + 90
    while time.monotonic() < until:
        ready, _, _ = select.select([primary], [], [], 0.2)
        try:
            data = os.read(primary, 1 << 16) if ready else b""
        except OSError:
            break
        shown += data
        if not data and train.poll() is not None:
            break
    os.close(primary)
    assert train.wait(10) == 0, shown.decode(errors="replace")
    text = shown.decode(errors="replace")
    assert "training" in text and "/20" in text and "tokens/s" in text and "succeeded" in text
