"""A machine's start as a person follows it: created, booted, driver, agent, checked, joined.

Each stage has a limit from the end of the one before it, and a reason when it is late. Compute Engine tells of the
first; the start-up script and the program after it put the others into the run's home; an agent has joined once the
supervisor says so. Exit codes of scripts are shown nowhere, so a stage that does not come is all there is to see. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

CREATED, BOOTED, DRIVER, AGENT, CHECKED, JOINED = "created", "booted", "driver", "agent", "checked", "joined"
FAILED = "failed"
LIMITS_S = {CREATED: 600.0, BOOTED: 300.0, DRIVER: 960.0, AGENT: 1200.0, CHECKED: 300.0, JOINED: 180.0}
"""Of the driver and the software the script itself gives up after 900 s each, with a reason of its own."""
OBJECTS = {BOOTED: "booted", DRIVER: "driver", AGENT: "started", CHECKED: "checked"}
"""Stage -> its object's name below the machine's folder."""
LATE = {
    CREATED: "the request has not made it a machine yet",
    BOOTED: "its start-up script has reported nothing: no way to Cloud Storage (Private Google Access, or an external "
    "address), no objectUser role on the bucket for its account, or no start (its serial port shows why)",
    DRIVER: "nvidia-smi does not show its GPUs: the image installs its driver at the first boot, or cannot",
    AGENT: "the bundle is still being fetched or installed",
    CHECKED: "its program has not read the run's files and secrets: the journal of muster.service shows why",
    JOINED: "its agent does not reach the supervisor, or is not reached: is there a firewall rule that lets the "
    "subnetwork's own addresses in?",
}


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One row of the tree."""

    name: str
    state: str
    """``done``, ``waiting``, ``late``, ``failed``, or ``-``: one before it is not done."""
    since_s: float | None = None
    """Seconds since 1970: when it was done, or when it could begin."""
    limit_s: float = 0.0
    text: str = ""
    """What the machine reported of it, or why it is late or failed."""


def tree(
    created_s: float | None, reported: Mapping[str, tuple[float, str]], *, asked_s: float, joined: bool, now_s: float
) -> list[Stage]:
    """The stages of one machine, in order.

    ``created_s``: when it began to run, None before; ``reported``: its objects in the home since its newest boot, by
    stage, with their times; ``asked_s``: when it was asked for. Times are seconds since 1970, and machines' own.
    """
    done = {CREATED: (created_s, "") if created_s is not None else None}
    done |= {stage: reported.get(name) for stage, name in OBJECTS.items()}
    # A later stage that was reported proves those before it: the bucket may have lost an object that was overwritten.
    found, before_s, open_ = [], asked_s, True
    reached = JOINED if joined else next((one for one in reversed(LIMITS_S) if done.get(one)), None)
    for name, limit_s in LIMITS_S.items():
        said = done.get(name)
        proven = reached is not None and list(LIMITS_S).index(name) <= list(LIMITS_S).index(reached)
        if proven:
            before_s = max(before_s, said[0]) if said is not None and said[0] is not None else before_s
            text = said[1] if said is not None else ""
            found.append(Stage(name=name, state="done", since_s=before_s, limit_s=limit_s, text=text))
        elif not open_:
            found.append(Stage(name=name, state="-", limit_s=limit_s))
        else:
            found.append(_open(name, limit_s, before_s, reported.get(FAILED), now_s))
            open_ = False
    return found


def _open(name: str, limit_s: float, began_s: float, failed: tuple[float, str] | None, now_s: float) -> Stage:
    """The first stage that is not done."""
    if failed is not None and name != CREATED:
        return Stage(name=name, state="failed", since_s=failed[0], limit_s=limit_s, text=failed[1])
    if now_s - began_s > limit_s:
        return Stage(name=name, state="late", since_s=began_s, limit_s=limit_s, text=LATE[name])
    return Stage(name=name, state="waiting", since_s=began_s, limit_s=limit_s)


def sentence(stages: list[Stage], now_s: float) -> str:
    """How far it is, in a line: ``driver for 70 s (limit 960 s)``, or the reason why it is late."""
    for stage in stages:
        if stage.state == "done":
            continue
        for_s = max(0.0, now_s - (stage.since_s if stage.since_s is not None else now_s))
        if stage.state == "failed":
            return f"{stage.name} failed: {stage.text}"
        if stage.state == "late":
            return f"{stage.name} is late ({for_s:.0f} s, limit {stage.limit_s:.0f} s): {stage.text}"
        return f"{stage.name} for {for_s:.0f} s (limit {stage.limit_s:.0f} s)"
    return "joined"


def read_report(text: str) -> tuple[float, str]:
    """An object's line: seconds since 1970, and words; 0 where another program wrote it."""
    seconds, _, words = text.strip().partition(" ")
    return (float(seconds) if re.fullmatch(r"[0-9]{1,12}", seconds) else 0.0, words)
