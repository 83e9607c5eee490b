"""Fault injection inside a rank, driven by ``muster drill`` (file format: ``muster.protocol.ranks``).

Installed only in the ranks of a drill (``MUSTER_DRILL``); otherwise the loop is untouched. The request is looked for
at the start of each step. The rank that it names injects the fault once, at the step where it first read the request,
and leaves a file with that step; with ``always`` it does so each time that step is repeated. ``slow`` persists: each
later step of that process's attempt takes longer.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from muster.protocol.ranks import FAULT_FILE, fault_done_file
from muster.train.data_feed.batch_reader import StepWork
from muster.train.distributed.reduce import local
from muster.train.training_run import TrainingRun

#: Faults that only a GPU can have; ``benchmarks/recovery_gpu.py`` requests them, no drill does.
ON_DEVICE = ("device-memory", "device-assert")
#: Where in a step each fault is injected.
AT_START = ("exception", "gil", "livelock", "memory", "not-finite", "reader", "slow", *ON_DEVICE)
AT_REDUCE, AT_UPDATE, AFTER_UPDATE, BIT = "kill-reduce", "kill-voted", "kill-updated", "flip"
FAULTS = (*AT_START, AT_REDUCE, AT_UPDATE, AFTER_UPDATE, BIT)
#: Longer than the longest pause of a retained rank where steps are short (``supervise.recovery.attempts``).
SLOW_S = 5.0
#: Memory left to a rank that is to run out of it.
MEMORY_LEFT_BYTES = 64 << 20


def install(run: TrainingRun) -> None:
    """Make this rank inject the faults that are requested in the run's folder."""
    requests = FaultRequests(folder=Path(run.context.run_dir), rank=run.context.rank)
    run.reader = _Reader(run.reader, requests)  # type: ignore[assignment]  # a stand-in for it
    run.reducer = _Reducer(run.reducer, requests)
    run.optimizer = _Optimizer(run.optimizer, requests)


@dataclass
class FaultRequests:
    """What is requested of this rank, and when it is due."""

    folder: Path
    rank: int
    due: str | None = None
    """The fault of the current step."""

    def look(self, step: int) -> str | None:
        """The fault that is due at this step, if any; recorded before it is injected."""
        self.due = None
        try:
            request = json.loads((self.folder / FAULT_FILE).read_text())
        except (OSError, ValueError):
            return None
        if int(request["rank"]) != self.rank or request["fault"] not in FAULTS:
            return None
        done = self.folder / fault_done_file(request["fault"])
        try:
            again = bool(request.get("always")) and int(done.read_text()) == step
        except (OSError, ValueError):
            again = False
        if done.exists() and not again:
            return None
        done.write_text(str(step))
        self.due = str(request["fault"])
        return self.due

    def die_if_due(self, fault: str) -> None:
        """SIGKILL this process if ``fault`` is due."""
        if self.due == fault:
            os.kill(os.getpid(), signal.SIGKILL)


class _StandIn:
    """Wraps a part of the run: what it does not define is the part's own."""

    def __init__(self, part: Any, requests: FaultRequests) -> None:
        self._part, self._requests = part, requests

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)


class _Reader(_StandIn):
    _slow = False

    def take(self, step: int) -> StepWork:
        """The step's work, after the faults that precede it."""
        fault = self._requests.look(step)
        self._slow = self._slow or fault == "slow"
        if self._slow:
            time.sleep(SLOW_S)
        if fault == "reader":
            self._part._make = _unreadable  # its thread fails at the next step that it reads ahead
        work: StepWork = self._part.take(step)
        if fault == "exception":
            raise ValueError(f"the sample of step {step} cannot be read")
        if fault == "gil":
            ctypes.PyDLL(None).sleep(3600)  # a PyDLL call keeps the GIL: no thread of this process runs
        if fault == "livelock":
            while True:  # the connection's thread still answers the agent
                time.sleep(0.01)
        if fault == "memory":
            _run_out_of_memory()
        if fault in ON_DEVICE:
            _break_device(fault)
        if fault == "not-finite":
            first, *rest = work.rounds
            return replace(work, rounds=(replace(first, scale=float("nan")), *rest))
        return work


class _Reducer(_StandIn):
    def finish(self) -> Any:
        """The peers wait in the reduction for this rank."""
        self._requests.die_if_due(AT_REDUCE)
        return self._part.finish()


class _Optimizer(_StandIn):
    def step(self, **values: Any) -> Any:
        """Every rank knows the norm and the verdict by now; some have applied the update."""
        self._requests.die_if_due(AT_UPDATE)
        result = self._part.step(**values)
        self._requests.die_if_due(AFTER_UPDATE)
        if self._requests.due == BIT:
            flip_a_bit(self._part.named)
        return result


def flip_a_bit(named: Mapping[str, torch.Tensor]) -> None:
    """Change the last bit of one weight of this rank, as a cosmic ray or a bad memory cell would."""
    parts = (local(parameter.detach()) for parameter in named.values())
    bits = next(part for part in parts if part.numel()).view(torch.uint8)
    bits.view(-1)[0] ^= 1


def _unreadable(step: int) -> StepWork:
    raise OSError(f"the data of step {step} cannot be read")


def _break_device(fault: str) -> None:
    """Ask a GPU for more than any has, or make a kernel fail, which its context does not survive."""
    if fault == "device-memory":
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    index = torch.full((1,), 1 << 20, device="cuda")
    torch.zeros(1, device="cuda")[index].sum().item()  # out of bounds: "device-side assert triggered"


def _run_out_of_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_LEFT_BYTES,) * 2)
    torch.ones(1 << 28)
