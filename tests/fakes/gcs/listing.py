"""``storage.objects.list``: names in the order of their UTF-8 bytes, folders by delimiter, pages."""

from __future__ import annotations

import base64
from collections.abc import Mapping

from fakes.gcs.objects import Object


def page(
    objects: Mapping[str, Object], query: Mapping[str, str], page_size: int, url: str, bucket: str
) -> dict[str, object]:
    """One page as ``storage#objects``; objects and prefixes count towards its size alike."""
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    limit = min(int(query.get("maxResults") or page_size), page_size)
    start, end = query.get("startOffset", "").encode(), query.get("endOffset", "").encode()
    trailing = query.get("includeTrailingDelimiter") == "true"
    entries: set[tuple[str, bool]] = set()
    for name in objects:
        if not name.startswith(prefix) or name.encode() < start or (end and name.encode() >= end):
            continue
        rest = name[len(prefix) :]
        if delimiter and delimiter in rest:
            folder = prefix + rest[: rest.index(delimiter) + len(delimiter)]
            entries.add((folder, True))
            if not (trailing and folder == name):
                continue
        entries.add((name, False))
    after = base64.urlsafe_b64decode(query.get("pageToken", "")).decode()
    found = sorted((one for one in entries if one[0].encode() > after.encode()), key=lambda one: one[0].encode())
    shown = found[:limit]
    while len(found) > len(shown) and shown and found[len(shown)][0] == shown[-1][0]:
        shown.append(found[len(shown)])  # a folder's marker stays with its prefix: the token is a name
    answer = {
        "kind": "storage#objects",
        "items": [objects[name].resource(url, bucket, name) for name, folder in shown if not folder],
        "prefixes": [name for name, folder in shown if folder],
    }
    if len(found) > len(shown):
        answer["nextPageToken"] = base64.urlsafe_b64encode(shown[-1][0].encode()).decode()
    return {key: value for key, value in answer.items() if value}
