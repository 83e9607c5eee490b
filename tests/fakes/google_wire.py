"""The way to Google's services: each request may go wrong in each way that the way itself can go wrong.

Wraps any of the fake services. What the service refuses by its own rules is the service's matter.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx2
from fakes.clock import VirtualClock
from thorough import THOROUGH

from muster.backends.google.http import Call, Reply, Unreachable, parse_reply

PATIENCE_S = 60.0
"""Until the caller gives up on an answer."""
LATE_S = 120.0
"""How late a request arrives that was delayed on its way."""


class Killed(BaseException):
    """The program died here: nothing of ours catches it."""


class Fault(enum.Enum):
    """What becomes of one request, and what the caller hears."""

    DROPPED = "never arrives; no answer"
    LOST = "carried out; no answer"
    DOUBLED = "carried out twice, as by a proxy that tries again; the second answer"
    DELAYED = "carried out two minutes later; no answer"
    EXPIRED = "401, not carried out"
    DENIED = "403 once, not carried out: a grant that does not hold yet"
    TOO_MANY = "429, not carried out"
    INTERNAL = "500, not carried out"
    INTERNAL_AFTER = "500, and carried out"
    UNAVAILABLE = "503, not carried out"
    TRUNCATED = "carried out; half of the answer"


STATUS = {
    Fault.EXPIRED: (401, "UNAUTHENTICATED"),
    Fault.DENIED: (403, "PERMISSION_DENIED"),
    Fault.TOO_MANY: (429, "rateLimitExceeded"),
    Fault.INTERNAL: (500, "INTERNAL"),
    Fault.INTERNAL_AFTER: (500, "INTERNAL"),
    Fault.UNAVAILABLE: (503, "UNAVAILABLE"),
}
NOT_CARRIED_OUT = {Fault.EXPIRED, Fault.DENIED, Fault.TOO_MANY, Fault.INTERNAL, Fault.UNAVAILABLE}


class Service(Protocol):
    def send(self, call: Call) -> Reply: ...


def refuse(status: int, reason: str, message: str) -> Reply:
    """A refusal as Google's newer services say it; ``errors`` is what the older ones add."""
    body: Any = {
        "code": status,
        "message": message,
        "status": reason,
        "errors": [{"reason": reason, "message": message}],
    }
    return Reply(status=status, body={"error": body})


@dataclass
class Wire:
    """Sends to ``service``; requests are numbered from 1 as they are sent."""

    service: Service
    clock: VirtualClock
    faults: dict[int, Fault] = field(default_factory=dict)
    kill_at: int | None = None
    """The program dies after this request has been carried out."""
    log: list[tuple[str, str]] = field(default_factory=list)
    replies: dict[int, Reply] = field(default_factory=dict)
    """Request number -> what the caller heard, where anything."""
    _late: list[tuple[float, Call]] = field(default_factory=list, repr=False)

    def send(self, call: Call) -> Reply:
        self.deliver()
        number = len(self.log) + 1
        self.log.append((call.method, call.url))
        self.replies[number] = self._send(number, call)
        return self.replies[number]

    def _send(self, number: int, call: Call) -> Reply:
        fault = self.faults.get(number)
        if fault in (Fault.DROPPED, Fault.DELAYED):
            if fault is Fault.DELAYED:
                self._late.append((self.clock.now_s + LATE_S, call))
            self._give_up(number)
        if fault in NOT_CARRIED_OUT:
            return self._refused(fault)
        reply = self.service.send(call)
        if fault is Fault.DOUBLED:
            reply = self.service.send(call)
        if self.kill_at == number:
            raise Killed(f"after request {number}: {call.method} {call.url}")
        if fault is Fault.LOST:
            self._give_up(number)
        if fault is Fault.INTERNAL_AFTER:
            return self._refused(fault)
        text = reply.text or json.dumps(reply.body)
        if fault is Fault.TRUNCATED:
            return parse_reply(reply.status, text[: len(text) // 2].encode())
        # A copy, as from a wire: what the caller holds does not change when the cloud does.
        return Reply(status=reply.status, body=json.loads(json.dumps(reply.body)), text=reply.text)

    def deliver(self) -> None:
        """What was delayed long enough arrives now; nobody hears the answer."""
        due = [row for row in self._late if row[0] <= self.clock.now_s]
        self._late = [row for row in self._late if row not in due]
        for _, call in due:
            self.service.send(call)

    def transport(self, endpoint: str, ca_pem: str | None) -> httpx2.BaseTransport:
        found: Callable[[str, str | None], httpx2.BaseTransport] = getattr(self.service, "transport")  # noqa: B009
        return found(endpoint, ca_pem)

    def _give_up(self, number: int) -> None:
        self.clock.sleep(PATIENCE_S)
        raise Unreachable(f"no answer to request {number} within {PATIENCE_S:.0f} s")

    def _refused(self, fault: Fault) -> Reply:
        status, reason = STATUS[fault]
        return refuse(status, reason, fault.value)


def turning_points(log: Sequence[tuple[str, str]]) -> list[int]:
    """Numbers of a log's requests: the first and the last of each method and URL. One who waits asks the same a hundred
    times, and is in the same place after each."""
    if THOROUGH:
        return list(range(1, len(log) + 1))
    numbered = list(enumerate(log, start=1))
    first = {request: number for number, request in reversed(numbered)}
    last = {request: number for number, request in numbered}
    return sorted({*first.values(), *last.values()})


def each_request_each_way(requests: int, faults: tuple[Fault, ...] = tuple(Fault)) -> Iterator[dict[int, Fault]]:
    """The ``faults`` of one wire after the other: every request goes wrong once in every way."""
    for number in range(1, requests + 1):
        for fault in faults:
            yield {number: fault}


def body_of(call: Call) -> dict[str, Any]:
    return json.loads(json.dumps(call.body)) if call.body else {}
