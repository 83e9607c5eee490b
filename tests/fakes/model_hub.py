"""A model hub in this process: what a download of weights asks, as the client of huggingface_hub asks it.

Addresses and headers: huggingface_hub's ``HfApi.model_info``, ``list_repo_tree`` and ``hf_hub_download``; codes of
refusals (``X-Error-Code``): its ``utils/_http.py``. Files are sent over plain HTTP, a part where a range is asked for.
"""

import hashlib
import json
import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34
#: Larger files are stored by their SHA-256, smaller ones by git's.
LARGE = 1000


@dataclass
class PlayedHub:
    """``files`` of each repository; what was asked is in ``asked``."""

    url: str = ""
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    commit: str = COMMIT
    asked: list[str] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    """While it is not set, of a large file only the first half comes."""

    def entry(self, name: str, data: bytes) -> dict:
        found = {"type": "file", "path": name, "rfilename": name, "size": len(data), "oid": git_hash(data)}
        found["blobId"] = found["oid"]
        if len(data) >= LARGE:
            digest = hashlib.sha256(data).hexdigest()
            found["lfs"] = {"oid": digest, "sha256": digest, "size": len(data), "pointerSize": 100}
        return found


def git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        hub = self.server.hub
        path = unquote(urlsplit(self.path).path)
        hub.asked.append(f"{self.command} {path}")
        repo = next((name for name in hub.repos if path.startswith((f"/api/models/{name}", f"/{name}/resolve/"))), None)
        if repo is None:
            return self.answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        revision = re.search(r"/(?:revision|tree|resolve)/([^/]+)", path)
        if revision is not None and revision[1] not in ("main", hub.commit):
            return self.answer(404, {"error": "no such revision"}, X_Error_Code="RevisionNotFound")
        files = hub.repos[repo]
        if path.startswith(f"/api/models/{repo}/tree/"):
            return self.answer(200, [hub.entry(*file) for file in files.items()])
        if path.startswith("/api/models/"):
            found = {"id": repo, "sha": hub.commit, "siblings": [hub.entry(*file) for file in files.items()]}
            return self.answer(200, found)
        if repo in hub.gated:
            return self.answer(403, {"error": "Access to model is restricted"}, X_Error_Code="GatedRepo")
        name = path.split("/resolve/", 1)[1].split("/", 1)[1]
        if name not in files:
            return self.answer(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound")
        return self.file(hub, files[name])

    def file(self, hub, data):
        start = re.match(r"bytes=(\d+)-", self.headers.get("Range") or "")
        begin = int(start[1]) if start else 0
        etag = hashlib.sha256(data).hexdigest() if len(data) >= LARGE else git_hash(data)
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
        for name, value in (("X-Repo-Commit", hub.commit), ("ETag", f'"{etag}"'), ("Accept-Ranges", "bytes")):
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data) - begin))
        self.end_headers()
        if self.command == "HEAD":
            return
        if len(data) < LARGE:
            self.wfile.write(data[begin:])
            return
        half = max(begin, len(data) // 2)
        self.wfile.write(data[begin:half])
        self.wfile.flush()
        hub.gate.wait(30)
        self.wfile.write(data[half:])

    def answer(self, code, body, **headers):
        data = json.dumps(body).encode()
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_):
        pass


@contextmanager
def model_hub():
    """A hub that serves until the block ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.hub = PlayedHub(url=f"http://127.0.0.1:{server.server_port}")
    server.hub.gate.set()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.hub
    finally:
        server.hub.gate.set()
        server.shutdown()
        server.server_close()
