"""The HTTP of the JSON API: which request is which operation, and how its answer is written."""

from __future__ import annotations

import contextlib
import json
import re
import time
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, unquote, urlsplit

from fakes.gcs import documents, listing, uploads
from fakes.gcs.objects import Object, Refused, check
from fakes.gcs.uploads import Answer, Request

if TYPE_CHECKING:
    from fakes.gcs import GcsFake

NOTHING: Answer = (204, {}, b"")
_PART = "([^/]+)"
#: (method, path below /storage/v1) -> operation; the groups are the names in the path. A "/" in a name is %2F.
ROUTES = [
    (method, re.compile(path.replace("NAME", _PART)), operation)
    for method, path, operation in (
        ("GET", "/b", "buckets.list"),
        ("POST", "/b", "buckets.insert"),
        ("GET", "/b/NAME", "buckets.get"),
        ("DELETE", "/b/NAME", "buckets.delete"),
        ("GET", "/b/NAME/storageLayout", "buckets.getStorageLayout"),
        ("GET", "/b/NAME/o", "objects.list"),
        ("GET", "/b/NAME/o/NAME", "objects.get"),
        ("DELETE", "/b/NAME/o/NAME", "objects.delete"),
        ("PATCH", "/b/NAME/o/NAME", "objects.patch"),
        ("PUT", "/b/NAME/o/NAME", "objects.update"),
        ("POST", "/b/NAME/o/NAME/compose", "objects.compose"),
        ("POST", "/b/NAME/o/NAME/restore", "objects.restore"),
        ("POST", "/b/NAME/o/NAME/moveTo/o/NAME", "objects.move"),
        ("POST", "/b/NAME/o/NAME/rewriteTo/b/NAME/o/NAME", "objects.rewrite"),
        ("POST", "/b/NAME/o/NAME/copyTo/b/NAME/o/NAME", "objects.copy"),
    )
]


