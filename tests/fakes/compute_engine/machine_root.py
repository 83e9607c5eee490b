"""A machine of namespaces: network, mounts, processes and an overlay root of its own, started as root.

The first process sets the root up, runs the start-up scripts as on every boot, and stays. Inside there is loopback with
the metadata server at its usual address, and nothing else: no internet, no way to or from outside.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from fakes.compute_engine import script_runner
from fakes.compute_engine.google_names import ADDRESS, NAMES
from fakes.metadata import Server

METADATA = "169.254.169.254"
IMAGE_PYTHONS = tuple(f"/usr/local/sbin/{name}" for name in ("python3", f"python3.{sys.version_info.minor}"))
"""The Python that ``google_front.image`` puts first on an image's PATH."""
PYTHONS = tuple(
    str(found)
    for folder in ("/usr/local/sbin", "/usr/local/bin", "/usr/bin")
    for found in sorted(Path(folder).glob("python3*"))
    if re.fullmatch(r"python3(\.\d+)?", found.name) and not found.is_symlink()
)
"""This computer's own ones, which a machine has too."""
Made = TypeVar("Made")


class Service(Protocol):
    """What answers on the machine's network."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


Services = Callable[[], Service]


class MachineRoot:
    """``folder`` holds its disk and its output (``serial.log``); give it a file system of its own (tmpfs)."""

    def __init__(
        self,
        folder: Path,
        values: dict[str, str],
        hidden: tuple[str, ...] = (),
        *,
        image: Path | None = None,
        shown: tuple[str, ...] = (),
        services: Services | None = None,
    ) -> None:
        self.folder, self.values, self.hidden = folder, values, hidden
        """``hidden``: programs of this computer's that the machine shall not have."""
        self.image, self.services = image, services
        """Files that its boot image adds to this computer's; what makes Google's services, inside the machine."""
        self.shown = shown
        """Folders that it must have at the same path, even below one that it replaces (``/tmp``) or on another disk."""
        self.front: Service | None = None
        self.server: Server | None = None
        self.first: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "serial.log"

    @property
    def disk(self) -> Path:
        """What was written to its disk."""
        return self.folder / "upper"

    def boot(self) -> None:
        """Power on: the disk is as it was left."""
        ready_in, ready_out = os.pipe()
        go_in, go_out = os.pipe()
        layout = {
            "name": self.values.get("name", ""),
            "image": str(self.image or ""),
            "hidden": self.hidden,
            "shown": self.shown,
        }
        program = [sys.executable, "-m", "fakes.compute_engine.machine_root", str(self.folder)]
        program += [str(ready_out), str(go_in), json.dumps(layout)]
        tests = Path(__file__).parents[2]
        command = ["unshare", "--net", "--mount", "--pid", "--uts", "--fork", "--kill-child", *program]
        with self.log.open("ab") as log:
            self.first = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(ready_out, go_in),
                env={**os.environ, "PYTHONPATH": str(tests)}, start_new_session=True,
            )  # fmt: skip
        os.close(ready_out)
        os.close(go_in)
        said = os.read(ready_in, 1)
        os.close(ready_in)
        assert said == b"1", f"the machine did not boot: {self.log.read_text()}"
        self.server = self.inside(lambda: Server((METADATA, 80), self.values))
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        if self.services is not None:
            self.front = self.inside(self.services)
            self.front.start()
        os.write(go_out, b"1")
        os.close(go_out)

    def power_off(self) -> None:
        """No warning: everything in it ends."""
        if self.first is not None:
            os.killpg(self.first.pid, signal.SIGKILL)
            self.first.wait()
            self.first = None
        if self.front is not None:
            self.front.stop()
            self.front = None
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()
            self.server = None

    def reboot(self) -> None:
        self.power_off()
        self.boot()

    def replace(self) -> None:
        """Another machine under the same name: its disk is new."""
        self.power_off()
        shutil.rmtree(self.disk)
        self.boot()

    def inside(self, make: Callable[[], Made]) -> Made:
        """The result of ``make`` in the machine's network: a socket that is made there stays there."""
        assert self.first is not None
        children = Path(f"/proc/{self.first.pid}/task/{self.first.pid}/children").read_text().split()
        found: list[Made] = []

        def enter() -> None:
            with open(f"/proc/{children[0]}/ns/net", "rb") as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
                    raise OSError(ctypes.get_errno(), "setns")
            found.append(make())

        thread = threading.Thread(target=enter)  # a namespace is a thread's
        thread.start()
        thread.join()
        assert found, "it could not be made in there"
        return found[0]

    def serial(self) -> str:
        return self.log.read_text(errors="replace")


def _first_process(
    folder: Path, ready: int, go: int, *, name: str, image: str, hidden: list[str], shown: list[str]
) -> None:
    def call(*command: str) -> None:
        subprocess.run(command, check=True)

    if name:
        socket.sethostname(name)
    root = folder / "root"
    for path in (folder / "upper", folder / "work", root):
        path.mkdir(exist_ok=True)
    call("mount", "--make-rprivate", "/")
    lower = f"{image}:/" if image else "/"
    layers = f"lowerdir={lower},upperdir={folder}/upper,workdir={folder}/work"
    call("mount", "-t", "overlay", "overlay", "-o", layers, str(root))
    call("mount", "-t", "proc", "proc", f"{root}/proc")
    call("mount", "--rbind", "/dev", f"{root}/dev")
    for volatile in ("tmp", "run", "dev/shm"):
        call("mount", "-t", "tmpfs", "tmpfs", f"{root}/{volatile}")
    for path in shown:
        if not (root / path.lstrip("/")).exists():
            (root / path.lstrip("/")).mkdir(parents=True)
            call("mount", "--rbind", path, f"{root}{path}")
    for program in hidden:
        if (root / program.lstrip("/")).is_file():
            call("mount", "--bind", "/dev/null", f"{root}{program}")
    hosts = root / "etc/hosts"
    google = "".join(f"{ADDRESS} {name}\n" for name in NAMES)
    hosts.write_text(f"127.0.0.1 localhost\n{METADATA} metadata.google.internal\n{google}")
    boot = root / "run/boot_id"  # this computer's is the same for all its machines and boots
    boot.write_text(f"{uuid.uuid4()}\n")
    call("mount", "--bind", str(boot), f"{root}/proc/sys/kernel/random/boot_id")
    call("ip", "link", "set", "lo", "up")
    for address in (METADATA, ADDRESS):
        call("ip", "addr", "add", f"{address}/32", "dev", "lo")
    os.write(ready, b"1")
    os.close(ready)
    os.read(go, 1)
    os.close(go)
    script_runner.run_all(f"http://{METADATA}", root, sys.stdout)
    while True:  # process 1: it buries what is left to it, and never ends
        try:
            os.wait()
        except ChildProcessError:
            signal.pause()


if __name__ == "__main__":
    _first_process(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), **json.loads(sys.argv[4]))
