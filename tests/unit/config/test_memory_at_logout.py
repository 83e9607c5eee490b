"""Who is warned that a logout deletes snapshots in memory: as systemd reads its configuration."""

from pathlib import Path

import pytest

from muster.backends.local.launcher import LocalLauncher
from muster.cli.live import display_of
from muster.config import memory_at_logout
from muster.config.memory_at_logout import SHARED_MEMORY, find
from muster.config.spec import RunSpec
from muster.core.types import JobRequest
from muster.storage.run_registry import RunDir

USER = 54321


@pytest.fixture
def system(tmp_path):
    """A machine that systemd has booted."""
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    return tmp_path


def write(system, path, text):
    file = system / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def warned(system, *, root=SHARED_MEMORY, uid=USER):
    return bool(find(root, uid=uid, system=system))


def test_by_default_it_is_deleted_and_said_how_to_keep_it(system):
    (sentence,) = find(SHARED_MEMORY / "mine", uid=USER, system=system)
    assert "empties /dev/shm when you log out" in sentence and "loginctl enable-linger" in sentence


def test_nobody_else_is_warned(system, tmp_path):
    assert not warned(system, root=Path("/tmp"))
    assert not warned(system, uid=0) and not warned(system, uid=999)
    assert not warned(tmp_path / "a container")
    write(system, f"var/lib/systemd/linger/{USER}", "")
    assert not warned(system)


@pytest.mark.parametrize(
    ("files", "deleted"),
    [
        ({"etc/systemd/logind.conf": "[Login]\nRemoveIPC=no\n"}, False),
        ({"etc/systemd/logind.conf": "[Login]\n#RemoveIPC=no\n"}, False),  # what it was built with
        ({"etc/systemd/logind.conf": "[Login]\n#RemoveIPC=no\nRemoveIPC=yes\n"}, True),
        ({"usr/lib/systemd/logind.conf": "[Login]\n#RemoveIPC=yes\n"}, True),
        ({"usr/lib/systemd/logind.conf": "RemoveIPC=no\n", "etc/systemd/logind.conf": "#RemoveIPC=yes\n"}, True),
        ({"etc/systemd/logind.conf.d/10-keep.conf": "[Login]\nRemoveIPC = off\n"}, False),
        ({"etc/systemd/logind.conf.d/10-keep.conf": "[Login]\n#RemoveIPC=no\n"}, True),
        ({"etc/systemd/logind.conf": "RemoveIPC=no\n", "usr/lib/systemd/logind.conf.d/a.conf": "RemoveIPC=1"}, True),
        ({"etc/systemd/logind.conf.d/a.conf": "RemoveIPC=no", "run/systemd/logind.conf.d/b.conf": "RemoveIPC=y"}, True),
        ({"usr/lib/systemd/logind.conf.d/a.conf": "RemoveIPC=no", "etc/systemd/logind.conf.d/a.conf": ""}, True),
    ],
)  # fmt: skip
def test_settings_count_as_systemd_reads_them(system, files, deleted):
    for path, text in files.items():
        write(system, path, text)
    assert warned(system) == deleted


def test_whoever_starts_a_run_here_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(memory_at_logout, "doubts", lambda: ("it will be emptied",))
    request = JobRequest(run_id="r", backend="local", run_dir=str(tmp_path), tasks=(), labels={})
    handle = LocalLauncher().submit(request)
    assert handle.warnings == ("it will be emptied",)
    display = display_of(RunSpec.model_validate({"name": "case", "command": ["train.py"]}))
    display.started(RunDir(tmp_path, "r"), handle.warnings)
    display.open()
    assert "warning: it will be emptied" in capsys.readouterr().err
