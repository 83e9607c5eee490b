"""A resource that exists, is absent, or differs. One shape for all of Google's REST resources."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from muster.backends.google.http import Call, Reply, Unreachable
from muster.backends.google.refusals import failure, refusal
from muster.backends.google.session import NotOver, Session, twice
from muster.core.errors import BackendError, CapacityError, ConflictError
from muster.core.typed_json import Json, JsonObject, at, children, text

MARK = "made by muster"
LABEL = {"managed-by": "muster"}
ACCOUNT_KNOWN_WITHIN_S = 120.0
"""Google says that a new service account may be unknown to other services for a minute or more."""
State = Literal["absent", "changing", "there", "broken"]


class NeedGone(BackendError):
    """A needed resource disappeared: an interrupted removal finished at Google."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """One look at a resource."""

    state: State
    body: JsonObject = field(default_factory=dict)
    ours: bool = True
    differences: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Resource(ABC):
    """What reconciliation needs of anything that can be created and removed."""

    key: str
    needs: tuple[str, ...] = ()
    """Keys of what must exist before."""
    foreign: Literal["refuse", "use"] = "refuse"
    """What to do with an existing one of that name that Muster did not create. Never removed, either way."""
    bills: str | None = None
    """What it costs while it exists; None: nothing."""
    runs_up: bool = False
    """It bills by the hour from the moment it exists."""
    usd_per_hour: float | None = None
    """About; None: nothing, or not known."""

    @abstractmethod
    def look(self, session: Session) -> Found: ...

    @abstractmethod
    def make(self, session: Session) -> None:
        """Create it and wait; existing already is success."""

    def settle(self, session: Session) -> None:  # noqa: B027 (most are there at once)
        """Wait until it is no longer changing.

        Raises:
            CapacityError, BackendError: it failed.
        """

    def give_up(self, session: Session) -> str | None:
        """Cancel its creation, where that goes on and is not waited for; returns why it cannot be cancelled."""
        return "it cannot be cancelled"

    def in_use(self, session: Session, found: Found) -> bool:
        """Whether a broken one is still in use: then it is not replaced."""
        return False

    def amendment(self, session: Session, found: Found) -> Call | None:
        """The request after which what is there and ours serves this run file too; None: it does already."""
        return None

    def amend(self, session: Session, call: Call) -> None:  # noqa: B027 (most have no amendment)
        """Send that request, and wait; sent twice it is as sent once.

        Raises:
            CapacityError, BackendError: it was refused, or failed; what was there is as it was.
        """

    @abstractmethod
    def remove(self, session: Session) -> None:
        """Remove it and wait; absent is success."""

    @abstractmethod
    def requests(self) -> list[Call]:
        """What making it sends."""


@dataclass(frozen=True, kw_only=True)
class RestResource(Resource):
    """A resource with an address of its own that is created by one POST."""

    url: str
    create: Call
    owner: tuple[str, ...]
    """Path of the field that says whose it is."""
    compared: JsonObject = field(default_factory=dict)
    """Part of the body in which a difference matters."""
    ready: tuple[str, ...] = ()
    """Values of ``status`` of a finished one; empty: it has no status."""
    broken: tuple[str, ...] = ()
    patience_s: float | None = None
    """A creation that takes longer is undone, and reported as a lack of capacity; None: it is waited for."""
    runs_as: str | None = None
    """The service account of its machines: one that was made just now may not be known everywhere yet."""
    operations: str | None = None
    """Folder of operations; None: the operation's own address (Compute), or none at all."""

    def look(self, session: Session) -> Found:
        reply = session.find(Call(method="GET", url=self.url))
        if reply is None:
            return Found(state="absent")
        status = reply.body.get("status")
        state: State = "there"
        if status in self.broken:
            state = "broken"
        elif self.ready and status not in self.ready:
            state = "changing"
        return Found(
            state=state,
            body=reply.body,
            ours=at(reply.body, *self.owner) in (MARK, LABEL["managed-by"]),
            differences=tuple(differences(self.compared, reply.body)),
        )

    def make(self, session: Session) -> None:
        unanswered, waited_s = 0, 0.0
        while unanswered < 3:
            try:
                reply = session.send(self.create)
            except Unreachable:
                # The answer is lost, not necessarily the request: look before asking for a second one.
                if self.look(session).state == "absent":
                    unanswered += 1
                    continue
                return self.settle(session)
            if self._account_is_new(reply) and waited_s < ACCOUNT_KNOWN_WITHIN_S:
                session.clock.sleep(5.0)
                waited_s += 5.0
                continue
            if reply.status == 409:
                return self.settle(session)
            if reply.status == 404:
                message = f"{self.key}: something that it needs is gone: {reply.message}"
                raise NeedGone(message, hint="run the same command again")
            if reply.status >= 300:
                raise refusal(self.create, reply)
            if _is_operation(reply.body):
                try:
                    session.wait(reply.body, self._poll(reply), patience_s=self.patience_s)
                except NotOver as late:
                    self._take_back(session, late)
            return self.settle(session)
        raise BackendError(f"no answer when making {self.key}", hint="run the same command again")

    def _account_is_new(self, reply: Reply) -> bool:
        return reply.status in (400, 403) and self.runs_as is not None and self.runs_as in reply.message

    def amend(self, session: Session, call: Call) -> None:
        self._follow(session, twice(lambda: session.ok(call)))

    def remove(self, session: Session) -> None:
        if reply := session.delete(self.url):
            self._follow(session, reply)

    def _follow(self, session: Session, reply: Reply) -> None:
        if _is_operation(reply.body):
            session.wait(reply.body, self._poll(reply))

    def requests(self) -> list[Call]:
        return [self.create]

    def settle(self, session: Session) -> None:
        """See ``Resource``; whichever process requested it."""
        pause_s, waited_s = 1.0, 0.0
        limit_s = session.operation_timeout_s if self.patience_s is None else self.patience_s
        while (result := self.look(session)).state == "changing":
            if waited_s > limit_s:
                late = NotOver(f"{self.key} is still {result.body.get('status')}", hint="run the same command again")
                self._take_back(session, late) if result.body.get("status") == "PROVISIONING" else None
                raise late
            session.clock.sleep(pause_s)
            waited_s += pause_s
            pause_s = min(30.0, pause_s * 1.5)
        if result.state == "broken":
            raise failure(f"{self.key} is {result.body.get('status')}: {result.body.get('statusMessage', '')}")

    def _take_back(self, session: Session, late: NotOver) -> None:
        """End what takes too long, and leave nothing of it.

        Raises:
            CapacityError: always, once it is gone.
            NotOver: still running, or cannot be cancelled: then no other location may be tried at the same time.
        """
        if self.patience_s is None:
            raise late
        if trouble := self.give_up(session):
            raise NotOver(f"{late}; {trouble}", hint="run muster down, or the same command to keep waiting") from late
        self.remove(session)
        raise CapacityError(
            f"{self.key}: no machines within {self.patience_s / 60:.0f} minutes",
            hint="name another place in resources.locations, or another mode",
        ) from late

    def give_up(self, session: Session) -> str | None:
        """See ``Resource``: machines that have not come are not waited for."""
        if self.operations is None or self.patience_s is None:
            return super().give_up(session)
        operations = session.ok(Call(method="GET", url=self.operations)).body
        end = "/clusters/" + self.url.rpartition("/clusters/")[2]
        for row in children(operations, "operations"):
            creates = text(row, "operationType") == "CREATE_NODE_POOL" and text(row, "status") in ("PENDING", "RUNNING")
            if creates and text(row, "targetLink").endswith(end):
                reply = session.send(Call(method="POST", url=f"{self.operations}/{row['name']}:cancel", body={}))
                if reply.status >= 300:
                    return f"it cannot be cancelled: {reply.message}"
        return None

    def _poll(self, reply: Reply) -> str | None:
        if self.operations is None:
            return text(reply.body, "selfLink") or None
        return f"{self.operations}/{last_word(reply.body['name'])}"


