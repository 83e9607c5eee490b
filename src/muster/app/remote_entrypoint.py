"""``python -m muster.app.remote_entrypoint --run-dir DIR``: requests about a run, answered inside its pod.

One JSON line comes in on standard input, one goes out. ``{"do": "ask", "message": {...}, "resolved": TEXT}`` speaks to
the supervisor (after putting run file and code in place, where there are any); ``{"do": "read", "folder": "logs",
"after": {NAME: OFFSET}}`` answers what the folder's files hold beyond the offsets. No further authentication:
who may run commands in the pod may read its token.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from muster.app.inspect.supervisor_client import request_here
from muster.backends import code_bundle
from muster.core.errors import MusterError, UsageError
from muster.storage import run_registry
from muster.storage.run_registry import RunDir

FOLDERS = {"logs": ".log", "events": ".jsonl"}
LARGEST_BYTES = 4 * 1024 * 1024
"""In one answer; the rest comes with the next question."""


def answer(run: RunDir, question: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to one question.

    Raises:
        UsageError: the question is not known here.
        SupervisorUnreachable: there is no supervisor.
    """
    if question.get("do") == "ask":
        if packed := question.get("code"):
            code_bundle.unpack(base64.b64decode(packed), run.path)
        if text := question.get("resolved"):
            run_registry.replace_text(run.resolved, str(text))
        return {"answer": request_here(run, question["message"], timeout_s=float(question.get("timeout_s", 5.0)))}
    if question.get("do") == "read" and question.get("folder") in FOLDERS:
        return {"files": read(run.path / question["folder"], FOLDERS[question["folder"]], question.get("after", {}))}
    raise UsageError(f"cannot do {question.get('do')!r} {question.get('folder', '')}".rstrip())


def read(folder: Path, suffix: str, after: Mapping[str, int]) -> list[dict[str, Any]]:
    """Name, offset and bytes (base64) of each file beyond its offset; a truncated one is read from its start."""
    result: list[dict[str, Any]] = []
    left = LARGEST_BYTES
    for path in sorted(folder.glob(f"*{suffix}")) if folder.is_dir() else []:
        start = int(after.get(path.name, 0))
        start = start if start <= path.stat().st_size else 0
        with open(path, "rb") as file:
            file.seek(start)
            data = file.read(left)
        left -= len(data)
        if data:
            result.append({"name": path.name, "offset": start, "data": base64.b64encode(data).decode()})
        if left <= 0:
            break
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, required=True)
    path = parser.parse_args().run_dir
    try:
        result = answer(
            RunDir(path=path, run_id=run_registry.existing_id(path) or ""), json.loads(sys.stdin.readline())
        )
    except MusterError as error:
        result = {"error": str(error), "hint": error.hint, "kind": type(error).__name__}
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
