"""What a run writes is its owner's alone, and a folder in which others can write is not taken."""

import contextlib
import os
import stat

import pytest

from muster.core import processes
from muster.core.errors import UsageError
from muster.core.event_log import EventLog
from muster.data import cache
from muster.storage import job_record, memory_dir, run_registry


@pytest.fixture(autouse=True)
def lax_umask():
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def open_to_others(folder):
    """Every path below it, itself included, whose mode gives others something."""
    return [path for path in (folder, *folder.rglob("*")) if stat.S_IMODE(path.lstat().st_mode) & 0o077]


def test_a_runs_folder_its_files_and_the_registry_are_its_owners_alone(home, tmp_path):
    run = run_registry.create("a-run", tmp_path / "there" / "run", run_file="name: a\n", resolved="{}\n")
    run_registry.create("b-run", home / "runs" / "b-run", run_file="name: b\n", resolved="{}\n")
    with job_record.locked(run.path):
        record = job_record.JobRecord(run_id="a-run", backend="local", submission=1, submitted_wall_ns=1)
        job_record.write(run.path, record)
    processes.open_log(run.logs / "agent.log").close()
    with contextlib.closing(EventLog("a-run", run.events, "client", 0)) as log:
        log.append("run.message", detail={"text": "hello"})
    assert open_to_others(home) == []
    assert open_to_others(tmp_path / "there") == []


def test_an_existing_folder_keeps_its_readers(home, tmp_path):
    (tmp_path / "run").mkdir(mode=0o755)
    run = run_registry.create("a-run", tmp_path / "run", run_file="", resolved="{}")
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o755


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_a_folder_in_which_others_can_write_is_refused(home, tmp_path, mode):
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(mode)
    with pytest.raises(UsageError, match=f"others can write in .*mode {mode:04o}") as refused:
        run_registry.create("a-run", tmp_path / "run", run_file="", resolved="{}")
    assert "chmod go-w" in refused.value.hint
    assert not any((tmp_path / "run").iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_another_users_folder_is_refused(home, tmp_path):
    (tmp_path / "run").mkdir(mode=0o700)
    os.chown(tmp_path / "run", 12345, 12345)
    with pytest.raises(UsageError, match="belongs to another user"):
        run_registry.create("a-run", tmp_path / "run", run_file="", resolved="{}")
    assert not any((tmp_path / "run").iterdir())


def test_a_share_that_gives_every_file_to_one_user_is_taken(home, tmp_path, monkeypatch):
    (tmp_path / "run").mkdir(mode=0o700)
    ours = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: ours + 1)  # who writes is not who owns what was written
    run_registry.create("a-run", tmp_path / "run", run_file="", resolved="{}")


def test_a_planted_temporary_name_is_not_written_through(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    monkeypatch.setattr("secrets.token_hex", lambda count: "guessed")
    (tmp_path / ".job.json.guessed.tmp").symlink_to(victim)
    with pytest.raises(FileExistsError):
        run_registry.replace_text(tmp_path / "job.json", "{}")
    assert victim.read_text() == "precious"


def test_a_log_is_not_written_through_a_link(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "agent.log").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        processes.open_log(tmp_path / "agent.log")
    assert victim.read_text() == "precious"


def test_another_users_folder_with_the_runs_name_is_no_leftover_of_it(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSTER_MEMORY_DIR", str(tmp_path))
    planted = tmp_path / f"{memory_dir.prefix(tmp_path / 'run', 'a-run')}-host-0"
    planted.mkdir()
    assert memory_dir.left_over(tmp_path / "run", "a-run") == ([planted], [])
    ours = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: ours + 1)
    assert memory_dir.left_over(tmp_path / "run", "a-run") == ([], [planted])


def test_prepared_data_follow_the_umask(tmp_path):
    """A cache may be shared on purpose; here nobody is kept out."""

    def build(data, kept):
        (data / "rows").write_text("x")

    cache.build_once(tmp_path / "cache" / "data", build, lambda *_: None)
    assert {stat.S_IMODE(path.stat().st_mode) & 0o066 for path in (tmp_path / "cache" / "data").rglob("*")} == {0o066}
