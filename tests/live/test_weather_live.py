"""Faults 34 to 36 of docs/explanation/recovery.md's list: a disk that is full, fails or is slow; an unreachable bucket;
clocks that are stepped. None is an incident: training continues, bit for bit, and unsaved state is saved after.

Every run's history is judged by the offline checker and compared, step by step, with an unfailed run's.
"""

import errno
import importlib.util
import itertools
import json
import os
import time

import pytest
from chaos import Judged
from cluster import checkpoint_hash, spec_of
from weather import HOUR_S, Weather, build

from muster.core.errors import ConflictError
from muster.protocol.client import AskStatus
from muster.storage.store import open_store
from muster.supervise.process.lease import LeaseKeeper

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

STEPS = 200
EVERY = 5
CHANGES = {"training.steps": STEPS, "resources.hosts": 2, "resources.ranks_per_host": 1}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return build(tmp_path_factory.mktemp("library"))


@pytest.fixture
def unfailed(reference):
    return reference(2, 1, **{"training.steps": STEPS})


def a_spec(**more):
    return spec_of(**{**CHANGES, "checkpoint.every_steps": EVERY, **more})


def saves(run):
    """How each save ended, in order: (kind, step)."""
    kinds = ("checkpoint.begun", "checkpoint.committed", "checkpoint.failed")
    return [(e.kind.removeprefix("checkpoint."), e.step) for e in run.events() if e.kind in kinds]


def notes(run):
    return " | ".join(str(event.detail["text"]) for event in run.events("run.message"))


def one_at_a_time(run):
    """Whether no save begins before the previous one, or its attempt, has ended."""
    kinds = ("checkpoint.begun", "checkpoint.committed", "checkpoint.failed")
    found = [(event.attempt, event.kind) for event in run.events() if event.kind in kinds]
    return not any(a == b and a[1] == "checkpoint.begun" for a, b in itertools.pairwise(found))


# ---------------------------------------------------------------- 34: the disk


def test_a_full_disk_costs_saves_and_nothing_else(disk, unfailed):
    """The run's whole folder is on it: events, logs and the lease have no space either. A rank dies meanwhile."""
    with Judged(disk.folder / "run", a_spec()) as run:
        run.start()
        run.wait_until(lambda: run.events("checkpoint.committed"), "a checkpoint")
        ranks, asked = run.ranks(), lambda: run.tell(AskStatus())
        while not disk.fill():
            pass
        run.wait_until(lambda: disk.fill() and "the last save failed" in asked().reason, "the alarm")
        before = asked()
        run.wait_until(lambda: asked().step >= before.step + 2 * EVERY, "steps without a checkpoint")
        os.kill(ranks[1][0], 9)
        run.wait_until(lambda: asked().attempt == 2 and "training" in asked().reason, "recovery")
        again = asked().step
        run.wait_until(lambda: asked().step >= again + EVERY, "steps of the second attempt")
        disk.free()
        room = asked().step
        run.wait_until(lambda: max(s for k, s in saves(run) if k == "committed") > room, "a checkpoint")
        run.ended()
        assert run.recoveries() == ["restart"], run.story()
        failed = [str(event.detail["reason"]) for event in run.events("checkpoint.failed")]
        assert any("No space left on device" in reason for reason in failed), failed
        assert run.final_hash() == unfailed[0]
        left = {path.name.split(".")[0] for path in (run.dir / "checkpoints").glob("step-*")}
        kept = {path.stem for path in (run.dir / "checkpoints" / "commits").glob("step-*.json")}
        assert left == kept, "what failed saves wrote has been removed"


def test_a_disk_that_fails_and_then_is_slow(tmp_path, unfailed, library, monkeypatch):
    """EIO for the replicator and rank 0 when they write a checkpoint; then each sync takes 0.4 s, several per save."""
    with Judged(tmp_path / "run", a_spec()) as run:
        weather = Weather(library, tmp_path / "page", (run.dir / "checkpoints").resolve())
        for name, value in weather.environment.items():
            monkeypatch.setenv(name, value)
        run.start_supervisor()
        for name in run.names:
            run.start_agent(name)
        run.wait_until(lambda: run.events("checkpoint.committed"), "a checkpoint")
        weather.change(disk_errno=errno.EIO)
        run.wait_until(lambda: run.events("checkpoint.failed"), "a save that fails")
        weather.change(fsync_s=0.4)
        run.wait_until(lambda: "is deferred" in notes(run), "a step that is due a save and does not wait for the last")
        slow = max(step for kind, step in saves(run) if kind == "begun")
        run.wait_until(lambda: ("committed", slow) in saves(run), "the slow save")
        weather.change()
        run.wait_until(lambda: max(s for k, s in saves(run) if k == "committed") > slow + EVERY, "a checkpoint")
        run.ended()
        assert run.recoveries() == [] and run.troubles() == [], run.story()
        assert "Input/output error" in str(run.events("checkpoint.failed")[0].detail["reason"])
        assert one_at_a_time(run), saves(run)
        assert run.final_hash() == unfailed[0]


