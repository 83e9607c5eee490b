"""Objects in Google Cloud Storage, with generation preconditions.

``STORAGE_EMULATOR_HOST`` points it at an emulator, as Google's own clients do. No call is repeated here: a
conditional write whose answer was lost would see its own object on a second try and report a lost race (``Patient``
knows the difference).
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Protocol

from muster.core.errors import BackendError, BusyError, ConflictError, MusterError, install_command
from muster.core.protocols import Stored
from muster.storage import uris
from muster.storage.store.blobs import translate

#: A clock that is further off from the bucket's is reported, in seconds: half a lease.
SKEW_S = 5.0
#: Answers after which the same request may succeed, by Google's own list for Cloud Storage.
_BUSY = (408, 429, 500, 502, 503, 504)


class _Blob(Protocol):
    """What is used of the library's, which has no types."""

    name: str
    generation: int
    size: int
    updated: datetime | None

    def download_as_bytes(self, *, start: int | None, timeout: float, retry: None) -> bytes: ...

    def upload_from_string(
        self, data: bytes, *, content_type: str, timeout: float, retry: None, if_generation_match: int | None = None
    ) -> None: ...

    def delete(self, *, timeout: float, retry: None) -> None: ...


class _Bucket(Protocol):
    def blob(self, name: str) -> _Blob: ...


class _Client(Protocol):
    def bucket(self, name: str) -> _Bucket: ...

    def list_blobs(self, bucket: str, *, prefix: str, fields: str, timeout: float, retry: None) -> Iterable[_Blob]: ...


class GcsStore:
    """The ``Store`` of ``gs://``. Safe to share between threads; makes its client at the first call."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        try:  # now: the first request may be one that has to be answered in time
            import google.cloud.storage  # noqa: F401
        except ImportError as error:
            raise BackendError(f"gs:// needs a library: {error}", hint=install_command("gcs")) from error
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._made: _Client | None = None
        self._clock_compared = False

    def get(self, uri: str, *, start: int = 0) -> Stored:
        with self._errors(uri):
            blob = self._blob(uri)
            # One request for both: the response's header carries the generation of its bytes.
            data = blob.download_as_bytes(start=start or None, timeout=self._timeout_s, retry=None)
            return Stored(data=data, generation=str(blob.generation))

    def put(self, uri: str, data: bytes) -> str:
        return self._upload(uri, data)

    def put_if_absent(self, uri: str, data: bytes) -> str:
        return self._upload(uri, data, if_generation_match=0)

    def put_if(self, uri: str, data: bytes, generation: str) -> str:
        if not generation.isdecimal() or int(generation) == 0:
            raise ConflictError(f"{uri}: {generation!r} is not a generation of this store")
        return self._upload(uri, data, if_generation_match=int(generation))

    def list(self, prefix: str) -> dict[str, int]:
        bucket, key = uris.bucket_and_key(prefix)
        folder = f"{key.rstrip('/')}/" if key.strip("/") else ""
        with self._errors(prefix):
            result = self._client().list_blobs(
                bucket, prefix=folder, fields="items(name,size),nextPageToken", timeout=self._timeout_s, retry=None
            )
            # A name that ends in a slash is a folder marker that consoles and FUSE mounts leave.
            held = sorted((blob.name, blob.size) for blob in result if not blob.name.endswith("/"))
            return {f"gs://{bucket}/{name}": size for name, size in held}

    def delete(self, uri: str) -> None:
        with contextlib.suppress(FileNotFoundError), self._errors(uri):
            self._blob(uri).delete(timeout=self._timeout_s, retry=None)

    def _upload(self, uri: str, data: bytes, **condition: int) -> str:
        with self._errors(uri):
            blob, began_s = self._blob(uri), time.time()
            blob.upload_from_string(
                data, content_type="application/octet-stream", timeout=self._timeout_s, retry=None, **condition
            )
            self._compare_clocks(began_s, blob.updated)
            return str(blob.generation)

    def _compare_clocks(self, began_s: float, written: datetime | None) -> None:
        """Say, once, that this machine's clock is wrong: leases are compared by the clocks of several machines."""
        if written is None or self._clock_compared:
            return
        ahead_s, behind_s = began_s - written.timestamp(), written.timestamp() - time.time()
        if max(ahead_s, behind_s) > SKEW_S:
            self._clock_compared = True
            wrong = f"{ahead_s:.0f} s ahead of" if ahead_s > 0 else f"{behind_s:.0f} s behind"
            text = (
                f"this machine's clock is {wrong} the bucket's: the run's lease may be taken from it, or kept too long"
            )
            print(f"warning: {text}", file=sys.stderr, flush=True)

    def _blob(self, uri: str) -> _Blob:
        bucket, key = uris.bucket_and_key(uri)
        return self._client().bucket(bucket).blob(key)

    def _client(self) -> _Client:
        with self._lock:
            if self._made is None:
                from google.cloud import storage

                self._made = storage.Client()
            return self._made

    @contextlib.contextmanager
    def _errors(self, uri: str) -> Iterator[None]:
        try:
            yield
        except MusterError:
            raise
        except Exception as error:
            code = getattr(error, "code", None)
            if code == 404 and "bucket does not exist" not in str(error):
                raise FileNotFoundError(uri) from error
            if code == 412:
                raise ConflictError(f"{uri} is of another generation, exists already or is gone") from error
            if code in _BUSY or _connection_failed(error):
                raise BusyError(f"{uri}: {type(error).__name__}: {error}".splitlines()[0][:300]) from error
            raise translate(uri, error) from error


def _connection_failed(error: Exception) -> bool:
    """Whether a connection broke or fell silent (one that is refused stays so), or no token could be had yet."""
    import requests.exceptions as failures
    import urllib3.exceptions as below

    if getattr(error, "retryable", False):  # by google.auth: the metadata server of a pod that has just begun
        return True
    if isinstance(error, (failures.Timeout, failures.ChunkedEncodingError, ConnectionResetError, BrokenPipeError)):
        return True
    return isinstance(error, failures.ConnectionError) and any(
        isinstance(cause, (below.ProtocolError, OSError)) for cause in error.args
    )
