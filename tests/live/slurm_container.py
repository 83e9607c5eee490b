"""Stand-ins for pyxis and apptainer, neither of which a package brings: ``srun`` and ``apptainer`` for a PATH.

What they stand in for is the part that a run can get wrong: a step sees an image's files, the system folders that
enroot mounts (/proc, /sys, /dev, an empty /tmp, host names), and what it asked for, which must exist; nothing else, and
nothing else can be written. It is a mount namespace with a root of its own (``pivot_root``), not a change of paths. An
image is a JSON file: folders of this machine that it is made of, and its variables, which win over the host's unless
they are named.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

CLONE_NEWNS = 0x00020000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
#: Of enroot's 10-system.fstab and 20-config.fstab, whose targets are below the root.
SYSTEM = ("/proc", "/sys", "/dev", "/dev/shm")
FILES = ("/etc/hosts", "/etc/hostname", "/etc/resolv.conf")
OPTIONS = ("image", "mounts", "env")
SLURMS = ("sacct", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun")
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}.get(os.uname().machine, 155)


def install(folder: Path) -> Path:
    """The programs, in a folder for the front of a PATH."""
    folder.mkdir(parents=True)
    for name in ("srun", "apptainer"):
        path = folder / name
        path.write_text(f'#!/bin/sh\nexec {sys.executable} -P {Path(__file__).absolute()} {name} "$@"\n')
        path.chmod(0o755)
    return folder


def image(path: Path, **variables: str) -> Path:
    """An image that holds this machine's system, this Python, torch and Muster. Neither /usr/local, where fabrics are,
    nor Slurm's commands."""
    parts = {"/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", sys.prefix, sys.base_prefix}
    parts |= {str(Path(__file__).parents[2] / "src"), sysconfig.get_paths()["purelib"]}
    programs = path.with_suffix(".bin")
    programs.mkdir()
    for program in Path("/usr/bin").iterdir():
        if program.name not in SLURMS:
            (programs / program.name).symlink_to(program)
    held = {part: part for part in sorted(parts) if Path(part).exists()}
    path.write_text(json.dumps({"parts": {**held, "/image": str(programs)}, "env": {"PATH": "/image", **variables}}))
    return path


# ---------------------------------------------------------------- the programs


def srun(words: Sequence[str]) -> None:
    """pyxis: its options are srun's own; what is behind them begins in the container."""
    real = next(path for path in map(str, _others("srun")))
    place = next((at for at, word in enumerate(words) if not word.startswith("-")), len(words))
    options, program = list(words[:place]), list(words[place:])
    found = {}
    for option in [option for option in options if option.startswith("--container-")]:
        name, _, value = option.removeprefix("--container-").partition("=")
        if name not in OPTIONS or not value:
            sys.exit(f"srun: unrecognized option '{option}'")
        found[name] = value
        options.remove(option)
    if found.get("image", "/")[:1] not in "./":
        sys.exit(f"srun: error: pyxis: failed to import docker image: {found['image']}")
    inner = [f"--{name}={value}" for name, value in found.items()]
    entry = [sys.executable, "-P", __file__, "enter", *inner, "--"] if found else []
    os.execv(real, [real, *options, *entry, *program])


def apptainer(words: Sequence[str]) -> None:
    """``apptainer exec [--nv] [--bind SOURCE[:TARGET[:OPTIONS]]]... IMAGE PROGRAM...``"""
    parser = argparse.ArgumentParser(prog="apptainer", allow_abbrev=False)
    parser.add_argument("command", choices=["exec"])
    parser.add_argument("--nv", action="store_true")
    parser.add_argument("--bind", action="append", default=[])
    parser.add_argument("image")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    given = parser.parse_args(words)
    prefix = "APPTAINERENV_"
    own = {name.removeprefix(prefix): value for name, value in os.environ.items() if name.startswith(prefix)}
    os.environ.update(own)
    enter(
        [f"--image={given.image}", f"--mounts={','.join(given.bind)}", f"--env={','.join(own)}", "--", *given.program]
    )


