"""Credentials of the machine that a program runs on, from its metadata server: no library of Google's is needed."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from muster.backends.google.http import Call, Reply, Unreachable, exchange
from muster.core import environment
from muster.core.typed_json import Unreadable, parse_object, text, whole

if TYPE_CHECKING:
    import httpx2

SERVER = "http://metadata.google.internal"
TOKEN = "instance/service-accounts/default/token"
EARLY_S = 60.0
"""A token is asked for again this long before it ends."""


@dataclass(kw_only=True)
class MachineHttp:
    """``Http`` as the machine's own account. Scopes are what the machine was given: a custom job without an account of
    its own has none for Secret Manager."""

    server: str = field(default_factory=lambda: environment.current().metadata_url or SERVER)
    timeout_s: float = 30.0
    _token: str = ""
    _until_s: float = 0.0

    def send(self, call: Call) -> Reply:
        return exchange(call, {"authorization": f"Bearer {self._bearer()}"}, self.timeout_s)

    def transport(self, endpoint: str, ca_pem: str | None) -> httpx2.BaseTransport:
        raise NotImplementedError("a host of a run speaks to no cluster's API server")

    def _bearer(self) -> str:
        if time.monotonic() >= self._until_s:
            said = read(TOKEN, server=self.server, timeout_s=self.timeout_s)
            try:
                body = parse_object(said)
            except Unreadable as error:
                raise Unreachable(f"the metadata server's token cannot be read: {error}") from error
            self._token = text(body, "access_token")
            self._until_s = time.monotonic() + max(0.0, whole(body, "expires_in") - EARLY_S)
        return self._token


def read(key: str, *, server: str | None = None, timeout_s: float = 10.0) -> str:
    """What the metadata server says at ``/computeMetadata/v1/KEY``.

    Raises:
        Unreachable: there is none, or it has no such key.
    """
    url = f"{server or environment.current().metadata_url or SERVER}/computeMetadata/v1/{key}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    try:
        # No proxy: the server is this machine's own.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=timeout_s) as answer:
            return str(answer.read().decode())
    except (urllib.error.URLError, TimeoutError, ConnectionError, UnicodeDecodeError) as error:
        raise Unreachable(f"no answer from the metadata server ({url}): {error}") from error
