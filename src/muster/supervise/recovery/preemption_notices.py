"""Hosts that are told to go: gathered for a moment, since a scheduler that takes one often takes all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muster.core.incidents import PREEMPTION_NOTICE
from muster.supervise.recovery.context import Context
from muster.supervise.recovery.final_flush import leave
from muster.supervise.recovery.incidents import incident, members_of
from muster.supervise.recovery.state import SECOND_NS, Phase

ALARM = "notices"


def noticed(c: Context, name: str, message: Mapping[str, Any]) -> None:
    """A host goes away soon. While ranks step they go on, until it is known who goes with it."""
    state, host = c.state, c.state.hosts[name]
    grace_s = float(message.get("grace_s", c.settings.spec.recovery.grace_s))
    c.log("termination.notice", {"notice": message["notice"], "source": message["source"], "grace_s": grace_s}, host=name)
    host.going_s = grace_s
    connected = [each for each in state.hosts.values() if each.connected]
    if state.phase is Phase.HOLD and state.verdict is not None and all(each.going_s is not None for each in connected):
        leave(c, "failed", state.verdict[0], state.verdict[1])  # no host is left to be held
        return
    if state.phase is Phase.RUN and name in members_of(c):
        wait_s = min(c.settings.gather_notices_s, grace_s / 10)
        state.alarms.setdefault(ALARM, c.now_ns + int(wait_s * SECOND_NS))
    else:
        judge(c)


def judge(c: Context) -> None:
    """Each host of the world that goes is an incident; the first decision may already answer for all."""
    state = c.state
    for name in members_of(c):
        host = state.hosts[name]
        if host.going_s is None or name not in members_of(c):
            continue
        if state.phase not in (Phase.RUN, Phase.COLLECT, Phase.WAIT):
            return
        evidence = f"{name} goes away in {host.going_s:.0f} s"
        incident(c, PREEMPTION_NOTICE, host=name, evidence=evidence)
