"""URIs as text: schemes, paths and joining. A URI without a scheme is a path of this machine."""

from __future__ import annotations

import os
import re
from pathlib import Path

from muster.core.errors import UsageError

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://(.*)$", re.DOTALL)
_ALIASES = {"": "file", "file": "file", "local": "file", "gcs": "gs", "s3a": "s3"}


def scheme(uri: str) -> str:
    """``file``, ``memory``, ``gs``, ``s3``... of a URI; ``file`` for a plain path."""
    match = _SCHEME.match(uri)
    name = match.group(1).lower() if match else ""
    return _ALIASES.get(name, name)


def is_local(uri: str) -> bool:
    return scheme(uri) == "file"


def local_path(uri: str | os.PathLike[str]) -> Path:
    """The path that a local URI names. Raises UsageError for any other scheme."""
    text = os.fspath(uri)
    if not is_local(text):
        raise UsageError(f"{text} is not a path of this machine")
    match = _SCHEME.match(text)
    return Path(match.group(2) if match else text)


def bucket_and_key(uri: str) -> tuple[str, str]:
    """``gs://bucket/a/b`` -> ``("bucket", "a/b")``. Raises UsageError without a bucket."""
    match = _SCHEME.match(uri)
    bucket, _, key = (match.group(2) if match else "").partition("/")
    if not bucket:
        raise UsageError(f"{uri!r} names no bucket", hint="for example gs://my-bucket/runs")
    return bucket, key


def join(uri: str, *parts: str) -> str:
    """``uri/part/part``, without doubled slashes; the root keeps its own."""
    head = uri.rstrip("/") if uri.strip("/") and not uri.endswith("://") else uri
    for part in parts:
        clean = part.strip("/")
        if clean:
            head = f"{head}{clean}" if head.endswith("/") else f"{head}/{clean}"
    return head


def name(uri: str) -> str:
    return uri.rstrip("/").rpartition("/")[2]
