"""``python -m muster.agent.ranks.setup_program``: the run file's ``setup``, once on a host, before its ranks start.

What its programs write goes to this program's stderr, the host's log of the setup. Where it fails one line comes out on
stdout (``protocol.pipes.DataFailed``). It ends with its programs: by SIGTERM, or after ``setup_timeout_s``. A second
one waits for the first (an agent was replaced meanwhile), and does nothing where that was done.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from muster.config.spec import RunSpec
from muster.core import redact, resolved_file
from muster.core.errors import MusterError, UsageError
from muster.protocol.codec import encode
from muster.protocol.pipes import DataFailed

#: From SIGTERM to SIGKILL.
GRACE_S = 5.0
#: Of a log's end, in which the last words are looked for.
TAIL_BYTES = 4096
LOOK_EVERY_S = 0.2


def steps_of(spec: RunSpec) -> list[list[str]]:
    """Argument lists, in their order."""
    return [[spec.setup]] if isinstance(spec.setup, str) else spec.setup or []


def run(spec: RunSpec, run_dir: Path, log: Path) -> None:
    """Run each step in the work folder (else the run's), with this process's Python first on the path.

    Raises:
        UsageError: a step cannot be started, fails, or takes too long; with its last words.
    """
    folder = Path(spec.workdir) if spec.workdir is not None else run_dir
    python = {"PYTHONUNBUFFERED": "1"}  # or its last words would not be the last
    env = {
        **python,
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
    }
    until = time.monotonic() + spec.setup_timeout_s
    for argv in steps_of(spec):
        words = " ".join(argv)
        program = str(folder / argv[0]) if isinstance(spec.setup, str) else argv[0]
        print(f"$ {redact.redact(words)}", file=sys.stderr, flush=True)
        began = log.stat().st_size if log.exists() else 0
        code = _finished([program, *argv[1:]], folder, env, until)
        if code == 0:
            continue
        said = _last_words(log, began)
        ended = f"took longer than setup_timeout_s={spec.setup_timeout_s:g}" if code is None else _end_in_words(code)
        raise UsageError(
            f"setup: {redact.redact(words)[:200]} {ended}" + (f": {said}" if said else ""), hint=f"see {log}"
        )


def _finished(argv: list[str], folder: Path, env: dict[str, str], until: float) -> int | None:
    """The exit code; None: it took too long, and was ended."""
    try:
        child = subprocess.Popen(
            argv, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(), process_group=0
        )
    except OSError as error:
        raise UsageError(f"setup: cannot start {argv[0]}: {error.strerror}") from error
    try:
        return child.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
    finally:  # with the processes that it left behind
        _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is not None:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_S)
            return


def _end_in_words(code: int) -> str:
    return f"ended with code {code}" if code >= 0 else f"was ended by signal {-code}"


def _last_words(log: Path, began: int) -> str:
    try:
        with open(log, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(began, size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    said = [line.strip() for line in lines if line.strip()]
    return redact.redact(said[-1][:500]) if said else ""


def _leave(_number: int, _frame: FrameType | None) -> None:
    sys.exit(143)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--done", type=Path, required=True, help="file that says which setup this host has had")
    parser.add_argument("--digest", required=True)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _leave)
    try:
        spec = RunSpec.model_validate_json(resolved_file.read(arguments.run_dir, patient=True))
        redact.hide_values(os.environ.get(name, "") for name in spec.secrets)
        with open(arguments.done, "a+") as done:
            _wait_for(done.fileno(), spec.setup_timeout_s + GRACE_S)
            done.seek(0)
            if done.read() == arguments.digest:
                return 0
            run(spec, arguments.run_dir, arguments.log)
            done.truncate(0)
            done.write(arguments.digest)
        return 0
    except MusterError as error:
        print(encode(DataFailed(error=str(error), exit_code=error.exit_code, hint=error.hint)).decode(), flush=True)
        return 1


def _wait_for(fd: int, limit_s: float) -> None:
    """Take the lock. Its holder ends within this time."""
    until = time.monotonic() + limit_s
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise UsageError("setup: another one on this host does not end") from None
            time.sleep(LOOK_EVERY_S)


if __name__ == "__main__":
    sys.exit(main())
