"""Which torch ``setup.sh`` installs: a stand-in for the environment's Python answers, and notes what it is asked."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TORCH = re.search(r"^torch==\S+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[0]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PYTHON = """#!/bin/sh
printf '%s\\n' "$*" >>"$NOTES"
case "$*" in
  *--dry-run*) exit "$INDEX_CODE" ;;      # what torch the usual index has
  "- "*) exit "$INDEX_IS_CPU" ;;          # is it a CPU build
  *"index versions"*) exit "$CPU_INDEX_CODE" ;;
  "-c import torch") exit 1 ;;
esac
"""


def install(folder, **codes):
    """(what was asked of pip, what was said)."""
    for path, text in ((folder / "venv/bin/python", PYTHON), (folder / "bin/nvidia-smi", "#!/bin/sh\nexit 9\n")):
        path.parent.mkdir(parents=True)
        path.write_text(text)
        path.chmod(0o755)
    env = {
        "PATH": f"{folder / 'bin'}:{os.defpath}",
        "NOTES": str(folder / "notes"),
        "MUSTER_VENV": str(folder / "venv"),
    }
    done = subprocess.run([ROOT / "setup.sh", "install"], env=env | codes, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return (folder / "notes").read_text().splitlines(), done.stderr


@pytest.mark.parametrize(
    ("codes", "arguments"),
    [
        ({"INDEX_CODE": "0", "INDEX_IS_CPU": "0"}, TORCH),
        ({"INDEX_CODE": "0", "INDEX_IS_CPU": "1", "CPU_INDEX_CODE": "0"}, f"{TORCH} --index-url {CPU_INDEX}"),
        ({"INDEX_CODE": "0", "INDEX_IS_CPU": "1", "CPU_INDEX_CODE": "1"}, TORCH),
        ({"MUSTER_TORCH": "torch==2.12.0 --no-index"}, "torch==2.12.0 --no-index"),
    ],
    ids=["the usual index has a CPU build", "PyTorch's CPU index", "which does not answer", "as the user says"],
)
def test_which_torch(tmp_path, codes, arguments):
    notes, said = install(tmp_path, **codes)
    assert f"-m pip --disable-pip-version-check install --quiet {arguments}" in notes
    assert f"installing {arguments}" in said
    assert (f"{CPU_INDEX} does not answer" in said) == (codes.get("CPU_INDEX_CODE") == "1")


def test_an_index_that_cannot_be_reached_is_tried_once_and_shortly(tmp_path):
    notes, _ = install(tmp_path, INDEX_CODE="0", INDEX_IS_CPU="1", CPU_INDEX_CODE="1")
    (asked,) = [line for line in notes if "index versions" in line]
    assert "--retries 0 --timeout 10" in asked
