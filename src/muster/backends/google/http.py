"""The seam to Google's services: send one request. The real one adds credentials; tests answer from memory."""

from __future__ import annotations

import functools
import http.client
import json
import re
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from muster.core.errors import AccessError, BackendError, install_command
from muster.core.typed_json import Json, JsonObject, children, text

if TYPE_CHECKING:
    import httpx2

LOGIN = "set GOOGLE_APPLICATION_CREDENTIALS to a key file, or run: gcloud auth application-default login"


@dataclass(frozen=True, kw_only=True)
class Call:
    """One request, exactly as it is sent (credentials aside)."""

    method: str
    url: str
    body: JsonObject | None = None
    data: bytes | None = None
    """What is sent as it is, in place of a body."""
    content_type: str = "application/json"
    secret: bool = False
    """The body holds a token: it is never printed."""

    def shown(self) -> str:
        """The request as text, for a dry run."""
        if self.data is not None:
            return f"{self.method} {self.url}\n({len(self.data)} bytes of {self.content_type})"
        if self.body is None:
            return f"{self.method} {self.url}"
        body = "(secret)" if self.secret else json.dumps(self.body, indent=1, sort_keys=True)
        return f"{self.method} {self.url}\n{body}"

    def to_json(self) -> dict[str, Json]:
        """The request for programs; a secret body is left out."""
        result: dict[str, Json] = {"method": self.method, "url": self.url}
        if self.body is not None:
            result["body"] = None if self.secret else self.body
        return result


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What came back; a refusal is data, not an exception."""

    status: int
    body: JsonObject = field(default_factory=dict)
    text: str = ""
    """What came back where it was no JSON (a container's log)."""

    @property
    def message(self) -> str:
        error = self.body.get("error")
        if isinstance(error, Mapping):
            return str(error.get("message", self.status))
        return str(self.body.get("message", f"status {self.status}"))

    @property
    def reasons(self) -> set[str]:
        """Machine-readable reasons of the refusal, in any of the formats of Google's services."""
        error = self.body.get("error")
        if not isinstance(error, Mapping):
            return {str(self.body.get("reason", ""))}
        details = [*children(error, "errors"), *children(error, "details")]
        return {text(error, "status"), *(text(row, "reason") for row in details)}


class Unreachable(BackendError):
    """No response: the request may or may not have arrived."""


class Http(Protocol):
    """Sends requests with one person's or program's credentials."""

    def send(self, call: Call) -> Reply:
        """Raises Unreachable where no answer came."""
        ...

    def transport(self, endpoint: str, ca_pem: str | None) -> httpx2.BaseTransport:
        """To a cluster's own API server, with the same credentials."""
        ...


class GoogleHttp:
    """Application-default credentials: a service-account key, Cloud Shell, a metadata server, or what gcloud left.

    A person's own credentials must name the project that their requests are charged to: Google refuses them otherwise
    (403, "requires a quota project"). That is the project they name, or else the one that the request is about.
    A service account belongs to a project and needs none.
    """

    def __init__(self, timeout_s: float = 60.0) -> None:
        self._timeout_s = timeout_s

    @functools.cached_property
    def _credentials(self) -> Any:
        """Looked for at the first request: a kubeconfig's cluster needs none of them."""
        try:
            import google.auth.transport.requests
        except ImportError as error:
            raise AccessError("google-auth is not installed", hint=install_command("gke")) from error
        try:
            return google.auth.default(scopes=["https://www.googleapis.com/auth/cloud-platform"])[0]
        except google.auth.exceptions.DefaultCredentialsError as error:
            raise AccessError("no Google credentials found", hint=LOGIN) from error

    def send(self, call: Call) -> Reply:
        return exchange(call, self._headers(call), self._timeout_s)

    def transport(self, endpoint: str, ca_pem: str | None) -> httpx2.BaseTransport:
        from muster.backends.google.api_server_transport import network

        trust = ssl.create_default_context(cadata=ca_pem)
        return network(endpoint, trust, lambda: {"authorization": f"Bearer {self._token()}"})

    def _headers(self, call: Call) -> dict[str, str]:
        headers = {"authorization": f"Bearer {self._token()}"}
        url = urllib.parse.urlsplit(call.url)
        named = re.search(r"/projects/([^/:]+)", url.path)
        project = getattr(self._credentials, "quota_project_id", None)
        if project is None and named and _of_a_person(self._credentials):
            project = named[1]
        if project and (url.hostname or "").endswith(".googleapis.com"):
            headers["x-goog-user-project"] = project
        return headers

    def _token(self) -> str:
        credentials = self._credentials
        from google.auth.exceptions import GoogleAuthError
        from google.auth.transport.requests import Request

        try:
            if not credentials.valid:
                credentials.refresh(Request())
        except GoogleAuthError as error:
            raise AccessError(f"Google refused the credentials: {error}", hint=LOGIN) from error
        return str(credentials.token)


def exchange(call: Call, headers: Mapping[str, str], timeout_s: float) -> Reply:
    """Send one request with these headers. Raises Unreachable."""
    data = call.data if call.body is None else json.dumps(call.body).encode()
    request = urllib.request.Request(call.url, data=data, method=call.method)
    request.add_header("content-type", call.content_type)
    for name, value in headers.items():
        request.add_header(name, value)
    try:
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return parse_reply(answer.status, answer.read())
        except urllib.error.HTTPError as error:
            return parse_reply(error.code, error.read())
    except (urllib.error.URLError, TimeoutError, ConnectionError, http.client.HTTPException) as error:
        raise Unreachable(f"no answer from {call.url}: {error}") from error


def _of_a_person(credentials: object) -> bool:
    """Whether they are ``gcloud auth application-default login``'s: a refresh token in a person's name."""
    from google.oauth2.credentials import Credentials

    return isinstance(credentials, Credentials)


def parse_reply(status: int, data: bytes) -> Reply:
    """A response of any content: JSON, a log, a proxy's page."""
    text = data.decode(errors="replace")
    try:
        result = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        result = {"message": text[:500]} if status >= 300 else {}
    return Reply(status=status, body=result if isinstance(result, dict) else {"items": result}, text=text)
