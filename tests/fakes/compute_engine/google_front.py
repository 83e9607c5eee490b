"""Google's services on a machine of namespaces: their own names and TLS, answered by the played ones.

``certificates`` makes an authority and a certificate for the names; the machine's image trusts it. The bucket is
``GcsFake``'s; Secret Manager is asked as the machine's own account, which its token names. A token that nobody gave out
is answered 401.
"""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from pathlib import Path

from fakes.compute_engine.google_names import ADDRESS, NAMES
from fakes.compute_engine.machine_root import IMAGE_PYTHONS
from fakes.gcs import GcsFake
from fakes.gcs.server import Handler as BucketHandler

from muster.backends.google.http import Call, Reply

Ask = Callable[[Call], Reply]


def certificates(folder: Path) -> tuple[Path, Path, Path]:
    """(authority, certificate, key)."""
    folder.mkdir(parents=True, exist_ok=True)
    authority, key, request, made = (folder / name for name in ("ca.pem", "key.pem", "request.pem", "cert.pem"))
    names = ",".join(f"DNS:{name}" for name in NAMES)

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], check=True, capture_output=True, cwd=folder)

    openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "30", "-subj", "/CN=test authority",
            "-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=keyCertSign",
            "-keyout", "ca.key", "-out", str(authority))  # fmt: skip
    openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=google", "-keyout", str(key), "-out", str(request))
    (folder / "ext").write_text(f"subjectAltName={names}\n")
    openssl("x509", "-req", "-in", str(request), "-CA", str(authority), "-CAkey", "ca.key", "-CAcreateserial",
            "-days", "30", "-extfile", "ext", "-out", str(made))  # fmt: skip
    return authority, made, key


def base_python() -> Path:
    """The Python that runs this environment's packages on a machine.

    Debian's own where it has the same version, as on Google's image, else the one that the environment was made from.
    """
    debian = Path(f"/usr/bin/python3.{sys.version_info.minor}")
    return debian if debian.exists() else Path(os.path.realpath(sys.executable))


def image(folder: Path, authority: Path, *, packages: Path | None = None) -> Path:
    """What such a machine's boot image adds to this computer's files: ``systemctl``, the authority, and a Python with
    ``packages``, in an environment that finds them wherever they are (``MachineRoot.shown`` makes them visible)."""
    here = Path(__file__).parent
    base, environment = base_python(), folder / "opt/image-python"
    site = environment / f"lib/python3.{sys.version_info.minor}/site-packages"
    for path in (environment / "bin", site, folder / "usr/bin", folder / "usr/local/sbin"):
        path.mkdir(parents=True)
    (environment / "bin/python3").symlink_to(base)
    (environment / "pyvenv.cfg").write_text(f"home = {base.parent}\ninclude-system-site-packages = false\n")
    if packages is not None:
        (site / "image.pth").write_text(f"{packages}\n")
    wrapper = '#!/bin/sh\nexec /opt/image-python/bin/python3 "$@"\n'
    shim = "#!/opt/image-python/bin/python3 -I\n" + (here / "systemctl.py").read_text()
    for program, text in (*((path, wrapper) for path in IMAGE_PYTHONS), ("/usr/bin/systemctl", shim)):
        (folder / program.lstrip("/")).write_text(text)
        (folder / program.lstrip("/")).chmod(0o755)
    bundle = folder / "etc/ssl/certs/ca-certificates.crt"
    bundle.parent.mkdir(parents=True)
    bundle.write_text(Path("/etc/ssl/certs/ca-certificates.crt").read_text() + authority.read_text())
    variables = folder / "etc/systemd/environment"
    variables.parent.mkdir(parents=True)
    trusted = "/etc/ssl/certs/ca-certificates.crt"
    variables.write_text(f"SSL_CERT_FILE={trusted} REQUESTS_CA_BUNDLE={trusted}")
    return folder


class Front:
    """One machine's way to Google. Make it inside the machine (``MachineRoot.inside``), then ``start``."""

    def __init__(self, bucket: GcsFake, ask: Ask, tokens: set[str], certificate: tuple[Path, Path]) -> None:
        fields = {"server_fake": bucket, "ask": staticmethod(ask), "tokens": tokens}
        self.server = ThreadingHTTPServer((ADDRESS, 443), type("OnWire", (_Handler,), fields))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True, do_handshake_on_connect=False)
        self.server.daemon_threads = True

    def start(self) -> None:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class _Handler(BucketHandler):
    ask: Ask
    tokens: set[str]

    @property
    def url(self) -> str:
        return f"https://{self.headers.get('Host')}"

    def _answer(self) -> None:
        given = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if given not in self.tokens:
            self._say(Reply(status=401, body={"error": {"code": 401, "message": "Invalid Credentials"}}))
        elif str(self.headers.get("Host")).startswith("storage."):
            super()._answer()
        else:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            url = f"https://{self.headers.get('Host')}{self.path}"
            self._say(type(self).ask(Call(method=self.command, url=url, body=json.loads(data) if data else None)))

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = _answer

    def _say(self, reply: Reply) -> None:
        text = (reply.text or json.dumps(reply.body)).encode()
        self.send_response(reply.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
        self.wfile.flush()
