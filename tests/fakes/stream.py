"""A command in a pod, in memory: the server's end of a WebSocket with channels, below the HTTP client."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable

import httpx2
import wsproto
from wsproto.events import BytesMessage, CloseConnection


class FakePodStream:
    """What the HTTP client takes for its socket: the command reads a line, prints, and ends."""

    def __init__(self, command: Callable[[bytes], tuple[int, bytes, bytes]], *, reads: bool) -> None:
        self.command, self.out = command, queue.Queue()
        self.connection = wsproto.connection.Connection(wsproto.ConnectionType.SERVER)
        if not reads:
            self.run(b"")

    def run(self, line: bytes) -> None:
        code, out, err = self.command(line)
        cause = {"reason": "ExitCode", "message": str(code)}
        status = {"status": "Failure", "details": {"causes": [cause]}} if code else {"status": "Success"}
        for channel, data in ((1, out), (2, err), (3, json.dumps(status).encode())):
            self.out.put(self.connection.send(BytesMessage(data=bytes([channel]) + data)))

    def write(self, data: bytes, timeout: float | None = None) -> None:
        self.connection.receive_data(data)
        for event in self.connection.events():
            if isinstance(event, BytesMessage) and event.data[0] == 0:
                self.run(bytes(event.data[1:]))
            elif isinstance(event, CloseConnection):
                self.out.put(b"")

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self.out.get(timeout=30)

    def get_extra_info(self, name: str) -> FakePodStream:
        return self

    def shutdown(self, how: int) -> None:
        self.out.put(b"")

    def close(self) -> None:
        self.out.put(b"")

    def response(self) -> httpx2.Response:
        return httpx2.Response(101, extensions={"network_stream": self})
