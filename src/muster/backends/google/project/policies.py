"""One role for one member on a bucket, an image repository or the project, in a policy that others change too."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from muster.backends.google.http import Call, Unreachable
from muster.backends.google.project.resources import ACCOUNT_KNOWN_WITHIN_S, Found, NeedGone, Resource
from muster.backends.google.refusals import refusal
from muster.backends.google.session import Session, twice
from muster.core.errors import BackendError
from muster.core.typed_json import JsonObject, children, text, texts

STORAGE = "https://storage.googleapis.com/storage/v1"
PROJECTS = "https://cloudresourcemanager.googleapis.com/v1/projects"
IMAGES = "https://artifactregistry.googleapis.com/v1"
TRIES = 5
"""Races that are lost in a row before it is an error."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Where the policy of one resource is read and written."""

    kind: Literal["bucket", "project", "repository", "account"]
    name: str
    """``B``, ``P``, ``projects/P/locations/L/repositories/R``, ``projects/P/serviceAccounts/EMAIL``."""
    read: Call
    url: str
    method: Literal["PUT", "POST"]
    """PUT: the policy itself is the body (Cloud Storage)."""

    @property
    def of(self) -> str:
        """For people."""
        return f"{self.kind} {self.name}"

    def write(self, policy: JsonObject) -> Call:
        body = policy if self.method == "PUT" else {"policy": policy}
        return Call(method=self.method, url=self.url, body=body)


def of_bucket(name: str) -> Policy:
    url = f"{STORAGE}/b/{name}/iam"
    read = Call(method="GET", url=f"{url}?optionsRequestedPolicyVersion=3")
    return Policy(kind="bucket", name=name, read=read, url=url, method="PUT")


def of_project(name: str) -> Policy:
    body: JsonObject = {"options": {"requestedPolicyVersion": 3}}
    read = Call(method="POST", url=f"{PROJECTS}/{name}:getIamPolicy", body=body)
    return Policy(kind="project", name=name, read=read, url=f"{PROJECTS}/{name}:setIamPolicy", method="POST")


def of_account(project: str, email: str) -> Policy:
    """Who may act as a service account."""
    path = f"projects/{project}/serviceAccounts/{email}"
    url = f"https://iam.googleapis.com/v1/{path}"
    read = Call(method="POST", url=f"{url}:getIamPolicy?options.requestedPolicyVersion=3")
    return Policy(kind="account", name=path, read=read, url=f"{url}:setIamPolicy", method="POST")


def of_repository(path: str) -> Policy:
    """``path``: ``projects/P/locations/L/repositories/R``, ``projects/P/serviceAccounts/EMAIL``."""
    read = Call(method="GET", url=f"{IMAGES}/{path}:getIamPolicy?options.requestedPolicyVersion=3")
    return Policy(kind="repository", name=path, read=read, url=f"{IMAGES}/{path}:setIamPolicy", method="POST")


@dataclass(frozen=True, kw_only=True)
class Grant(Resource):
    """A role without conditions for one member. Other members and roles of the policy stay as they are."""

    policy: Policy
    role: str
    foreign: Literal["refuse", "use"] = "use"

    @abstractmethod
    def member(self, session: Session) -> str:
        """As policies name it: ``serviceAccount:...``."""

    @abstractmethod
    def shown_member(self) -> str:
        """The same for a dry run, without asking anybody."""

    def look(self, session: Session) -> Found:
        reply = twice(lambda: session.send(self.policy.read))
        if reply.status >= 300:
            return Found(state="absent")
        member = self.member(session)
        there = any(self._ours(row, member) for row in children(reply.body, "bindings"))
        return Found(state="there" if there else "absent", body=reply.body)

    def make(self, session: Session) -> None:
        member = self.member(session)

        def with_member(rows: list[JsonObject]) -> list[JsonObject]:
            if any(self._ours(row, member) for row in rows):
                return rows
            return [*rows, {"role": self.role, "members": [member]}]

        if not self._change(session, with_member):
            raise NeedGone(f"{self.key}: there is no {self.policy.of}", hint="run the same command again")

    def remove(self, session: Session) -> None:
        member = self.member(session)

        def without(rows: list[JsonObject]) -> list[JsonObject]:
            kept: list[JsonObject] = []
            for row in rows:
                if not self._ours(row, member):
                    kept.append(row)
                elif members := [other for other in texts(row, "members") if other != member]:
                    kept.append({**row, "members": members})
            return kept

        self._change(session, without)

    def requests(self) -> list[Call]:
        row = {"role": self.role, "members": [self.shown_member()]}
        return [self.policy.read, self.policy.write({"bindings": ["...", row]})]

    def _change(self, session: Session, change: Callable[[list[JsonObject]], list[JsonObject]]) -> bool:
        """Read, change, write back under the policy's etag: a lost race is tried again. False: no such resource."""
        tries, waited_s = 0, 0.0
        while tries < TRIES:
            reply = twice(lambda: session.find(self.policy.read))
            if reply is None:
                return False
            there = children(reply.body, "bindings")
            changed = change(there)
            if changed == there:
                return True
            call = self.policy.write({**reply.body, "bindings": changed})
            try:
                answer = session.send(call)
            except Unreachable:
                tries += 1
                continue
            if answer.status < 300:
                return True
            if answer.status in (409, 412):
                session.clock.sleep(1.0)
                tries += 1
            elif answer.status == 400 and "does not exist" in answer.message and waited_s < ACCOUNT_KNOWN_WITHIN_S:
                session.clock.sleep(5.0)
                waited_s += 5.0
            else:
                raise refusal(call, answer)
        raise BackendError(f"the policy of {self.policy.of} keeps changing", hint="run the same command again")

    def _ours(self, row: JsonObject, member: str) -> bool:
        return text(row, "role") == self.role and member in texts(row, "members") and "condition" not in row
