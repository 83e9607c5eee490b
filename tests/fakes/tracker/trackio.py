"""A tracker that hangs, refuses and comes back, called as trackio is. ``TRACKIO_FAKE`` names its folder.

``mode`` there says what each call does: ``ok``, ``init hangs``, ``log hangs``, ``refuses`` (as requests does where no
server listens). A call that hangs goes on once the mode has changed. ``calls.jsonl`` has what it accepted.
"""

import json
import os
import time
from pathlib import Path

_FOLDER = Path(os.environ["TRACKIO_FAKE"])


def _call(call, **given):
    while (mode := (_FOLDER / "mode").read_text().strip()) == f"{call} hangs":
        time.sleep(0.05)
    if mode == "refuses":
        raise ConnectionError("[Errno 111] Connection refused")
    line = json.dumps({"call": call, "pid": os.getpid(), **given}) + "\n"
    with open(_FOLDER / "calls.jsonl", "ab", buffering=0) as file:
        file.write(line.encode())


def init(*, project, name, resume="never", config=None, **_others):
    _call("init", project=project, name=name, resume=resume, config=config)


def log(metrics, step=None):
    _call("log", metrics=metrics, step=step)


def finish():
    _call("finish")
