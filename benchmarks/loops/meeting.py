"""Systems that are measured side by side begin together: rank 0 of each waits behind its warm-up for the others."""

import os
import time
from pathlib import Path

#: A folder, and how many are to meet there; unset: nobody waits.
FOLDER, COUNT = "MUSTER_BENCH_MEETING", "MUSTER_BENCH_MEETING_COUNT"
WARMUP = 3


def meet(steps_done):
    """Called by rank 0 at the end of every step."""
    folder = os.environ.get(FOLDER)
    if folder is None or steps_done != WARMUP:
        return
    (Path(folder) / str(os.getpid())).touch()
    while len(os.listdir(folder)) < int(os.environ[COUNT]):
        time.sleep(0.01)
