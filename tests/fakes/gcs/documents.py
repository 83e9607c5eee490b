"""Requests and answers against Google's discovery document of Cloud Storage, where google-api-python-client is
installed (it ships the document)."""

from __future__ import annotations

import functools
import json
from urllib.parse import parse_qsl, urlencode

from fakes import discovery

HOST = "storage.googleapis.com"


@functools.cache
def document() -> discovery.Discovery | None:
    found = discovery.folder()
    return discovery.Discovery(found, ("storage.v1",)) if found else None


def complaints(method: str, path: str, query: str, body: bytes) -> list[str]:
    """What the document does not know of a request. ``body``: the JSON of it, without an upload's data."""
    google = document()
    if google is None or "upload_id" in dict(parse_qsl(query)):  # a session's address is the service's own
        return []
    download = path.startswith("/download/")
    match = google.match(method, HOST, path.removeprefix("/download"))
    if match is None:
        return [f"{method} {path}: no such method"]
    pairs = parse_qsl(query, keep_blank_values=True)
    found = []
    if match.id.endswith(".upload"):
        kind = dict(pairs).get("uploadType")
        if kind not in ("media", "multipart", "resumable"):
            found.append(f"query uploadType: {kind!r}")
        pairs = [pair for pair in pairs if pair[0] != "uploadType"]
    if download and dict(pairs).get("alt") != "media":
        found.append("query alt: want media below /download")
    return found + google.complaints(match, urlencode(pairs), json.loads(body) if body.strip() else None)


def wrong_answer(method: str, path: str, answer: bytes) -> list[str]:
    """What the document does not know of an answer's JSON. Of a list three items are looked at."""
    google = document()
    match = google.match(method, HOST, path) if google else None
    if google is None or match is None or not answer:
        return []
    value = json.loads(answer)
    if "items" in value:
        value["items"] = value["items"][:3]
    return google.wrong_answer(match, value)
