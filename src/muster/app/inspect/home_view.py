"""A run whose home is in a bucket, seen from the machine of a user who follows it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

from muster import backends
from muster.backends.protocols import Launcher
from muster.core.errors import MusterError, UsageError
from muster.core.event_log import Damage, EventReader
from muster.core.typed_json import Unreadable, decode
from muster.protocol.client import SupervisorStatus
from muster.protocol.lease import HomeStatus
from muster.storage.home import Home, What
from muster.storage.home.chunks import Damaged
from muster.storage.run_registry import RunDir

#: The supervisor writes its status twice in this time, in seconds: an older one is no news.
STALE_S = 60.0


def home_of(run: RunDir, launcher: Launcher) -> Home | None:
    """Where ``run`` lives, if this machine reads it in a bucket; None: a folder, here or in pods."""
    return launcher.remote.home(run.run_id) if launcher.remote is not None else None


def bring(run: RunDir, backend: str, what: What, on_damage: Callable[[Damage], None] | None = None) -> None:
    """Bring to ``run``'s folder on this machine what its home holds beyond it; what cannot be reached stays away.

    ``on_damage``: called with what is damaged in the home; None: it is printed on standard error.
    """
    try:
        home = home_of(run, backends.load(backend))
    except MusterError:
        return
    if home is not None:
        fetch(home, run, what, on_damage or (lambda damage: print(f"{run.run_id}: {damage}", file=sys.stderr)))


def fetch(home: Home, run: RunDir, what: What, on_damage: Callable[[Damage], None]) -> None:
    """``bring``, from ``home``."""

    def tell(text: str) -> None:
        place, _, reason = text.partition(": ")  # "events of host-0: ..."
        on_damage(Damage(file=place, line=0, reason=reason))

    try:
        home.mirror(run.path, what=what, on_damage=tell)
    except MusterError as error:
        if isinstance(error, (Damaged, UsageError)):  # all others say that the home is out of reach
            tell(str(error))
    except OSError as error:  # a full disk; an object whose name no file can have
        print(f"{run.run_id}: not all {what} can be kept in {run.path}: {error}", file=sys.stderr)


def once(reader: EventReader) -> Callable[[Damage], None]:
    """Counts a damage among ``reader``'s, and tells of it as it does."""

    def tell(damage: Damage) -> None:
        if damage not in reader.damaged:
            reader.damaged.append(damage)
            if reader.on_damage is not None:
                reader.on_damage(damage)

    return tell


def status_in(home: Home) -> HomeStatus | None:
    """What the supervisor last wrote of the run: one request. None where there is nothing, or no answer."""
    try:
        return decode(HomeStatus, home.store.get(home.uri_of("status.json")).data)
    except (FileNotFoundError, Unreadable, MusterError):
        return None


def as_of_now(said: HomeStatus, wall_ns: int) -> SupervisorStatus:
    """It, with its age in the sentence where it is old."""
    age_s = (wall_ns - said.wall_ns) / 1e9
    if age_s <= STALE_S:
        return said.status
    text = f"{said.status.reason} (as of {age_s:.0f} s ago: the supervisor has not been heard of since)"
    return replace(said.status, reason=text)
