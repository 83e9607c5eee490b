"""The bucket as gcsfuse sees it: the JSON API with endless patience, and what it remembers of objects.

429, 5xx and lost connections are tried again without limit, the pause doubling up to 30 s (``max-retry-attempts`` 0,
``max-retry-sleep``); only an upload in pieces has a deadline. Names are remembered for ``ttl_s``, their absence for
``negative_ttl_s`` (fast_stat_bucket.go). Standard library only.
"""

import errno
import http.client
import json
import math
import random
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import quote, urlencode, urlsplit

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
MTIME, SYMLINK = "gcsfuse_mtime", "gcsfuse_symlink_target"
TEMPORARY = ".gcsfuse_tmp/"


class NotFound(OSError):
    def __init__(self, name: str) -> None:
        super().__init__(errno.ENOENT, name)


class Precondition(OSError):
    """412. Where nobody makes something better of it, it is EIO."""

    def __init__(self, name: str) -> None:
        super().__init__(errno.EIO, name)


@dataclass(frozen=True)
class Meta:
    """An object without its bytes."""

    name: str
    generation: int
    metageneration: int
    size: int
    mtime_ns: int
    components: int = 0
    link: str | None = None

    @property
    def identity(self) -> tuple[int, int]:
        return self.generation, self.metageneration


@dataclass(frozen=True)
class Listing:
    objects: list[Meta]
    prefixes: list[str]


