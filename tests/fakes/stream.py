"""A command in a pod, in memory: what a stream to it gives."""

from __future__ import annotations

import json
from collections.abc import Callable


class FakeStream:
    """One command in a pod: it reads a line, prints, and ends."""

    def __init__(self, command: Callable[[bytes], tuple[int, bytes, bytes]]) -> None:
        self.command, self.typed = command, b""
        self.messages: list[tuple[int, bytes]] | None = None

    def send(self, channel: int, data: bytes) -> None:
        if channel == 0:
            self.typed += data

    def receive(self) -> tuple[int, bytes] | None:
        if self.messages is None:
            code, out, err = self.command(self.typed)
            cause = {"reason": "ExitCode", "message": str(code)}
            status = {"status": "Failure", "details": {"causes": [cause]}} if code else {"status": "Success"}
            self.messages = [(1, out), (2, err), (3, json.dumps(status).encode())]
        return self.messages.pop(0) if self.messages else None

    def close(self) -> None:
        pass
