"""``ssh://HOST/RUN/...``: a run's home on the disk of its first host, for runs without a shared folder or a bucket.

On the run's hosts (MUSTER_STORE names the address) calls go to that host over TCP, and both ends prove that they know
the run's token. Anywhere else they go through the user's own ``ssh``. ``backends.ssh.store_server`` is the other end.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import io
import os
import socket
import threading
import uuid
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Literal, TypeAlias

from muster.core import environment, processes
from muster.core.errors import AccessError, BackendError, BusyError, ConflictError
from muster.core.protocols import Stored
from muster.core.typed_json import Unreadable
from muster.protocol.codec import reader_of
from muster.protocol.pipes import FROM_STORE, STORE_BYTES, FromStore, StoreAnswer, StoreCall, StoreVerb
from muster.storage import uris
from muster.transport.secure_session import run_token
from muster.transport.stream import Stream

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

ENV = ".muster/ssh/env"
"""In the user's home directory on a host, where commands begin: the environment that ``muster up`` makes, or a link."""
FAR = (f"{ENV}/bin/python", "-I", "-m", "muster.backends.ssh.far")
"""The one program that is started there: plain words, which every login shell reads alike."""
MARK = "muster-far 1"
"""The line before its answer; what a login shell prints comes earlier."""
OVER_SSH = b"sshd has authenticated both ends"
"""Takes a token's place where ssh carries the frames."""
CONNECT_S = 20.0
NOISE_BYTES = 1 << 20
Connection: TypeAlias = Stream[FromStore]


def client(host: str) -> list[str]:
    """``ssh`` to ``[USER@]HOST[:PORT]`` as its user has configured it; a command follows.

    Never interactive; an unknown host key is refused; nothing is forwarded. A connection is kept for a minute, in a
    folder of the user's own whose path leaves room for a socket's (ssh adds 57 characters).
    """
    folder = environment.current().home / "ssh"
    shared = []
    if len(str(folder)) < 48:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        shared = ["-oControlMaster=auto", "-oControlPersist=60", f"-oControlPath={folder}/%C"]
    destination, port = split(host)
    return [
        "ssh", "-T", "-oBatchMode=yes", "-oStrictHostKeyChecking=yes", "-oForwardAgent=no", "-oForwardX11=no",
        "-oClearAllForwardings=yes", "-oRemoteCommand=none", "-oConnectTimeout=10", "-oServerAliveInterval=5",
        *shared, *(["-p", port] if port else []), "--", destination,
    ]  # fmt: skip


def split(host: str) -> tuple[str, str]:
    """(what ssh is given, port or nothing)."""
    destination, _, port = host.partition(":")
    return destination, port


class SshStore:
    """The ``Store`` of ``ssh://``. Safe to share between threads: each call has a connection of its own."""

    def __init__(self) -> None:
        self._idle: dict[tuple[int, str], list[Connection]] = {}
        """By process too: a forked one must not share its parent's."""
        self._lock = threading.Lock()

    def get(self, uri: str, *, start: int = 0) -> Stored:
        data, answer = b"", self.call(uri, "get", start=start)
        generation = answer.generation
        while data := data + base64.b64decode(answer.data):
            if start + len(data) >= answer.size:
                break
            answer = self.call(uri, "get", start=start + len(data))
            if answer.generation != generation:
                raise BusyError(f"{uri} was replaced while it was read")
        return Stored(data=data, generation=generation)

    def put(self, uri: str, data: bytes, generation: str | None = None) -> str:
        staged = ""
        if len(data) > STORE_BYTES:
            staged = f".muster-{uuid.uuid4().hex}"
            with SshFiles().open(uris.join(uri.rpartition("/")[0], staged), "wb") as file:
                file.write(data)
            data = b""
        return self.call(uri, "put", data, generation=generation, staged=staged).generation

    def put_if_absent(self, uri: str, data: bytes) -> str:
        return self.put(uri, data, "")

    def put_if(self, uri: str, data: bytes, generation: str) -> str:
        return self.put(uri, data, generation)

    def list(self, prefix: str) -> dict[str, int]:
        host, _ = uris.bucket_and_key(prefix)
        return {f"ssh://{host}/{key}": size for key, size in self.call(prefix, "list").sizes.items()}

    def delete(self, uri: str) -> None:
        self.call(uri, "delete")

    def call(
        self,
        uri: str,
        verb: StoreVerb,
        data: bytes = b"",
        *,
        generation: str | None = None,
        staged: str = "",
        start: int = 0,
        stop: int = 0,
    ) -> StoreAnswer:
        """One call's answer.

        Raises:
            FileNotFoundError, ConflictError, AccessError, BackendError: the other end's.
            BusyError: no answer; a write may have been done.
        """
        host, key = uris.bucket_and_key(uri)
        packed, mine = base64.b64encode(data).decode(), (os.getpid(), host)
        try:
            with self._lock:
                waiting = self._idle.get(mine)
                stream = waiting.pop() if waiting else None
            stream = stream or _connected(host)
            stream.send(
                StoreCall(
                    verb=verb, key=key, data=packed, generation=generation, staged=staged, start=start, stop=stop
                )
            )  # fmt: skip
            answer = stream.receive()
        except (OSError, Unreadable) as error:
            with self._lock:  # those that wait were lost with it
                self._idle.pop(mine, None)
            raise BusyError(f"the run's home on {host} does not answer: {error}") from error
        with self._lock:
            self._idle.setdefault(mine, []).append(stream)
        if isinstance(answer, StoreAnswer):
            return answer
        if answer.kind == "absent":
            raise FileNotFoundError(uri)
        kinds = {"conflict": ConflictError, "access": AccessError}
        raise kinds.get(answer.kind, BackendError)(answer.text, hint=answer.hint or None)


