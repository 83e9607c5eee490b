"""The rank's side: hand the staged share to the host's replicator, which writes it."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from muster.checkpoint_format.shard_file import StoredFile
from muster.core.errors import AccessError, BackendError, MusterError
from muster.protocol.codec import reader_of
from muster.protocol.handover import FROM_WRITER, WriteFailed, WriteShard, Written
from muster.protocol.replicator_peers import Go
from muster.storage import uris
from muster.transport.secure_session import run_token
from muster.transport.stream import REPLICATOR_SOCKET, TIMEOUT_S, Stream

#: A replicator takes a share within this time, or the rank writes it itself. Writing then takes as long as it takes:
#: the replicator says every two seconds that it is at it.
TAKEN_S = 5.0
_decode = reader_of(FROM_WRITER)


class ReplicatorLost(Exception):
    """The replicator is absent, died or hangs: the rank writes its share itself."""


@dataclass(frozen=True, kw_only=True)
class Handover:
    """Where the host's replicator listens."""

    address: str
    token: bytes

    @classmethod
    def on_this_host(cls, *, host_memory: str | None, run_dir: str, directory_uri: str) -> Handover | None:
        """None where no agent runs (torchrun), and for ``memory://``, which is this process's alone."""
        if host_memory is None or uris.scheme(directory_uri) == "memory":
            return None
        path = Path(host_memory) / REPLICATOR_SOCKET
        if not path.exists():
            return None
        try:
            return cls(address=str(path), token=run_token(run_dir))
        except AccessError:
            return None

    def write(self, uri: str, preamble: bytes, fd: int, size: int) -> StoredFile:
        """Have the first ``size`` bytes of ``fd`` written behind ``preamble``. Blocks.

        Raises:
            ReplicatorLost: no answer. The replicator may still write the file: use another name.
            BackendError: it could not be written.
        """
        try:
            answer = self._ask(uri, preamble, fd, size)
        except (OSError, MusterError, ValueError) as error:
            raise ReplicatorLost(str(error) or type(error).__name__) from error
        if isinstance(answer, Written):
            return StoredFile(name=uris.name(uri), bytes=answer.bytes, checksum=answer.checksum)
        raise BackendError(answer.reason, hint=answer.hint)

    def _ask(self, uri: str, preamble: bytes, fd: int, size: int) -> Written | WriteFailed:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(TAKEN_S)
            sock.connect(self.address)
            stream = Stream(sock, self.token, server=False, decode=_decode, timeout_s=TAKEN_S)
            stream.send(WriteShard(uri=uri, bytes=size, preamble_bytes=len(preamble)))
            if not isinstance(stream.receive(), Go):
                raise ConnectionError("the replicator refused a share")
            stream.send_file(fd)
            stream.send_bytes(memoryview(preamble))
            sock.settimeout(TIMEOUT_S)
            while not isinstance(answer := stream.receive(), Written | WriteFailed):
                pass
            return answer
