"""Connections that stay open, for real on loopback: a command in a pod over a WebSocket, a followed log."""

import http.server
import json
import queue
import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent / "kube"))
import channels

from muster.backends.gke.kubernetes.api import Cluster
from muster.backends.gke.kubernetes.config import connect
from muster.backends.gke.operate.exec_stream import Target, attach, run
from muster.backends.google.http import Unreachable
from muster.core.clock import SystemClock
from muster.core.errors import AccessError, BackendError

pytestmark = pytest.mark.live

TARGET = Target(namespace="default", pod="p", container="c")


class Kubelet(http.server.BaseHTTPRequestHandler):
    """Echoes what is typed; the command says how it ends."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        if "command=forbidden" in self.path:
            body = json.dumps({"message": "pods/exec is forbidden"}).encode()
            self.send_response(403)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        assert self.headers["authorization"] == "Bearer a-token"
        if "/log?" in self.path:
            self.followed()
            return
        channels.accept(self)
        self.close_connection = True
        if "command=silent" in self.path:
            return
        _, typed = next(channels.messages(self))
        channels.send(self, 1, typed)
        channels.send(self, 2, b"e" * 70_000)
        channels.send(self, 1, b"x" * 200)
        causes = {"causes": [{"reason": "ExitCode", "message": "5"}]}
        status = {"status": "Failure", "details": causes} if "command=fail" in self.path else {"status": "Success"}
        channels.send(self, 3, json.dumps(status).encode())
        channels.close(self)

    def followed(self):
        """Two lines in three chunks, then nothing: broken off, or silent until the client goes."""
        if "pods/nobody" in self.path:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for part in (b"2026-01-02T03:04:05Z one\n2026-", b"01-02T03:04:05Z tw", b"o\n"):
            self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            self.wfile.flush()
        self.close_connection = True
        if "pods/silent" in self.path:
            self.rfile.read(1)  # until the client hangs up


@pytest.fixture
def cluster(tmp_path) -> Cluster:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Kubelet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    document = {
        "current-context": "x", "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
        "users": [{"name": "u", "user": {"token": "a-token"}}],
    }  # fmt: skip
    (tmp_path / "config").write_text(json.dumps(document))
    yield connect(f"kubeconfig:{tmp_path / 'config'}", SystemClock())
    server.shutdown()
    server.server_close()


def test_a_line_in_the_output_out(cluster):
    line = "ä" * 40_000  # frames of every length field
    assert run(cluster, TARGET, ["echo"], line=line) == line.encode() + b"\n" + b"x" * 200


def test_the_commands_own_exit_code(cluster):
    out, err = bytearray(), bytearray()
    assert attach(cluster, TARGET, ["fail"], out=out.extend, err=err.extend, typed=iter([b"hi"])) == 5
    assert out == b"hi" + b"x" * 200 and err == b"e" * 70_000
    with pytest.raises(BackendError, match="ended with 5"):
        run(cluster, TARGET, ["fail"], line="x")


def test_not_allowed(cluster):
    with pytest.raises(AccessError, match="is forbidden") as caught:
        run(cluster, TARGET, ["forbidden"], line="x")
    assert "pods/exec" in caught.value.hint


def test_a_stream_that_breaks_off(cluster):
    with pytest.raises(Unreachable, match="broke"):
        run(cluster, TARGET, ["silent"], line="x")


def test_a_log_that_breaks_off_and_one_that_is_not_there(cluster):
    lines = iter(cluster.follow_log("default", "broken", "c"))
    assert [next(lines), next(lines)] == [b"2026-01-02T03:04:05Z one\n", b"2026-01-02T03:04:05Z two\n"]
    assert next(lines, None) is None, "an end like any other: whether the container ended is asked"
    assert cluster.follow_log("default", "nobody", "c") is None


def test_a_log_on_which_nothing_comes_is_closed_from_outside(cluster):
    found = cluster.follow_log("default", "silent", "c")
    lines, ended = iter(found), queue.Queue()
    next(lines), next(lines)

    def wait():
        try:
            ended.put(next(lines, None))
        except OSError as error:
            ended.put(error)

    threading.Thread(target=wait, daemon=True).start()
    found.close()
    ended.get(timeout=30)
