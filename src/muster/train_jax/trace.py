"""A trace of XLA's own profiler, in place of torch's, which sees nothing of what chips compute."""

from __future__ import annotations

import gzip
import json
import shutil
import tempfile
from pathlib import Path

import jax


class XlaTrace:
    """``train.measurement.live_trace.Recorder`` of this process and its chips.

    Besides the Chrome trace it leaves XLA's, ``NAME.xplane.pb``, which XProf and TensorBoard open.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None

    def start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="muster-trace-"))
        jax.profiler.start_trace(self._folder)

    def stop(self) -> None:
        jax.profiler.stop_trace()

    def export_chrome_trace(self, path: str) -> None:
        """Move what was recorded to ``path``, and XLA's own next to it. Raises OSError where there is none."""
        assert self._folder is not None
        try:
            for found in self._folder.rglob("*.trace.json.gz"):
                with gzip.open(found) as packed:
                    trace = json.load(packed)
                trace["traceEvents"] = [
                    event for event in trace["traceEvents"] if event
                ]  # XLA ends them with an empty one
                Path(path).write_text(json.dumps(trace))
            for found in self._folder.rglob("*.xplane.pb"):
                shutil.copyfile(found, Path(path).with_suffix(".xplane.pb"))
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
