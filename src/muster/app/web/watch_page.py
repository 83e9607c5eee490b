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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler

from muster.app.inspect.event_format import step_figures
from muster.app.inspect.logs import REMOTE_LOOK_EVERY_S
from muster.app.inspect.watch import View, Watcher
from muster.app.web.server import CLIENT_S, BoundedServer
from muster.core.clock import SystemClock
from muster.core.errors import MusterError, UsageError
from muster.core.event_log import in_words
from muster.core.protocols import Clock
from muster.core.typed_json import Json, JsonObject, child, parse_object
from muster.report.render import page
from muster.report.render.series import series
from muster.storage import run_registry
from muster.storage.run_registry import RunDir

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
    """Serves until ``end``. ``address`` is called with each address that opens one page: the first, and after each use
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
        """As a rule the client is gone; an error of our own is reported."""
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


# ---------------- what the watching page shows of each run, brought up to date by a thread of its own


ACCOUNT_SHARE = 8
"""The ledger is folded again after so many times what folding it took: charts are what the page is for."""


@dataclass(kw_only=True)
class Shown:
    run_id: str
    view: JsonObject = field(default_factory=dict)
    """As the terminal's ``muster watch`` has it."""
    version: int = 0
    """Rises with every change of ``account``; 0: there is none yet."""
    account: JsonObject = field(default_factory=dict)
    """The report and its curves, as of some seconds ago."""


@dataclass
class Looks:
    """Looks at the runs every ``every_s`` until they have ended, once ``begin`` was called. Changes nothing in them."""

    runs: Sequence[RunDir]
    every_s: float
    clock: Clock = field(default_factory=SystemClock)

    def __post_init__(self) -> None:
        self._watchers = [Watcher(run, clock=self.clock, account_share=ACCOUNT_SHARE) for run in self.runs]
        self._shown = {run.run_id: Shown(run_id=run.run_id) for run in self.runs}
        self._over = threading.Event()

    def begin(self) -> None:
        """One thread a run: a slow back end holds up no other run."""
        for watcher in self._watchers:
            name = f"muster-watch-{watcher.run.run_id}"
            threading.Thread(target=self._follow, args=(watcher,), name=name, daemon=True).start()

    def end(self) -> None:
        self._over.set()

    def answer(self, have: Mapping[str, Json]) -> JsonObject:
        """Every run's view, and the account of those of which ``have`` (run id -> version) has another one."""
        runs: list[Json] = []
        for run in self.runs:
            shown = self._shown[run.run_id]
            row: dict[str, Json] = {"run_id": shown.run_id, "view": dict(shown.view), "version": shown.version}
            if shown.version and have.get(shown.run_id) != shown.version:
                row["account"] = dict(shown.account)
            runs.append(row)
        return {"runs": runs}

    def look(self, watcher: Watcher) -> bool:
        """Bring one run up to date; return whether there is more to come."""
        shown, before = self._shown[watcher.run.run_id], watcher.report
        try:
            view, problem = watcher.look(), None
        except (MusterError, OSError) as error:  # a back end that does not answer now may later
            view, problem = watcher.view, str(error)
        if view.ended:
            watcher.fold()
        account = shown.account
        if watcher.report is not None and (watcher.report is not before or not shown.version):
            account = {"report": watcher.report.to_json(), "series": series(watcher.report.ledger)}
        new = account is not shown.account
        self._shown[shown.run_id] = Shown(
            run_id=shown.run_id,
            view={**view_json(view), "problem": problem},
            version=shown.version + new,
            account=account,
        )
        return not view.ended

    def _follow(self, watcher: Watcher) -> None:
        every_s = self.every_s if watcher.launcher.remote is None else max(self.every_s, REMOTE_LOOK_EVERY_S)
        while self.look(watcher):
            if self._over.wait(every_s):
                return


def view_json(view: View) -> JsonObject:
    """A look in plain JSON types; None is what is not known."""
    left = None if view.total_steps is None else view.total_steps - view.step
    evals = [(step, each) for step, each in sorted(view.evals.items()) if each.loss is not None]
    return {
        "name": view.name,
        "state": view.state,
        "ended": view.ended,
        "sentence": view.sentence,
        "step": view.step,
        "total_steps": view.total_steps,
        "eta_s": None if view.ended or left is None or not view.step_every_s else left * view.step_every_s,
        "step_age_s": None if view.ended else view.step_age_s,
        "attempt": view.attempt,
        "world_size": view.world_size,
        "layout": dict(view.layout),
        "figures": list(step_figures(view.numbers)),
        "heldout": None if not evals else {"step": evals[-1][0], "loss": evals[-1][1].loss},
        "hosts": [
            {
                "name": host.name,
                "state": host.state,
                "ranks": [
                    {"rank": rank.rank, "phase": rank.phase, "pid": rank.pid} for _, rank in sorted(host.ranks.items())
                ],
            }
            for host in sorted(view.hosts.values(), key=lambda host: (len(host.name), host.name))
        ],
        "tiers": [{"tier": tier.tier, "step": tier.step, "age_s": tier.age_s} for tier in view.tiers],
        "incidents": list(view.incidents),
        "damaged": list(in_words(view.damaged)),
    }
