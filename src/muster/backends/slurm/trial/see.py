"""``python -m muster.backends.slurm.trial.see --folder FOLDER``: what one node sees of what a run needs, in the run's
container where it has one: Muster itself, and the folder that the submitting machine wrote to."""

from __future__ import annotations

import argparse
import json
import platform
import socket
from pathlib import Path

from muster import __version__
from muster.core import environment, processes
from muster.storage.run_registry import replace_text

WORD = "word"


def main() -> None:
    """Write ``seen-NODE.json`` into the folder."""
    parser = argparse.ArgumentParser(description="what this node sees")
    parser.add_argument("--folder", required=True, type=Path)
    folder = parser.parse_args().folder
    node = environment.inherited().get("SLURMD_NODENAME") or socket.gethostname()
    seen = {
        "node": node, "word": (folder / WORD).read_text(), "boot_id": processes.boot_id(),
        "muster": __version__, "python": platform.python_version(),
    }  # fmt: skip
    replace_text(folder / f"seen-{node}.json", json.dumps(seen) + "\n")


if __name__ == "__main__":
    main()