def enter(words: Sequence[str]) -> None:
    """Become the program, in a root of its own."""
    at = list(words).index("--")
    given = dict(word.removeprefix("--").split("=", 1) for word in words[:at])
    held = json.loads(Path(given["image"]).read_text())
    root = Root()
    root.empty("/tmp")  # before the parts: the clone, which is one, may be below it
    for target, source in held["parts"].items():  # sorted: a folder before what is in it
        root.hold(source, target)
    for path in SYSTEM:
        root.bind(path, path)
    root.empty("/var/run")
    for path in filter(os.path.exists, FILES):
        root.bind(path, path)
    for asked in filter(None, given.get("mounts", "").split(",")):
        source, _, rest = asked.partition(":")
        root.bind(source, rest.partition(":")[0] or source)
    named = [name for name in given.get("env", "").split(",") if name in os.environ]
    environ = {**os.environ, **held["env"], **{name: os.environ[name] for name in named}}
    root.become()
    os.execvpe(words[at + 1], list(words[at + 1 :]), environ)


class Root:
    """A folder that becomes this process's root; every mount is seen by it alone."""

    def __init__(self) -> None:
        self.libc = ctypes.CDLL(None, use_errno=True)
        self._must(self.libc.unshare(CLONE_NEWNS), "unshare")
        self._mount("none", "/", flags=MS_REC | MS_PRIVATE)
        self.path = "/mnt"  # seen as such by this namespace alone
        self._mount("tmpfs", self.path, "tmpfs")

    def hold(self, source: str, target: str) -> None:
        """A part of the image: read only, without what is mounted below it."""
        if os.path.islink(source):
            os.symlink(os.readlink(source), f"{self.path}{target}")
            return
        self.bind(source, target, 0)
        self._mount("none", f"{self.path}{target}", flags=MS_BIND | MS_REMOUNT | MS_RDONLY)

    def bind(self, source: str, target: str, recursive: int = MS_REC) -> None:
        place = f"{self.path}{target}"
        if not os.path.exists(source):
            sys.exit(f"enroot-mount: failed to mount: {source} at {target}: No such file or directory")
        if not os.path.exists(place):
            os.makedirs(place if os.path.isdir(source) else os.path.dirname(place), exist_ok=True)
        if not os.path.exists(place):
            open(place, "w").close()
        self._mount(source, place, flags=MS_BIND | recursive)

    def empty(self, target: str) -> None:
        os.makedirs(f"{self.path}{target}", exist_ok=True)
        self._mount("tmpfs", f"{self.path}{target}", "tmpfs")

    def become(self) -> None:
        os.makedirs(f"{self.path}/.before")
        moved = self.libc.syscall(_PIVOT_ROOT, self.path.encode(), f"{self.path}/.before".encode())
        self._must(moved, "pivot_root")
        os.chdir("/")
        self._must(self.libc.umount2(b"/.before", MNT_DETACH), "umount")
        os.rmdir("/.before")
        self._mount("none", "/", flags=MS_REMOUNT | MS_RDONLY)  # enroot's default, and all that a SIF file can be

    def _mount(self, source: str, target: str, kind: str = "", flags: int = 0) -> None:
        done = self.libc.mount(source.encode(), target.encode(), kind.encode(), flags, None)
        self._must(done, f"enroot-mount: failed to mount: {source} at {target}")

    @staticmethod
    def _must(done: int, what: str) -> None:
        if done != 0:
            sys.exit(f"{what}: {os.strerror(ctypes.get_errno())}")


def _others(name: str) -> list[Path]:
    """Programs of this name on the PATH that are not ours."""
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(":")]
    found = [folder / name for folder in folders if shutil.which(name, path=str(folder))]
    return [path for path in found if __file__ not in path.read_bytes()[:4096].decode(errors="replace")]


if __name__ == "__main__":
    {"srun": srun, "apptainer": apptainer, "enter": enter}[sys.argv[1]](sys.argv[2:])
