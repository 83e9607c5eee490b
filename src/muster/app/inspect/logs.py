"""Logs and events of a run, so far or as they come."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator

from muster.app.inspect.home_view import once
from muster.app.inspect.status import job, mirror
from muster.backends.protocols import Launcher
from muster.core.clock import SystemClock
from muster.core.errors import UsageError
from muster.core.event_details.kinds import KINDS
from muster.core.event_log import Damage, EventReader
from muster.core.events import Event
from muster.core.protocols import Clock
from muster.core.types import JobHandle, LogChunk
from muster.storage import run_registry
from muster.storage.run_registry import RunDir

LOOK_EVERY_S = 0.3
REMOTE_LOOK_EVERY_S = 2.0
"""Where each look is a command in a pod."""


def logs(
    reference: str,
    *,
    follow: bool = False,
    rank: int | None = None,
    task: str | None = None,
    clock: Clock | None = None,
) -> Iterator[LogChunk]:
    """Output of the run's processes (of one rank or task); with ``follow``, until the run has ended.

    Raises:
        UsageError: no such run, or no such log.
    """
    run = run_registry.find(reference)
    launcher, handle = job(run)
    if follow and launcher.follow is not None:
        chunks = launcher.follow(handle)
    else:
        chunks = _looked_at(launcher, handle, follow, clock or SystemClock())
    seen: set[str] = set()
    for chunk in chunks:
        seen.add(chunk.task)
        if _wanted(chunk.task, rank, task):
            yield chunk
    known = sorted({path.stem for path in run.logs.glob("*.log")} | seen)
    if not any(_wanted(name, rank, task) for name in known) and (rank is not None or task is not None):
        task_text = f"rank {rank}" if rank is not None else f"task {task!r}"
        raise UsageError(f"no log of {task_text} in {run.run_id}", hint=f"there are: {', '.join(known) or 'none'}")


def events(
    reference: str,
    *,
    follow: bool = False,
    kinds: tuple[str, ...] = (),
    clock: Clock | None = None,
    on_damage: Callable[[Damage], None] | None = None,
    reader: EventReader | None = None,
    writer: str | None = None,
) -> Iterator[Event]:
    """The run's events, oldest first; with ``follow``, new ones until the run has ended. ``on_damage``: called with
    each place of the log that had to be left out. ``reader``: it goes on where this one is. ``writer``: of one alone.

    Raises:
        UsageError: no such run, or no such kind of event.
    """
    for kind in kinds:
        if kind not in KINDS:
            near = difflib.get_close_matches(kind, KINDS, n=1)
            raise UsageError(
                f"no kind of event {kind!r}", hint=f"did you mean {near[0]}?" if near else "docs/reference/events.md"
            )
    run = run_registry.find(reference)
    launcher, handle = job(run)
    clock = clock or SystemClock()
    every_s = REMOTE_LOOK_EVERY_S if launcher.remote is not None else LOOK_EVERY_S
    reader = reader or EventReader(run.events, on_damage, writer)
    while True:
        ended = launcher.poll(handle).state.ended
        mirror(launcher, run, once(reader))
        yield from (event for event in new_events(reader) if not kinds or event.kind in kinds)
        if not follow or ended:
            return
        clock.sleep(every_s)


def from_now_on(run: RunDir) -> EventReader:
    """What reads events that are not in the run's log yet; however long that is, it is not read."""
    launcher, _ = job(run)
    reader = EventReader(run.events)
    mirror(launcher, run, once(reader))
    reader.skip()
    return reader


def new_events(reader: EventReader) -> list[Event]:
    """Events that ``reader`` has not read yet, oldest first."""
    result = list(reader.read())
    return [event for _, event in sorted(result, key=lambda item: (item[1].wall_ns, item[0], item[1].seq))]


def _looked_at(launcher: Launcher, handle: JobHandle, follow: bool, clock: Clock) -> Iterator[LogChunk]:
    """Output so far; with ``follow`` looked at again until the job has ended."""
    positions: dict[str, int] = {}
    while True:
        ended = launcher.poll(handle).state.ended
        for chunk in launcher.logs(handle, after=positions):
            positions[chunk.task] = chunk.next_offset
            yield chunk
        if not follow or ended:
            return
        clock.sleep(LOOK_EVERY_S)


def _wanted(task: str, rank: int | None, name: str | None) -> bool:
    if rank is not None:
        return task == f"rank-{rank}" or task.startswith(f"rank-{rank}.a")
    return name is None or task == name or task.startswith(f"{name}-")
