"""Requests to one API server on the network: TLS, proxies, and what lightkube cannot send."""

from __future__ import annotations

import ssl
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping

import httpx2


class ServerTransport(httpx2.BaseTransport):
    """Adds headers computed for each request, and strict field checks to an apply."""

    def __init__(self, inner: httpx2.BaseTransport, headers: Callable[[], Mapping[str, str]] = dict) -> None:
        self._inner, self._headers = inner, headers

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        request.headers.update(self._headers())
        if request.method == "PATCH":
            request.url = request.url.copy_merge_params({"fieldValidation": "Strict"})
        response = self._inner.handle_request(request)
        if response.status_code >= 300:
            # lightkube parses a JSON refusal into types of its own, which threads cannot share (msgspec), and fails
            # where there is no content type. The caller reads the body itself.
            response.headers["content-type"] = ""
        return response


def network(
    endpoint: str, trust: ssl.SSLContext, headers: Callable[[], Mapping[str, str]] = dict
) -> httpx2.BaseTransport:
    """By way of the environment's proxy where there is one; every followed pod holds a connection."""
    url = urllib.parse.urlsplit(endpoint)
    bypassed = urllib.request.proxy_bypass(url.hostname or "")
    proxy = None if bypassed else urllib.request.getproxies().get(url.scheme)
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=8)
    return ServerTransport(httpx2.HTTPTransport(verify=trust, limits=limits, proxy=proxy), headers)
