"""One damaged line in a host's event log: every verb goes on from what is whole, and the run ends as if nothing was."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from verbs import Shell
from waiting import eventually
from watched import Watched

from muster.core.event_details.run import LogDamaged

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

HASHES = "training.state_hash_every_steps=1"


def damage(path: Path, number: int) -> None:
    """Change one byte of a line, counted from 1, so that it is no JSON any more; its writer may add lines meanwhile."""
    at = sum(len(line) for line in path.read_bytes().splitlines(keepends=True)[: number - 1])
    fd = os.open(path, os.O_WRONLY)
    try:
        assert os.pwrite(fd, b"[", at) == 1
    finally:
        os.close(fd)


def hashes(folder: Path) -> dict[int | None, object]:
    return {event.step: event.detail["state_hash"] for event in Watched(folder).events("step")}


def test_every_verb_goes_on_and_recover_ends_at_the_same_weights(shell: Shell) -> None:
    there = shell.folder / "there"
    run = shell.run("submit", "run.yaml", "run_dir=there", HASHES).stdout.strip()
    shell.wait_for_step(5)
    damage(there / "events" / "host-0.1.jsonl", 5)  # under its writer
    shell.run("stop", run)
    eventually(lambda: not shell.left(run), 30)
    stopped = shell.status(run)
    assert [row["line"] for row in stopped["damaged"]] == [5]
    assert (stopped["state"], stopped["exit_code"]) == ("stopped", 130) and stopped["step"] >= 5
    damage(there / "events" / "host-0.0.jsonl", 1)  # its next agent opens this one again

    named = ["host-0.0.jsonl", "host-0.1.jsonl"]
    for words in (("events", run), ("checkpoints", run), ("report", run)):
        found = shell.run(*words, "--json")
        warnings = [line for line in found.stderr.splitlines() if line.startswith("warning: ")]
        assert [line.split()[1].split(":")[0] for line in warnings] == named, (words, found.stderr)
        last = found.stdout.splitlines()[-1] if words[0] == "events" else found.stdout
        assert [row["file"] for row in json.loads(last)["damaged"]] == named, words
    last_step = stopped["step"] + 3
    recovered = shell.run("recover", run, f"training.steps={last_step}")
    assert recovered.stdout.strip() == run and recovered.stderr.count("warning: host-0.") == 2
    eventually(lambda: len(Watched(there).events("run.finished")) == 2 and not shell.left(run), 90)
    end = shell.status(run)
    assert (end["state"], end["step"], end["exit_code"]) == ("succeeded", last_step, 0), end["reason"]
    (said,) = [event for event in Watched(there).events("log.damaged") if event.attempt == 0]
    assert said.read(LogDamaged).file == "host-0.0.jsonl"
    assert (there / "events" / "host-0.part2.0.jsonl").is_file()
    texts = [event.detail["text"] for event in Watched(there).events("run.message")]
    assert any("goes on without a part of its log: host-0.1.jsonl:5" in str(text) for text in texts), texts

    shell.run("train", "run.yaml", "run_dir=whole", HASHES, f"training.steps={last_step}")
    assert hashes(there)[last_step] == hashes(shell.folder / "whole")[last_step] is not None
