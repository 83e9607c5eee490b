"""Large files under the store's URIs: streams, ranges and sizes; never conditional, never renamed.

A blob is written once under its final name and counts only when something conditional (a commit marker)
says so.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Literal, Protocol

from muster.core import environment
from muster.core.errors import AccessError, BackendError, MusterError, install_command
from muster.core.processes import sync_directory
from muster.storage import uris
from muster.storage.store.local import translated

_REFUSALS = ("Credential", "Forbidden", "Unauthorized", "AccessDenied", "Access Denied")


@contextlib.contextmanager
def writing(uri: str) -> Iterator[IO[bytes]]:
    """A stream to a new blob (parents made, an old one replaced); its bytes are durable when the block ends.

    Raises:
        AccessError, BackendError: also from ``write`` and from the block's end. An exception inside the block
            leaves no blob in a bucket and a short file on a disk.
    """
    with _errors(uri):
        if uris.is_local(uri):
            path = uris.local_path(uri)
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "wb", buffering=0) as file:
                yield file
                os.fsync(file.fileno())
            for folder in (path.parent, path.parent.parent):  # its name in its folder, and the folder's own
                sync_directory(folder)
        else:
            upload = filesystem(uri).open(uri, "wb")
            try:
                yield upload
            except BaseException:
                # Closing would finish the upload with what there is of it.
                with contextlib.suppress(AttributeError):
                    upload.closed = True  # type: ignore[misc]
                raise
            upload.close()


@contextlib.contextmanager
def reading(uri: str) -> Iterator[IO[bytes]]:
    """A seekable stream of the blob. Raises FileNotFoundError when absent."""
    with _errors(uri):
        if uris.is_local(uri):
            with open(uris.local_path(uri), "rb") as file:
                yield file
        else:
            with filesystem(uri).open(uri, "rb") as file:
                yield file


def read_range(uri: str, start: int, stop: int) -> bytes:
    """Bytes ``start`` to ``stop``; fewer where the blob ends before."""
    with _errors(uri):
        if uris.is_local(uri):
            with open(uris.local_path(uri), "rb", buffering=0) as file:
                return os.pread(file.fileno(), stop - start, start)
        return filesystem(uri).cat_file(uri, start=start, end=stop)


def size(uri: str) -> int:
    """Bytes. Raises FileNotFoundError when absent."""
    with _errors(uri):
        if uris.is_local(uri):
            return uris.local_path(uri).stat().st_size
        return int(_current(uri).size(uri))


def folders(uri: str) -> list[str]:
    """Names of the folders directly below ``uri``, sorted; empty where nothing is."""
    with _errors(uri):
        try:
            if uris.is_local(uri):
                return sorted(entry.name for entry in os.scandir(uris.local_path(uri)) if entry.is_dir())
            entries = _current(uri).ls(uri, detail=True)
            return sorted(uris.name(entry["name"]) for entry in entries if entry["type"] == "directory")
        except FileNotFoundError:
            return []


def remove_tree(uri: str) -> None:
    """Remove everything below ``uri`` and, where folders exist, the folder; absent is success."""
    with _errors(uri):
        try:
            if uris.is_local(uri):
                shutil.rmtree(uris.local_path(uri))
            else:
                _current(uri).rm(uri, recursive=True)
        except FileNotFoundError:
            pass


class FileSystem(Protocol):
    """What is used of fsspec's, which has no types."""

    def open(self, path: str, mode: str) -> IO[bytes]: ...

    def cat_file(self, path: str, *, start: int, end: int) -> bytes: ...

    def size(self, path: str) -> int: ...

    def ls(self, path: str, *, detail: bool) -> Iterable[Mapping[str, str]]: ...

    def find(self, path: str, *, detail: Literal[True]) -> Mapping[str, Mapping[str, int]]: ...

    def rm(self, path: str, *, recursive: bool) -> None: ...

    def invalidate_cache(self) -> None: ...


def filesystem(uri: str) -> FileSystem:
    """fsspec's file system for ``uri``. Raises BackendError where its library is missing."""
    scheme = uris.scheme(uri)
    if scheme == "ssh":
        from muster.storage.store.ssh import SshFiles

        return SshFiles()
    # Without this each new bucket costs gcsfs about a minute of gRPC attempts against an emulator.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    import fsspec

    extra = {"gs": "gcs", "s3": "s3"}.get(scheme)
    try:
        anonymous = {"token": "anon"} if scheme == "gs" and environment.current().storage_emulator else {}
        result: FileSystem = fsspec.filesystem(scheme, **anonymous)
        return result
    except ImportError as error:
        hint = install_command(extra) if extra else None
        raise BackendError(f"{uri}: {error}", hint=hint) from error
    except ValueError as error:
        raise BackendError(f"{uri}: {error}") from error


def _current(uri: str) -> FileSystem:
    """The file system, which forgets what it has listed."""
    system = filesystem(uri)
    system.invalidate_cache()
    return system


@contextlib.contextmanager
def _errors(uri: str) -> Iterator[None]:
    if uris.is_local(uri):
        with translated(uri):
            yield
        return
    try:
        yield
    except (MusterError, FileNotFoundError):
        raise
    except Exception as error:
        raise translate(uri, error) from error


def translate(uri: str, error: Exception) -> MusterError:
    """A cloud library's exception as ours: credentials and permissions apart, everything else the back end's."""
    code = str(getattr(error, "code", "") or getattr(error, "status", ""))
    text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    if code in ("401", "403") or isinstance(error, PermissionError) or any(word in text for word in _REFUSALS):
        return AccessError(f"{uri}: {text}", hint="check the credentials and the bucket's permissions")
    return BackendError(f"{uri}: {text}")
