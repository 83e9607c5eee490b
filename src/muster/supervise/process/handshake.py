"""Who connects to the supervisor, and what a client's messages mean to the state machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from muster.core.incidents import KINDS
from muster.core.typed_json import Unreadable
from muster.protocol.client import HealthReport, StopRun
from muster.protocol.hello import AgentHello, BeatHello
from muster.protocol.to_supervisor import Greeting
from muster.supervise.recovery.inputs import FromHost, StopRequest

Role: TypeAlias = Literal["agent", "beat", "client"]


@dataclass(frozen=True)
class ClientIdentity:
    """The other end of a connection."""

    role: Role
    """beat: a host's watchdog; client: a verb of another terminal."""
    host: str = ""

    def __str__(self) -> str:
        return self.host or "a client"


def identity_of(hello: Greeting) -> ClientIdentity:
    """Who says so."""
    match hello:
        case AgentHello(host=host):
            return ClientIdentity("agent", host)
        case BeatHello(host=host):
            return ClientIdentity("beat", host)
        case _:
            return ClientIdentity("client")


def stop_of(message: StopRun) -> StopRequest:
    """``muster stop``; ``again``: of a scheduler that will start the run again."""
    code = 75 if message.again else 130
    return StopRequest(source=message.source, save=message.save, exit_code=code, force=message.force)


def health_of(message: HealthReport) -> FromHost:
    """What a health check or another detector reports for a host. Raises Unreadable for a kind that is not known."""
    if message.kind not in KINDS.names():
        raise Unreadable(f"no incident kind {message.kind[:40]!r}")
    return FromHost(host=message.host, message=message)
