"""A small Google Cloud Storage on loopback: the JSON API with generations and preconditions, in memory.

It exists because the ready-made emulators were found wanting: one lets sixteen of sixteen racing writers win
``ifGenerationMatch=0``, another refuses the multipart bodies of gcsfs. Checked against google-cloud-storage and
gcsfs in ``tests/contract/test_store_contract.py``.

Done: buckets; upload (media, multipart, resumable with status query and cancel); download with ranges and
hashes; list with prefix, delimiter and pages; patch; delete; rewrite, copy, compose; batch; preconditions on
generation and metageneration; error bodies as the service writes them. Not done: versions, ACLs, soft delete,
XML API, gRPC, authentication.

    with GcsFake(buckets=("bucket",)) as fake:      # or: python tests/fakes/gcs.py [PORT]
        os.environ["STORAGE_EMULATOR_HOST"] = fake.url
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import json
import re
import sys
import threading
import uuid
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass
class Object:
    data: bytes
    generation: int
    metageneration: int = 1
    content_type: str = "application/octet-stream"
    metadata: dict = field(default_factory=dict)


@dataclass
class Upload:
    """A resumable upload under way: nothing is visible until its last byte is here."""

    bucket: str
    name: str
    query: dict
    content_type: str
    metadata: dict
    data: bytearray = field(default_factory=bytearray)


class Refused(Exception):
    """An answer that is an error."""

    def __init__(self, code, reason, message):
        self.code, self.reason, self.message = code, reason, message


class GcsFake:
    """The server. ``denied`` buckets answer 403; ``requests`` records (method, path) of every call."""

    def __init__(self, buckets=("bucket",), port=0):
        self.lock = threading.RLock()
        self.buckets = {name: {} for name in buckets}
        self.denied = set()
        self.uploads = {}
        self.requests = []
        self.page_size = 1000
        self._generation = itertools.count(1_700_000_000_000_000)
        fake = self

        class Handler(_Handler):
            server_fake = fake

        self.server = _Server(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    # ------------------------------------------------------------ the state, under the lock

    def bucket(self, name):
        if name in self.denied:
            raise Refused(403, "forbidden", f"Caller does not have storage.objects access to {name}.")
        if name not in self.buckets:
            raise Refused(404, "notFound", "The specified bucket does not exist.")
        return self.buckets[name]

    def find(self, bucket, name, query):
        """The object, its preconditions checked."""
        found = self.bucket(bucket).get(name)
        if found is not None and query.get("generation", str(found.generation)) != str(found.generation):
            found = None
        if found is None:
            raise Refused(404, "notFound", f"No such object: {bucket}/{name}")
        self.check(found, query)
        return found

    def check(self, found, query, prefix="if"):
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

    def write(self, bucket, name, data, query, content_type=None, metadata=None):
        """Replace the object in one step, if the preconditions hold."""
        with self.lock:
            objects = self.bucket(bucket)
            self.check(objects.get(name), query)
            made = Object(bytes(data), next(self._generation), metadata=dict(metadata or {}))
            made.content_type = content_type or made.content_type
            objects[name] = made
            return made

    def resource(self, bucket, name, found):
        quoted = name.replace("/", "%2F")
        return {
            "kind": "storage#object",
            "id": f"{bucket}/{name}/{found.generation}",
            "selfLink": f"{self.url}/storage/v1/b/{bucket}/o/{quoted}",
            "mediaLink": f"{self.url}/download/storage/v1/b/{bucket}/o/{quoted}?alt=media",
            "name": name,
            "bucket": bucket,
            "generation": str(found.generation),
            "metageneration": str(found.metageneration),
            "contentType": found.content_type,
            "storageClass": "STANDARD",
            "size": str(len(found.data)),
            "md5Hash": _md5(found.data),
            "crc32c": _crc32c(found.data),
            "etag": base64.b64encode(str(found.generation).encode()).decode(),
            "timeCreated": "2026-01-01T00:00:00.000Z",
            "updated": "2026-01-01T00:00:00.000Z",
            "metadata": found.metadata,
        }


class _Server(ThreadingHTTPServer):
    request_queue_size = 256  # racing writers connect all at once
    daemon_threads = True


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # headers and body in one packet: else each answer waits 40 ms for an acknowledgement
    server_fake: GcsFake

    def do_GET(self):
        self._answer()

    do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = do_GET

    def log_message(self, *_):
        pass

    def _answer(self):
        parts = urlsplit(self.path)
        query = {key: values[-1] for key, values in parse_qs(parts.query, keep_blank_values=True).items()}
        try:
            body = self._body()
        except ConnectionError:
            self.close_connection = True  # the writer died: nothing of it is kept
            return
        fake = self.server_fake
        with fake.lock:
            fake.requests.append((self.command, parts.path))
        try:
            code, headers, data = self._route(self.command, parts.path, query, body)
        except Refused as error:
            code, headers, data = _error(error)
        with contextlib.suppress(ConnectionError):
            self.send_response(code)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

    def _body(self):
        """The request's bytes, whole or not at all."""
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            data = bytearray()
            while size := int(self.rfile.readline().split(b";")[0] or b"0", 16):
                data += self._exactly(size)
                self.rfile.readline()
            self.rfile.readline()
            return bytes(data)
        return self._exactly(int(self.headers.get("Content-Length") or 0))

    def _exactly(self, size):
        data = self.rfile.read(size)
        if len(data) != size:
            raise ConnectionResetError
        return data

    def _route(self, method, path, query, body):
        fake = self.server_fake
        if path.startswith("/batch/storage/v1"):
            return self._batch(body)
        match = re.fullmatch(r"(/upload|/download)?/storage/v1/b(?:/([^/]+))?(?:/o(?:/(.+))?)?/?", path)
        if match is None:
            raise Refused(404, "notFound", f"Not Found: {path}")
        kind, bucket, name = match.group(1), *(unquote(g) if g else g for g in match.groups()[1:])
        if kind == "/upload":
            return self._upload(method, bucket, query, body)
        if bucket is None or not re.search(r"/o(/|$)", path.removeprefix(f"/storage/v1/b/{match.group(2)}")):
            return self._bucket(method, bucket, query, body)
        if name is None:
            return self._list(bucket, query)
        action = re.fullmatch(r"(.+?)/(rewriteTo|copyTo)/b/([^/]+)/o/(.+)", match.group(3) or "")
        with fake.lock:
            if action:
                source, verb, to_bucket, to_name = (unquote(group) for group in action.groups())
                return self._copy(verb, bucket, source, to_bucket, to_name, query)
            if name.endswith("/compose") and method == "POST":
                return self._compose(bucket, name.removesuffix("/compose"), query, json.loads(body))
            return self._object(method, bucket, name, query, body, media=kind == "/download")

    def _bucket(self, method, bucket, query, body):
        fake = self.server_fake
        with fake.lock:
            if method == "POST":
                bucket = json.loads(body)["name"]
                if bucket in fake.buckets:
                    raise Refused(409, "conflict", "Your previous request to create the named bucket succeeded.")
                fake.buckets[bucket] = {}
            if bucket is None:
                items = [{"kind": "storage#bucket", "name": name, "id": name} for name in sorted(fake.buckets)]
                return _json({"kind": "storage#buckets", "items": items})
            fake.bucket(bucket)
            if method == "DELETE":
                del fake.buckets[bucket]
                return 204, {}, b""
            return _json({"kind": "storage#bucket", "name": bucket, "id": bucket, "location": "US"})

    def _object(self, method, bucket, name, query, body, *, media):
        fake = self.server_fake
        found = fake.find(bucket, name, query)
        if method == "DELETE":
            del fake.buckets[bucket][name]
            return 204, {}, b""
        if method in ("PATCH", "PUT"):
            found.metadata.update(json.loads(body).get("metadata") or {})
            found.metageneration += 1
        if method == "GET" and (media or query.get("alt") == "media"):
            return self._media(found)
        return _json(fake.resource(bucket, name, found))

    def _media(self, found):
        headers = {
            "Content-Type": found.content_type,
            "X-Goog-Generation": str(found.generation),
            "X-Goog-Metageneration": str(found.metageneration),
            "X-Goog-Hash": f"crc32c={_crc32c(found.data)},md5={_md5(found.data)}",
            "ETag": str(found.generation),
            "Accept-Ranges": "bytes",
        }
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if wanted is None:
            return 200, headers, found.data
        first, last, size = wanted.group(1), wanted.group(2), len(found.data)
        start = int(first) if first else max(0, size - int(last))
        stop = min(size, int(last) + 1) if first and last else size
        if start >= size:
            return 416, {**headers, "Content-Range": f"bytes */{size}"}, b""
        return 206, {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{size}"}, found.data[start:stop]

    def _list(self, bucket, query):
        fake = self.server_fake
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        limit = min(int(query.get("maxResults") or fake.page_size), fake.page_size)
        with fake.lock:
            entries = {}
            for name, found in fake.bucket(bucket).items():
                if not name.startswith(prefix):
                    continue
                if not query.get("startOffset", "") <= name or name >= query.get("endOffset", "\U0010ffff"):
                    continue
                rest = name[len(prefix) :]
                if delimiter and delimiter in rest:
                    entries[prefix + rest[: rest.index(delimiter) + len(delimiter)]] = None
                else:
                    entries[name] = fake.resource(bucket, name, found)
        after = base64.urlsafe_b64decode(query.get("pageToken", "")).decode()
        names = [name for name in sorted(entries) if name > after]
        answer = {
            "kind": "storage#objects",
            "items": [entries[name] for name in names[:limit] if entries[name] is not None],
            "prefixes": [name for name in names[:limit] if entries[name] is None],
        }
        if len(names) > limit:
            answer["nextPageToken"] = base64.urlsafe_b64encode(names[limit - 1].encode()).decode()
        return _json({key: value for key, value in answer.items() if value})

    def _copy(self, verb, bucket, name, to_bucket, to_name, query):
        fake = self.server_fake
        source = fake.find(bucket, name, {})
        fake.check(source, query, prefix="ifSource")
        made = fake.write(to_bucket, to_name, source.data, query, source.content_type, source.metadata)
        resource = fake.resource(to_bucket, to_name, made)
        if verb == "copyTo":
            return _json(resource)
        size = str(len(source.data))
        return _json(
            {
                "kind": "storage#rewriteResponse",
                "totalBytesRewritten": size,
                "objectSize": size,
                "done": True,
                "resource": resource,
            }
        )

    def _compose(self, bucket, name, query, body):
        fake = self.server_fake
        data = b"".join(fake.find(bucket, item["name"], {}).data for item in body["sourceObjects"])
        made = fake.write(bucket, name, data, query, body.get("destination", {}).get("contentType"))
        return _json(fake.resource(bucket, name, made))

    # ------------------------------------------------------------ uploads

    def _upload(self, method, bucket, query, body):
        fake = self.server_fake
        with fake.lock:
            fake.bucket(bucket)
            if "upload_id" in query:
                return self._resume(method, query["upload_id"], body)
        kind = query.get("uploadType")
        content_type = self.headers.get("Content-Type", "")
        if kind == "resumable":
            described = json.loads(body) if body.strip() else {}
            name = described.get("name") or query.get("name")
            if not name:
                raise Refused(400, "required", "Required")
            kind_of_data = self.headers.get("X-Upload-Content-Type") or described.get("contentType") or ""
            identity = uuid.uuid4().hex
            with fake.lock:
                # Fails early as the service does; checked again when the last byte is here.
                fake.check(fake.bucket(bucket).get(name), query)
                fake.uploads[identity] = Upload(bucket, name, query, kind_of_data, described.get("metadata") or {})
            location = f"{fake.url}/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id={identity}"
            return 200, {"Location": location, "X-GUploader-UploadID": identity}, b""
        if kind == "multipart":
            described, data_type, data = _multipart(content_type, body)
            name = described.get("name") or query.get("name")
            for key, have in (("crc32c", _crc32c(data)), ("md5Hash", _md5(data))):
                if described.get(key, have) != have:
                    raise Refused(400, "invalid", f"Provided {key} {described[key]} doesn't match calculated {have}.")
            made = fake.write(bucket, name, data, query, data_type, described.get("metadata"))
        else:
            name = query.get("name")
            made = fake.write(bucket, name, body, query, content_type)
        return _json(fake.resource(bucket, name, made))

    def _resume(self, method, identity, body):
        fake = self.server_fake
        upload = fake.uploads.get(identity)
        if upload is None:
            raise Refused(404, "notFound", "Not Found")
        if method == "DELETE":
            del fake.uploads[identity]
            return 499, {}, b""
        described = re.fullmatch(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)", self.headers.get("Content-Range", ""))
        total = len(upload.data) + len(body)
        if described:
            start = int(described.group(1)) if described.group(1) else len(upload.data)
            if start > len(upload.data):
                raise Refused(503, "backendError", "bytes are missing before this piece")
            upload.data[start:] = body if described.group(1) else b""
            total = int(described.group(3)) if described.group(3) != "*" else None
        else:
            upload.data += body
        if total is None or len(upload.data) < total:
            sent = {"Range": f"bytes=0-{len(upload.data) - 1}"} if upload.data else {}
            return 308, sent, b""
        made = fake.write(upload.bucket, upload.name, upload.data, upload.query, upload.content_type, upload.metadata)
        del fake.uploads[identity]
        return _json(fake.resource(upload.bucket, upload.name, made))

    def _batch(self, body):
        boundary = self.headers["Content-Type"].split("boundary=")[1].strip('"').encode()
        answers = []
        for part in body.split(b"--" + boundary)[1:-1]:
            request = re.search(rb"^(GET|DELETE|PATCH|POST) (\S+) HTTP", part, re.MULTILINE)
            identity = re.search(rb"Content-ID:\s*<?([^>\r\n]*)>?", part, re.IGNORECASE)
            parts = urlsplit(request.group(2).decode())
            query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
            payload = re.split(rb"\r?\n\r?\n", part)[-1].strip()
            try:
                code, _, data = self._route(request.group(1).decode(), parts.path, query, payload)
            except Refused as error:
                code, _, data = _error(error)
            answers.append(
                b"--batch_x\r\nContent-Type: application/http\r\nContent-ID: <response-"
                + (identity.group(1) if identity else b"")
                + f">\r\n\r\nHTTP/1.1 {code} X\r\nContent-Type: application/json\r\n".encode()
                + f"Content-Length: {len(data)}\r\n\r\n".encode()
                + data
                + b"\r\n"
            )
        return 200, {"Content-Type": "multipart/mixed; boundary=batch_x"}, b"".join(answers) + b"--batch_x--\r\n"


def _multipart(content_type, body):
    """(metadata, content type of the data, data). Lines may end in LF alone, as gcsfs writes them."""
    boundary = b"--" + re.search(r'boundary="?([^";]+)"?', content_type).group(1).encode()
    newline = b"\r\n" if body[len(boundary) :].startswith(b"\r\n") else b"\n"
    first = body.index(boundary) + len(boundary) + len(newline)
    second = body.index(newline + boundary, first)
    last = body.rindex(newline + boundary + b"--")
    _, described = body[first:second].split(newline * 2, 1)
    head, data = body[second + len(newline + boundary + newline) : last].split(newline * 2, 1)
    kind = re.search(rb"content-type:\s*([^\r\n]+)", head, re.IGNORECASE)
    return json.loads(described), kind.group(1).decode() if kind else None, data


def _json(value):
    return 200, {"Content-Type": "application/json; charset=UTF-8"}, json.dumps(value).encode()


def _error(error):
    entry = {"message": error.message, "domain": "global", "reason": error.reason}
    if error.code == 412:
        entry |= {"locationType": "header", "location": "If-Match"}
    body = {"error": {"code": error.code, "message": error.message, "errors": [entry]}}
    return error.code, {"Content-Type": "application/json; charset=UTF-8"}, json.dumps(body).encode()


def _md5(data):
    return base64.b64encode(hashlib.md5(data).digest()).decode()


def _crc32c(data):
    import google_crc32c

    return base64.b64encode(google_crc32c.value(bytes(data)).to_bytes(4, "big")).decode()


if __name__ == "__main__":
    with GcsFake(port=int(sys.argv[1]) if len(sys.argv) > 1 else 0) as served:
        print(f"STORAGE_EMULATOR_HOST={served.url}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
