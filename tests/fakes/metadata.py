"""Compute Engine's metadata server: values, etags, ``wait_for_change``, and the days on which it is not well."""

import http.server
import json
import threading
from contextlib import contextmanager
from urllib.parse import parse_qs, urlsplit

ROOT = "/computeMetadata/v1/"
NONE_PLANNED = {"error": {"code": 503, "message": "no notifications have been received yet, try again later"}}


class Metadata(http.server.BaseHTTPRequestHandler):
    """Values with etags; ``wait_for_change`` holds a request until the value is another one, or its time is up: then
    the old value comes, as if nothing was asked for."""

    def do_GET(self):
        server, parts = self.server, urlsplit(self.path)
        if self.headers.get("X-Forwarded-For") or self.headers.get("Metadata-Flavor") != "Google":
            self.answer(403, "Missing Metadata-Flavor:Google header.")
        elif server.unwell > 0:
            server.unwell -= 1
            self.answer(503, "Service Unavailable")
        elif parts.path in ("", "/"):
            self.answer(200, "computeMetadata/\n")
        else:
            self.value(parts.path.removeprefix(ROOT), parse_qs(parts.query, keep_blank_values=True))

    def value(self, path, asked):
        server = self.server
        with server.changed:
            if asked.get("wait_for_change") == ["true"] or "last_etag" in asked:
                known = asked.get("last_etag", [etag(server.find(path))])[0]
                longest_s = min(float(asked.get("timeout_sec", ["20"])[0]), 20)
                server.changed.wait_for(lambda: etag(server.find(path)) != known, timeout=longest_s)
            found = server.find(path)
        if found is None and path == "instance/upcoming-maintenance":
            self.answer(503, json.dumps(NONE_PLANNED))
        elif found is None:
            self.answer(404, "Not Found")
        elif not isinstance(found, dict):
            self.answer(200, found, found, "application/json" if path.endswith("/token") else "application/text")
        elif asked.get("recursive") == ["true"] and asked.get("alt", ["json"]) == ["json"]:
            self.answer(
                200,
                json.dumps(found if path.rstrip("/").endswith("attributes") else nested(found)),
                found,
                "application/json",
            )
        else:
            names = {name.partition("/")[0] + "/" * ("/" in name) for name in found}
            self.answer(200, "\n".join(sorted(names)) + "\n", found)

    def do_PUT(self):
        """Guest attributes, where the machine's metadata says so: few writes a minute."""
        data = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        server, path = self.server, urlsplit(self.path).path.removeprefix(ROOT + "instance/guest-attributes/")
        if self.headers.get("Metadata-Flavor") != "Google" or path.count("/") != 1:
            self.answer(403, "Forbidden")
        elif server.values.get("attributes/enable-guest-attributes", "").upper() != "TRUE":
            self.answer(403, "Guest attributes endpoint access is disabled.")
        elif len(server.written) >= server.writes:
            self.answer(429, "Too many requests")
        else:
            server.written.append((path, data))
            self.answer(200, "")

    def answer(self, status, text, value=None, kind="application/text"):
        self.send_response(status)
        if self.server.genuine:
            self.send_header("Metadata-Flavor", "Google")
        if value is not None:
            self.send_header("ETag", etag(value))
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


class Server(http.server.ThreadingHTTPServer):
    """``values``: paths below ``instance/`` (or ``project/``) -> text; change them with ``change``."""

    daemon_threads = True

    def __init__(self, address, values, genuine=True):
        super().__init__(address, Metadata)
        self.values, self.changed, self.genuine = values, threading.Condition(), genuine
        self.unwell, self.written, self.writes = 0, [], 10

    def find(self, path):
        """A value, everything below a folder, or None."""
        path = path.rstrip("/")
        key = path.removeprefix("instance/") if path.startswith("instance/") else path
        if key in self.values:
            return self.values[key]
        below = "" if path == "instance" else f"{key}/"
        found = {name.removeprefix(below): value for name, value in self.values.items() if name.startswith(below)}
        if path == "instance":
            found = {name: value for name, value in found.items() if not name.startswith("project/")}
        return found or ({} if path in ("instance/attributes", "project/attributes") else None)


def nested(flat):
    """A folder as JSON: keys in camel case (attributes' stay as they are), an account's scopes and aliases as lists."""
    tree = {}
    for path, value in flat.items():
        at, names = tree, path.split("/")
        for name in names[:-1]:
            at = at.setdefault(camel(name), {})
        if names[-1] in ("scopes", "aliases"):
            value = value.split()
        at[names[-1] if names[0] == "attributes" else camel(names[-1])] = value
    return tree


def camel(name):
    head, *rest = name.split("-")
    return head + "".join(word.title() for word in rest)


def etag(value):
    return f"{hash(json.dumps(value, sort_keys=True)) & (1 << 64) - 1:x}"


def token(account="default", *, expires_in=3599, scopes="https://www.googleapis.com/auth/cloud-platform"):
    """Values of a service account, under ``default`` and, as the real server has it, under its email address.

    google-auth asks by address once it has learned it: two threads that refresh at once, or a second refresh, would
    otherwise get 404 until the process ends.
    """
    whole = {"access_token": "ya29.fake", "expires_in": expires_in, "token_type": "Bearer"}
    values = {"email": account, "scopes": f"{scopes}\n", "aliases": "default\n", "token": json.dumps(whole)}
    return {f"service-accounts/{name}/{key}": value for name in ("default", account) for key, value in values.items()}


@contextmanager
def metadata(values=None, *, genuine=True, address=("127.0.0.1", 0)):
    given = {"preempted": "FALSE", "maintenance-event": "NONE"} if values is None else values
    server = Server(address, given, genuine)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def change(server, key, value):
    with server.changed:
        server.values[key] = value
        server.changed.notify_all()
