"""A machine's own credentials: the token of its metadata server, kept until shortly before its end."""

import http.server
import json
import threading

import pytest

from muster.backends.google import metadata
from muster.backends.google.http import Call, Unreachable
from muster.backends.google.metadata import MachineHttp


@pytest.fixture
def server():
    """The metadata server and one service of Google's at once; what each was asked is in ``seen``."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append((self.path, self.headers.get("Metadata-Flavor"), self.headers.get("authorization")))
            body = {"ok": True}
            if self.path.endswith("/token"):
                body = {"access_token": f"ya29.{len(seen)}", "expires_in": lives_s[0], "token_type": "Bearer"}
            text = json.dumps(body).encode() if not garbled else b"<html>"
            self.send_response(200)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *arguments):
            pass

    seen, lives_s, garbled = [], [3600], []
    found = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{found.server_port}", seen, lives_s, garbled
    found.shutdown()
    found.server_close()


def test_no_proxy_is_asked(server, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")
    assert "ya29." in metadata.read(metadata.TOKEN, server=server[0])


def test_the_token_is_kept_while_it_lives(server):
    url, seen, _, _ = server
    wire = MachineHttp(server=url)
    for _ in range(2):
        assert wire.send(Call(method="GET", url=f"{url}/v1/secret")).body == {"ok": True}
    tokens = [flavor for path, flavor, _ in seen if path.endswith("/token")]
    assert tokens == ["Google"]
    assert [bearer for path, _, bearer in seen if path == "/v1/secret"] == ["Bearer ya29.1"] * 2


def test_a_token_that_is_about_to_end_is_asked_for_anew(server):
    url, seen, lives_s, _ = server
    lives_s[0] = 30
    wire = MachineHttp(server=url)
    for _ in range(2):
        wire.send(Call(method="GET", url=f"{url}/v1/secret"))
    assert sum(path.endswith("/token") for path, *_ in seen) == 2


def test_no_server_and_no_token(server):
    url, _, _, garbled = server
    garbled.append(True)
    with pytest.raises(Unreachable, match="cannot be read"):
        MachineHttp(server=url).send(Call(method="GET", url=f"{url}/v1/secret"))
    with pytest.raises(Unreachable, match="no answer from the metadata server"):
        metadata.read("instance/id", server="http://127.0.0.1:1")
