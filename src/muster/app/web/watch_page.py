"""``muster watch --web``: the terminal's view with the report's charts, in a browser on this machine.

Other users of the machine can reach the port, so the page itself holds nothing of a run. What it shows it asks for with
a key that only it has: it gets the key for the code in the address it was opened with (the fragment, which no browser
sends), and each code opens one page. The key is no cookie: a browser sends those to every port of the machine, and so
to a server of another user's. It is kept in the page's ``sessionStorage``, which belongs to this port alone.

``Host`` is checked against rebinding of a name to loopback, ``Origin`` against pages of others (Fetch standard; RFC
9110, 7.2).
"""

from __future__ import annotations

import hmac
import json
import secrets
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler

from muster.app.web.looks import Looks
from muster.app.web.server import CLIENT_S, BoundedServer
from muster.core.errors import UsageError
from muster.core.typed_json import Json, child, parse_object
from muster.report.render import page
from muster.storage import run_registry

BIND = "127.0.0.1"
MOST_BYTES = 64 * 1024
"""Of what the page sends."""
SCRIPTS = ("words.js", "charts.js", "watch.js")
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


@dataclass
class WatchPage:
    """Serves until ``end``. ``address`` is told of each address that opens one page: the first, and after each use
    the next."""

    looks: Looks
    port: int
    address: Callable[[str], None]
    key: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    code: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> None:
        """Raises UsageError where the port cannot be had."""
        try:
            self._server = _Server(self, self.port)
        except OSError as error:
            hint = "leave out --port: any that is free"
            raise UsageError(f"port {self.port} of {BIND}: {error.strerror or error}", hint=hint) from error
        self.port = int(self._server.server_address[1])
        self.looks.begin()
        self._server.begin("muster-watch-page")
        self._tell()

    def end(self) -> None:
        self.looks.end()
        self._server.end()

    def exchange(self, code: str) -> str | None:
        """The key for a code that has not been used; None: it is none."""
        with self._lock:
            if not hmac.compare_digest(code.encode(), self.code.encode()):
                return None
            self.code = secrets.token_urlsafe(32)
        self._tell()
        return self.key

    def _tell(self) -> None:
        self.address(f"http://{BIND}:{self.port}/#{self.code}")


def watch_page(references: Sequence[str], *, every_s: float, port: int, address: Callable[[str], None]) -> WatchPage:
    """A page of these runs, not begun yet.

    Raises:
        UsageError: no such run, or one is named twice.
    """
    runs = [run_registry.find(reference) for reference in references]
    ids = [run.run_id for run in runs]
    if len(set(ids)) < len(ids):
        twice = next(run_id for run_id in ids if ids.count(run_id) > 1)
        raise UsageError(f"{twice} is named twice", hint="each run once")
    return WatchPage(Looks(runs, every_s), port, address)


def shell() -> str:
    """The page without anything of a run."""
    return page.fill({}, title="Muster watch", scripts=SCRIPTS, plain="muster watch RUN", connects=True)


class _Server(BoundedServer):
    def __init__(self, owner: WatchPage, port: int) -> None:
        self.owner = owner
        self.shell = shell().encode()
        super().__init__(BIND, port, _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Whoever asked is gone, as a rule; a mistake of ours is told."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    timeout = CLIENT_S
    server_version, sys_version = "muster", ""
    server: _Server

    def do_GET(self) -> None:
        if not self._ours():
            self._answer(403, b"this address is not served here\n", "text/plain; charset=utf-8")
        elif self.path != "/":
            self._answer(404, b"/ is all there is\n", "text/plain; charset=utf-8")
        else:
            self._answer(200, self.server.shell, "text/html; charset=utf-8")

    def do_POST(self) -> None:
        """From our own page alone: ``/session`` with a code, ``/data`` with the key."""
        owner = self.server.owner
        if not self._ours() or self.headers.get("Origin") is None:
            self._json(403, {"problem": "not asked by this page"})
            return
        if self.path == "/session":
            key = owner.exchange(self._body().decode("latin-1"))
            self._json(403 if key is None else 200, {"problem": "not a fresh code"} if key is None else {"key": key})
        elif self.path == "/data":
            given = self.headers.get("Authorization", "").encode()
            if not hmac.compare_digest(given, f"Bearer {owner.key}".encode()):
                self._json(401, {"problem": "no key"})
                return
            try:
                have = child(parse_object(self._body()), "have")
            except (ValueError, TypeError, KeyError):
                have = {}
            self._json(200, owner.looks.answer(have))
        else:
            self._json(404, {"problem": "no such place"})

    def _ours(self) -> bool:
        """The request names this server, and where it says which page asks, a page of this server."""
        names = [f"{name}:{self.server.owner.port}" for name in (BIND, "localhost")]
        hosts, origins = self.headers.get_all("Host") or [], self.headers.get_all("Origin") or []
        if len(hosts) != 1 or hosts[0] not in names:
            return False
        return all(origin == f"http://{hosts[0]}" for origin in origins)

    def _body(self) -> bytes:
        try:
            length = int(self.headers.get("Content-Length", "0"))
        except ValueError:
            return b""
        return self.rfile.read(length) if 0 < length <= MOST_BYTES else b""

    def _json(self, status: int, value: Json) -> None:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=False, default=str)
        self._answer(status, text.encode(), "application/json")

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """A question of the page is no news."""
