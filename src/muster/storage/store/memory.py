"""Objects in this process, in fsspec's own memory file system, so that large files written there are seen too."""

from __future__ import annotations

import itertools
import threading
from collections.abc import MutableMapping
from io import BytesIO
from typing import Protocol

from muster.core.errors import ConflictError
from muster.core.protocols import Stored

# Process-wide, like the file system they describe: path -> the counter's value at its last write here.
_LOCK = threading.RLock()
_GENERATIONS: dict[str, int] = {}
_COUNTER = itertools.count(1)


class MemoryStore:
    """The ``Store`` of ``memory://``. Threads share it; other processes have their own."""

    def get(self, uri: str, *, start: int = 0) -> Stored:
        with _LOCK:
            system, path = _system(), _path(uri)
            if path not in system.store:
                raise FileNotFoundError(uri)
            return Stored(data=system.store[path].getvalue()[start:], generation=_generation(path))

    def put(self, uri: str, data: bytes) -> str:
        with _LOCK:
            path = _path(uri)
            _system().pipe_file(path, bytes(data))
            _GENERATIONS[path] = next(_COUNTER)
            return _generation(path)

    def put_if_absent(self, uri: str, data: bytes) -> str:
        with _LOCK:
            if _path(uri) in _system().store:
                raise ConflictError(f"{uri} exists already")
            return self.put(uri, data)

    def put_if(self, uri: str, data: bytes, generation: str) -> str:
        with _LOCK:
            path = _path(uri)
            if path not in _system().store:
                raise ConflictError(f"{uri} is gone; expected generation {generation}")
            if _generation(path) != generation:
                raise ConflictError(f"{uri} is at generation {_generation(path)}, not {generation}")
            return self.put(uri, data)

    def list(self, prefix: str) -> dict[str, int]:
        folder = _path(prefix).rstrip("/") + "/"
        with _LOCK:
            held = sorted(item for item in _system().store.items() if item[0].startswith(folder))
            return {f"memory:/{path}": file.getbuffer().nbytes for path, file in held}

    def delete(self, uri: str) -> None:
        with _LOCK:
            path = _path(uri)
            _GENERATIONS.pop(path, None)
            _system().store.pop(path, None)


def _generation(path: str) -> str:
    return str(_GENERATIONS.get(path, 0))


def _path(uri: str) -> str:
    """``memory://a/b`` -> ``/a/b``, the key that fsspec uses."""
    return "/" + uri.partition("://")[2].strip("/")


class _FileSystem(Protocol):
    """What is used of fsspec's, which has no types."""

    store: MutableMapping[str, BytesIO]

    def pipe_file(self, path: str, value: bytes) -> None: ...


def _system() -> _FileSystem:
    import fsspec

    result: _FileSystem = fsspec.filesystem("memory")
    return result
