"""Checkpoints with real ranks: resharding, kill -9 in the middle of a save, a full disk, fencing."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from checkpoint_rank import sha256, whole  # noqa: E402

from muster.checkpoint.saver import Saver  # noqa: E402
from muster.checkpoint_format.manifest import committed  # noqa: E402
from muster.core.types import Layout  # noqa: E402
from muster.storage.store import open_store  # noqa: E402

pytestmark = pytest.mark.live
RANK = Path(__file__).with_name("checkpoint_rank.py")


class Ranks:
    """Starts worlds of ranks, each rank a process of its own, one world at a time."""

    def __init__(self, program, tmp_path):
        self.program = program
        self.tmp_path = tmp_path
        self.count = itertools.count()

    def start(self, **told):
        """(folder of the answers, process ids)."""
        place = self.tmp_path / f"world-{next(self.count)}"
        place.mkdir()
        told = {"directory": str(self.tmp_path / "checkpoints"), "meeting": str(place / "meet"), **told}
        (place / "told.json").write_text(json.dumps({**told, "answers": str(place)}))
        return place, self.ask(place / "told.json")

    def ask(self, line):
        self.program.stdin.write(f"{line}\n")
        self.program.stdin.flush()
        return json.loads(self.program.stdout.readline())

    def run(self, **told):
        """Rank 0's answer; all answers are equal where they must be."""
        place, pids = self.start(**told)
        codes = self.ask("wait")
        assert codes == [0] * len(pids), "".join(path.read_text() for path in place.glob("*.log"))
        answers = [json.loads((place / f"{rank}.json").read_text()) for rank in range(len(codes))]
        assert len({(answer.get("step"), answer.get("sha256")) for answer in answers}) == 1
        return answers[0]


@pytest.fixture(scope="module")
def program():
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, str(RANK)], env=env, **pipes) as started:
        yield started
        started.stdin.close()
        started.wait(30)


@pytest.fixture
def ranks(program, tmp_path):
    return Ranks(program, tmp_path)


def test_four_ranks_to_any_number(ranks):
    saved = ranks.run(do="save", ranks=4, attempt=0, steps=[1, 2, 3])
    assert [kind for kind, _ in saved["events"]].count("checkpoint.committed") == 3
    for size, layout in ((1, "fsdp"), (2, "fsdp"), (3, "fsdp"), (5, "fsdp"), (4, "2d")):
        loaded = ranks.run(do="load", ranks=size, layout=layout)
        assert loaded["step"] == 3
        assert loaded["sha256"] == saved["sha256"], (size, layout)


def test_two_dimensions_and_replicas_are_written_once(ranks, tmp_path):
    saved = ranks.run(do="save", ranks=4, attempt=0, steps=[1], layout="2d")
    assert ranks.run(do="load", ranks=3)["sha256"] == saved["sha256"]
    replicated = ranks.run(do="save", ranks=4, attempt=1, steps=[2], layout="replicated")
    assert ranks.run(do="load", ranks=2)["sha256"] == replicated["sha256"]
    sizes = [path.stat().st_size for path in (tmp_path / "checkpoints" / "step-00000002.a1").glob("*.shard")]
    whole = sum(path.stat().st_size for path in (tmp_path / "checkpoints" / "step-00000001.a0").glob("*.shard"))
    assert sum(sizes) < 1.1 * whole  # not twice, though two replicas hold everything
    assert max(sizes) < 0.7 * sum(sizes)  # and shared out


