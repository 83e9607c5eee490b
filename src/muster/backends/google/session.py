"""Requests with retries: transient refusals, busy clusters, and operations that take minutes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from muster.backends.google.http import Call, Http, Reply, Unreachable
from muster.backends.google.refusals import failure, refusal
from muster.core.errors import BackendError
from muster.core.protocols import Clock
from muster.core.typed_json import JsonObject, child, children

TRANSIENT = {429, 500, 502, 503, 504}
BUSY = ("resourceNotReady", "CLUSTER_ALREADY_HAS_OPERATION", "running incompatible operation")
NOT_SWITCHED_ON = {"accessNotConfigured", "SERVICE_DISABLED"}
"""The API itself is off."""
TRIES = 8
LONGEST_PAUSE_S = 30.0
Answer = TypeVar("Answer")


class NotOver(BackendError):
    """The operation continues at Google; waiting for it has timed out."""


@dataclass(kw_only=True)
class Session:
    """One person's requests to Google."""

    http: Http
    clock: Clock
    operation_timeout_s: float = 3600.0

    def send(self, call: Call) -> Reply:
        """Send with retries; see ``with_retries``."""
        return with_retries(
            lambda: self.http.send(call), call.method, call.url, self.clock, longest_s=self.operation_timeout_s
        )

    def wait(self, operation: JsonObject, poll: str | None, *, patience_s: float | None = None) -> None:
        """Block until the operation is over; ``poll`` is its address.

        Raises:
            CapacityError: it failed for quota or capacity.
            NotOver: it did not end in time.
            BackendError: it failed otherwise.
        """
        pause_s, waited_s = 1.0, 0.0
        limit_s = self.operation_timeout_s if patience_s is None else patience_s
        while not _over(operation):
            if poll is None:
                raise BackendError(f"an operation without an address: {operation}")
            if waited_s > limit_s:
                raise NotOver(
                    f"not finished after {waited_s:.0f} s: {poll}", hint="run the same command again to keep waiting"
                )
            self.clock.sleep(pause_s)
            waited_s += pause_s
            pause_s = min(LONGEST_PAUSE_S, pause_s * 1.5)
            operation = self.ok(Call(method="GET", url=poll)).body
        if message := _failure(operation):
            raise failure(message)

    def ok(self, call: Call) -> Reply:
        """Send, and refuse to go on unless it worked."""
        reply = self.send(call)
        if reply.status >= 300:
            raise refusal(call, reply)
        return reply

    def find(self, call: Call) -> Reply | None:
        """The same; None where there is no such thing, or its API is off, so that nothing of it can exist."""
        reply = self.send(call)
        if reply.status == 404 or NOT_SWITCHED_ON & reply.reasons:
            return None
        if reply.status >= 300:
            raise refusal(call, reply)
        return reply

    def delete(self, url: str) -> Reply | None:
        """Remove what is at that address; None where nothing is."""
        call = Call(method="DELETE", url=url)
        return twice(lambda: self.find(call))


def twice(send: Callable[[], Answer]) -> Answer:
    """Send what may be sent again without harm; an answer that is lost is asked for once more."""
    try:
        return send()
    except Unreachable:
        return send()


def with_retries(send: Callable[[], Reply], method: str, url: str, clock: Clock, *, longest_s: float = 3600.0) -> Reply:
    """Send, and send again what may be sent again: reads always, writes where the service says that it did not act.

    Raises:
        Unreachable: no answer to a write; look before writing again.
        BackendError: the service still fails after several tries.
    """
    pause_s, waited_s, failed = 1.0, 0.0, 0
    while True:
        try:
            reply = send()
        except Unreachable:
            failed += 1
            if method != "GET" or failed == TRIES:
                raise
        else:
            busy = reply.status >= 400 and any(text in reply.reasons or text in reply.message for text in BUSY)
            if not busy and reply.status not in TRANSIENT:
                return reply
            failed += not busy
            if failed == TRIES or waited_s > longest_s:
                hint = "the service is failing, or busy; run the same command again"
                raise BackendError(f"{method} {url}: {reply.message}", hint=hint)
        clock.sleep(pause_s)
        waited_s += pause_s
        pause_s = min(LONGEST_PAUSE_S, pause_s * 2)


def _over(operation: JsonObject) -> bool:
    return operation.get("status") == "DONE" or operation.get("done") is True


def _failure(operation: JsonObject) -> str | None:
    """The error of a finished operation: compute, container and long-running ones report it differently."""
    error = child(operation, "error")
    if not error:
        return None
    if rows := children(error, "errors"):
        return "; ".join(f"{row.get('code', '')}: {row.get('message', '')}" for row in rows)
    return f"{error.get('message', '')} {operation.get('statusMessage', '')}".strip()
