"""Misdeeds of a rank, done on order: what ``muster drill`` breaks inside a training process.

Armed only where ``MUSTER_DRILL`` is set in the environment, which the drill does for its own run and nobody else;
otherwise ``arm`` does nothing and the loop is untouched. An order is a file, ``<run_dir>/inject_fault.json``::

    {"fault": "exception", "rank": 1, "always": false}

It is looked for at the start of each step. The rank it names does it once, at the step where it found it first, and
leaves ``inject_fault.<fault>.done`` with that step; with ``always`` it does so each time that step is taken again. ``slow``
stays: each step of that process's attempt takes longer from then on.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from muster.train.data_feed.batch_reader import StepWork
from muster.train.distributed.reduce import local

if TYPE_CHECKING:
    from muster.train.training_run import TrainingRun

#: What only a GPU can do to a rank; ``benchmarks/recovery_gpu.py`` orders them, no drill does.
ON_DEVICE = ("device-memory", "device-assert")
#: Moment -> the deeds that happen there.
AT_START = ("exception", "gil", "livelock", "memory", "not-finite", "reader", "slow", *ON_DEVICE)
AT_REDUCE = ("kill-reduce",)
AT_UPDATE = ("kill-voted",)
AFTER_UPDATE = ("kill-updated",)
BIT = ("flip",)
FAULTS = (*AT_START, *AT_REDUCE, *AT_UPDATE, *AFTER_UPDATE, *BIT)
#: Longer than a kept rank has to stand still where steps are short (``supervise.survivors``).
SLOW_S = 5.0
#: Room beyond what is used, for a rank that is to run out of memory.
MEMORY_LEFT_BYTES = 64 << 20


def install(run: TrainingRun) -> None:
    """Make this rank obey ``inject_fault.json``, where this is a drill."""
    if os.environ.get("MUSTER_DRILL") != "1":
        return
    consensus = FaultRequests(folder=Path(run.context.run_dir), rank=run.context.rank)
    run.reader = _Reader(run.reader, consensus)  # type: ignore[assignment]  # stands in for it
    run.reducer = _Sums(run.reducer, consensus)
    run.optimizer = _Updates(run.optimizer, consensus)


@dataclass
class FaultRequests:
    """What this rank was told to do, and when it is due."""

    folder: Path
    rank: int
    due: str | None = None
    """The deed of the step that is being taken."""
    step: int = 0
    _refused: set[str] = field(default_factory=set)

    def look(self, step: int) -> str | None:
        """The deed that is due at this step, if any; noted before it is done."""
        self.step, self.due = step, None
        try:
            told = json.loads((self.folder / "inject_fault.json").read_text())
        except (OSError, ValueError):
            return None
        if int(told["rank"]) != self.rank or told["fault"] not in FAULTS:
            return None
        done = self.folder / f"inject_fault.{told['fault']}.done"
        try:
            again = bool(told.get("always")) and int(done.read_text()) == step
        except (OSError, ValueError):
            again = False
        if done.exists() and not again:
            return None
        done.write_text(str(step))
        self.due = str(told["fault"])
        return self.due

    def dies(self, moments: tuple[str, ...]) -> None:
        """Die here, by the signal that nobody can catch, if that is the deed."""
        if self.due in moments:
            os.kill(os.getpid(), signal.SIGKILL)


class _Stand:
    """Stands in for a part of the run: everything it does not know is the part's."""

    def __init__(self, part: Any, consensus: FaultRequests) -> None:
        self._part, self._orders = part, consensus

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)


class _Reader(_Stand):
    _slow = False

    def take(self, step: int) -> StepWork:
        """The step's work, after the deeds that come before it."""
        fault = self._orders.look(step)
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
            while True:  # the link's thread goes on beating
                time.sleep(0.01)
        if fault == "memory":
            _run_out_of_memory()
        if fault in ON_DEVICE:
            _break_device(fault)
        if fault == "not-finite":
            first, *rest = work.rounds
            return replace(work, rounds=(replace(first, scale=float("nan")), *rest))
        return work


class _Sums(_Stand):
    def finish(self) -> Any:
        """The peers wait in the reduction for this rank."""
        self._orders.dies(AT_REDUCE)
        return self._part.finish()


class _Updates(_Stand):
    def step(self, **values: Any) -> Any:
        """Every rank knows norm and verdict by now; some have applied the update."""
        self._orders.dies(AT_UPDATE)
        found = self._part.step(**values)
        self._orders.dies(AFTER_UPDATE)
        if self._orders.due in BIT:
            flip_a_bit(self._part.named)
        return found


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