def test_kill_in_the_middle_of_a_save(ranks, tmp_path):
    """Whenever the ranks die, the newest committed step is whole and is found."""
    for attempt, late in ((1, 0), (2, 1), (3, None)):
        before, step = 10 * attempt, 10 * attempt + 1  # no rank writes in a world before rank 0 holds the folder
        _, pids = ranks.start(do="save", ranks=2, attempt=attempt, steps=[before, step], late=late)
        folder = tmp_path / "checkpoints" / f"step-{step:08d}.a{attempt}"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not any(folder.glob("*.shard")):
            time.sleep(0.0005)
        assert any(folder.glob("*.shard"))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        codes = ranks.ask("wait")
        assert codes == [-signal.SIGKILL] * 2 or late is None
        marker = tmp_path / "checkpoints" / "commits" / f"step-{step:08d}.json"
        assert not (marker.exists() and late is not None)
        loaded = ranks.run(do="load", ranks=1)
        assert loaded["skipped"] == []
        newest = step if marker.exists() else before  # nobody was late: the save may have been done before the kill
        assert (loaded["step"], loaded["sha256"]) == (newest, sha256(whole(newest)))
    # The next attempt goes on, and removes what the dead ones left behind.
    saved = ranks.run(do="save", ranks=2, attempt=4, steps=[40, 41])
    assert ranks.run(do="load", ranks=1)["sha256"] == saved["sha256"]
    left = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert left == ["step-00000040.a4", "step-00000041.a4"]


def test_damage_is_named_and_skipped_by_all_ranks(ranks, tmp_path):
    ranks.run(do="save", ranks=2, attempt=0, steps=[1, 2, 3], keep_last=3)
    shard = tmp_path / "checkpoints" / "step-00000003.a0" / "rank-00001.shard"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 4
    shard.write_bytes(data)
    other = tmp_path / "checkpoints" / "step-00000002.a0" / "rank-00000.shard"
    os.truncate(other, other.stat().st_size - 1)
    loaded = ranks.run(do="load", ranks=2)
    assert loaded["step"] == 1
    assert [reason for _, reason in loaded["skipped"]] == [
        "rank-00001.shard does not match its checksum: damaged",
        f"rank-00000.shard has {other.stat().st_size} bytes, not {other.stat().st_size + 1}: truncated",
    ]


def test_one_rank_that_cannot_write_fails_the_save_and_nothing_else(ranks, tmp_path):
    blocked = tmp_path / "checkpoints" / "step-00000002.a0" / "rank-00001.shard"
    blocked.mkdir(parents=True)  # as root no permission would stop the write; a folder in its place does
    saved = ranks.run(do="save", ranks=2, attempt=0, steps=[1, 2, 3])
    kinds = [(kind, detail["step"]) for kind, detail in saved["events"] if kind != "checkpoint.begun"]
    assert kinds == [("checkpoint.committed", 1), ("checkpoint.failed", 2), ("checkpoint.committed", 3)]
    (reason,) = [detail["reason"] for kind, detail in saved["events"] if kind == "checkpoint.failed"]
    assert "rank 1" in reason and "rank-00001.shard" in reason
    assert ranks.run(do="load", ranks=1)["step"] == 3


def test_an_older_attempt_cannot_commit(ranks, tmp_path):
    go_on = tmp_path / "go-on"
    place, _ = ranks.start(do="save", ranks=1, attempt=1, steps=[1, 2], waits={"after": 1, "for": str(go_on)})
    marker = tmp_path / "checkpoints" / "commits" / "step-00000001.json"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not marker.exists():
        time.sleep(0.01)
    newer = Saver(
        str(tmp_path / "checkpoints"),
        run_id="live",
        attempt=2,
        layout=Layout(),
        keep_last=2,
        asynchronous=False,
        group=None,
        store=open_store(),
        on_event=lambda kind, **detail: None,
    )
    newer.claimed()
    go_on.touch()
    assert ranks.ask("wait") == [0]
    events = json.loads((place / "0.json").read_text())["events"]
    failed = [detail for kind, detail in events if kind == "checkpoint.failed"]
    assert [detail["step"] for detail in failed] == [2]
    assert "attempt 2" in failed[0]["reason"]
    assert ranks.run(do="load", ranks=1)["step"] == 1
    newer.save(2, {"model.other": torch.ones(3)}, {})
    assert [manifest.attempt for manifest in committed(open_store(), newer.directory)] == [2, 1]
    skipped = ranks.run(do="load", ranks=1)["skipped"]
    assert ["foreign" in reason for _, reason in skipped] == [True]