class Bucket:
    """One bucket at ``url``. Thread-safe: every thread has a connection of its own."""

    def __init__(self, url: str, bucket: str, *, ttl_s: float, negative_ttl_s: float) -> None:
        self.address = urlsplit(url).netloc
        self.bucket = bucket
        self.ttl_s, self.negative_ttl_s = (_seconds(one) for one in (ttl_s, negative_ttl_s))
        self.remembers = ttl_s != 0
        self.lock = threading.Lock()
        self.known: dict[str, tuple[float, Meta | None]] = {}
        self.mine = threading.local()

    # ---------------------------------------------------------------- what is remembered

    def recall(self, name: str) -> tuple[bool, Meta | None]:
        """(whether anything is known, what: None is that it is not there)"""
        with self.lock:
            until, found = self.known.get(name, (0.0, None))
        return self.remembers and time.monotonic() < until, found

    def note(self, name: str, found: Meta | None) -> None:
        with self.lock:
            if self.remembers:
                self.known[name] = time.monotonic() + (self.ttl_s if found else self.negative_ttl_s), found

    def forget(self, *names: str) -> None:
        with self.lock:
            for name in names:
                self.known.pop(name, None)

    # ---------------------------------------------------------------- operations

    def stat(self, name: str, *, fresh: bool = False) -> Meta:
        """Raises NotFound. ``fresh`` asks the bucket whatever is remembered."""
        known, found = self.recall(name)
        if known and not fresh:
            if found is None:
                raise NotFound(name)
            return found
        try:
            found = _meta(json.loads(self._call("GET", self._at(name), {"projection": "noAcl"})))
        except NotFound:
            self.note(name, None)
            raise
        self.note(name, found)
        return found

    def page(self, prefix: str, *, folders: bool, most: int = 0, token: str = "") -> tuple[Listing, str]:
        """One page, and the next one's token. ``folders``: only what lies directly below, markers included."""
        query = {"prefix": prefix, "projection": "noAcl"}
        query |= {"delimiter": "/", "includeTrailingDelimiter": "true"} if folders else {}
        query |= {"maxResults": str(most)} if most else {}
        query |= {"pageToken": token} if token else {}
        answer = json.loads(self._call("GET", f"/storage/v1/b/{self.bucket}/o", query))
        objects = [_meta(one) for one in answer.get("items", [])]
        for one in objects:
            self.note(one.name, one)
        return Listing(objects, answer.get("prefixes", [])), answer.get("nextPageToken", "")

    def list(self, prefix: str, *, folders: bool = True) -> Listing:
        objects: list[Meta] = []
        prefixes: list[str] = []
        token = None
        while token != "":
            found, token = self.page(prefix, folders=folders, token=token or "")
            objects += found.objects
            prefixes += found.prefixes
        return Listing(objects, prefixes)

    def read(self, of: Meta, start: int, stop: int) -> bytes:
        """Bytes of that generation. Raises NotFound where another has taken its place."""
        if start >= min(stop, of.size):
            return b""
        query = {"alt": "media", "generation": str(of.generation)}
        path = "/download" + self._at(of.name)
        return self._call("GET", path, query, headers={"Range": f"bytes={start}-{min(stop, of.size) - 1}"})

    def insert(
        self,
        name: str,
        data: bytes | bytearray,
        replaces: Meta | None,
        *,
        mtime_ns: int | None = None,
        link: str | None = None,
        deadline_s: float = math.inf,
    ) -> Meta:
        """Raises Precondition unless ``replaces`` (None: nothing) has the name. Raises OSError (EIO): the deadline."""
        self.forget(name)
        told: dict[str, str | dict[str, str]] = {"name": name, "contentType": "application/octet-stream"}
        metadata = {} if mtime_ns is None else {MTIME: written_time(mtime_ns)}
        metadata |= {} if link is None else {SYMLINK: link}
        if metadata:
            told["metadata"] = metadata
        mark = uuid.uuid4().hex.encode()
        parts = (
            b"--" + mark + b"\r\nContent-Type: application/json\r\n\r\n" + json.dumps(told).encode(),
            b"\r\n--" + mark + b"\r\nContent-Type: application/octet-stream\r\n\r\n",
            data,
            b"\r\n--" + mark + b"--\r\n",
        )
        path, query = f"/upload/storage/v1/b/{self.bucket}/o", {"uploadType": "multipart"} | _conditions(replaces)
        kind = {"Content-Type": f'multipart/related; boundary="{mark.decode()}"'}
        made = _meta(json.loads(self._call("POST", path, query, b"".join(parts), kind, deadline_s=deadline_s)))
        self.note(name, made)
        return made

    def append(self, to: Meta, tail: bytes | bytearray, mtime_ns: int) -> Meta:
        """Upload only ``tail`` and compose. Raises Precondition."""
        self.forget(to.name)
        piece = self.insert(TEMPORARY + uuid.uuid4().hex, tail, None)
        body = {
            "sourceObjects": [{"name": one.name, "generation": str(one.generation)} for one in (to, piece)],
            "destination": {
                "contentType": "application/octet-stream",
                "metadata": {MTIME: written_time(mtime_ns)},
            },
        }
        try:
            answer = self._call("POST", self._at(to.name) + "/compose", _conditions(to), json.dumps(body).encode())
        finally:
            self.delete(piece.name)
        made = _meta(json.loads(answer))
        self.note(to.name, made)
        return made

    def move(self, of: Meta, to: str) -> Meta:
        path = f"{self._at(of.name)}/moveTo/o/{quote(to, safe='')}"
        try:
            answer = self._call("POST", path, _conditions(of, "ifSource"))
        finally:
            self.forget(of.name, to)
        made = _meta(json.loads(answer))
        self.note(to, made)
        return made

    def copy(self, of: Meta, to: str) -> Meta:
        path = f"{self._at(of.name)}/copyTo/b/{self.bucket}/o/{quote(to, safe='')}"
        self.forget(to)
        made = _meta(json.loads(self._call("POST", path, _conditions(of, "ifSource"))))
        self.note(to, made)
        return made

    def patch(self, of: Meta, mtime_ns: int) -> Meta:
        body = json.dumps({"metadata": {MTIME: written_time(mtime_ns)}}).encode()
        query = {"generation": str(of.generation), "ifMetagenerationMatch": str(of.metageneration)}
        try:
            answer = self._call("PATCH", self._at(of.name), query, body)
        finally:
            self.forget(of.name)
        made = _meta(json.loads(answer))
        self.note(of.name, made)
        return made

    def delete(self, name: str, of: Meta | None = None) -> None:
        query = {}
        if of is not None:
            query = {"generation": str(of.generation), "ifMetagenerationMatch": str(of.metageneration)}
        try:
            self._call("DELETE", self._at(name), query)
        except (NotFound, Precondition):
            self.forget(name)
            raise
        self.note(name, None)

    # ---------------------------------------------------------------- HTTP

    def _at(self, name: str) -> str:
        return f"/storage/v1/b/{self.bucket}/o/{quote(name, safe='')}"

    def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        *,
        deadline_s: float = math.inf,
    ) -> bytes:
        until, pause_s = time.monotonic() + deadline_s, FIRST_PAUSE_S
        url = path + (f"?{urlencode(query)}" if query else "")
        sent = dict(headers or ({"Content-Type": "application/json"} if body else {}))
        while True:
            code, answer = self._try(method, url, body, sent)
            if 200 <= code < 300:
                return answer
            if code not in (0, 408, 429) and code < 500:
                raise refusal(code, path)
            if time.monotonic() > until:
                raise OSError(errno.EIO, f"{path}: no answer within {deadline_s:g} s")
            time.sleep(random.uniform(0, pause_s))
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    def _try(self, method: str, url: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """(status, body); 0 where there was no answer."""
        line = getattr(self.mine, "line", None) or http.client.HTTPConnection(self.address, timeout=30)
        self.mine.line = line
        try:
            line.request(method, url, body or None, dict(headers))
            reply = line.getresponse()
            return reply.status, reply.read()
        except (OSError, http.client.HTTPException):
            line.close()
            self.mine.line = None
            return 0, b""


def refusal(code: int, what: str) -> OSError:
    """error_mapping.go: what is not named there is EIO."""
    if code == 404:
        return NotFound(what)
    if code == 412:
        return Precondition(what)
    return OSError(errno.EACCES if code in (401, 403) else errno.EIO, f"{what}: {code}")


def _conditions(of: Meta | None, prefix: str = "if") -> dict[str, str]:
    if of is None:
        return {f"{prefix}GenerationMatch": "0"}
    return {
        f"{prefix}GenerationMatch": str(of.generation),
        f"{prefix}MetagenerationMatch": str(of.metageneration),
    }


def _seconds(ttl_s: float) -> float:
    return math.inf if ttl_s < 0 else ttl_s


def _meta(one: Mapping[str, object]) -> Meta:
    metadata = one.get("metadata")
    told: Mapping[str, str] = metadata if isinstance(metadata, dict) else {}
    return Meta(
        name=str(one["name"]),
        generation=int(str(one["generation"])),
        metageneration=int(str(one["metageneration"])),
        size=int(str(one["size"])),
        mtime_ns=read_time(told.get(MTIME) or str(one["updated"])),
        components=int(str(one.get("componentCount") or 0)),
        link=told.get(SYMLINK),
    )


def written_time(at_ns: int) -> str:
    """RFC 3339 with nanoseconds, as gcsfuse keeps a modification time."""
    seconds, rest = divmod(at_ns, 10**9)
    text = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return text + (f".{rest:09}".rstrip("0") if rest else "") + "Z"


def read_time(text: str) -> int:
    whole, _, rest = text.removesuffix("Z").partition(".")
    seconds = int(datetime.strptime(whole, "%Y-%m-%dT%H:%M:%S").replace(tzinfo=UTC).timestamp())
    return seconds * 10**9 + int((rest + "0" * 9)[:9])


def children(found: Listing, of: str) -> Sequence[Meta]:
    """What lies below a folder, without its own marker."""
    return [one for one in found.objects if one.name != of]
