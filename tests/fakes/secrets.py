"""Secret Manager in memory: secrets, versions, and who may read them."""

from __future__ import annotations

import base64
import urllib.parse
from dataclasses import dataclass, field
from typing import Any

from fakes.discovery import Discovery
from fakes.google_wire import body_of, refuse

from muster.backends.google.http import Call, Reply

API = "secretmanager.v1"
OWNER = None
"""The caller who may do everything."""
ACCESSOR = "roles/secretmanager.secretAccessor"


@dataclass
class FakeSecrets:
    """One project's, under its number and its id alike."""

    discovery: Discovery
    projects: tuple[str, ...] = ("example-project", "123456789")
    holds_after: int = 0
    """Reads that are refused although the grant is there: grants take their time."""
    versions: dict[str, list[bytes]] = field(default_factory=dict)
    labels: dict[str, dict[str, str]] = field(default_factory=dict)
    policies: dict[str, dict[str, Any]] = field(default_factory=dict)
    states: dict[tuple[str, int], str] = field(default_factory=dict)
    """Of versions that are not ENABLED: DISABLED or DESTROYED. Such a one is there (``get``) and cannot be read."""
    may_look: bool = True
    """False: the owner lacks ``secretmanager.versions.get``, which secretAccessor does not have."""

    def send(self, call: Call) -> Reply:
        return self.as_account(OWNER, call)

    def as_account(self, account: str | None, call: Call) -> Reply:
        """The same service, asked with this account's token."""
        url = urllib.parse.urlsplit(call.url)
        match = self.discovery.match(call.method, url.netloc, url.path)
        assert match is not None and match.api == API, f"no documented method: {call.method} {call.url}"
        complaints = self.discovery.complaints(match, url.query, call.body)
        assert not complaints, f"{match.id}: {complaints}"
        if match.path["projectsId"] not in self.projects:
            return refuse(403, "PERMISSION_DENIED", "Permission denied on the project (or it may not exist).")
        reply = self._answer(match.verb, match.path, dict(urllib.parse.parse_qsl(url.query)), account, call)
        wrong = self.discovery.wrong_answer(match, reply.body) if reply.status < 300 else []
        assert not wrong, f"{match.id}: {wrong}"
        return reply

    def _answer(self, verb: str, path: dict[str, str], query: dict[str, str], account: str | None, call: Call) -> Reply:
        name = path.get("secretsId") or query.get("secretId", "")
        if account is not OWNER and verb != "access":
            return refuse(403, "PERMISSION_DENIED", f"{account} may not do that.")
        if verb == "create":
            if name in self.versions:
                return refuse(409, "ALREADY_EXISTS", f"Secret [{name}] already exists.")
            self.versions[name], self.labels[name] = [], body_of(call).get("labels", {})
            return Reply(status=200, body=self._secret(name))
        if verb == "list":
            rows = [self._secret(one) for one in self.versions]
            return Reply(status=200, body={"secrets": rows} if rows else {})
        if name not in self.versions and not (verb == "get" and "versionsId" in path):
            return refuse(404, "NOT_FOUND", f"Secret [{name}] not found.")
        if verb == "access":
            return self._access(name, path["versionsId"], account)
        if verb == "addVersion":
            self.versions[name].append(base64.b64decode(body_of(call)["payload"]["data"]))
            return Reply(status=200, body=self._version(name, len(self.versions[name])))
        if verb in ("getIamPolicy", "setIamPolicy"):
            found = self.policies.setdefault(name, {"bindings": [], "etag": "MQ=="})
            if verb == "setIamPolicy":
                if body_of(call)["policy"].get("etag", found["etag"]) != found["etag"]:
                    return refuse(409, "ABORTED", "There were concurrent policy changes.")
                found |= body_of(call)["policy"] | {"etag": base64.b64encode(found["etag"].encode()).decode()}
            return Reply(status=200, body=found)
        if verb == "delete":
            for of in (self.versions, self.labels, self.policies):
                of.pop(name, None)
            return Reply(status=200, body={})
        assert verb == "get", f"not played: {verb}"
        if "versionsId" in path:
            return self._look(name, path["versionsId"])
        return Reply(status=200, body=self._secret(name))

    def _look(self, name: str, version: str) -> Reply:
        if not self.may_look:
            words = f"Permission 'secretmanager.versions.get' denied for resource '{name}' (or it may not exist)."
            return refuse(403, "PERMISSION_DENIED", words)
        if not 1 <= int(version) <= len(self.versions.get(name, ())):
            return refuse(404, "NOT_FOUND", f"Secret Version [{name}/{version}] not found.")
        return Reply(status=200, body=self._version(name, int(version)))

    def _access(self, name: str, version: str, account: str | None) -> Reply:
        rows = self.policies.get(name, {}).get("bindings", [])
        granted = any(row["role"] == ACCESSOR and f"serviceAccount:{account}" in row["members"] for row in rows)
        if account is not OWNER and (not granted or self.holds_after > 0):
            self.holds_after -= granted
            words = f"Permission 'secretmanager.versions.access' denied for resource 'secrets/{name}'."
            return refuse(403, "PERMISSION_DENIED", words)
        number = len(self.versions[name]) if version == "latest" else int(version)
        if not 1 <= number <= len(self.versions[name]):
            return refuse(404, "NOT_FOUND", f"Secret Version [{name}/{version}] not found.")
        if state := self.states.get((name, number)):
            return refuse(400, "FAILED_PRECONDITION", f"Secret Version [{name}/{number}] is in {state} state.")
        data = self.versions[name][number - 1]
        payload = {"data": base64.b64encode(data).decode(), "dataCrc32c": str(crc32c(data))}
        return Reply(status=200, body={"name": self._version(name, number)["name"], "payload": payload})

    def _secret(self, name: str) -> dict[str, Any]:
        return {"name": f"projects/{self.projects[-1]}/secrets/{name}", "labels": self.labels[name]}

    def _version(self, name: str, number: int) -> dict[str, Any]:
        state = self.states.get((name, number), "ENABLED")
        return {"name": f"projects/{self.projects[-1]}/secrets/{name}/versions/{number}", "state": state}


def crc32c(data: bytes) -> int:
    """Castagnoli's checksum, bit by bit (RFC 3720, appendix B.4)."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF
