"""Another user of the machine prepares what a run will use, or takes its name: the run is as if nobody had.

Needs root, to be that user.
"""

import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest
from cluster import RUN_ID, LiveRun, spec_of

from muster.core import environment
from muster.storage import memory_dir

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(240),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user"),
]

NOBODY = 65534
PLANT = """
umask 0 && mkdir "$0" && ln -s "$1" "$0/forkserver.pid" && ln -s "$1" "$0/replicator.json" && shift && cp "$@" "$0"
"""


class SecondUser:
    """Acts as ``nobody``. ``victim`` is a file of the user's that a link of theirs names."""

    def __init__(self, folder: Path) -> None:
        folder.chmod(0o755)
        self.loot = folder / "loot"
        self.loot.mkdir()
        self.victim = folder / "victim"
        self.victim.write_text("precious")
        self.planted: dict[Path, list[str]] = {}

    def keep(self, files) -> None:
        """Files that they got hold of."""
        for file in files:
            shutil.copyfile(file, self.loot / file.name)

    def plant(self, folder: Path) -> None:
        """Make ``folder``: open to all, with links to the victim and what was kept."""
        argv = ["/bin/sh", "-ec", PLANT, folder, self.victim, *(self.loot.iterdir())]
        subprocess.run(argv, user=NOBODY, group=NOBODY, extra_groups=[], check=True)
        self.planted[folder] = sorted(os.listdir(folder))

    def check_nothing_came_of_it(self) -> None:
        assert self.victim.read_text() == "precious"
        for folder, names in self.planted.items():
            assert sorted(os.listdir(folder)) == names
            assert folder.stat().st_uid == NOBODY


@pytest.fixture
def second_user():
    with tempfile.TemporaryDirectory() as folder:
        found = SecondUser(Path(folder))
        yield found
        for planted in found.planted:
            shutil.rmtree(planted, ignore_errors=True)


def guessed(run_dir, run_id, host="host-0"):
    """The memory folder as far as its name follows from the run."""
    return environment.current().memory_root / f"{memory_dir.prefix(run_dir, run_id)}-{host}"


def test_whole_snapshots_that_lie_ready_are_not_restored(tmp_path, second_user):
    with LiveRun(tmp_path / "other", spec_of(**{"training.seed": 1})) as run:
        run.start()
        run.wait_for_step(20)
        run.signal_host("host-0", signal.SIGSTOP)
        second_user.keep(environment.current().memory_root.glob(f"{memory_dir.prefix(run.dir, RUN_ID)}*/own.*.ring"))
        assert len(list(second_user.loot.iterdir())) == 2
    second_user.plant(guessed(tmp_path / "run", RUN_ID))
    with LiveRun(tmp_path / "run", spec_of(**{"training.steps": 30})) as run:
        run.start()
        assert run.wait() == 0, run.story()
        assert run.events("checkpoint.restored") == [], run.story()
        assert sorted(run.losses()) == list(range(1, 31)), run.story()
    second_user.check_nothing_came_of_it()


def test_a_run_goes_on_and_down_beside_a_folder_that_took_its_memorys_name(shell, second_user):
    run_id = shell.run("submit", "run.yaml", "run_dir=there").stdout.strip()
    shell.wait_for_step(3)
    root = environment.current().memory_root
    (ours,) = root.glob(f"{memory_dir.prefix(shell.folder / 'there', run_id)}-host-0*")
    assert ours.stat().st_mode & 0o077 == 0
    shell.run("stop", run_id)
    stopped = shell.status(run_id)
    second_user.keep([shell.folder / "run.yaml"])
    for folder in {ours, guessed(shell.folder / "there", run_id)}:
        second_user.plant(folder)
    shell.run("recover", run_id)
    shell.wait_for_step(stopped["step"] + 2)
    second_user.check_nothing_came_of_it()
    down = shell.run("down", run_id).stderr
    assert "is down" in down
    assert f"{ours} belongs to another user" in down
    assert shell.left(run_id) == []
    assert not set(root.glob(f"{memory_dir.prefix(shell.folder / 'there', run_id)}-*")) - second_user.planted.keys()
    shell.run("down", run_id)
    second_user.check_nothing_came_of_it()
