"""The ways of bringing bytes: media, multipart, resumable; and batches."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.message import Message
from typing import TYPE_CHECKING

from fakes.gcs.objects import Object, Refused, check, check_name, md5

if TYPE_CHECKING:
    from fakes.gcs import GcsFake
    from fakes.gcs.server import Handler

Answer = tuple[int, dict[str, str], bytes]
#: The service keeps whole pieces of this size; a smaller one is refused unless it is the last.
PIECE = 256 * 1024


@dataclass(frozen=True)
class Request:
    method: str
    query: Mapping[str, str]
    body: bytes
    headers: Message


@dataclass
class Upload:
    """A resumable upload under way: nothing is visible until its last byte is here."""

    bucket: str
    name: str
    query: Mapping[str, str]
    content_type: str
    metadata: dict[str, str]
    data: bytearray = field(default_factory=bytearray)


@dataclass(frozen=True)
class Told:
    """What an upload's JSON says of the object."""

    name: str | None
    content_type: str | None
    metadata: dict[str, str]
    sums: dict[str, str]
    json: bytes

    @classmethod
    def of(cls, text: bytes) -> Told:
        told = json.loads(text) if text.strip() else {}
        sums = {key: told[key] for key in ("crc32c", "md5Hash") if key in told}
        return cls(told.get("name"), told.get("contentType"), told.get("metadata") or {}, sums, text)


@dataclass(frozen=True)
class Made:
    name: str
    object: Object


def described(operation: str, query: Mapping[str, str], body: bytes, headers: Message) -> bytes:
    """The JSON of a request, without the data that an upload brings."""
    if operation != "objects.insert":
        return body
    if "upload_id" in query or query.get("uploadType") == "media":
        return b""
    if query.get("uploadType") == "multipart":
        return multipart(headers.get("Content-Type") or "", body)[0].json
    return body


def upload(fake: GcsFake, url: str, bucket: str, request: Request) -> Made | Answer:
    """What was made, or the answer on the way there."""
    query, headers = request.query, request.headers
    if "upload_id" in query:
        return resume(fake, request)
    content_type = headers.get("Content-Type") or ""
    if query.get("uploadType") == "resumable":
        told = Told.of(request.body)
        name = check_name(told.name or query.get("name"))
        # Fails early as the service does; checked again when the last byte is here.
        check(fake.buckets[bucket].get(name), query)
        identity = uuid.uuid4().hex
        kind = headers.get("X-Upload-Content-Type") or told.content_type or ""
        fake.uploads[identity] = Upload(bucket, name, query, kind, told.metadata)
        location = f"{url}/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id={identity}"
        return 200, {"Location": location, "X-GUploader-UploadID": identity}, b""
    if query.get("uploadType") == "multipart":
        told, data_type, data = multipart(content_type, request.body)
        name = check_name(told.name or query.get("name"))
        kind = told.content_type or data_type
        made = fake.write(bucket, name, data, query, kind, told.metadata, wanted=told.sums)
        return Made(name, made)
    name = check_name(query.get("name"))
    return Made(name, fake.write(bucket, name, request.body, query, content_type))


def resume(fake: GcsFake, request: Request) -> Made | Answer:
    identity, body = request.query["upload_id"], request.body
    under_way = fake.uploads.get(identity)
    if under_way is None:
        raise Refused(404, "notFound", "Not Found")
    if request.method == "DELETE":
        del fake.uploads[identity]
        return 499, {}, b""
    span = re.fullmatch(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)", request.headers.get("Content-Range") or "")
    total: int | None = len(under_way.data) + len(body)
    if span:
        start = int(span.group(1)) if span.group(1) else len(under_way.data)
        if start > len(under_way.data):
            raise Refused(503, "backendError", "bytes are missing before this piece")
        under_way.data[start:] = body if span.group(1) else b""
        total = int(span.group(3)) if span.group(3) != "*" else None
    else:
        under_way.data += body
    if total is None or len(under_way.data) < total:
        if span and span.group(1) and len(body) < PIECE:
            del under_way.data[start:]
            raise Refused(400, "invalid", f"A piece that is not the last has at least {PIECE} bytes, not {len(body)}.")
        del under_way.data[len(under_way.data) // PIECE * PIECE :]
        sent = {"Range": f"bytes=0-{len(under_way.data) - 1}"} if under_way.data else {}
        return 308, sent, b""
    made = fake.write(
        under_way.bucket, under_way.name, bytes(under_way.data), under_way.query, under_way.content_type,
        under_way.metadata,
    )  # fmt: skip
    del fake.uploads[identity]
    return Made(under_way.name, made)


def multipart(content_type: str, body: bytes) -> tuple[Told, str, bytes]:
    """(metadata, content type of the data, data). Lines may end in LF alone, as gcsfs writes them."""
    named = re.search(r'boundary="?([^";]+)"?', content_type)
    if named is None:
        raise Refused(400, "badRequest", "Missing or invalid boundary")
    boundary = b"--" + named.group(1).encode()
    newline = b"\r\n" if body[len(boundary) :].startswith(b"\r\n") else b"\n"
    first = body.index(boundary) + len(boundary) + len(newline)
    second = body.index(newline + boundary, first)
    last = body.rindex(newline + boundary + b"--")
    _, told = body[first:second].split(newline * 2, 1)
    start = body.index(newline * 2, second + len(newline + boundary)) + len(newline * 2)
    kind = re.search(rb"content-type:\s*([^\r\n]+)", body[second:start], re.IGNORECASE)
    return Told.of(told), kind.group(1).decode() if kind else "", body[start:last]


def check_sums(made: Object, wanted: Mapping[str, str]) -> None:
    for key, have in (("crc32c", made.crc32c), ("md5Hash", md5(made.data))):
        if wanted.get(key, have) != have:
            raise Refused(400, "invalid", f"Provided {key} {wanted[key]} doesn't match calculated {have}.")


def batch(handler: Handler, body: bytes) -> Answer:
    """Every part is a request of its own, with its own answer."""
    boundary = handler.headers["Content-Type"].split("boundary=")[1].strip('"').encode()
    answers = []
    for part in body.split(b"--" + boundary)[1:-1]:
        request = re.search(rb"^(GET|DELETE|PATCH|POST) (\S+) HTTP", part, re.MULTILINE)
        identity = re.search(rb"Content-ID:\s*<?([^>\r\n]*)>?", part, re.IGNORECASE)
        payload = re.split(rb"\r?\n\r?\n", part)[-1].strip()
        try:
            if request is None:
                raise Refused(400, "badRequest", "Failed to parse batch request")
            code, _, data = handler.route(request.group(1).decode(), request.group(2).decode(), payload, Message())
        except Refused as error:
            code, _, data = error.answer()
        answers.append(
            b"--batch_x\r\nContent-Type: application/http\r\nContent-ID: <response-"
            + (identity.group(1) if identity else b"")
            + f">\r\n\r\nHTTP/1.1 {code} X\r\nContent-Type: application/json\r\n".encode()
            + f"Content-Length: {len(data)}\r\n\r\n".encode()
            + data
            + b"\r\n"
        )
    return 200, {"Content-Type": "multipart/mixed; boundary=batch_x"}, b"".join(answers) + b"--batch_x--\r\n"
