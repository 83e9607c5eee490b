"""Live tests import their harness by name; what several files need is made once."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """Unfailed runs, one of each course for all the files that a worker takes."""
    from chaos import References

    return References(tmp_path_factory)


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
