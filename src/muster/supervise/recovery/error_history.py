"""The same error again: how often it occurred at one step, and on which hosts. Pure, but for the state it counts in."""

from __future__ import annotations

from collections.abc import Mapping

from muster.core.incidents import IncidentTraits, Repeats
from muster.supervise.recovery.state import State


def key_of(
    state: State, traits: IncidentTraits, step: int | None, detail: Mapping[str, object], evidence: str
) -> str | None:
    """What is the same about two incidents that are the same error; None: this one cannot be recognised again."""
    if traits.repeats is Repeats.NEVER or (traits.repeats is Repeats.BY_SIGNATURE and "signature" not in detail):
        return None
    # A rank that fails right at its start has not reported a step yet: it was at the next one.
    at = step if step is not None and step >= 0 else state.last_applied_step + 1
    error = traits.kind if traits.repeats is Repeats.BY_STEP else detail.get("signature", evidence)
    return f"{at}:{error}"


def count(state: State, key: str | None, host: str | None) -> None:
    """Count one more, on ``host``."""
    if key is None:
        return
    state.error_counts[key] = state.error_counts.get(key, 0) + 1
    hosts = state.error_hosts.setdefault(key, [])
    if host is not None and host not in hosts:
        hosts.append(host)


def readmit_suspects(state: State, key: str | None, host: str | None) -> list[str]:
    """Readmit the hosts that are quarantined for this error, since it recurred on another one; return their names."""
    suspects = [
        other
        for other in state.hosts.values()
        if key is not None and other.quarantined_for_error == key and other.name != host and host is not None
    ]
    for other in suspects:
        readmit_host(state, other.name)
    return [other.name for other in suspects]


def readmit_host(state: State, name: str) -> None:
    """A quarantined host becomes like any other."""
    host = state.hosts[name]
    host.quarantined = host.until_return = host.asked_about = False
    host.quarantined_for_error, host.hold_off_s = None, 0.0
    host.failures_ns = []
