"""What `muster rm` and `muster prune` delete, and above all what they never do. Real folders; no process is started."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.app.run import remove
from muster.backends.local.launcher import LocalLauncher
from muster.cli import main
from muster.config import load
from muster.core import resolved_file
from muster.core.errors import ConflictError, UsageError
from muster.core.types import JobState, JobStatus
from muster.storage import memory_dir, run_registry, sweep_record
from muster.storage.memory_dir import MemoryDir
from muster.storage.run_registry import RunDir
from muster.storage.store import local
from muster.storage.sweep_record import SweepRecord, TrialRecord

SPEC = load.loads(
    "name: x\nmodel: {config: {model_type: llama}}\ndata: {sources: [{type: random}]}\ntraining: {steps: 5}\n"
).spec


class State:
    """What the back end says of every run; of its processes it says what is really there."""

    def __init__(self) -> None:
        self.of: dict[str, JobState] = {}


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[State]:
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    found = State()

    def poll(self: LocalLauncher, handle: object) -> JobStatus:
        return JobStatus(state=found.of.get(handle.run_id, JobState.STOPPED), reason="so it is")  # type: ignore[attr-defined]

    monkeypatch.setattr(LocalLauncher, "poll", poll)
    with tempfile.TemporaryDirectory(dir="/tmp") as memory:  # sockets have short names only
        monkeypatch.setenv("MUSTER_MEMORY_DIR", memory)
        yield found


def made(run_id: str, path: Path | None = None, **changes: object) -> RunDir:
    place = path or run_registry.place(run_id, None)
    spec = SPEC.model_dump()
    for section, values in changes.items():
        spec[section].update(values)
    text = json.dumps(spec)
    run = run_registry.create(run_id, place, run_file="name: x\n", resolved=text)
    resolved_file.write(place, text)
    run.checkpoints.mkdir()
    (run.checkpoints / "data").write_bytes(b"x" * 100_000)
    return run


def test_a_run_goes_with_its_memory_and_its_entry(state: State, tmp_path: Path):
    run, other = made("one-1", tmp_path / "work" / "first"), made("two-1")
    memory = MemoryDir.create(run.path, run_id=run.run_id, host="host-0")
    (memory.folder / "ring").write_bytes(b"y" * 50_000)
    theirs = MemoryDir.create(other.path, run_id=other.run_id, host="host-0")
    found = remove.removal("first")
    assert found.bytes >= 100_000 and found.memory == (memory.folder,) and found.memory_bytes >= 50_000
    assert run.path.exists() and memory.folder.exists(), "asking changes nothing"
    remove.remove(found)
    assert not run.path.exists() and (tmp_path / "work").exists() and not memory.folder.exists()
    assert [run_id for run_id, _ in run_registry.registry()] == ["two-1"]
    assert not (tmp_path / "home" / "index" / "one-1").exists() and theirs.folder.exists()


@pytest.mark.parametrize("word", ["running", "waiting"])
def test_a_live_run_is_never_removed(state: State, word: str):
    run = made("one-1")
    found = remove.removal("one-1")
    state.of["one-1"] = JobState(word)
    with pytest.raises(ConflictError, match=f"one-1 is {word}"):
        remove.removal("one-1")
    with pytest.raises(ConflictError, match=f"one-1 is {word}"):
        remove.remove(found)
    assert (run.checkpoints / "data").exists()


def test_a_run_with_a_process_left_or_being_started_is_not_removed(state: State, monkeypatch: pytest.MonkeyPatch):
    run = made("one-1")
    found = remove.removal("one-1")
    lock = run_registry.lock_submit(run.path)
    assert lock is not None
    with pytest.raises(ConflictError, match="is being started"):
        remove.remove(found)
    lock.close()
    monkeypatch.setattr(LocalLauncher, "remaining", lambda self, handle: ["process 7: python", "memory /dev/shm/x"])
    with pytest.raises(ConflictError, match="process 7"):
        remove.removal("one-1")
    assert (run.checkpoints / "data").exists()


def test_what_links_name_and_what_lies_elsewhere_stays(state: State, tmp_path: Path):
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "precious").write_text("years of work")
    run = made("one-1", checkpoint={"dir": str(shared / "checkpoints")})
    (run.path / "export").symlink_to(shared)
    (run.path / "file").symlink_to(shared / "precious")
    (run.path / "deep").mkdir()
    (run.path / "deep" / "link").symlink_to(shared)
    os.link(shared / "precious", run.path / "same")
    found = remove.removal("one-1")
    assert found.kept == (str(shared / "checkpoints"),)
    remove.remove(found)
    assert not run.path.exists() and (shared / "precious").read_text() == "years of work"


def test_a_folder_that_is_a_link_is_refused(state: State, tmp_path: Path):
    run = made("one-1")
    real = tmp_path / "real"
    run.path.rename(real)
    run.path.symlink_to(real)
    with pytest.raises(UsageError, match="is a link to"):
        remove.removal("one-1")
    assert (real / "run_id").exists()


def test_a_mount_in_it_is_refused(state: State, monkeypatch: pytest.MonkeyPatch):
    run = made("one-1")
    monkeypatch.setattr(local, "points", lambda: ["/", str(run.checkpoints)])
    with pytest.raises(UsageError, match="is mounted in"):
        remove.removal("one-1")


def test_another_run_in_it_or_in_need_of_it_is_named(state: State, tmp_path: Path):
    run = made("one-1", tmp_path / "one")
    inner = made("two-1", run.path / "two")
    with pytest.raises(UsageError, match="two-1 lies in"):
        remove.removal("one-1")
    remove.remove(remove.removal("two-1"))
    assert not inner.path.exists()
    made("three-1", checkpoint={"dir": str(run.checkpoints)})
    with pytest.raises(UsageError, match="three-1 uses what lies in"):
        remove.removal("one-1")


def test_memory_that_a_record_names_falsely_stays(state: State, tmp_path: Path):
    run = made("one-1")
    MemoryDir.create(run.path, run_id=run.run_id, host="host-0")
    precious = Path(os.environ["MUSTER_MEMORY_DIR"]) / "precious"
    precious.mkdir(mode=0o700)
    record = run.path / "memory" / "host-0.json"
    place = json.loads(record.read_text())
    record.write_text(json.dumps({**place, "path": str(precious), "inode": precious.stat().st_ino}))
    assert list(memory_dir.MemoryDir.of_run(run.path)) == ["host-0"], "the record is believed elsewhere"
    found = remove.removal("one-1")
    assert precious not in found.memory and len(found.memory) == 1
    remove.remove(found)
    assert precious.exists()


def test_prune_takes_the_old_and_ended(state: State):
    for run_id in ("a-1", "b-1", "c-1", "d-1"):
        made(run_id)
    state.of |= {"a-1": JobState.RUNNING, "b-1": JobState.FAILED}
    now_ns = time.time_ns()
    assert remove.prunable(older_than_s=60, now_ns=now_ns) == ([], [])
    later_ns = now_ns + 3600 * 10**9
    everything, left = remove.prunable(older_than_s=60, now_ns=later_ns)
    assert {each.run.run_id for each in everything} == {"b-1", "c-1", "d-1"} and left == []
    (failed,), _ = remove.prunable(older_than_s=60, now_ns=later_ns, states=["failed"])
    assert failed.run.run_id == "b-1"
    assert len(remove.prunable(older_than_s=60, now_ns=later_ns, keep=2)[0]) == 1


def a_sweep(*run_ids: str) -> Path:
    """A sweep called tune whose trials are these runs."""
    folder = sweep_record.place("tune")
    for number, run_id in enumerate(run_ids):
        made(run_id, folder / f"trial-{number:03d}")
    trials = tuple(TrialRecord(number=number, values={}, run_id=run_id) for number, run_id in enumerate(run_ids))
    record = SweepRecord(name="tune", run_file={}, over=(), sampler="tpe", pruner="none", seed=0, trials=trials)
    folder.mkdir(parents=True, exist_ok=True)
    sweep_record.write(folder, record)
    return folder


def test_a_sweep_goes_with_all_of_its_trials(state: State):
    folder, other = a_sweep("t-0", "t-1"), made("other-1")
    assert main.run(["rm", "tune", "other-1", "--yes"]) == 0
    assert not folder.exists() and not other.path.exists() and not list(run_registry.registry())


def test_a_sweep_with_a_trial_that_runs_or_that_runs_itself_stays_whole(state: State):
    folder = a_sweep("t-0", "t-1")
    state.of["t-1"] = JobState.RUNNING
    assert main.run(["rm", "tune", "--yes"]) == ConflictError.exit_code
    state.of.clear()
    with run_registry.lock_submit(folder, sweep_record.LOCK):
        assert main.run(["rm", "tune", "--yes"]) == ConflictError.exit_code
    assert (folder / sweep_record.NAME).exists() and len(list(run_registry.registry())) == 2


def test_a_sweep_without_a_trial_can_be_removed_and_files_of_others_stay(state: State):
    folder = a_sweep()
    (folder / "notes.txt").write_text("mine")
    assert main.run(["rm", "tune", "--yes"]) == 0
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_prune_takes_a_sweep_with_the_last_of_its_trials(state: State):
    folder = a_sweep("t-0", "t-1")
    assert main.run(["rm", "t-0", "--yes"]) == 0
    assert (folder / sweep_record.NAME).exists(), "one trial is left"
    (last,), _ = remove.removals(["t-1"])
    assert remove.emptied_sweeps([], [last]) == [folder]


def test_a_run_of_unknown_age_is_not_old(state: State):
    made("a-1").token.unlink()
    found, left = remove.prunable(older_than_s=0, now_ns=time.time_ns() + 10**18)
    assert found == [] and left == ["a-1 is left alone: when it was started is not known"]


def test_a_file_with_two_names_counts_once(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"x" * 8192)
    once = remove.size_of(tmp_path)
    os.link(tmp_path / "a", tmp_path / "b")
    (tmp_path / "root").symlink_to("/usr")
    assert 8192 <= once == remove.size_of(tmp_path)


def test_entries_without_a_folder_are_forgotten_unless_their_disk_is_away(state: State, tmp_path: Path):
    gone, away = made("gone-1", tmp_path / "gone"), made("away-1", tmp_path / "disk" / "away")
    here = made("here-1", tmp_path / "here")
    gone.path.rename(tmp_path / "elsewhere")
    (tmp_path / "disk").rename(tmp_path / "unplugged")
    assert run_registry.forgotten() == ["gone-1"]
    assert main.run(["prune", "--yes"]) == 0
    assert sorted(os.listdir(tmp_path / "home" / "index")) == [away.run_id, here.run_id]


def test_nobody_is_asked_in_a_pipe(state: State, capsys: pytest.CaptureFixture[str]):
    run = made("one-1")
    assert main.run(["rm", "one-1"]) == 2
    captured = capsys.readouterr()
    assert "MiB" in captured.out and "no terminal to ask on" in captured.err and run.path.exists()
    assert main.run(["rm", "one-1", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["removed"] is False and run.path.exists()
    assert main.run(["rm", "one-1", "one-1", "--yes"]) == 0
    assert not run.path.exists() and "removed: 1 run, " in capsys.readouterr().err
    assert main.run(["rm", "one-1", "--yes"]) == 2, "it is no longer there"
