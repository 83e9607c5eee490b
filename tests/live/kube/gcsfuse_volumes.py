"""A pod's buckets as the CSI driver brings them: mounted by the node, served by a sidecar of the pod.

The driver mounts and hands the descriptor to the sidecar over a socket; until the sidecar serves it (it waits 1.5 s
before each bucket) every call on the mount hangs. The sidecar is the first of the init containers and ends last; when
the program that serves a bucket dies, its mount is dead for the rest of the pod's life.

As a program (``python gcsfuse_volumes.py FOLDER``) it is the sidecar. Standard library only.
"""

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import fuse_wire
import gcsfuse
from gcsfuse_options import BadOption, of_volume, settings

SIDECAR = "gke-gcsfuse-sidecar"
ANNOTATION = "gke-gcsfuse/volumes"
DRIVER = "gcsfuse.csi.storage.gke.io"
SOCKET = "gcsfuse.sock"
LEFT_TO_A_SERVER_S = 5.0


class Refused(Exception):
    """The driver cannot mount it now; ``code`` as gRPC has it."""

    def __init__(self, code, why):
        super().__init__(why)
        self.code = code


def sidecar(pod, folder):
    """The container that the driver's webhook puts first, where the pod asks for it."""
    asked = pod["metadata"].get("annotations", {}).get(ANNOTATION)
    if asked != "true" or not any("csi" in one for one in pod["spec"].get("volumes", [])):
        return []
    command = [sys.executable, str(Path(__file__).resolve()), str(folder)]
    return [{"name": SIDECAR, "image": SIDECAR, "restartPolicy": "Always", "command": command}]


class BucketVolume:
    """Mounted when made. Raises Refused."""

    def __init__(self, csi, place, url, *, machine, version, hang_s, fs_group, mark):
        options, attributes, self.bucket = of_volume(csi, fs_group=fs_group)
        self.place = place
        self._look(url)
        try:
            found = settings(options, attributes, machine=machine, version=version)
        except BadOption as error:
            raise Refused("InvalidArgument", f"gcsfuse failed with error: {error}") from error
        with contextlib.suppress(FileExistsError):
            place.mkdir(parents=True)
        self.fd = fuse_wire.mount(self.bucket, str(place), read_only=found.read_only)
        self.argv = gcsfuse.server(url, self.bucket, found, hang_s=hang_s, mark=mark)

    def _look(self, url):
        """Whether the bucket is there and lets us in (the driver's own check)."""
        try:
            urllib.request.urlopen(f"{url}/storage/v1/b/{self.bucket}", timeout=5).close()
        except urllib.error.HTTPError as error:
            code = {403: "PermissionDenied", 404: "NotFound", 429: "ResourceExhausted"}.get(error.code, "Internal")
            raise Refused(code, f'failed to get GCS bucket "{self.bucket}": googleapi: Error {error.code}') from error
        except OSError as error:
            raise Refused("Internal", f'failed to get GCS bucket "{self.bucket}": {error}') from error

    def close(self):
        with contextlib.suppress(OSError):
            fd, self.fd = self.fd, -1
            os.close(fd)

    def remove(self):
        self.close()
        with contextlib.suppress(OSError):
            fuse_wire.unmount(str(self.place))
            self.place.rmdir()


def offer(folder, volumes):
    """Hand the descriptors to the sidecar that comes for them; from then on only it has them."""
    if not volumes:
        return
    line = socket.socket(socket.AF_UNIX)
    where = os.open(folder, os.O_PATH)
    line.bind(f"/proc/self/fd/{where}/{SOCKET}")  # the path itself may be longer than an address
    os.close(where)
    line.listen(1)
    line.settimeout(0.5)
    threading.Thread(target=_hand_over, args=(line, volumes), daemon=True).start()


def _hand_over(line, volumes):
    with line:
        while all(one.fd >= 0 for one in volumes):  # else the pod has gone
            try:
                peer, _ = line.accept()
            except TimeoutError:
                continue
            with peer, contextlib.suppress(OSError):
                told = json.dumps([one.argv for one in volumes]).encode()
                socket.send_fds(peer, [len(told).to_bytes(4, "big")], [one.fd for one in volumes])
                peer.sendall(told)
            break
    for one in volumes:
        one.close()


def serve(folder):
    """The sidecar: one server a bucket; ends them when it is told to end, and has a little patience with them."""
    os.chdir(folder)
    with socket.socket(socket.AF_UNIX) as line:
        while True:
            try:
                line.connect(SOCKET)
                break
            except (FileNotFoundError, ConnectionRefusedError):
                time.sleep(0.05)
        head, fds, _, _ = socket.recv_fds(line, 4, 64)
        told = b""
        while len(told) < int.from_bytes(head, "big"):
            told += line.recv(1 << 16)
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    servers = []
    for argv, fd in zip(json.loads(told), fds, strict=True):
        servers.append(subprocess.Popen(argv, stdin=fd))  # as its descriptor 0
        os.close(fd)
    asked.wait()
    for one in servers:
        one.terminate()
    until = time.monotonic() + LEFT_TO_A_SERVER_S
    for one in servers:
        try:
            one.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            one.kill()


def kill(mark):
    """The fault "fuse dies": end the servers of the pod with this uid, at once. How many there were."""
    count = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
            if any(word.endswith(b"gcsfuse_server.py") for word in words) and any(
                mark.encode() in word for word in words
            ):
                os.kill(int(path.parent.name), signal.SIGKILL)
                count += 1
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESRCH):
                raise
    return count


if __name__ == "__main__":
    serve(sys.argv[1])
