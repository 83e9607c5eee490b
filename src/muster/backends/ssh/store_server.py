"""The far end of ``ssh://``: a run's home on this host's disk, for its other hosts and for terminals.

As a program it serves one run's hosts, below a parent that starts it again: a run outlives its host programs.
"""

from __future__ import annotations

import base64
import functools
import os
import re
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from muster.backends.host.place import say
from muster.core import processes
from muster.core.errors import AccessError, ConflictError, MusterError
from muster.protocol.codec import reader_of
from muster.protocol.pipes import STORE_BYTES, TO_STORE, FarRefused, FromStore, StoreAnswer, StoreCall
from muster.storage.store import blobs
from muster.storage.store.local import LocalStore, translated
from muster.transport.listening import listen_on, raise_soft_limit
from muster.transport.secure_session import run_token
from muster.transport.stream import Stream
from muster.transport.stream_server import serve_streams

RESTART_S, LAST_S = 1.0, 5.0
"""The other hosts learn here that the run has ended, and bring their last events."""


@dataclass(frozen=True)
class Homes:
    """Answers calls below ``folder``. ``run_id``: for this run alone; None: who calls may read this user's files."""

    folder: Path
    run_id: str | None = None
    served: set[int] = field(default_factory=set)
    """Connections, by their descriptors."""

    def serve(self, stream: Stream[StoreCall]) -> None:
        """Until the connection ends. Raises as ``Stream``."""
        stream.sock.settimeout(None)
        number = stream.sock.fileno()
        self.served.add(number)
        try:
            while True:
                stream.send(self.answer(stream.receive()))
        finally:
            self.served.discard(number)

    def answer(self, call: StoreCall) -> FromStore:
        try:
            parts = PurePosixPath(call.key).parts
            outside = not parts or call.key.startswith("/") or ".." in parts
            if outside or (self.run_id is not None and parts[0] != self.run_id):
                raise AccessError(f"{call.key!r} is no object of this run")
            return self._done(call, str(self.folder.joinpath(*parts)))
        except (MusterError, OSError, ValueError) as error:
            return refusal(error)

    def _done(self, call: StoreCall, path: str) -> StoreAnswer:
        data, store = base64.b64decode(call.data), LocalStore()
        if call.staged:
            if not re.fullmatch(r"\.muster-[0-9a-f]{32}", call.staged):
                raise AccessError(f"{call.staged!r} is no staged file")
            staged = Path(path).with_name(call.staged)
            data = staged.read_bytes()
            staged.unlink()
        match call.verb:
            case "get":
                found = store.get(path, start=call.start)
                part, size = found.data[:STORE_BYTES], call.start + len(found.data)
                return StoreAnswer(data=base64.b64encode(part).decode(), generation=found.generation, size=size)
            case "put" if call.generation is None:
                return StoreAnswer(generation=store.put(path, data))
            case "put" if call.generation:
                return StoreAnswer(generation=store.put_if(path, data, call.generation))
            case "put":
                return StoreAnswer(generation=store.put_if_absent(path, data))
            case "list":
                below = {str(Path(uri).relative_to(self.folder)): size for uri, size in store.list(path).items()}
                return StoreAnswer(sizes=below)
            case "delete":
                store.delete(path)
            case "size":
                return StoreAnswer(size=blobs.size(path))
            case "folders":
                return StoreAnswer(sizes=dict.fromkeys(blobs.folders(path), 0))
            case "remove_tree":
                blobs.remove_tree(path)
            case "read":
                return StoreAnswer(data=base64.b64encode(blobs.read_range(path, call.start, call.stop)).decode())
            case "write":
                _write(Path(path), data, call.start)
        return StoreAnswer()


def refusal(error: Exception) -> FarRefused:
    """The reply to the other end for this error."""
    hint = getattr(error, "hint", None) or ""
    match error:
        case FileNotFoundError():
            return FarRefused(kind="absent", text=str(error))
        case ConflictError():
            return FarRefused(kind="conflict", text=str(error), hint=hint)
    return FarRefused(kind="access" if isinstance(error, AccessError) else "failed", text=str(error), hint=hint)


def _write(path: Path, data: bytes, start: int) -> None:
    """Part of a large file, on the disk when it returns; the same again changes nothing."""
    with translated(str(path)):
        makes = not start and not data
        if makes:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT | os.O_TRUNC if makes else 0)
        with open(os.open(path, flags, 0o600), "wb", buffering=0) as file:
            done = 0
            while done < len(data):
                done += os.pwrite(file.fileno(), data[done:], start + done)
            os.fsync(file.fileno())


def main() -> None:
    processes.forgive_outputs()
    raise_soft_limit()
    folder, run_id, address, port = sys.argv[1:]
    token = run_token("")  # its file goes with the host program
    while (child := os.fork()) and os.WIFSIGNALED(os.waitpid(child, 0)[1]):  # another one takes its place
        time.sleep(RESTART_S)
    if not child:
        serve(Homes(Path(folder), run_id), token, address, int(port))


def serve(homes: Homes, token: bytes, address: str, port: int) -> None:
    """Serve until the run has ended since, and no client was connected for ``LAST_S``."""
    end, began_s, idle_s = homes.folder / str(homes.run_id) / "end.json", time.time(), 0.0
    with listen_on(address, port) as listener:
        talk = functools.partial(
            serve_streams, listener, token, homes.serve, decode=reader_of(TO_STORE), peer="a host", log=say
        )
        threading.Thread(target=talk, daemon=True).start()
        while idle_s < LAST_S:
            time.sleep(1.0)
            ended = end.exists() and end.stat().st_mtime > began_s
            idle_s = idle_s + 1.0 if ended and not homes.served else 0.0


if __name__ == "__main__":
    main()