def differences(requested: Json, there: Json, where: str = "") -> list[str]:
    """Where ``there`` is not as ``wanted`` says; keys that ``wanted`` does not name do not matter."""
    if isinstance(requested, Mapping):
        result = []
        for key, value in requested.items():
            inner = there.get(key) if isinstance(there, Mapping) else None
            result += differences(value, inner, f"{where}.{key}" if where else key)
        return result
    if isinstance(requested, list) and isinstance(there, list) and len(requested) == len(there):
        return [
            line
            for index, pair in enumerate(zip(requested, there, strict=True))
            for line in differences(*pair, f"{where}[{index}]")
        ]
    same = requested == there or str(requested) == str(there)
    if same or _same_address(requested, there) or (not requested and not there):
        return []
    return [f"{where} should be {requested!r}, is {there!r}"]


def refuse_foreign(resource: Resource, result: Found, *, adopt: bool) -> None:
    """A resource under our name that Muster did not create is left alone.

    Raises:
        ConflictError: it is not ours and ``adopt`` is not set, or it differs from what the run file needs.
    """
    if not result.ours and resource.foreign == "refuse" and not adopt:
        raise ConflictError(
            f"{resource.key} exists and was not made by muster",
            hint="choose another name, or --adopt to use it unchanged",
        )
    if result.differences and result.ours:
        raise ConflictError(
            f"{resource.key} is not as the run file needs it: " + "; ".join(result.differences),
            hint="muster down, then muster up; or another name",
        )


def _same_address(requested: Json, there: Json) -> bool:
    """Google answers with full addresses where short ones were given."""
    if not (isinstance(requested, str) and isinstance(there, str) and "/" in requested):
        return False
    return there.endswith("/" + requested.split("/projects/")[-1].removeprefix("projects/"))


def _is_operation(body: JsonObject) -> bool:
    return "operationType" in body or "done" in body or "/operations/" in str(body.get("name", ""))


def last_word(address: object) -> str:
    """``.../zones/us-central1-b`` -> ``us-central1-b``."""
    return str(address).rpartition("/")[2]
