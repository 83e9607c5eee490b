"""Init program of every pod of a run: the run file goes from its volume into the run's folder, and where the run lives.

Run as ``python -m muster.backends.gke.pod.init_container --run-dir DIR --run-id ID [--home URI]``. On a claim existing
files stay: a replaced supervisor's successor finds the folder unchanged, and a corrected run file (another submission)
replaces the old one. Where the run lives in a bucket the folder is the pod's own: its file ``home`` names the bucket's,
and what a restart put there since the submission is fetched.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from pathlib import Path

from muster.backends import code_bundle
from muster.core import resolved_file
from muster.core.errors import AccessError, BackendError, MusterError
from muster.core.resolved_file import DamagedRunFile
from muster.storage import run_registry
from muster.storage.home import HOME_FILE, open_home

RUN_FILES = Path("/etc/muster/run")
CODE = "code.tar.gz"
"""A file of the config map: the user's own code, where the run has any."""
SUBMISSION = "submission"
"""A file of the config map: which submission of the run it belongs to."""
PATIENCE_S = 180.0
"""A fresh pod's account may be refused for a while: GKE's metadata server has to learn of it."""
RETRY_S = 3.0


def place(run_dir: Path, *, run_id: str, home: str | None = None, run_files: Path = RUN_FILES) -> list[str]:
    """Create what is missing in ``run_dir`` and bring the run file up to date; return the names written.

    Raises:
        UsageError: a run is there, in a format that this version does not read.
        AccessError, BackendError: the home cannot be read.
    """
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    if run_registry.existing_id(run_dir) is not None:
        run_registry.check_format(run_dir)
    files = {"format": f"{run_registry.FORMAT}\n".encode()}
    files["run.yaml"] = (run_files / "run.yaml").read_bytes()
    submitted = resolved_file.sealed((run_files / resolved_file.NAME).read_text())
    files[resolved_file.NAME] = submitted.encode()
    if home is not None:
        files[HOME_FILE] = f"{home}\n".encode()
    files["run_id"] = f"{run_id}\n".encode()
    files["job.json"] = (json.dumps({"version": 1, "run_id": run_id, "backend": "gke"}) + "\n").encode()
    # Files of an older submission are replaced; what a restart on held hosts wrote after this one stays.
    number = (run_files / SUBMISSION).read_bytes() if (run_files / SUBMISSION).exists() else b"1"
    files[SUBMISSION] = number
    newer = _read(run_dir / SUBMISSION) != number
    if newer and (run_files / CODE).exists():
        code_bundle.unpack((run_files / CODE).read_bytes(), run_dir)
    # Of a claim's file that a restart wrote the supervisor alone knows the contents; it writes a damaged one anew.
    damaged = {resolved_file.NAME} if _is_damaged(run_dir, None if home is not None else submitted) else set()
    written = [name for name, data in files.items() if _written(run_dir / name, data, replace=newer or name in damaged)]
    return [*written, "what a restart changed"] if _fetched(run_dir) else written


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


def _fetched(run_dir: Path) -> bool:
    """Whether the home had a newer run file of the same submission; it is in ``run_dir`` then."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return open_home(run_dir).fetch()
        except (AccessError, BackendError) as error:
            if time.monotonic() > until:
                raise
            print(f"waiting for the bucket: {error}", file=sys.stderr, flush=True)
            time.sleep(RETRY_S)


def _is_damaged(run_dir: Path, only: str | None) -> bool:
    """``only``: where it had this text's checksum, if given."""
    try:
        resolved_file.read(run_dir)
    except DamagedRunFile as error:
        data = _read(run_dir / resolved_file.NAME) or b""
        if only is not None and not resolved_file.names(data, resolved_file.unsealed(only.encode())):
            return False
        print(f"{error}: the submitted one takes its place", file=sys.stderr)
        resolved_file.set_aside(run_dir)
        return True
    except OSError:
        pass
    return False


def _written(target: Path, data: bytes, *, replace: bool) -> bool:
    """Several pods may do this at once, with the same contents: a reader never sees half a file."""
    if target.exists() and (not replace or _read(target) == data):
        return False
    half = target.with_name(f".{target.name}.{socket.gethostname()}.{os.getpid()}")
    descriptor = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    os.replace(half, target)
    return True


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


if __name__ == "__main__":
    raise SystemExit(main())
