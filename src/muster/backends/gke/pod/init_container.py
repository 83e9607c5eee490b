"""Init program of every pod of a run: the run file goes from its volume into the run's folder, and where the run lives.

Run as ``python -m muster.backends.gke.pod.init_container --run-dir DIR --run-id ID [--home URI]``. See
``backends.run_folder`` for what happens to files that are there already.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from muster.backends import run_folder
from muster.backends.run_folder import RunFiles
from muster.core import resolved_file
from muster.core.errors import MusterError

RUN_FILES = Path("/etc/muster/run")
CODE = "code.tar.gz"
"""A file of the config map: the user's own code, where the run has any."""
SUBMISSION = "submission"
"""A file of the config map: which submission of the run it belongs to."""


def place(run_dir: Path, *, run_id: str, home: str | None = None, run_files: Path = RUN_FILES) -> list[str]:
    """Place the config map's files; as ``run_folder.place``."""
    files = RunFiles(
        resolved=(run_files / resolved_file.NAME).read_text(),
        run_yaml=(run_files / "run.yaml").read_text(),
        code=(run_files / CODE).read_bytes() if (run_files / CODE).exists() else None,
    )
    number = (run_files / SUBMISSION).read_text() if (run_files / SUBMISSION).exists() else "1"
    return run_folder.place(run_dir, run_id=run_id, backend="gke", files=files, submission=number, home=home)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--home", help="URI of the bucket's folder that the run lives in; default: the run's folder")
    arguments = parser.parse_args()
    try:
        written = place(arguments.run_dir, run_id=arguments.run_id, home=arguments.home)
    except MusterError as error:
        print(f"error: {error}\nhint: {error.hint}", file=sys.stderr)
        return error.exit_code
    print("placed " + (", ".join(written) or "nothing: all there"), file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