class Server(ThreadingHTTPServer):
    request_queue_size = 256  # racing writers connect all at once
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hung up in mid-request says nothing about the server."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # headers and body in one packet: else each answer waits 40 ms for an acknowledgement
    disable_nagle_algorithm = True
    server_fake: GcsFake

    def do_GET(self) -> None:
        self._answer()

    do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass

    @property
    def url(self) -> str:
        """This server, as the client calls it: it may sit behind a bridge."""
        return f"http://{self.headers.get('Host') or self.server_fake.url.removeprefix('http://')}"

    def _answer(self) -> None:
        try:
            body = self._body()
        except ConnectionError:
            self.close_connection = True  # the writer died: nothing of it is kept
            return
        fake, path = self.server_fake, urlsplit(self.path).path
        with fake.lock:
            fake.requests.append((self.command, path))
            wait_s, unavailable, lost = fake.weather.draw()
        if fake.away:
            self.close_connection = True
            return
        time.sleep(wait_s / 2)
        try:
            if unavailable:
                fake.bill.add("", refused=True)
                raise Refused(503, "backendError", "We encountered an internal error. Please try again.")
            code, headers, data = self.route(self.command, self.path, body, self.headers)
        except Refused as error:
            code, headers, data = error.answer()
        time.sleep(wait_s / 2)
        if lost:
            self.close_connection = True
            return
        with contextlib.suppress(ConnectionError):
            self.send_response(code)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

    def _body(self) -> bytes:
        """The request's bytes, whole or not at all."""
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            data = bytearray()
            while size := int(self.rfile.readline().split(b";")[0] or b"0", 16):
                data += self._exactly(size)
                self.rfile.readline()
            self.rfile.readline()
            return bytes(data)
        return self._exactly(int(self.headers.get("Content-Length") or 0))

    def _exactly(self, size: int) -> bytes:
        data = self.rfile.read(size)
        if len(data) != size:
            raise ConnectionResetError
        return data

    # ------------------------------------------------------------ operations

    def route(self, method: str, target: str, body: bytes, headers: Message) -> Answer:
        """One request, or one part of a batch."""
        fake, parts = self.server_fake, urlsplit(target)
        if parts.path.startswith("/batch/storage/v1"):
            return uploads.batch(self, body)
        operation, names = operation_of(method, parts.path)
        query = {key: values[-1] for key, values in parse_qs(parts.query, keep_blank_values=True).items()}
        try:
            described = uploads.described(operation, query, body, headers)
            if wrong := documents.complaints(method, parts.path, parts.query, described):
                fake.complaints += wrong
                raise Refused(400, "invalid", f"{method} {target}: {'; '.join(wrong)}")
            request = Request(method, query, body, headers)
            with fake.lock:
                if names:
                    fake.bucket(names[0])
                answer: Answer = getattr(self, "_" + operation.replace(".", "_"))(request, *names)
        except Refused:
            fake.bill.add(operation, refused=True)
            raise
        fake.bill.add("upload.piece" if "upload_id" in query else operation)
        if answer[1].get("Content-Type", "").startswith("application/json"):
            path = parts.path.removeprefix("/upload").removeprefix("/download")
            fake.complaints += documents.wrong_answer(method, path, answer[2])
        return answer

    def _buckets_list(self, request: Request) -> Answer:
        return as_json(
            {"kind": "storage#buckets", "items": [bucket(name) for name in sorted(self.server_fake.buckets)]}
        )

    def _buckets_insert(self, request: Request) -> Answer:
        name = json.loads(request.body)["name"]
        if name in self.server_fake.buckets:
            raise Refused(409, "conflict", "Your previous request to create the named bucket succeeded.")
        self.server_fake.buckets[name] = {}
        return as_json(bucket(name))

    def _buckets_get(self, request: Request, name: str) -> Answer:
        return as_json(bucket(name))

    def _buckets_delete(self, request: Request, name: str) -> Answer:
        if self.server_fake.buckets[name]:
            raise Refused(409, "conflict", "The bucket you tried to delete is not empty.")
        del self.server_fake.buckets[name]
        return NOTHING

    def _buckets_getStorageLayout(self, request: Request, name: str) -> Answer:
        flat = {"kind": "storage#storageLayout", "bucket": name, "location": "US", "locationType": "multi-region"}
        return as_json({**flat, "hierarchicalNamespace": {"enabled": False}})

    def _objects_list(self, request: Request, name: str) -> Answer:
        found = self.server_fake.buckets[name]
        if request.query.get("softDeleted") == "true":
            entries = [(key, one) for (of, key), one in self.server_fake.soft_deleted.items() if of == name]
            found = {key[0]: one for key, one in entries}
        return as_json(listing.page(found, request.query, self.server_fake.page_size, self.url, name))

    def _objects_get(self, request: Request, bucket: str, name: str) -> Answer:
        found = self.server_fake.find(bucket, name, request.query)
        if request.query.get("alt") == "media":
            return media(found, request.headers.get("Range", ""))
        return self._described(bucket, name, found)

    def _objects_delete(self, request: Request, bucket: str, name: str) -> Answer:
        self.server_fake.find(bucket, name, request.query)
        self.server_fake.remove(bucket, name)
        return NOTHING

    def _objects_patch(self, request: Request, bucket: str, name: str) -> Answer:
        found = self.server_fake.find(bucket, name, request.query)
        self.server_fake.limit.check(bucket, name)
        wanted = json.loads(request.body)
        if request.method == "PUT":
            found.metadata = {}
        for key, value in (wanted.get("metadata") or {}).items():
            if value is None:
                found.metadata.pop(key, None)
            else:
                found.metadata[key] = value
        found.content_type = wanted.get("contentType") or found.content_type
        found.changed()
        return self._described(bucket, name, found)

    _objects_update = _objects_patch

    def _objects_compose(self, request: Request, bucket: str, name: str) -> Answer:
        wanted = json.loads(request.body)
        if not 0 < len(wanted["sourceObjects"]) <= 32:
            raise Refused(400, "invalid", "The number of source components must be from 1 to 32.")
        parts = []
        for item in wanted["sourceObjects"]:
            conditions = {"ifGenerationMatch": item.get("objectPreconditions", {}).get("ifGenerationMatch")}
            given = {"generation": item.get("generation"), **conditions}
            query = {key: value for key, value in given.items() if value is not None}
            parts.append(self.server_fake.find(bucket, item["name"], query))
        described = wanted.get("destination", {})
        made = self.server_fake.write(
            bucket, name, b"".join(part.data for part in parts), request.query, described.get("contentType"),
            described.get("metadata"), components=sum(part.components or 1 for part in parts),
        )  # fmt: skip
        return self._described(bucket, name, made)

    def _objects_restore(self, request: Request, bucket: str, name: str) -> Answer:
        found = self.server_fake.soft_deleted.get((bucket, (name, int(request.query["generation"]))))
        if found is None:
            raise Refused(404, "notFound", f"No such object: {bucket}/{name}")
        made = self.server_fake.write(bucket, name, found.data, request.query, found.content_type, found.metadata)
        return self._described(bucket, name, made)

    def _objects_move(self, request: Request, bucket: str, source: str, name: str) -> Answer:
        """The source's bytes and metadata under the other name, in one step, as a new generation."""
        fake = self.server_fake
        found = fake.find(bucket, source, {})
        check(found, request.query, "ifSource")
        check(fake.buckets[bucket].get(name), request.query)
        if name == source:
            raise Refused(400, "invalid", "The source and the destination object are the same.")
        fake.limit.check(bucket, source, name)
        made = fake.place(bucket, name, Object(found.data, fake.generation(), metadata=dict(found.metadata)))
        made.content_type, made.components = found.content_type, found.components
        del fake.buckets[bucket][source]
        return self._described(bucket, name, made)

    def _objects_copy(self, request: Request, bucket: str, source: str, to: str, name: str) -> Answer:
        found = self.server_fake.find(bucket, source, {})
        check(found, request.query, "ifSource")
        self.server_fake.bucket(to)
        made = self.server_fake.write(to, name, found.data, request.query, found.content_type, found.metadata)
        return self._described(to, name, made)

    def _objects_rewrite(self, request: Request, bucket: str, source: str, to: str, name: str) -> Answer:
        resource = json.loads(self._objects_copy(request, bucket, source, to, name)[2])
        sizes = {"totalBytesRewritten": resource["size"], "objectSize": resource["size"]}
        return as_json({"kind": "storage#rewriteResponse", **sizes, "done": True, "resource": resource})

    def _objects_insert(self, request: Request, bucket: str) -> Answer:
        made = uploads.upload(self.server_fake, self.url, bucket, request)
        return made if isinstance(made, tuple) else self._described(bucket, made.name, made.object)

    def _described(self, bucket: str, name: str, found: Object) -> Answer:
        return as_json(found.resource(self.url, bucket, name))


