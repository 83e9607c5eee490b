"""What is asked before anything is made: billing, permissions, and Google's services, which are switched on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from muster.backends.google.http import Call, Reply
from muster.backends.google.project.policies import Grant, Policy
from muster.backends.google.project.resources import MARK, Found, Resource, RestResource
from muster.backends.google.refusals import refusal
from muster.backends.google.session import NOT_SWITCHED_ON, Session, twice
from muster.core.errors import AccessError
from muster.core.typed_json import JsonObject, children, text, texts


@dataclass(frozen=True, kw_only=True)
class Services(Resource):
    """Google's APIs that the rest needs, switched on. They are left on: they cost nothing and others may use them."""

    project: str
    names: tuple[str, ...]
    key: str = "services"
    foreign: Literal["refuse", "use"] = "use"

    def look(self, session: Session) -> Found:
        names = "&".join(f"names=projects/{self.project}/services/{name}" for name in self.names)
        reply = session.ok(Call(method="GET", url=f"{self._url}:batchGet?{names}"))
        on = sum(text(row, "state") == "ENABLED" for row in children(reply.body, "services"))
        return Found(state="there" if on == len(self.names) else "absent", ours=False)

    def make(self, session: Session) -> None:
        reply = twice(lambda: session.ok(self.requests()[0]))
        name = reply.body.get("name")
        session.wait(reply.body, f"https://serviceusage.googleapis.com/v1/{name}" if name else None)

    def remove(self, session: Session) -> None:
        """Nothing: see the class."""

    def requests(self) -> list[Call]:
        return [Call(method="POST", url=f"{self._url}:batchEnable", body={"serviceIds": list(self.names)})]

    @property
    def _url(self) -> str:
        return f"https://serviceusage.googleapis.com/v1/projects/{self.project}/services"


def billing(project: str) -> Call:
    return Call(method="GET", url=f"https://cloudbilling.googleapis.com/v1/projects/{project}/billingInfo")


def permissions_of(project: str, names: Iterable[str]) -> Call:
    url = f"https://cloudresourcemanager.googleapis.com/v1/projects/{project}:testIamPermissions"
    return Call(method="POST", url=url, body={"permissions": list(names)})


def check_billing(services: Services, session: Session) -> None:
    """Raises AccessError: no such project, or no billing."""
    project = services.project
    reply = ask(call := billing(project), services, session)
    if reply.status in (403, 404):
        raise AccessError(f"project {project} does not exist or cannot be seen: {reply.message}")
    if reply.status >= 300:
        raise refusal(call, reply)
    if not reply.body.get("billingEnabled"):
        raise AccessError(
            f"project {project} has no billing account",
            hint=f"https://console.cloud.google.com/billing/linkedaccount?project={project}",
        )


def granted(names: Iterable[str], services: Services, session: Session) -> list[str]:
    """Those of the permissions that the caller has in the project. Raises AccessError, BackendError."""
    answer = ask(question := permissions_of(services.project, names), services, session)
    if answer.status >= 300:
        raise refusal(question, answer)
    return texts(answer.body, "permissions")


def ask(call: Call, services: Services, session: Session) -> Reply:
    """Even the questions need their service; switching it on makes nothing and costs nothing."""
    reply = twice(lambda: session.send(call))
    if not NOT_SWITCHED_ON & reply.reasons:
        return reply
    services.make(session)
    return session.send(call)


@dataclass(frozen=True, kw_only=True)
class AccountGrant(Grant):
    """A role of one of our accounts. Those of an account that ``up`` did not make are left alone: neither granted nor
    revoked nor read, since a user who may not grant them may not see them either."""

    account: RestResource
    email: str

    def member(self, session: Session) -> str:
        return self.shown_member()

    def shown_member(self) -> str:
        return f"serviceAccount:{self.email}"

    def look(self, session: Session) -> Found:
        account = self.account.look(session)
        if account.state == "absent":
            return account
        return super().look(session) if account.ours else Found(state="there", ours=False)


def service_account(project: str, email: str, shown: str) -> RestResource:
    """One that is there already is used as it is."""
    folder = f"https://iam.googleapis.com/v1/projects/{project}/serviceAccounts"
    name = email.partition("@")[0]
    body: JsonObject = {"accountId": name, "serviceAccount": {"displayName": shown, "description": MARK}}
    return RestResource(
        key=f"serviceAccounts/{name}",
        url=f"{folder}/{email}",
        create=Call(method="POST", url=folder, body=body),
        owner=("description",),
        needs=("services",),
        foreign="use",
    )


def account_grant(
    account: RestResource, key: str, email: str, policy: Policy, role: str, needs: tuple[str, ...] = ()
) -> AccountGrant:
    return AccountGrant(
        key=f"grants/{key}", needs=(account.key, *needs), account=account, email=email, policy=policy, role=role
    )
