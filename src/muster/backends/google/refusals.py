"""What a refusal of Google's means, whichever service said it: a reply, a finished operation's error, or a text.

Missing capacity is tested before quota: a stock-out of Spot machines names quota too. Unknown is no stock-out.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from muster.backends.google.http import LOGIN, Call, Reply
from muster.core.errors import AccessError, BackendError, CapacityError, MusterError


class Cause(enum.Enum):
    NO_MACHINES = "the zone has no such machines now"
    QUOTA = "the project's quota is used up"
    RATE = "too many requests at once"
    EXISTS = "it is there already"
    ACCESS = "not allowed"
    GONE = "something that it names does not exist"
    UNKNOWN = "refused"

    @property
    def elsewhere(self) -> bool:
        """Whether another zone or region may serve the same request."""
        return self in (Cause.NO_MACHINES, Cause.QUOTA)


CODES = {
    "ZONE_RESOURCE_POOL_EXHAUSTED": Cause.NO_MACHINES,
    "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS": Cause.NO_MACHINES,
    "REGION_RESOURCE_POOL_EXHAUSTED": Cause.NO_MACHINES,
    "resourcePoolExhausted": Cause.NO_MACHINES,
    "insufficientCapacity": Cause.NO_MACHINES,
    "quotaExceeded": Cause.QUOTA,  # 403, not 429
    "QUOTA_EXCEEDED": Cause.QUOTA,
    "rateLimitExceeded": Cause.RATE,  # 403, too
    "RATE_LIMIT_EXCEEDED": Cause.RATE,
    "RESOURCE_ALREADY_EXISTS": Cause.EXISTS,
    "alreadyExists": Cause.EXISTS,
    "forbidden": Cause.ACCESS,
    "PERMISSION_DENIED": Cause.ACCESS,
    "notFound": Cause.GONE,
}
"""A refusal's reason, or the code of an operation's error."""
TEXTS = (
    (
        Cause.NO_MACHINES,
        r"RESOURCE_POOL_EXHAUSTED|stock[-_ ]?out|not have enough resources available|resources are insufficient in",
    ),
    (
        Cause.QUOTA,
        r"QUOTA_?EXCEEDED|RESOURCE_EXHAUSTED|exceed(ed)? quota|quota\b.*\bexceeded|quota metrics? exceed|quota limits?",
    ),
)
"""Where no code tells: the words of container operations, custom jobs and autoscalers, in this order."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why something was not made."""

    cause: Cause
    text: str

    def __str__(self) -> str:
        return f"{self.cause.value}: {self.text}"


def of_code(code: str, message: str) -> Refusal:
    """``code`` is a refusal's reason or an operation's error."""
    return Refusal(cause=CODES.get(code, Cause.UNKNOWN), text=f"{code}: {message}")


def of_reply(reply: Reply) -> Refusal:
    """A refusal at once; of several reasons that of missing machines counts first."""
    order = list(Cause)
    known = sorted((one for one in reply.reasons if one in CODES), key=lambda one: (order.index(CODES[one]), one))
    found = of_code(known[0] if known else " ".join(sorted(reply.reasons)), reply.message)
    if found.cause is Cause.UNKNOWN and reply.status in (401, 403):
        return Refusal(cause=Cause.ACCESS, text=found.text)
    return found


def of_text(message: str) -> Cause:
    """Of an error that is known by its words alone."""
    return next((cause for cause, words in TEXTS if re.search(words, message, re.IGNORECASE)), Cause.UNKNOWN)


def refusal(call: Call, reply: Reply) -> MusterError:
    where = f"{call.method} {call.url}"
    if reply.status == 401:
        return AccessError(f"{where}: Google rejected these credentials: {reply.message}", hint=LOGIN)
    if reply.status == 403 and not of_text(" ".join(reply.reasons)).elsewhere:
        return AccessError(
            f"{where}: {reply.message}", hint="muster up --dry-run lists the permissions that are needed"
        )
    return failure(f"{where}: {reply.message} {' '.join(sorted(reply.reasons))}".rstrip())


def failure(message: str) -> MusterError:
    """Quota and stock-outs are capacity errors, each with its way out; the rest are the back end's."""
    hints = {Cause.NO_MACHINES: "try another zone or mode", Cause.QUOTA: "ask for quota, or try another zone or mode"}
    hint = hints.get(of_text(message))
    return CapacityError(message, hint=hint) if hint is not None else BackendError(message)
