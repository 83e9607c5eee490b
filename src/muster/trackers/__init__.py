"""Copies of a run's figures for trackers, by a process on the host of rank 0 that reads the run's event files.

No rank waits for a tracker. The event files are the queue: what a tracker has not accepted stays in them.
"""

from __future__ import annotations

import importlib.util

from muster.config.spec import RunSpec

TENSORBOARD = "tensorboard"


def wanted(spec: RunSpec) -> list[str]:
    """Names of the run file's trackers. TensorBoard is one by default where it is installed, but for a user's loop."""
    asked, service = spec.output.tensorboard, spec.output.tracker
    if asked is None:
        asked = spec.command is None and importlib.util.find_spec(TENSORBOARD) is not None
    return [*([TENSORBOARD] if asked else []), *([] if service == "none" else [service])]