# ---------------------------------------------------------------- 35: the bucket


@pytest.fixture
def bucket(monkeypatch):
    """A bucket behind a real server that can go down: connections end without an answer."""
    if not importlib.util.find_spec("gcsfs"):  # importing it here would be too early: see ``blobs.filesystem``
        pytest.skip("needs the gcs extra")
    from fakes.gcs import GcsFake

    with GcsFake() as fake:

        class Weathered(fake.server.RequestHandlerClass):
            def _answer(self):
                if fake.gone:
                    fake.refused += 1
                    self.close_connection = True
                else:
                    super()._answer()

        fake.gone, fake.refused = False, 0
        fake.server.RequestHandlerClass = Weathered
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", fake.url)
        yield fake


def test_a_bucket_that_is_away_for_a_while(tmp_path, unfailed, bucket):
    """A save is under way when it goes down, a rank dies before it is back: the fence cannot be written either."""
    at = "gs://bucket/run/checkpoints"
    with Judged(tmp_path, a_spec(**{"checkpoint.dir": at})) as run:
        run.start()
        run.wait_until(lambda: run.events("checkpoint.committed"), "a checkpoint")
        bucket.gone = True
        begun = len(run.events("checkpoint.begun"))
        run.wait_until(
            lambda: len(run.events("checkpoint.begun")) > begun and bucket.refused, "a save without a bucket"
        )
        run.wait_until(lambda: "is deferred" in notes(run), "a save that waits for another")
        before = run.step()
        run.wait_for_step(before + 2 * EVERY)
        run.kill_rank(1)
        run.wait_until(lambda: run.events("incident.resolved"), "recovery from memory")
        run.wait_until(lambda: any("claimed" in str(e.detail["reason"]) for e in run.events("checkpoint.failed")),
                       "a save that is not even begun")  # fmt: skip
        away = run.step()
        bucket.gone = False
        run.wait_until(lambda: any(e.step > away for e in run.events("checkpoint.committed")), "a checkpoint")
        run.ended()
        assert run.recoveries() == ["restart"], run.story()
        assert all(event.detail["redone_steps"] <= 1 for event in run.events("incident.resolved")), run.story()
        assert one_at_a_time(run), saves(run)
        assert checkpoint_hash(at) == unfailed[0]


# ---------------------------------------------------------------- 36: clocks


def test_clocks_that_are_stepped_by_an_hour_are_nobodys_incident(tmp_path, unfailed, library, monkeypatch):
    """The supervisor's, forwards and backwards, then one host's; then a rank and the supervisor are replaced."""
    host, boss = (Weather(library, tmp_path / name, tmp_path / "nowhere") for name in ("host", "boss"))
    with Judged(tmp_path / "run", a_spec(**{"checkpoint.every_steps": 20})) as run:
        with monkeypatch.context() as patch:
            for name, value in boss.environment.items():
                patch.setenv(name, value)
            run.start_supervisor()
            for name, value in host.environment.items():
                patch.setenv(name, value)
            run.start_agent("host-0")
        run.start_agent("host-1")
        run.wait_for_step(10)
        for weather, ahead_s in ((boss, HOUR_S), (boss, -HOUR_S), (host, HOUR_S), (host, -HOUR_S)):
            weather.change(clock_ahead_s=ahead_s)
            run.wait_for_step(run.step() + 10)
        run.wait_until(lambda: lease(run)["expires_wall_ns"] < time.time_ns(), "a lease in the past")
        with pytest.raises(ConflictError, match="holds this run"):
            LeaseKeeper(open_store(), str(run.dir / "lease.json")).take(("127.0.0.1", 1))
        assert run.recoveries() == [] and run.troubles() == [], run.story()
        run.kill_rank(1)
        run.wait_until(lambda: run.events("incident.resolved"), "recovery")
        run.supervisor.kill()
        run.supervisor.wait()
        run.start_supervisor()
        run.ended()
        # A rank that the rest of this machine leaves without a processor may be told as a straggler, and left alone.
        assert run.recoveries() == ["restart"], run.story()
        assert not run.events("host.lost"), run.story()
        assert all(event.detail["redone_steps"] <= 1 for event in run.events("incident.resolved")), run.story()
        assert {hours_off(event) for event in run.events("step")} == {-1, 0, 1}, "rank 0's clock was stepped"
        assert [hours_off(event) for event in run.events("incident.decided")] == [-1], "and the supervisor's"
        assert run.final_hash() == unfailed[0]


def lease(run):
    return json.loads((run.dir / "lease.json").read_text())


def hours_off(event):
    """Of a clock that wrote in the last minutes."""
    return round((event.wall_ns - time.time_ns()) / 3.6e12)
