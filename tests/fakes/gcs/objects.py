"""What a bucket holds, and how an object is described."""

from __future__ import annotations

import base64
import datetime
import functools
import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote

#: ``storage.objects.insert`` refuses a longer one (UTF-8 bytes).
LONGEST_NAME = 1024


class Refused(Exception):
    """An answer that is an error."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(f"{code} {reason}: {message}")
        self.code, self.reason, self.message = code, reason, message

    def answer(self) -> tuple[int, dict[str, str], bytes]:
        domain = "usageLimits" if self.code == 429 else "global"
        entry = {"message": self.message, "domain": domain, "reason": self.reason}
        if self.code == 412:
            entry |= {"locationType": "header", "location": "If-Match"}
        body = {"error": {"code": self.code, "message": self.message, "errors": [entry]}}
        return self.code, {"Content-Type": "application/json; charset=UTF-8"}, json.dumps(body).encode()


@dataclass
class Object:
    data: bytes
    generation: int
    metageneration: int = 1
    content_type: str = "application/octet-stream"
    metadata: dict[str, str] = field(default_factory=dict)
    created_s: float = field(default_factory=time.time)
    updated_s: float = field(default_factory=time.time)
    components: int = 0
    """Of how many it was composed; 0: it was uploaded whole."""
    soft_deleted_s: float = 0.0

    @functools.cached_property
    def crc32c(self) -> str:
        import google_crc32c

        return base64.b64encode(google_crc32c.value(self.data).to_bytes(4, "big")).decode()

    @functools.cached_property
    def md5(self) -> str:
        return md5(self.data)

    @property
    def etag(self) -> str:
        return base64.b64encode(f"{self.generation}/{self.metageneration}".encode()).decode()

    def changed(self) -> None:
        self.metageneration += 1
        self.updated_s = time.time()

    def resource(self, url: str, bucket: str, name: str) -> dict[str, object]:
        """As ``storage#object``; every field is one of the discovery document's."""
        quoted = quote(name, safe="")
        found: dict[str, object] = {
            "kind": "storage#object",
            "id": f"{bucket}/{name}/{self.generation}",
            "selfLink": f"{url}/storage/v1/b/{bucket}/o/{quoted}",
            "mediaLink": f"{url}/download/storage/v1/b/{bucket}/o/{quoted}?generation={self.generation}&alt=media",
            "name": name,
            "bucket": bucket,
            "generation": str(self.generation),
            "metageneration": str(self.metageneration),
            "contentType": self.content_type,
            "storageClass": "STANDARD",
            "size": str(len(self.data)),
            "crc32c": self.crc32c,
            "etag": self.etag,
            "timeCreated": stamp(self.created_s),
            "timeFinalized": stamp(self.created_s),
            "timeStorageClassUpdated": stamp(self.created_s),
            "updated": stamp(self.updated_s),
        }
        if self.components:
            found["componentCount"] = self.components  # and no MD5: the service has only the parts' checksums
        else:
            found["md5Hash"] = self.md5
        if self.metadata:
            found["metadata"] = self.metadata
        if self.soft_deleted_s:
            found["softDeleteTime"] = stamp(self.soft_deleted_s)
        return found


def stamp(at_s: float) -> str:
    return datetime.datetime.fromtimestamp(at_s, datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data).digest()).decode()


def check_name(name: str | None) -> str:
    if not name:
        raise Refused(400, "required", "Required")
    if len(name.encode()) > LONGEST_NAME or name in (".", "..") or "\r" in name or "\n" in name:
        raise Refused(400, "invalid", f"Invalid object name: {name!r}")
    return name


def check(found: Object | None, query: Mapping[str, str], prefix: str = "if") -> None:
    """The preconditions on generation and metageneration; an object that is not there has 0 of both."""
    generation = found.generation if found else 0
    metageneration = found.metageneration if found else 0
    for key, have, equal in (
        ("GenerationMatch", generation, True),
        ("GenerationNotMatch", generation, False),
        ("MetagenerationMatch", metageneration, True),
        ("MetagenerationNotMatch", metageneration, False),
    ):
        wanted = query.get(prefix + key)
        if wanted is not None and (int(wanted) == have) != equal:
            raise Refused(412, "conditionNotMet", "At least one of the pre-conditions you specified did not hold.")
