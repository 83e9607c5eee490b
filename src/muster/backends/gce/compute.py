"""Compute Engine's answers in Muster's words: lists in all zones, what a refusal means, why an operation failed."""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from muster.backends.google.http import Call, Reply, Unreachable
from muster.backends.google.refusals import Refusal, of_code, refusal
from muster.backends.google.session import Session
from muster.core.typed_json import JsonObject, child, children, text

API = "https://compute.googleapis.com/compute/v1/projects"


TOO_FEW = "VM_MIN_COUNT_NOT_REACHED"
"""Says that a bulk request failed, and nothing of why."""


@dataclass(frozen=True, kw_only=True)
class Compute:
    """One project's."""

    session: Session
    project: str

    def url(self, path: str) -> str:
        return f"{API}/{self.project}/{path}"

    def address(self, link: str) -> str:
        """Of what a link or a path (``projects/...``) names; links are written under several hosts."""
        return f"{API}/{link.rpartition('projects/')[2]}"

    def send(self, method: str, url: str, body: JsonObject | None = None) -> Reply:
        """One request, once; refusals come back. Raises Unreachable."""
        return _whole(self.session.http.send(Call(method=method, url=url, body=body)), url)

    def get(self, url: str) -> JsonObject | None:
        """None: there is no such thing. Raises as ``Session.find``."""
        reply = self.session.find(Call(method="GET", url=url))
        return _whole(reply, url).body if reply is not None else None

    def everywhere(self, kind: str, wanted: str) -> list[tuple[str, JsonObject]]:
        """Of ``kind`` by a filter, each with where it is: ``zones/Z`` or ``regions/R``."""
        query = urllib.parse.urlencode({"filter": wanted})
        pages = self._pages(self.url(f"aggregated/{kind}?{query}"))
        return [(place, row) for page in pages for place in page for row in children(child(page, place), kind)]

    def listed(self, path: str, wanted: str = "") -> list[JsonObject]:
        query = f"?{urllib.parse.urlencode({'filter': wanted})}" if wanted else ""
        return [row for page in self._pages(self.url(f"{path}{query}")) for row in children(page, "items")]

    def why(self, operation: JsonObject) -> Refusal | None:
        """Why a finished operation failed; None: it did not. Of a bulk request the reasons stand in the operations of
        its machines alone, which have the same group."""
        errors = children(child(operation, "error"), "errors")
        if not errors:
            return None
        group, zone = text(operation, "operationGroupId"), text(operation, "zone").rpartition("/")[2]
        if text(errors[0], "code") == TOO_FEW and group and zone:
            rows = self.listed(f"zones/{zone}/operations", f'operationGroupId="{group}"')
            parts = [error for row in rows for error in children(child(row, "error"), "errors")]
            known = [one for one in parts if text(one, "code") not in (TOO_FEW, "RESOURCE_ALREADY_EXISTS")]
            errors = known or errors
        code, message = text(errors[0], "code"), text(errors[0], "message")
        return of_code(code, message + _elsewhere(errors[0]))

    def _pages(self, url: str) -> Iterator[JsonObject]:
        """Pages of a list: of an aggregated one what is below ``items``, by place."""
        token = ""
        while True:
            joint = "&" if "?" in url else "?"
            at = f"{url}{joint}pageToken={urllib.parse.quote(token)}" if token else url
            reply = self.session.find(Call(method="GET", url=at))
            if reply is None:
                return
            body = _whole(reply, at).body
            yield child(body, "items") if isinstance(body.get("items"), Mapping) else body
            token = text(body, "nextPageToken")
            if not token:
                return

    def ok(self, method: str, url: str, body: JsonObject | None = None) -> Reply | None:
        """The same as ``send``; None where nothing is there (any more). Raises what else is refused."""
        call = Call(method=method, url=url, body=body)
        reply = self.session.send(call)
        if reply.status in (404, 409, 412):
            return None
        if reply.status >= 300:
            raise refusal(call, reply)
        return reply


def _whole(reply: Reply, url: str) -> Reply:
    """Half an answer is none: a list that seems empty would make a run ask for its machines again."""
    if reply.status < 300 and not reply.body and reply.text.strip() not in ("", "{}"):
        raise Unreachable(f"half of an answer from {url}")
    return reply


def _elsewhere(error: JsonObject) -> str:
    """Where Google says that there are some: a hint of the newer stock-out code."""
    for detail in children(error, "errorDetails"):
        if zones := text(detail, "errorInfo", "metadatas", "zonesAvailable"):
            return f" (there may be some in {zones})"
    return ""


def over(operation: JsonObject) -> bool:
    return text(operation, "status") == "DONE"
