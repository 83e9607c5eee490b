"""The rank's side: hand the staged share to the host's replicator, which writes it."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.core.errors import AccessError, BackendError, MusterError
from muster.storage import uris
from muster.storage.paths import memory_dir
from muster.transport.secure_session import read_token
from muster.transport.stream import REPLICATOR_SOCKET, Stream


class ReplicatorLost(Exception):
    """The replicator is absent, died or hangs: the rank writes its share itself."""


@dataclass(frozen=True, kw_only=True)
class Handover:
    """Where the host's replicator listens."""

    address: str
    token: bytes

    @classmethod
    def on_this_host(cls, *, run_dir: str, run_id: str, host: str, directory_uri: str) -> Handover | None:
        """None where no agent runs (torchrun), and for ``memory://``, which is this process's alone."""
        path = memory_dir(run_dir, run_id, host) / REPLICATOR_SOCKET
        if not path.exists() or uris.scheme(directory_uri) == "memory":
            return None
        try:
            return cls(address=str(path), token=read_token(str(Path(run_dir) / "token")))
        except AccessError:
            return None

    def write(self, uri: str, preamble: bytes, fd: int, size: int) -> Mapping[str, Any]:
        """Have the first ``size`` bytes of ``fd`` written behind ``preamble``: {bytes, crc32}. Blocks.

        Raises:
            ReplicatorLost: no answer. The replicator may still write the file: use another name.
            BackendError: it could not be written.
        """
        try:
            answer = self._ask(uri, preamble, fd, size)
        except (OSError, MusterError, ValueError) as error:
            raise ReplicatorLost(str(error) or type(error).__name__) from error
        if answer.get("t") != "written":
            raise BackendError(str(answer.get("reason", "the replicator could not write it")), hint=answer.get("hint"))
        return answer

    def _ask(self, uri: str, preamble: bytes, fd: int, size: int) -> Mapping[str, Any]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(5.0)
            sock.connect(self.address)
            stream = Stream(sock, self.token, server=False)
            stream.send({"t": "write", "uri": uri, "bytes": size, "preamble_bytes": len(preamble)})
            if stream.receive().get("t") != "go":
                raise ConnectionError("the replicator refused a share")
            stream.send_file(fd)
            stream.send_bytes(memoryview(preamble))
            while (answer := stream.receive()).get("t") == "busy":
                pass
            return answer
