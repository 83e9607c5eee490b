"""A rank's profiling: a trace of one step, a memory snapshot, the peak rate of this machine's matmul."""

from __future__ import annotations

import gc
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path

import torch

from muster.catalog import devices
from muster.config.spec import Profile, RunSpec
from muster.protocol.ranks import AgentClient
from muster.protocol.values import TraceSteps
from muster.train.measurement.live_trace import LiveTrace, Recorder, torch_profiler


class Profiler:
    """Traces: of the step that the run file names, and of those that ``muster profile`` asks for (``LiveTrace``).
    Writes ``traces/memory-step-K.rank-R.json``, and ``.pickle`` for pytorch.org/memory_viz, where the run file asks."""

    def __init__(
        self,
        profile: Profile,
        agent: AgentClient,
        *,
        directory: Path,
        rank: int,
        device: torch.device,
        recorder: Callable[[], Recorder] = torch_profiler,
    ) -> None:
        self.profile, self.directory, self.rank, self.device = profile, directory, rank, device
        self._trace = LiveTrace(agent, directory=directory, rank=rank, recorder=recorder)
        if profile.memory_step is not None and device.type == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=100_000)

    def begin(self, step: int) -> None:
        """The step starts."""
        asked = TraceSteps(request="training.profile", steps=1) if self.profile.trace_step == step else None
        self._trace.begin(step, asked)

    def end(self, step: int) -> None:
        """The step ends; write what was requested."""
        self._trace.end(step)
        if self.profile.memory_step == step and self.device.type == "cuda":
            self.directory.mkdir(parents=True, exist_ok=True)
            path = self.directory / f"memory-step-{step}.rank-{self.rank}.json"
            snapshot = torch.cuda.memory._snapshot()
            path.write_text(json.dumps(snapshot, default=str))
            viewed = str(path.with_suffix(".pickle"))  # the only format that the viewer takes
            torch.cuda.memory._dump_snapshot(viewed)  # type: ignore[no-untyped-call]
            torch.cuda.memory._record_memory_history(enabled=None)

    def close(self) -> None:
        """No step follows in this world."""
        self._trace.close()


class Collector:
    """Python's garbage collector, run at the same step on all ranks, because a pause of one delays all.

    ``every_steps`` 0 leaves it to Python. Existing objects are frozen, without a collection
    before: that would take 0.3 s of every restart, and touch pages that a forked rank shares with its parent.
    """

    def __init__(self, every_steps: int) -> None:
        self.every_steps = every_steps
        if every_steps:
            gc.freeze()
            gc.disable()

    def step(self, step: int) -> None:
        if self.every_steps and step % self.every_steps == 0:
            gc.collect()

    def close(self) -> None:
        if self.every_steps:
            gc.enable()


def memory_bytes(device: torch.device) -> int:
    """Peak so far: the CUDA allocator's, or on CPU the resident set's."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB


def memory_room_bytes(device: torch.device) -> float:
    """Memory of the whole device, or of this machine: a constant, not the free memory."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def peak_flops(spec: RunSpec, device: torch.device) -> tuple[float | None, str]:
    """Peak FLOP/s of one rank, for MFU, and the source of the figure. None: unknown, so no MFU.

    On a GPU it is the data sheet's dense bf16 rate, in any dtype of the run, so that MFU compares between runs. A
    CPU has none: a timed matmul gave 22, 64 and 131 GFLOP/s on one shared machine within an hour.
    """
    if spec.output.peak_tflops is not None:
        return spec.output.peak_tflops * 1e12, "output.peak_tflops of the run file"
    if device.type != "cuda":
        return None, "no peak is known for a CPU: set output.peak_tflops"
    name = torch.cuda.get_device_name(device)
    known = devices.bf16_peak(name)
    return known, f"data sheet of {name}" if known else f"no peak is known for {name}: set output.peak_tflops"
