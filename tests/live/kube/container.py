"""The inside of a test pod's container: a root of its own with the pod's volumes in it, then the command.

Run by ``kubelet.py`` as process 1 of fresh mount, pid and uts namespaces: ``python container.py SPEC.json``. The root
is the machine's own, seen through bind mounts; ``/etc``, ``/dev/shm``, ``/proc`` and the volumes are the pod's. All of
it goes with the namespaces. Standard library only.
"""

import ctypes
import json
import os
import socket
import sys
from pathlib import Path

MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
LIBC = ctypes.CDLL(None, use_errno=True)


def mount(source, target, kind=None, flags=0):
    """mount(2). Raises OSError."""
    words = [None if one is None else str(one).encode() for one in (source, target, kind)]
    if LIBC.mount(*words, ctypes.c_ulong(flags), None) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"mount {source} on {target}: {os.strerror(code)}")


def bind(source, target):
    mount(source, target, flags=MS_BIND | MS_REC)


def build(root, volumes, hostname, address):
    """The machine's own folders below ``root``, and the pod's volumes where the container wants them."""
    mount(None, "/", flags=MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs")
    for entry in Path("/").iterdir():
        place = root / entry.name
        if entry.is_symlink():
            place.symlink_to(os.readlink(entry))
        elif entry.is_dir() and entry.name not in ("etc", "proc"):
            place.mkdir()
            bind(entry, place)
    # Volumes appear below /etc, so it has to be one of our own: every entry points at the machine's.
    for folder in (".etc", "etc", "proc"):
        (root / folder).mkdir()
    bind("/etc", root / ".etc")
    for entry in Path("/etc").iterdir():
        if entry.name not in ("hosts", "hostname"):
            (root / "etc" / entry.name).symlink_to(f"/.etc/{entry.name}")
    (root / "etc" / "hosts").write_text(f"127.0.0.1 localhost\n{address} {hostname}\n")
    (root / "etc" / "hostname").write_text(f"{hostname}\n")
    mount("proc", root / "proc", "proc")
    mount("tmpfs", root / "dev" / "shm", "tmpfs")
    for path, (source, read_only) in sorted(volumes.items()):  # a volume may lie within another's path
        place = root / path.lstrip("/")
        if path == "/dev/shm":
            continue
        if path.startswith("/var/run/"):  # /run, which is the machine's: shadowed whole
            mount("tmpfs", root / "run", "tmpfs")
            place = root / "run" / path.removeprefix("/var/run/")
        if not os.path.lexists(place):  # not mkdir with exist_ok: it would look at a bucket that nobody serves yet
            place.mkdir(parents=True)
        bind(source, place)
        if read_only:
            mount(None, place, flags=MS_BIND | MS_REMOUNT | MS_RDONLY)


def main():
    spec = json.loads(Path(sys.argv[1]).read_text())
    root = Path(spec["root"])
    root.mkdir(parents=True, exist_ok=True)
    socket.sethostname(spec["hostname"])
    build(root, spec["volumes"], spec["hostname"], spec["address"])
    os.chroot(root)
    os.chdir(spec.get("cwd") or "/")
    os.execvpe(spec["argv"][0], spec["argv"], spec["env"])


if __name__ == "__main__":
    main()
