"""NVIDIA's tool resets GPUs; a tool that never ends does not hold the host."""

import os
import time
from pathlib import Path

import pytest

from muster.agent import gpu_reset
from muster.transport.connections import ConnectionPool


def played(tmp_path, monkeypatch, script, *, limit_s=60.0):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    hub = ConnectionPool(token="0" * 32, on_gone=lambda *_: None)
    answers = []
    gpu_reset.start(hub, [0, 3], lambda ok, evidence: answers.append((ok, evidence)), limit_s=limit_s)
    until = time.monotonic() + 30
    while not answers and time.monotonic() < until:
        hub.run_once(0.05)
    return hub, answers


@pytest.mark.parametrize(
    ("script", "answer"),
    [
        ('echo "$@"; echo "All done."', (True, "All done.")),
        ('echo "$@"; exit 0', (True, "--gpu-reset -i 0,3")),
        ("echo 'GPU 00000000:3B:00.0 is in use by other processes' >&2; exit 19", (False, "GPU 00000000:3B")),
        ("exit 6", (False, "exit code 6")),
    ],
)
def test_the_tools_last_line_is_the_evidence(tmp_path, monkeypatch, script, answer):
    hub, (found,) = played(tmp_path, monkeypatch, script)
    assert found[0] is answer[0] and found[1].startswith(answer[1])
    hub.shutdown()


def test_a_tool_that_waits_for_a_broken_driver_is_given_up(tmp_path, monkeypatch):
    hub, answers = played(tmp_path, monkeypatch, "exec sleep 600", limit_s=0.2)
    assert answers == [(False, "nvidia-smi --gpu-reset has not ended within 0 s")]
    for _ in range(20):
        hub.run_once(0.05)  # it is reaped, and answers nothing more
    assert len(answers) == 1
    mine = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    names = [Path(f"/proc/{pid}/comm").read_text().strip() for pid in mine]
    assert "sleep" not in names, "a dead one has its name too; other tests may have left children of their own"
    hub.shutdown()
