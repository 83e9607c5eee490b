"""Making and removing in order: independent things go side by side, and every step may be repeated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Literal

from muster.backends.gke.provision.resources import Resource, refuse_foreign
from muster.backends.gke.provision.session import Session
from muster.core.errors import MusterError

Step = Literal["looking", "making", "waiting", "replacing", "there", "removing", "gone", "kept"]
Progress = Callable[[str, Step], None]


def ensure(
    resources: Sequence[Resource],
    session: Session,
    *,
    adopt: bool = False,
    workers: int = 1,
    progress: Progress | None = None,
) -> None:
    """Make what is missing; what is there already, and fits, is left alone. Running it again resumes it.

    Raises:
        ConflictError: something is somebody else's, or differs.
        CapacityError, AccessError, BackendError: Google refused; nothing half-made stays behind.
    """
    say = progress or _silent
    known = {resource.key: resource for resource in resources}
    before = {key: {need for need in resource.needs if need in known} for key, resource in known.items()}

    def act(key: str) -> None:
        _ensure_one(known[key], session, adopt=adopt, say=say)

    _in_order(before, act, workers, stop_on_error=True)


def survey(resources: Sequence[Resource], session: Session, *, adopt: bool = False) -> None:
    """Look at everything and refuse what is somebody else's, or differs, before anything is made.

    Raises:
        ConflictError: the first such resource.
    """
    for resource in resources:
        found = resource.look(session)
        if found.state != "absent":
            refuse_foreign(resource, found, adopt=adopt)


def remove(
    resources: Sequence[Resource],
    session: Session,
    *,
    keep: Callable[[Resource], bool],
    workers: int = 1,
    progress: Progress | None = None,
) -> list[str]:
    """Remove everything of ours, dependents first; return what could not be removed, with the reason.

    What somebody else made, and what ``keep`` names, stays.
    """
    say = progress or _silent
    known = {resource.key: resource for resource in resources}
    before: dict[str, set[str]] = {key: set() for key in known}
    for key, resource in known.items():
        for need in resource.needs:
            if need in before:
                before[need].add(key)
    troubles: list[str] = []

    def act(key: str) -> None:
        try:
            _remove_one(known[key], session, keep=keep, say=say)
        except MusterError as error:
            troubles.append(f"{key}: {error}")

    _in_order(before, act, workers, stop_on_error=False)
    return troubles


def _ensure_one(resource: Resource, session: Session, *, adopt: bool, say: Progress) -> None:
    say(resource.key, "looking")
    found = resource.look(session)
    if found.state in ("there", "changing"):
        refuse_foreign(resource, found, adopt=adopt)
    if found.state == "changing":
        say(resource.key, "waiting")
        resource.settle(session)
    elif found.state == "broken":
        refuse_foreign(resource, found, adopt=False)
        say(resource.key, "replacing")
        resource.remove(session)
        _make(resource, session)
    elif found.state == "absent":
        say(resource.key, "making")
        _make(resource, session)
    say(resource.key, "there")


def _make(resource: Resource, session: Session) -> None:
    """Make it; where that ends badly, what was half made goes away again."""
    try:
        resource.make(session)
    except MusterError:
        found = resource.look(session)
        if found.state == "broken" and found.ours:
            resource.remove(session)
        raise


def _remove_one(resource: Resource, session: Session, *, keep: Callable[[Resource], bool], say: Progress) -> None:
    say(resource.key, "looking")
    found = resource.look(session)
    if found.state == "absent":
        return say(resource.key, "gone")
    if not found.ours or keep(resource):
        return say(resource.key, "kept")
    if found.state == "changing":
        say(resource.key, "waiting")
        try:
            resource.settle(session)
        except MusterError:
            # It ended up broken: all the more reason to remove it.
            pass
    say(resource.key, "removing")
    resource.remove(session)
    say(resource.key, "gone")


def _in_order(before: dict[str, set[str]], act: Callable[[str], None], workers: int, *, stop_on_error: bool) -> None:
    """Call ``act`` for every key once everything before it is done."""
    left, done = dict(before), set[str]()
    if workers == 1:
        while left:
            key = next(key for key, needs in left.items() if needs <= done)
            del left[key]
            act(key)
            done.add(key)
        return
    with ThreadPoolExecutor(workers) as pool:
        running: dict[Future[None], str] = {}
        first: BaseException | None = None
        while left or running:
            for key in [key for key, needs in left.items() if needs <= done]:
                del left[key]
                running[pool.submit(act, key)] = key
            finished, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                done.add(running.pop(future))
                error = future.exception()
                first = first or error
            if first is not None and stop_on_error:
                left.clear()
    if first is not None:
        raise first


def _silent(key: str, step: Step) -> None:
    pass
