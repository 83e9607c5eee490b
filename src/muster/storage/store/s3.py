"""Objects in S3 and what speaks its language, with ``If-None-Match: *`` and ``If-Match``.

**Never run**: no S3 server was at hand when this was written, only the API's documentation (conditional
writes, August and November 2024). Two hazards follow from S3 itself: a generation is the ETag, which is the
same for equal bytes (so what is written conditionally must differ each time: Muster's leases, fences and
markers do), and older S3-compatible servers ignore the conditions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol, cast

from muster.core.errors import BusyError, ConflictError, MusterError
from muster.core.protocols import Stored
from muster.storage import uris
from muster.storage.store.blobs import FileSystem, filesystem, translate

#: After which the same request may succeed, by Amazon's list of error codes.
_BUSY = ("SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "429", "500", "503")


class S3Store:
    def get(self, uri: str, *, start: int = 0) -> Stored:
        with _errors(uri):
            span = {"Range": f"bytes={start}-"} if start else {}
            answer = _call("get_object", uri, **span)
            import fsspec.asyn

            data: bytes = fsspec.asyn.sync(_system(uri).loop, answer["Body"].read)
            return Stored(data=data, generation=answer["ETag"])

    def put(self, uri: str, data: bytes) -> str:
        return self._put(uri, data)

    def put_if_absent(self, uri: str, data: bytes) -> str:
        return self._put(uri, data, IfNoneMatch="*")

    def put_if(self, uri: str, data: bytes, generation: str) -> str:
        return self._put(uri, data, IfMatch=generation)

    def list(self, prefix: str) -> dict[str, int]:
        with _errors(prefix):
            system = filesystem(prefix)
            system.invalidate_cache()
            held = system.find(prefix, detail=True).items()
            return {f"s3://{key}": int(entry["size"]) for key, entry in sorted(held) if not key.endswith("/")}

    def delete(self, uri: str) -> None:
        with contextlib.suppress(FileNotFoundError), _errors(uri):
            _call("delete_object", uri)

    def _put(self, uri: str, data: bytes, **condition: str) -> str:
        with _errors(uri):
            return str(_call("put_object", uri, Body=data, **condition)["ETag"])


class _FileSystem(FileSystem, Protocol):
    """What is used of s3fs's besides."""

    loop: object

    def call_s3(self, method: str, **arguments: str | bytes) -> Any: ...


def _system(uri: str) -> _FileSystem:
    return cast(_FileSystem, filesystem(uri))


def _call(method: str, uri: str, **arguments: str | bytes) -> Any:
    """The service's answer, whose form depends on the method."""
    bucket, key = uris.bucket_and_key(uri)
    return _system(uri).call_s3(method, Bucket=bucket, Key=key, **arguments)


@contextlib.contextmanager
def _errors(uri: str) -> Iterator[None]:
    try:
        yield
    except (MusterError, FileNotFoundError):
        raise
    except Exception as error:
        # s3fs turns botocore's ClientError into an OSError and keeps it as the cause.
        cause = error if hasattr(error, "response") else error.__cause__
        answer = getattr(cause, "response", None) or {}
        code = str(answer.get("Error", {}).get("Code", ""))
        if code in ("NoSuchKey", "404"):
            raise FileNotFoundError(uri) from error
        # 412: the condition failed. 409: a racing conditional write is under way.
        if code in ("PreconditionFailed", "ConditionalRequestConflict", "412", "409"):
            raise ConflictError(f"{uri} is of another version, exists already or is gone") from error
        if code in _BUSY:
            raise BusyError(f"{uri}: {code}") from error
        raise translate(uri, error) from error
