"""Secret Manager: a secret of one version that a run's hosts read, by its full name, with their own account.

``projects/P/secrets/S/versions/1`` is a version; nothing here reads ``latest``, which another writer could replace.
"""

from __future__ import annotations

import base64
import binascii
import re
import urllib.parse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from muster.backends.google.http import Call, Unreachable
from muster.backends.google.refusals import refusal
from muster.backends.google.session import Session
from muster.core.errors import AccessError, BackendError, ConflictError, UsageError
from muster.core.typed_json import Json, children, text, texts

ROOT = "https://secretmanager.googleapis.com/v1"
GRANT_S = 120.0
"""For this long a grant that was just made may not hold yet."""
RETRY_S = 3.0
ACCESSOR = "roles/secretmanager.secretAccessor"
POLICY_TRIES = 5
_VERSION = re.compile(r"projects/([^/]+)/secrets/([A-Za-z0-9_-]{1,255})/versions/([1-9][0-9]*)")


@dataclass(frozen=True, kw_only=True)
class SecretManager:
    """Secrets as one person or one host sees them."""

    session: Session

    def create(self, version: str, data: bytes, labels: Mapping[str, str]) -> None:
        """Make the secret with ``data`` as its first ``version``; the same again changes nothing.

        Raises:
            ConflictError: it holds something else.
            AccessError, BackendError: Google's refusal.
        """
        project, secret, number = _parts(version)
        if number != "1":
            raise ConflictError(f"{version}: only the first version of a secret is made here")
        whole: dict[str, Json] = {"labels": dict(labels), "replication": {"automatic": {}}}
        url = f"{ROOT}/projects/{project}/secrets"
        self._once(Call(method="POST", url=f"{url}?secretId={secret}", body=whole))
        if (held := self._held(version)) is None:
            payload: dict[str, Json] = {"data": base64.b64encode(data).decode(), "dataCrc32c": str(crc32c(data))}
            self._once(Call(method="POST", url=f"{url}/{secret}:addVersion", body={"payload": payload}, secret=True))
            held = self._held(version)
        if held != data:
            raise ConflictError(f"{version} holds something else", hint="muster down RUN removes the run's secret")

    def allow(self, version: str, account: str) -> None:
        """Let the service account ``account`` read the secret of ``version``; the same again changes nothing.

        Raises:
            AccessError, BackendError: Google's refusal.
        """
        project, secret, _ = _parts(version)
        url, member = f"{ROOT}/projects/{project}/secrets/{secret}", f"serviceAccount:{account}"
        for tries_left in reversed(range(POLICY_TRIES)):
            policy = self.session.ok(Call(method="GET", url=f"{url}:getIamPolicy")).body
            bindings = children(policy, "bindings")
            if any(text(row, "role") == ACCESSOR and member in texts(row, "members") for row in bindings):
                return
            wanted: dict[str, Json] = {**policy, "bindings": [*bindings, {"role": ACCESSOR, "members": [member]}]}
            call = Call(method="POST", url=f"{url}:setIamPolicy", body={"policy": wanted})
            reply = self.session.send(call)
            if reply.status < 300:
                return
            if reply.status != 409 or not tries_left:  # 409: it was changed meanwhile
                raise refusal(call, reply)

    def share(self, version: str, accounts: Iterable[str | None]) -> list[str]:
        """``allow`` for each of these (None: no such account). Returns warnings where the caller may not grant it.

        Raises:
            BackendError: Google's refusal.
        """
        warnings = []
        for account in accounts:
            try:
                if account is not None:
                    self.allow(version, account)
            except AccessError as error:
                words = f"cannot let {account} read the run's secret, so it has to be allowed already: {error}"
                warnings.append(words)
        return warnings

    def access(self, version: str, *, project: str | None = None, patience_s: float = GRANT_S) -> bytes:
        """What ``version`` holds; a refused account is asked for again for ``patience_s``. ``project``: the number by
        which a host knows the project, in place of the name's.

        Raises:
            AccessError: the account may not read it, or Secret Manager is off.
            BackendError: there is no such version, or it came damaged.
        """
        waited_s = 0.0
        while True:
            try:
                held = self._held(version, project=project)
            except AccessError:
                if waited_s >= patience_s:
                    raise
                self.session.clock.sleep(RETRY_S)
                waited_s += RETRY_S
                continue
            if held is None:
                raise BackendError(f"{version} does not exist", hint="it is made by muster submit, removed by down")
            return held

    def value(self, version: str, *, project: str | None = None) -> str:
        """What ``version`` holds as a variable's value: text without the line's end, as of a ``file:`` (``echo`` and
        editors add one, and a token with it is refused everywhere).

        Raises:
            AccessError: as ``access``.
            BackendError: as ``access``; or no variable can hold it.
        """
        try:
            value = self.access(version, project=project).decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise BackendError(f"{version} is not UTF-8 text") from error
        if not value or "\0" in value:
            raise BackendError(f"{version} is empty or holds a NUL byte, which no variable can")
        return value

    def require(self, versions: Mapping[str, str]) -> list[str]:
        """Look at the versions (variable -> version) that hosts are going to read, before a machine is paid for.
        Returns warnings about those at which the caller may not look (``secretmanager.versions.get``).

        Raises:
            UsageError: there is no such version, or it is disabled or destroyed.
            BackendError: Google's refusal.
        """
        warnings = []
        for variable, version in versions.items():
            project, secret, _ = _parts(version)
            listed = f"gcloud secrets versions list {secret} --project {project}"
            try:
                # By hand: ``find`` takes an API that is off for a thing that is not there.
                reply = self.session.send(call := Call(method="GET", url=f"{ROOT}/{version}"))
                if reply.status != 404 and reply.status >= 300:
                    raise refusal(call, reply)
            except AccessError as error:
                warnings.append(f"cannot look whether {version}, for {variable}, is there: {error}")
                continue
            if reply.status == 404:
                raise UsageError(f"{variable} is to come from {version}, which does not exist", hint=listed)
            if (state := text(reply.body, "state")) in ("DISABLED", "DESTROYED"):
                raise UsageError(f"{variable} is to come from {version}, which is {state.lower()}", hint=listed)
        return warnings

    def delete(self, version: str) -> bool:
        """Remove the secret with all its versions; False: there was none."""
        project, secret, _ = _parts(version)
        return self.session.delete(f"{ROOT}/projects/{project}/secrets/{secret}") is not None

    def labelled(self, project: str, label: str, value: str) -> list[str]:
        """Full names of the secrets with that label, ``projects/NUMBER/secrets/S``."""
        found: list[str] = []
        query = {"filter": f"labels.{label}={value}"}
        while True:
            url = f"{ROOT}/projects/{project}/secrets?{urllib.parse.urlencode(query)}"
            reply = self.session.find(Call(method="GET", url=url))
            body = reply.body if reply is not None else {}
            # The filter's result is checked again: `down` removes what is named here.
            found += [text(row, "name") for row in children(body, "secrets") if text(row, "labels", label) == value]
            if not (page := text(body, "nextPageToken")):
                return found
            query["pageToken"] = page

    def _once(self, call: Call) -> None:
        """Create; what is there already, also by an answer that was lost, is looked at by the caller."""
        try:
            reply = self.session.send(call)
        except Unreachable:
            return
        if reply.status >= 300 and reply.status != 409:
            raise refusal(call, reply)

    def _held(self, version: str, *, project: str | None = None) -> bytes | None:
        """None: there is no such secret or version. Raises as ``access``."""
        named, secret, number = _parts(version)
        call = Call(method="GET", url=f"{ROOT}/projects/{project or named}/secrets/{secret}/versions/{number}:access")
        reply = self.session.send(call)
        if reply.status == 404:
            return None
        if reply.status >= 300:
            raise refusal(call, reply)
        try:
            data = base64.b64decode(text(reply.body, "payload", "data"), validate=True)
        except (binascii.Error, ValueError) as error:
            raise BackendError(f"{version} came damaged: no base64") from error
        said = text(reply.body, "payload", "dataCrc32c")
        if said and said != str(crc32c(data)):
            raise BackendError(f"{version} came damaged: its checksum is another")
        return data


def variables(secrets: Mapping[str, str], hugging_face: str | None) -> dict[str, str]:
    """Variable -> version, of all that a run's hosts read: its ``secrets`` and, where they have none, the token."""
    return {**({"HF_TOKEN": hugging_face} if hugging_face else {}), **secrets}


def _parts(version: str) -> tuple[str, str, str]:
    """(project, secret, number). Raises BackendError."""
    match = _VERSION.fullmatch(version)
    if match is None:
        raise BackendError(f"{version!r} names no version of a secret", hint="projects/P/secrets/S/versions/1")
    return match[1], match[2], match[3]


def crc32c(data: bytes) -> int:
    """Castagnoli's checksum, bit by bit (RFC 3720, appendix B.4): secrets are short."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF
