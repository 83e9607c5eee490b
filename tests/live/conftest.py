"""Live tests import their harness by name; what several files need is made once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("gcsfuse_mounts")


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """Unfailed runs, one of each course for all the files that a worker takes."""
    from chaos import References

    return References(tmp_path_factory)


@pytest.fixture
def disk(tmp_path):
    """A file system of its own at ``disk`` in the test's folder, which can be filled and freed; a machine that mounts
    none skips the test. Ask for it before ``shell``, whose runs are then ended while it is still there."""
    from muster.chaos.network import Disk
    from muster.core.errors import UsageError

    found = Disk(tmp_path / "disk")
    try:
        found.up()
    except UsageError as error:
        pytest.skip(str(error))
    yield found
    found.down()


@pytest.fixture
def shell(tmp_path):
    """In a folder with a run file; its runs are taken down."""
    from verbs import MUSTER, RUN_FILE, Shell

    (tmp_path / "run.yaml").write_text(RUN_FILE)
    found = Shell(tmp_path)
    yield found
    for folder in tmp_path.glob("**/run_id"):
        subprocess.run(
            [*MUSTER, "down", str(folder.parent)], cwd=tmp_path, env=found.env, capture_output=True, check=False
        )


@pytest.fixture
def seed():
    """Of a test that draws at random."""
    found = int(os.environ.get("MUSTER_CHAOS_SEED", "20261121"))
    print(f"MUSTER_CHAOS_SEED={found}")
    return found


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    from browser import Browser

    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()
