"""Init program of every pod of a run: the run file and the token go from their volumes into the run folder.

Run as ``python -m muster.backends.gke.place --run-dir DIR``. What is there already stays: a supervisor that was
replaced finds the folder as it left it.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from pathlib import Path

RUN_FILES = Path("/etc/muster/run")
TOKEN = Path("/etc/muster/token/token")


def place(run_dir: Path, *, run_files: Path = RUN_FILES, token: Path = TOKEN) -> list[str]:
    """Create what is missing in ``run_dir``; return the names created."""
    run_dir.mkdir(parents=True, exist_ok=True)
    sources = {name: run_files / name for name in ("run.yaml", "resolved.json")} | {"token": token}
    return [name for name, source in sources.items() if _created(run_dir / name, source)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    created = place(parser.parse_args().run_dir)
    print("placed " + (", ".join(created) or "nothing: all there"), file=sys.stderr)
    return 0


def _created(target: Path, source: Path) -> bool:
    """Several pods may do this at once, with the same contents: a reader never sees half a file."""
    if target.exists():
        return False
    half = target.with_name(f".{target.name}.{socket.gethostname()}.{os.getpid()}")
    descriptor = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(source.read_bytes().strip() if target.name == "token" else source.read_bytes())
    os.replace(half, target)
    return True


if __name__ == "__main__":
    raise SystemExit(main())
