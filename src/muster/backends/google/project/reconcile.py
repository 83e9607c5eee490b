"""Making and removing in order: independent things go side by side, and every step may be repeated."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from queue import SimpleQueue

from muster.backends.cluster import Changed, Progress, Said, Step, silent
from muster.backends.google.project.resources import Found, Resource, refuse_foreign
from muster.backends.google.session import Session
from muster.core.errors import ConflictError, MusterError
from muster.core.typed_json import text


def ensure(
    resources: Sequence[Resource],
    session: Session,
    *,
    adopt: bool = False,
    workers: int = 1,
    progress: Progress = silent,
) -> None:
    """Make what is missing; what is there already, and fits, is left alone. Running it again resumes it.

    Raises:
        ConflictError: a resource was not created by Muster, or differs.
        CapacityError, AccessError, BackendError: Google refused; nothing half-made stays behind.
    """
    known = {resource.key: resource for resource in resources}
    before = {key: {need for need in resource.needs if need in known} for key, resource in known.items()}

    def act(key: str) -> None:
        _ensure_one(known[key], session, adopt=adopt, progress=progress)

    _in_order(before, act, workers, stop_on_error=True)


def survey(
    resources: Sequence[Resource], session: Session, *, adopt: bool = False, progress: Progress = silent
) -> set[str]:
    """Look at everything, refuse what Muster did not create or what differs, and return the keys of what is absent or
    too small.

    Raises:
        ConflictError: the first such resource.
    """
    lacking = set()
    for resource in resources:
        with _reporting(resource, progress) as tell:
            result = resource.look(session)
            if result.state == "absent":
                lacking.add(resource.key)
            else:
                refuse_foreign(resource, result, adopt=adopt)
                if result.state == "there" and result.ours and resource.amendment(session, result) is not None:
                    lacking.add(resource.key)
        tell("there" if result.state == "there" else "absent")
    return lacking


def remove(
    resources: Sequence[Resource],
    session: Session,
    *,
    keep: Callable[[Resource], bool],
    workers: int = 1,
    progress: Progress = silent,
) -> list[str]:
    """Remove everything of ours, dependents first; return what could not be removed, with the reason.

    What Muster did not create, and what ``keep`` names, stays.
    """
    known = {resource.key: resource for resource in resources}
    before: dict[str, set[str]] = {key: set() for key in known}
    for key, resource in known.items():
        for need in resource.needs:
            if need in before:
                before[need].add(key)
    troubles: list[str] = []

    def act(key: str) -> None:
        try:
            _remove_one(known[key], session, keep=keep, progress=progress)
        except MusterError as error:
            troubles.append(f"{key}: {error}")

    _in_order(before, act, workers, stop_on_error=False)
    return troubles


@contextlib.contextmanager
def _reporting(resource: Resource, progress: Progress, conflict: Step = "differs") -> Iterator[Callable[[Step], None]]:
    """Tells the steps of work on one resource, and how it fails."""

    def tell(step: Step, text: str = "") -> None:
        progress(Changed(key=resource.key, step=step, text=text))

    tell("looking")
    try:
        yield tell
    except MusterError as error:
        tell(conflict if isinstance(error, ConflictError) else "failed", str(error))
        raise


def _ensure_one(resource: Resource, session: Session, *, adopt: bool, progress: Progress) -> None:
    with _reporting(resource, progress) as tell:
        result = resource.look(session)
        if result.state == "broken" and resource.in_use(session, result):
            result = replace(result, state="there")
        if result.state == "there" and (trouble := _trouble(resource, result)):
            progress(Said(text=trouble))
        if result.state in ("there", "changing"):
            refuse_foreign(resource, result, adopt=adopt)
        if result.state == "changing":
            tell("waiting")
            # An operation in progress is perhaps our own from before an interruption.
            _whole_or_gone(resource.settle, resource, session)
        elif result.state == "broken":
            refuse_foreign(resource, result, adopt=False)
            tell("replacing")
            resource.remove(session)
            _whole_or_gone(resource.make, resource, session)
        elif result.state == "absent":
            tell("making")
            _whole_or_gone(resource.make, resource, session)
        if result.state in ("there", "changing") and result.ours:
            now = result if result.state == "there" else resource.look(session)
            if call := resource.amendment(session, now):
                tell("waiting")
                resource.amend(session, call)
    tell("there")


def _trouble(resource: Resource, result: Found) -> str:
    """What Google says of one that is there and not well; empty: it is well."""
    status = text(result.body, "status")
    if status not in ("ERROR", "DEGRADED", "RUNNING_WITH_ERROR"):
        return ""
    return f"{resource.key} is {status} and used as it is: {text(result.body, 'statusMessage') or 'no reason given'}"


def _whole_or_gone(act: Callable[[Session], None], resource: Resource, session: Session) -> None:
    """Make it, or wait for it; where that ends badly, what was half made goes away again."""
    try:
        act(session)
    except MusterError as error:
        result = resource.look(session)
        if result.state == "broken" and result.ours:
            resource.remove(session)
        raise explained(error) from error


def _remove_one(resource: Resource, session: Session, *, keep: Callable[[Resource], bool], progress: Progress) -> None:
    with _reporting(resource, progress, conflict="failed") as tell:
        result = resource.look(session)
        if result.state == "absent":
            return tell("gone")
        if not result.ours or keep(resource):
            return tell("kept")
        if result.state == "changing" and resource.give_up(session) is not None:
            tell("waiting")
            with contextlib.suppress(MusterError):  # it ended up broken: all the more reason to remove it
                resource.settle(session)
        tell("removing")
        resource.remove(session)
    tell("gone")


def _in_order(before: dict[str, set[str]], act: Callable[[str], None], workers: int, *, stop_on_error: bool) -> None:
    """Call ``act`` for every key once everything before it is done; of several errors the first is raised at the end.

    The threads are daemons: a person who interrupts the program does not wait for an operation of an hour.
    """
    left, done = dict(before), set[str]()
    if workers == 1:
        while left:
            key = next(key for key, needs in left.items() if needs <= done)
            del left[key]
            act(key)
            done.add(key)
        return
    begin, ended = SimpleQueue[str | None](), SimpleQueue[tuple[str, BaseException | None]]()
    for _ in range(workers):
        threading.Thread(target=_work, args=(act, begin, ended), daemon=True).start()
    running, first = 0, None
    try:
        while left or running:
            for key in [key for key, needs in left.items() if needs <= done]:
                del left[key]
                running += 1
                begin.put(key)
            key, error = ended.get()
            running -= 1
            done.add(key)
            first = first or error
            if first is not None and stop_on_error:
                left.clear()
    finally:
        for _ in range(workers):
            begin.put(None)
    if first is not None:
        raise first


def _work(
    act: Callable[[str], None], begin: SimpleQueue[str | None], ended: SimpleQueue[tuple[str, BaseException | None]]
) -> None:
    while (key := begin.get()) is not None:
        try:
            act(key)
        except BaseException as error:  # noqa: BLE001 (a thread's edge: it is raised where the order is kept)
            ended.put((key, error))
        else:
            ended.put((key, None))


# ---------------- rules of an organisation that refuse what ``up`` makes, and what of the run file answers to them


ANSWERS = {
    "compute.vmExternalIpAccess": "resources.private: true makes nodes without public addresses",
    "gcp.restrictNonCmekServices": "keys of one's own (CMEK) for disks, buckets and images are not supported: "
    "an exception for this project, or a cluster, bucket and repository made by hand (--adopt)",
    "iam.disableServiceAccountCreation": "name accounts that are there: resources.node_service_account and "
    "resources.build_service_account",
    "compute.requireShieldedVm": "--adopt a cluster whose node pools have secure boot",
}
"""Constraint -> hint."""


def explained(error: MusterError) -> MusterError:
    """The same error, with the hint for the constraint that its text names."""
    for constraint, answer in ANSWERS.items():
        if constraint in str(error):
            return type(error)(str(error), hint=answer)
    return error