@functools.cache
def opened() -> SshStore:
    """This process's."""
    return SshStore()


class SshFiles:
    """Large files of ``ssh://``, as much of fsspec's interface as ``blobs`` uses."""

    def open(self, path: str, mode: str) -> IO[bytes]:
        if mode == "rb":
            return io.BufferedReader(_Reading(path, self.size(path)), STORE_BYTES)
        _repeated(path, "write")
        return io.BufferedWriter(_Writing(path), STORE_BYTES)

    def cat_file(self, path: str, *, start: int, end: int) -> bytes:
        parts = []
        for begin in range(start, end, STORE_BYTES):
            stop = min(end, begin + STORE_BYTES)
            parts.append(base64.b64decode(_repeated(path, "read", start=begin, stop=stop).data))
        return b"".join(parts)

    def size(self, path: str) -> int:
        return _repeated(path, "size").size

    def ls(self, path: str, *, detail: bool) -> list[Mapping[str, str]]:
        return [{"name": name, "type": "directory"} for name in _repeated(path, "folders").sizes]

    def find(self, path: str, *, detail: Literal[True]) -> Mapping[str, Mapping[str, int]]:
        host = uris.bucket_and_key(path)[0]
        return {f"ssh://{host}/{key}": {"size": size} for key, size in _repeated(path, "list").sizes.items()}

    def rm(self, path: str, *, recursive: bool) -> None:
        _repeated(path, "remove_tree")

    def invalidate_cache(self) -> None:
        """Nothing is kept."""


class _Reading(io.RawIOBase):
    def __init__(self, uri: str, size: int) -> None:
        self._uri, self._size, self._at = uri, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer)
        data = SshFiles().cat_file(self._uri, start=self._at, end=min(self._size, self._at + len(view)))
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


class _Writing(io.RawIOBase):
    def __init__(self, uri: str) -> None:
        self._uri, self._at = uri, 0

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer) -> int:
        part = bytes(memoryview(data)[:STORE_BYTES])
        _repeated(self._uri, "write", part, start=self._at)
        self._at += len(part)
        return len(part)


def _repeated(uri: str, verb: StoreVerb, data: bytes = b"", *, start: int = 0, stop: int = 0) -> StoreAnswer:
    """A call that may be made twice, and is where the first had no answer. As ``SshStore.call``."""
    with contextlib.suppress(BusyError):
        return opened().call(uri, verb, data, start=start, stop=stop)
    return opened().call(uri, verb, data, start=start, stop=stop)


def _connected(host: str) -> Connection:
    """Raises OSError, AccessError."""
    decode, address = reader_of(FROM_STORE), environment.current().store
    if address is not None:
        return Stream(socket.create_connection(address, CONNECT_S), run_token(""), server=False, decode=decode)
    sock, stderr = processes.connect([*client(host), *FAR, "store"])
    with stderr:
        sock.settimeout(CONNECT_S)
        line = b""
        for _ in range(NOISE_BYTES):  # byte by byte: what follows the mark is the stream's
            byte = sock.recv(1)
            if line == MARK.encode() and byte == b"\n":
                return Stream(sock, OVER_SSH, server=False, decode=decode)
            if not byte:
                break
            line = b"" if byte == b"\n" else line + byte
        sock.close()
        stderr.seek(0)
        said = stderr.read().decode(errors="replace").strip().splitlines()
    raise ConnectionError(said[-1] if said else "muster up RUN.yaml prepares hosts")
