"""Compute Engine's metadata server as far as notices need it: values, etags, ``wait_for_change``."""

import http.server
import threading
from contextlib import contextmanager
from urllib.parse import parse_qs, urlsplit


class Metadata(http.server.BaseHTTPRequestHandler):
    """Values with etags; ``wait_for_change`` holds a request until the value is another one."""

    def do_GET(self):
        server, parts = self.server, urlsplit(self.path)
        key, asked = parts.path.removeprefix("/computeMetadata/v1/instance/"), parse_qs(parts.query)
        if self.headers.get("Metadata-Flavor") != "Google" or key not in server.values:
            self.send_error(403)
            return
        with server.changed:
            if "last_etag" in asked:
                known = asked["last_etag"][0]
                server.changed.wait_for(lambda: f"{hash(server.values[key]):x}" != known, timeout=20)
            value = server.values[key]
        self.send_response(200)
        if server.genuine:
            self.send_header("Metadata-Flavor", "Google")
        self.send_header("ETag", f"{hash(value):x}")
        self.end_headers()
        self.wfile.write(value.encode())

    def log_message(self, *_):
        pass


@contextmanager
def metadata(*, genuine=True):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    server.values, server.changed = {"preempted": "FALSE", "maintenance-event": "NONE"}, threading.Condition()
    server.genuine, server.daemon_threads = genuine, True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()


def change(server, key, value):
    with server.changed:
        server.values[key] = value
        server.changed.notify_all()
