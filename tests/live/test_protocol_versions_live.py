"""Two versions of Muster in one run: whoever meets the other names both, and starts nothing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import RUN_ID, LiveRun, spec_of

import muster
from muster.protocol.client import AskStatus, StopRun
from muster.protocol.version import MINE

pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]

OURS = f"protocol {MINE.protocol} (muster {MINE.muster})"
NEWER = f"protocol {MINE.protocol + 1} (muster {MINE.muster})"
ASK = """
import sys
from pathlib import Path
from muster.app.inspect.supervisor_client import request_here
from muster.core.errors import MusterError
from muster.protocol.client import AskStatus
from muster.storage.run_registry import RunDir
try:
    request_here(RunDir(path=Path(sys.argv[1]), run_id=sys.argv[2]), AskStatus())
except MusterError as error:
    sys.exit(f"{error.exit_code}: {error}")
"""


@pytest.fixture
def newer(tmp_path):
    """The environment of processes of the next version."""
    source = tmp_path / "newer"
    shutil.copytree(Path(muster.__file__).parent, source / "muster", ignore=shutil.ignore_patterns("__pycache__"))
    version = source / "muster" / "protocol" / "version.py"
    given = version.read_text()
    version.write_text(given.replace(f"\nPROTOCOL = {MINE.protocol}\n", f"\nPROTOCOL = {MINE.protocol + 1}\n"))
    assert version.read_text() != given
    return {**os.environ, "PYTHONPATH": str(source)}


def test_a_host_and_a_command_of_another_version_are_refused(tmp_path, newer):
    with LiveRun(tmp_path / "run", spec_of()) as run:
        run.start_supervisor()
        run.wait_until(lambda: (run.dir / "lease.json").exists(), "a supervisor")
        argv = [sys.executable, "-m", "muster.agent.watchdog", "--run-dir", str(run.dir), "--run-id", RUN_ID]
        host = subprocess.run(
            [*argv, "--host", "host-0", "--bind", "127.0.0.1"], env=newer, capture_output=True, text=True, timeout=60
        )
        assert host.returncode == 2, host.stderr
        assert host.stderr == f"error: host-0 speaks {NEWER}, the run's supervisor speaks {OURS}\n"
        assert not list((run.dir / "logs").glob("forkserver*")), "nothing was started"

        command = [sys.executable, "-c", ASK, str(run.dir), RUN_ID]
        asked = subprocess.run(command, env=newer, capture_output=True, text=True, timeout=60)
        assert asked.stderr == f"2: this command speaks {NEWER}, the run's supervisor speaks {OURS}\n"

        assert run.tell(AskStatus()).phase == "starting", "the run waits for a host of its own version"
        run.tell(StopRun(force=True))
        assert run.supervisor.wait(timeout=30) == 130
