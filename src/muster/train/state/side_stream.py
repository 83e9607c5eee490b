"""Copies that run during the next step: its forward and backward passes read the state, and change nothing.

From a GPU on a stream of their own, on the CPU in a thread. The first ran on one H100, where overlap was not
measured; tests replace ``torch.cuda`` by one that keeps the order of what it is asked for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch


class SideStream:
    """A stream of its own for the copies of one device's state."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._done: torch.cuda.Event | None = None

    def copy(self, copy: Callable[[], None]) -> torch.cuda.Event:
        """Have ``copy`` enqueued behind what computes now; the event that follows it. The host waits for nothing.

        The tensors that it reads must live on and stay as they are until then (``before_change``).
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copy()
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(self._stream)
        self._done = done
        return done

    def before_change(self) -> None:
        """What computes next, on the device, waits for the last copy."""
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)
            self._done = None


class ThreadCopy:
    """One copy that another thread makes: it calls this; code that is about to change what is copied waits."""

    def __init__(self, copy: Callable[[], None]) -> None:
        self._copy, self._ended, self._seconds = copy, threading.Event(), 0.0

    def __call__(self) -> None:
        began = time.monotonic()
        try:
            self._copy()
        finally:
            self._seconds = time.monotonic() - began
            self._ended.set()

    def wait(self) -> float:
        """Until it has ended, well or not; the seconds that it took."""
        self._ended.wait()
        return self._seconds
