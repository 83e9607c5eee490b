"""Who connects to the supervisor, and whether its messages are usable: it may be of another version, or wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from muster.core.incidents import HOST_UNHEALTHY, KINDS
from muster.protocol.held_snapshots import Snapshot
from muster.supervise.recovery.state import FromHost, StopRequest

#: What an unusable message raises, here and where its fields are read.
UNUSABLE = (LookupError, TypeError, ValueError, AttributeError, OverflowError)


@dataclass(frozen=True)
class ClientIdentity:
    """The other end of a connection."""

    role: str
    """agent, beat (its watchdog) or client (a verb of another terminal)."""
    host: str = ""


def parse_hello(hello: Mapping[str, Any]) -> ClientIdentity:
    """Who it is. Raises one of ``UNUSABLE`` before anything is done with the message."""
    client = ClientIdentity(role=str(hello["role"]), host=str(hello.get("host", "")))
    if client.role not in ("agent", "beat", "client"):
        raise ValueError(f"role {client.role[:40]!r}")
    if client.role != "client" and not client.host:
        raise ValueError("no host")
    if client.role == "agent":
        _ranks_of(hello)
    if not 0 <= float(hello.get("every_s", 0.0)) <= 3600:
        raise ValueError("every_s")
    return client


def _ranks_of(hello: Mapping[str, Any]) -> None:
    """Read every field as the state machine will."""
    dict(hello.get("alive", {}).items())
    [int(rank) for rank in (*hello.get("alive", {}), *hello.get("exited", ()))]
    [int(hello.get(name, 0)) for name in ("attempt", "step")]
    [Snapshot.reported("", held) for held in hello.get("snapshots", ())]
    for name in ("store", "memory"):
        if hello.get(name):
            _, _port = str(hello[name][0]), int(hello[name][1])


def stop_of(message: Mapping[str, Any]) -> StopRequest:
    """``muster stop``; ``again``: of a scheduler that will start the run again."""
    return StopRequest(
        source=str(message.get("source", "muster stop")),
        save=bool(message.get("save", True)),
        exit_code=75 if message.get("again") else 130,
        force=bool(message.get("force", False)),
    )


def health_of(message: Mapping[str, Any]) -> FromHost:
    """What a health check or another detector reports for a host. Raises one of ``UNUSABLE``."""
    gpus = [int(gpu) for gpu in message.get("resettable", ())]
    kind = str(message.get("kind", HOST_UNHEALTHY.kind))
    if kind not in KINDS.names():
        raise ValueError(f"no incident kind {kind[:40]!r}")
    verdict = {"t": "health", "kind": kind, "evidence": str(message.get("evidence", ""))[:500], "resettable": gpus}
    return FromHost(host=str(message.get("host", "")), message=verdict)
