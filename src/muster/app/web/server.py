"""A small HTTP server for pages of ours: bounded in its clients, quiet, without a name server's help."""

from __future__ import annotations

import contextlib
import socketserver
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6, SHUT_RDWR, socket

#: How often the server looks whether it is to end.
LOOK_S = 0.2
#: Questions that are answered at once. Each has so long for every part of its request; where one more comes, the
#: oldest gives way, so that a client that sends nothing, or sends slowly, does not keep others out.
MOST_CLIENTS, CLIENT_S = 16, 5.0


class BoundedServer(ThreadingHTTPServer):
    """Serves ``handler`` on ``bind`` and ``port`` (0: any that is free)."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, bind: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self._open: dict[socket, None] = {}
        self._lock = threading.Lock()
        self.address_family = AF_INET6 if ":" in bind else AF_INET
        super().__init__((bind, port), handler)

    def server_bind(self) -> None:
        """Without the host's name, which may take a name server's time."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def begin(self, name: str) -> None:
        """Serve in a thread of its own until ``end``."""
        threading.Thread(target=self.serve_forever, args=(LOOK_S,), name=name, daemon=True).start()

    def end(self) -> None:
        """Once ``begin`` was called. Idempotent."""
        self.shutdown()
        self.server_close()

    def verify_request(self, request: socket | tuple[bytes, socket], client_address: object) -> bool:
        if isinstance(request, socket):
            with self._lock:
                oldest = next(iter(self._open), None) if len(self._open) >= MOST_CLIENTS else None
                if oldest is not None:
                    del self._open[oldest]
                self._open[request] = None
            if oldest is not None:
                with contextlib.suppress(OSError):
                    oldest.shutdown(SHUT_RDWR)
        return True

    def process_request_thread(self, request: socket | tuple[bytes, socket], client_address: object) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            if isinstance(request, socket):
                with self._lock:
                    self._open.pop(request, None)
