"""The plugin of Reduction Server in an image: real shared libraries with symbols of several ages."""

import shutil
import subprocess
import sys

import pytest
from fakes.vertex.plugin import build

from muster.backends.vertex.on_host import reduction_plugin as plugin

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")


@pytest.mark.parametrize(
    ("versions", "fits", "said"),
    [
        ((4, 5), False, "has the symbols v4, v5, and NCCL looks for v6 to v12"),
        ((5, 6), True, "has the symbols v6, which NCCL loads"),
        ((8, 9), True, "v9"),
        ((13,), False, "has the symbols v13"),
        ((), False, "has the symbols none"),
    ],
)
def test_its_age_is_read_from_its_symbols(tmp_path, versions, fits, said):
    found, sentence = plugin.verdict(build(tmp_path, versions))
    assert found is fits and said in sentence
    assert plugin.versions(tmp_path / plugin.LIBRARY) == sorted(versions)


def test_an_image_without_it():
    fits, sentence = plugin.verdict(None)
    assert not fits and "google-reduction-server" in sentence


def test_as_a_program_in_the_image(tmp_path):
    build(tmp_path, (8,))
    argv = [sys.executable, "-m", "muster.backends.vertex.on_host.reduction_plugin"]
    done = subprocess.run(argv, env={"LD_LIBRARY_PATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "which NCCL loads" in done.stdout
