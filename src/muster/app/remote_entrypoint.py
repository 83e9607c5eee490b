"""``python -m muster.app.remote_entrypoint --run-dir DIR``: requests about a run, answered inside its pod.

One message comes in on standard input, one goes out (``protocol.pipes``). ``AskInPod`` speaks to the supervisor (after
putting run file and code in place, where there are any); ``ReadFolder`` is answered with what the folder's files hold
beyond the offsets. A pod whose run lives in a bucket has its own files only: events are brought from there first, into
a folder next to its own. No further authentication: who may run commands in the pod may read its token.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import fcntl
import sys
from collections.abc import Mapping
from pathlib import Path

from muster.app.inspect.supervisor_client import request_here
from muster.backends import code_bundle
from muster.core import resolved_file
from muster.core.errors import MusterError
from muster.core.typed_json import Unreadable
from muster.protocol.client import FROM_CLIENT
from muster.protocol.codec import encode, reader_of
from muster.protocol.pipes import TO_POD, FilePart, FileParts, Folder, FromPod, PodError, ReadFolder, ToPod
from muster.storage import run_registry
from muster.storage.home import open_home
from muster.storage.run_registry import RunDir

SUFFIXES: Mapping[Folder, str] = {"logs": ".log", "events": ".jsonl"}
SEEN = "seen"
"""Folder of a run's folder with what was brought for questions."""
LARGEST_BYTES = 4 * 1024 * 1024
"""In one answer; the rest comes with the next question."""


def answer(run: RunDir, question: ToPod) -> FromPod:
    """The answer to one question.

    Raises:
        Unreadable: a client's message cannot be read.
        SupervisorUnreachable: there is no supervisor.
    """
    if isinstance(question, ReadFolder):
        folder = _events(run) if question.folder == "events" else run.path / question.folder
        return FileParts(files=read(folder, SUFFIXES[question.folder], question.after))
    message = reader_of(FROM_CLIENT)(question.message.encode())
    if question.code is not None:
        code_bundle.unpack(base64.b64decode(question.code), run.path)
    if question.resolved is not None:
        resolved_file.write(run.path, question.resolved)
    return request_here(run, message, timeout_s=question.timeout_s)


def _events(run: RunDir) -> Path:
    """The folder with everybody's events; where the home does not answer, those that were brought before. Damage in the
    home is reported on standard error; where its place is known, a line that is no event takes its place."""
    home = open_home(run.path)
    if home.is_folder:
        return run.events
    seen = run.path / SEEN
    seen.mkdir(mode=0o700, exist_ok=True)
    with open(seen / ".lock", "w") as lock, contextlib.suppress(MusterError):
        fcntl.flock(lock, fcntl.LOCK_EX)  # two questions at once
        home.mirror(seen, on_damage=lambda text: print(text, file=sys.stderr))
    return seen / "events"


def read(folder: Path, suffix: str, after: Mapping[str, int]) -> tuple[FilePart, ...]:
    """Each file beyond its offset; a truncated one is read from its start."""
    result: list[FilePart] = []
    left = LARGEST_BYTES
    for path in sorted(folder.glob(f"*{suffix}")) if folder.is_dir() else []:
        start = after.get(path.name, 0)
        start = start if start <= path.stat().st_size else 0
        with open(path, "rb") as file:
            file.seek(start)
            data = file.read(left)
        left -= len(data)
        if data:
            result.append(FilePart(name=path.name, offset=start, data=base64.b64encode(data).decode()))
        if left <= 0:
            break
    return tuple(result)


def reply(run: RunDir, line: bytes) -> FromPod:
    """To what came in: the answer, or why there is none."""
    try:
        return answer(run, reader_of(TO_POD)(line))
    except Unreadable as error:
        return PodError(error=f"cannot read the question: {error}", hint="another version of Muster asks")
    except MusterError as error:
        return PodError(error=str(error), hint=error.hint)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, required=True)
    path = parser.parse_args().run_dir
    run = RunDir(path=path, run_id=run_registry.existing_id(path) or "")
    print(encode(reply(run, sys.stdin.buffer.readline().strip())).decode(), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
