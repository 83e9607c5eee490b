"""Containers of a played job as processes of this machine: started, printing into the job's log, ending it.

Time is the machine's own, and more where somebody sleeps on it: what takes minutes at Vertex takes a moment here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fakes.timeline import EPOCH, Timeline
from fakes.vertex.jobs import Job
from fakes.vertex.service import FakeVertex
from fakes.vertex.workers import Worker

from muster.backends.google.http import Call, Reply

Command = Callable[[Job, Worker, Mapping[str, str]], tuple[Sequence[Sequence[str]], Mapping[str, str]]]
"""What a worker's container runs, and in which environment: programs that live side by side."""


class RealTime:
    """The machine's clock; whoever sleeps on it goes ahead by as much, at once, or ``really`` sleeps."""

    def __init__(self, *, really: bool = False) -> None:
        self._began, self._slept, self.really = time.monotonic(), 0.0, really

    @property
    def now_s(self) -> float:
        return time.monotonic() - self._began + self._slept

    def sleep(self, seconds: float) -> None:
        if self.really:
            time.sleep(seconds)
        else:
            self._slept += seconds

    def monotonic_ns(self) -> int:
        return int(self.now_s * 1e9)

    def wall_ns(self) -> int:
        return int((EPOCH.timestamp() + self.now_s) * 1e9)


@dataclass
class Containers:
    """Set as the service's ``programs`` (``start``, ``stop``); ``settle`` sees what has ended since."""

    command: Command
    service: FakeVertex = field(init=False)
    running: dict[tuple[str, str], list[subprocess.Popen[str]]] = field(default_factory=dict)
    """By the job's number and the worker's name."""
    lock: threading.RLock = field(default_factory=threading.RLock)

    def job_of(self, worker: Worker) -> Job:
        return next(job for job in self.service.jobs.values() if any(one is worker for one in job.workers))

    def start(self, worker: Worker, environment: dict[str, str]) -> None:
        job = self.job_of(worker)
        argvs, env = self.command(job, worker, environment)
        children = []
        for argv in argvs:
            child = subprocess.Popen(
                list(argv), env=dict(env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, start_new_session=True,
            )  # fmt: skip
            threading.Thread(target=self._print, args=(job, worker, child), daemon=True).start()
            children.append(child)
        self.running[job.number, worker.name] = children

    def _print(self, job: Job, worker: Worker, child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        for line in child.stdout:
            with self.lock:
                self.service.prints(job, worker, line.rstrip("\n"))

    def stop(self, worker: Worker, grace_s: float | None) -> None:
        """SIGTERM where this worker gets one, and SIGKILL to everything in the container then."""
        job = self.job_of(worker)
        children = self.running.pop((job.number, worker.name), [])
        if grace_s is not None:
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(first_process(child.pid), signal.SIGTERM)
            until = time.monotonic() + grace_s
            while any(child.poll() is None for child in children) and time.monotonic() < until:
                time.sleep(0.05)
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()

    def settle(self) -> None:
        """A container ends when all its programs have; with the first code that is not 0."""
        with self.lock:
            self.service.timeline.settle()
            for (number, name), children in list(self.running.items()):
                codes = [child.poll() for child in children]
                if None not in codes and (number, name) in self.running:
                    del self.running[number, name]
                    code = next((one for one in codes if one), 0) or 0
                    self.service.jobs[number].exit(name, 128 - code if code < 0 else code)
            self.service.timeline.settle()

    def send(self, call: Call) -> Reply:
        """The service as its clients reach it."""
        with self.lock:
            self.settle()
            return self.service.send(call)


def first_process(pid: int) -> int:
    """Of a container that ``unshare --fork`` has made: its child. Of any other program: itself."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") if Path(f"/proc/{pid}").exists() else [b""]
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split() if words[0] == b"unshare" else []
    return int(children[0]) if children else pid


def timeline(*, really: bool = False) -> tuple[RealTime, Timeline]:
    clock = RealTime(really=really)
    return clock, Timeline(clock)  # type: ignore[arg-type]
