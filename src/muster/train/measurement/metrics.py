"""A step's numbers: kept on the device until the host reads them, then one ``step`` event."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from muster.core.typed_json import Json, JsonObject
from muster.protocol.ranks import AgentClient
from muster.train.data_feed.batch_reader import StepWork
from muster.train.distributed.arrivals import Mark, StepClock
from muster.train.measurement.profiling import memory_bytes


@dataclass(frozen=True)
class Peak:
    """The denominator of MFU."""

    flops: float | None
    """Of one rank, per second; None: unknown, and MFU is not reported."""
    ranks: int


class Pending:
    """Scalars being copied to the host. Only ``values`` waits for the device."""

    def __init__(self, scalars: Sequence[Tensor]) -> None:
        stacked = torch.stack([scalar.double() for scalar in scalars])
        self._event: torch.cuda.Event | None = None
        if stacked.is_cuda:
            self._host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True)
            self._host.copy_(stacked, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._host = stacked

    def values(self) -> list[float]:
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return [float(value) for value in self._host.tolist()]


@dataclass
class StepTimes:
    """This rank's time in a step besides computing, in nanoseconds."""

    data_wait_ns: int = 0
    stall_ns: int = 0


@dataclass
class StepLog:
    """Rank 0's record of the steps; emits nothing on other ranks.

    ``step_ns`` runs from the end of the previous step (or from ``restart``, after an evaluation or a save) until this
    step's numbers are known.
    """

    agent: AgentClient
    rank: int
    device: torch.device
    peak: Peak
    clock: StepClock | None = None
    """Where the loop's time goes; None: not known (a GPU)."""
    _since: Mark | None = None
    _since_ns: int = field(default_factory=time.monotonic_ns)

    def restart(self) -> None:
        """The next step's time starts now."""
        self._since_ns = time.monotonic_ns()
        self._since = None if self.clock is None else self.clock.mark()

    def write(
        self,
        work: StepWork,
        *,
        loss: float | None,
        norm: float | None,
        learning_rate: float,
        times: StepTimes,
        extra: JsonObject | None = None,
    ) -> JsonObject | None:
        """Emit the ``step`` event, with ``extra`` in its detail; returns the detail, None on other ranks than 0.

        No loss: the update was skipped, so none of its tokens was trained on.
        """
        now = time.monotonic_ns()
        step_ns, self._since_ns = max(1, now - self._since_ns), now
        if self.rank != 0:
            return None
        extra = {**self._parts(), **(extra or {})}
        if loss is None:
            extra = {**(extra or {}), "skipped": True, "skipped_tokens": work.tokens}
            work = replace(work, tokens=0, supervised_tokens=0, padding_tokens=0, padding_rounds=0, model_flops=0.0)
        detail: dict[str, Json] = {
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": learning_rate,
            "step_ns": step_ns,
            "tokens": work.tokens,
            "supervised_tokens": work.supervised_tokens,
            "padding_tokens": work.padding_tokens,
            "data_wait_ns": times.data_wait_ns,
            "stall_ns": times.stall_ns,
            "tokens_per_s": work.tokens / step_ns * 1e9,
            "memory_bytes": memory_bytes(self.device),
            "rows": work.rows,
            "padding_rounds": work.padding_rounds,
            **(extra or {}),
        }
        if work.model_flops:
            detail["model_flops"] = work.model_flops
            detail["tflops_per_rank"] = work.model_flops / step_ns / self.peak.ranks / 1e3  # per ns, in tera
            if self.peak.flops:
                detail["mfu"] = work.model_flops / (step_ns / 1e9 * self.peak.flops * self.peak.ranks)
        self.agent.emit("step", step=work.step, phase=None, **detail)
        return detail

    def _parts(self) -> JsonObject:
        """Where the step's time went, as far as it is known."""
        begin, self._since = self._since, None if self.clock is None else self.clock.mark()
        if begin is None or self._since is None:
            return {}
        parts = begin.until(self._since)
        return {"compute_ns": parts.compute, "comm_ns": parts.comm, "host_gap_ns": parts.gap}


@dataclass
class Phases:
    """Reports to the agent what this rank spends its time on, when that changes."""

    agent: AgentClient
    now: str | None = None

    def enter(self, phase: str, *, step: int | None = None) -> None:
        if phase != self.now:
            self.now = phase
            self.agent.emit("phase.changed", phase=phase, step=step)
