"""Clients who ask what the hosts' hardware looks like now."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from muster.protocol.client import CheckHosts, FromClient, SupervisorStatus
from muster.protocol.to_agent import LookAtHost
from muster.protocol.to_supervisor import HostLooked
from muster.protocol.values import HostLook

#: Questions whose answers are kept: a client asks again and again until it has them.
_KEPT = 4
#: Of all outputs in one answer, of whose frame quotes take twice as much: a host beyond it counts as not looked at.
MOST_BYTES = 6 << 20


class AskedLooks:
    """By the number of the question. The state machine hears nothing of them: who asks decides what follows."""

    def __init__(self, send: Callable[[str, LookAtHost], None]) -> None:
        self._send = send
        self._by_number: dict[int, dict[str, HostLook]] = {}

    def answer(self, message: FromClient, status: SupervisorStatus, agents: Iterable[str]) -> SupervisorStatus:
        """``status``, with what has come where it was asked for. The first time the hosts are asked."""
        if not isinstance(message, CheckHosts):
            return status
        if message.number not in self._by_number:
            while len(self._by_number) >= _KEPT:
                del self._by_number[next(iter(self._by_number))]
            self._by_number[message.number] = {}
            for host in list(agents):
                self._send(host, LookAtHost(number=message.number))
        room, looks = MOST_BYTES, dict[str, HostLook]()
        for host, look in sorted(self._by_number[message.number].items()):
            room -= len(look.output)
            looks[host] = look if room >= 0 else replace(look, output="")
        return replace(status, looks=looks)

    def take(self, host: str, message: object) -> bool:
        """Whether it is an answer to a client."""
        if not isinstance(message, HostLooked) or not message.number:
            return False
        if message.number in self._by_number:
            self._by_number[message.number][host] = message.look
        return True
