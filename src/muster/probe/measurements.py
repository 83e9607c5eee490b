"""Measurements with limits: each in a thread of its own, given up (not waited for) when its time is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from muster.core.typed_json import encode
from muster.health.machine.report import BEGIN, END, ProbeLine

#: Measures one thing; the line's name and duration are filled in.
Measurement = Callable[[], ProbeLine]


class Output:
    """Lines to a descriptor, each written whole by one call."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write, self._lock = write, threading.Lock()
        self._open: set[str] = set()
        self.sent: list[ProbeLine] = []

    def begin(self, plan: tuple[str, ...]) -> None:
        self._open = set(plan)
        self._put(ProbeLine(rung=BEGIN, plan=plan))

    def add(self, line: ProbeLine) -> bool:
        """Write the measurement's line, unless it has one: one that was given up may end later."""
        with self._lock:
            if line.rung not in self._open:
                return False
            self._open.discard(line.rung)
            self.sent.append(line)
            self._put(line)
            return True

    def awaits(self, name: str) -> bool:
        """Whether the measurement has no line yet."""
        return name in self._open

    def end(self) -> None:
        with self._lock:
            self._put(ProbeLine(rung=END))

    def _put(self, line: ProbeLine) -> None:
        self._write(encode(line) + b"\n")


def run_together(measurements: Mapping[str, Measurement], output: Output, *, limit_s: float) -> None:
    """All at once; returns when all have ended, or after ``limit_s`` with the rest given up."""
    deadline = time.monotonic() + limit_s
    threads = {name: _start(name, measure, output) for name, measure in measurements.items()}
    for name, thread in threads.items():
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            output.add(ProbeLine(rung=name, seconds=limit_s, failed=f"it did not end within {limit_s:g} s"))


def run_in_turn(measurements: Mapping[str, tuple[Measurement, float]], output: Output) -> None:
    """One after the other, since they load the same GPUs. After one that did not end, the rest is not tried."""
    hung = ""
    for name, (measure, limit_s) in measurements.items():
        if not output.awaits(name):
            continue
        if hung:
            output.add(ProbeLine(rung=name, failed=f"not tried: {hung} did not end"))
            continue
        thread = _start(name, measure, output)
        thread.join(limit_s)
        if thread.is_alive() and output.add(
            ProbeLine(rung=name, seconds=limit_s, failed=f"it did not end within {limit_s:g} s")
        ):
            hung = name


def _start(name: str, measure: Measurement, output: Output) -> threading.Thread:
    def look() -> None:
        begun = time.monotonic()
        try:
            line = measure()
        except Exception as error:  # noqa: BLE001 (any error of a driver or a library: nothing was learned)
            text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            line = ProbeLine(rung=name, failed=text)
        output.add(replace(line, rung=name, seconds=time.monotonic() - begun))

    thread = threading.Thread(target=look, name=name, daemon=True)
    thread.start()
    return thread
