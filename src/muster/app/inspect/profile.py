"""A look into a run that trains: traces of its next steps, or the stacks of its ranks. Nothing is restarted."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from muster.app.inspect.logs import events, from_now_on
from muster.app.inspect.status import job
from muster.app.inspect.supervisor_client import request
from muster.core.errors import UsageError
from muster.core.event_details.attempts import AttemptStarted
from muster.core.event_details.run import RunHeld
from muster.core.event_details.training import TraceWritten
from muster.core.typed_json import JsonObject, decode
from muster.health.hang.stack_groups import StackGroup, ranges
from muster.protocol.client import AskStacks, FromClient, SupervisorStatus, TraceRun
from muster.storage import run_registry
from muster.storage.run_registry import RunDir

#: How long the hosts may take to look at their ranks, and how long the answer may take besides.
LOOK_S, ANSWER_S = 2.0, 5.0


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What one rank reports."""

    rank: int
    first_step: int | None = None
    last_step: int | None = None
    file: str | None = None
    """Its path, or its name in the run's folder where that is on other machines; None: there is none."""
    bytes: int | None = None
    stall_s: float | None = None
    """How long the rank stood still to write it."""
    problem: str | None = None

    @property
    def line(self) -> str:
        """For people."""
        if self.problem is not None:
            return f"rank {self.rank}: no trace: {self.problem}"
        size, stall = (self.bytes or 0) / 1e6, self.stall_s or 0.0
        steps = f"steps {self.first_step} to {self.last_step}"
        return f"{self.file}  rank {self.rank}, {steps}, {size:.1f} MB, written in {stall:.2f} s"

    def to_json(self) -> JsonObject:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Stacks:
    """What the ranks of a run do at one moment. ``groups``: the largest first."""

    groups: tuple[StackGroup, ...]
    missing: tuple[str, ...] = ()
    """What was not seen, one sentence each."""

    def to_json(self) -> JsonObject:
        return {"groups": [asdict(group) for group in self.groups], "missing": list(self.missing)}

    def lines(self) -> Iterator[str]:
        """For people: each group's ranks, then its frames, the innermost first, down to where every rank begins."""
        for group in self.groups:
            yield group.title
            for frame in group.frames:
                if frame.function == "run_rank" and "muster/rank/" in frame.file:
                    break
                yield f"  {frame.function} at {frame.place}"
            if not group.frames:
                yield "  no stack was captured"
        yield from (f"missing: {sentence}" for sentence in self.missing)


def ranks_of(text: str) -> tuple[int, ...]:
    """``0,7`` or ``0-3,8``; ``all``: none, which means every one.

    Raises:
        UsageError: it is neither.
    """
    if text.strip() == "all":
        return ()
    result: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part.strip())
        if found is None or (found[2] and int(found[2]) < int(found[1])):
            raise UsageError(f"--rank {text[:60]!r} names no ranks", hint="--rank 0,7 or --rank 0-3, or --rank all")
        result.update(range(int(found[1]), int(found[2] or found[1]) + 1))
    return tuple(sorted(result))


def traces(reference: str, *, steps: int = 3, ranks: tuple[int, ...] = ()) -> Iterator[Trace]:
    """Have ``ranks`` (none: all) trace their next steps; yields each rank's report as it comes.

    It ends when all have reported, or when those that have not cannot any more: their attempt or the run has ended.

    Raises:
        UsageError: no such run; it has ended; a rank does not exist; no rank trains now.
        SupervisorUnreachable: no supervisor answers for the run.
    """
    run = run_registry.find(reference)
    name, reader = secrets.token_hex(4), from_now_on(run)
    answer = _asked(run, TraceRun(request=name, steps=steps, ranks=ranks))
    waiting = set(ranks or (rank for host in answer.hosts.values() for rank in host.ranks))
    over = "the run ended first"
    kinds = (TraceWritten.kind, AttemptStarted.kind, RunHeld.kind)
    for event in events(reference, follow=True, kinds=kinds, reader=reader):
        if event.attempt < answer.attempt:
            continue
        if event.kind == TraceWritten.kind:
            detail = event.read(TraceWritten)
            if detail.request == name and event.rank in waiting:
                waiting.discard(event.rank)
                yield _trace(run, event.rank, event.step, detail)
        elif event.kind == RunHeld.kind or event.attempt > answer.attempt:
            over = f"attempt {answer.attempt} ended first"
            break
        if not waiting:
            return
    yield from (Trace(rank=rank, problem=over) for rank in sorted(waiting))


def stacks(reference: str) -> Stacks:
    """The stacks of all ranks at this moment, equal ones together. Raises as ``traces``."""
    answer = _asked(run_registry.find(reference), AskStacks(limit_s=LOOK_S), timeout_s=LOOK_S + ANSWER_S)
    return Stacks(groups=tuple(decode(StackGroup, text) for text in answer.stacks), missing=answer.missing)


def _asked(run: RunDir, message: FromClient, *, timeout_s: float = 5.0) -> SupervisorStatus:
    launcher, handle = job(run)
    status = launcher.poll(handle)
    if status.state.ended:
        raise UsageError(
            f"{run.run_id} has ended: {status.reason}", hint="muster profile looks at a run that trains; muster report"
        )
    answer = request(run, message, timeout_s=timeout_s)
    if answer.refused is not None:
        raise UsageError(f"{run.run_id}: {answer.refused}", hint=_hint(answer))
    return answer


def _hint(answer: SupervisorStatus) -> str:
    if answer.phase != "run":
        return "try again when it trains: muster status"
    held: Mapping[str, tuple[int, ...]] = {name: host.ranks for name, host in answer.hosts.items() if host.ranks}
    return "; ".join(f"{name}: {ranges(ranks)}" for name, ranks in list(held.items())[:8])


def _trace(run: RunDir, rank: int | None, step: int | None, detail: TraceWritten) -> Trace:
    file = detail.file
    if file is not None and (run.path / file).exists():
        file = str(run.path / file)
    return Trace(
        rank=rank if rank is not None else -1,
        first_step=detail.first_step,
        last_step=step,
        file=file,
        bytes=detail.bytes,
        stall_s=detail.write_ns / 1e9 if detail.write_ns is not None else None,
        problem=detail.problem,
    )
