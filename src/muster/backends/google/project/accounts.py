"""Service accounts of ours, and their roles."""

from __future__ import annotations

from dataclasses import dataclass

from muster.backends.google.http import Call
from muster.backends.google.project.policies import Grant, Policy
from muster.backends.google.project.resources import MARK, Found, RestResource
from muster.backends.google.session import Session
from muster.core.typed_json import JsonObject


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