def operation_of(method: str, path: str) -> tuple[str, list[str]]:
    """("objects.get", names) of a request. Raises Refused (404)."""
    if re.fullmatch("/upload/storage/v1/b/[^/]+/o", path) and method in ("POST", "PUT", "DELETE"):
        return "objects.insert", [unquote(path.split("/")[5])]
    below = re.sub("^(/download)?/storage/v1", "", path)
    for verb, pattern, operation in ROUTES:
        if verb == ("GET" if method == "HEAD" else method) and (found := pattern.fullmatch(below)) and below != path:
            return operation, [unquote(one) for one in found.groups()]
    raise Refused(404, "notFound", f"Not Found: {path}")


def media(found: Object, wanted: str) -> Answer:
    headers = {
        "Content-Type": found.content_type,
        "X-Goog-Generation": str(found.generation),
        "X-Goog-Metageneration": str(found.metageneration),
        "X-Goog-Hash": f"crc32c={found.crc32c}" + ("" if found.components else f",md5={found.md5}"),
        "ETag": found.etag,
        "Accept-Ranges": "bytes",
    }
    span = re.fullmatch(r"bytes=(\d*)-(\d*)", wanted)
    if span is None:
        return 200, headers, found.data
    first, last, size = span.group(1), span.group(2), len(found.data)
    start = int(first) if first else max(0, size - int(last))
    stop = min(size, int(last) + 1) if first and last else size
    if start >= size:
        return 416, {**headers, "Content-Range": f"bytes */{size}"}, b""
    return 206, {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{size}"}, found.data[start:stop]


def bucket(name: str) -> dict[str, str]:
    return {"kind": "storage#bucket", "name": name, "id": name, "location": "US"}


def as_json(value: object) -> Answer:
    return 200, {"Content-Type": "application/json; charset=UTF-8"}, json.dumps(value).encode()
