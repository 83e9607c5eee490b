"""Small records that a run reads again, damaged while it runs: lease.json, fence.json, resolved.json.

No step and no save is lost.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from verbs import Shell
from waiting import eventually
from watched import Watched

from muster.core.typed_json import Unreadable
from muster.protocol.lease import LeaseRecord, read_lease

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]


def lease(there: Path) -> LeaseRecord | None:
    try:
        return read_lease((there / "lease.json").read_bytes(), me="the test")
    except (FileNotFoundError, Unreadable):
        return None


def flip(path: Path) -> bytes:
    """Change one bit of the file, and nothing else of it, in place; what it holds then."""
    data = bytearray(path.read_bytes())
    at = len(data) // 2
    data[at] ^= 4
    fd = os.open(path, os.O_WRONLY)
    try:
        assert os.pwrite(fd, data[at : at + 1], at) == 1
    finally:
        os.close(fd)
    return bytes(data)


def said(seen: Watched) -> list[str]:
    return [str(event.detail["text"]) for event in seen.events("run.message")]


def test_a_lost_lease_and_a_flipped_bit_in_the_fence_and_in_the_run_file(shell: Shell) -> None:
    run_id = shell.run("submit", "run.yaml", "run_dir=there", "checkpoint.every_steps=1").stdout.strip()
    there = shell.folder / "there"
    seen = Watched(there)
    shell.wait_for_step(2)
    first = lease(there)
    assert first is not None and first.term == 1

    (there / "lease.json").unlink()
    eventually(lambda: lease(there) is not None, 30)
    again = lease(there)
    assert again is not None and (again.term, again.pid) == (1, first.pid), "its holder wrote it again"

    eventually(lambda: (there / "checkpoints" / "fence.previous.json").exists(), 30)
    fence, nonce = (json.loads(path.read_bytes())["body"] for path in
                    (there / "checkpoints" / "fence.json", there / "nonces" / "1"))  # fmt: skip
    assert fence["nonce"] == nonce["nonce"], "a copy of this run is known by it"
    broken = flip(there / "checkpoints" / "fence.json")
    eventually(lambda: seen.events("fence.rebuilt"), 60)
    step = seen.step()
    eventually(lambda: any((event.step or 0) > step for event in seen.events("checkpoint.committed")), 60)
    assert (there / "checkpoints" / "fence.damaged.json").read_bytes() == broken
    assert not seen.events("checkpoint.failed")

    whole = (there / "resolved.json").read_bytes()
    broken = flip(there / "resolved.json")
    keeper = json.loads((there / "job.json").read_text())["tasks"]["agent-host-0"]["pid"]
    os.kill(keeper, signal.SIGKILL)  # the next one reads the file
    eventually(lambda: (there / "resolved.json").read_bytes() == whole, 30)
    assert (there / "resolved.json.damaged").read_bytes() == broken
    eventually(lambda: len({event.attempt for event in seen.events("rank.started")}) > 1, 60)
    step = seen.step()
    eventually(lambda: seen.step() > step, 60)

    os.kill(first.pid, signal.SIGKILL)
    flip(there / "resolved.json")
    (there / "lease.json").write_bytes(b"")
    for name in ("fence.json", "fence.previous.json"):
        flip(there / "checkpoints" / name)
    assert shell.run("recover", run_id).stdout.strip() == run_id
    assert (there / "resolved.json").read_bytes() == whole, "as it was submitted"
    eventually(lambda: (found := lease(there)) is not None and found.term == 2, 60)
    step = seen.step()
    eventually(lambda: any((event.step or 0) > step for event in seen.events("checkpoint.committed")), 60)
    for words in (
        ("resolved.json is damaged", "this supervisor holds"),
        ("resolved.json is damaged", "as it was submitted"),
        ("lease.json was gone: written again",),
        ("lease.json was damaged", "this is term 2"),  # said once the log is read; the ranks train on meanwhile
    ):
        eventually(lambda words=words: any(all(word in text for word in words) for text in said(seen)), 60)
    assert json.loads(shell.run("checkpoints", run_id, "--json").stdout)["skipped"] == []
    shell.run("down", run_id)
