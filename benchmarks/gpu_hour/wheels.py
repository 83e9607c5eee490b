"""Wheels that an image without a network lacks: downloaded where there is one, installed beside what the image has."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tempfile
from pathlib import Path

try:
    from packaging.markers import Marker
except ModuleNotFoundError:  # on the very image that lacks packages; pip is there
    from pip._vendor.packaging.markers import Marker

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements" / "run.lock"
#: In the lock, and not needed here: nothing is read from Parquet files, and nothing comes from the hub.
LEFT_OUT = {"pyarrow", "hf-xet", "setuptools", "colorama", "httpx2-jsfetch"}
#: Newer than any image's glibc would be refused by pip there, so older platforms are asked for.
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "any")


def pinned(python: str, lock: Path = LOCK) -> dict[str, str]:
    """Package -> its lines of the lock, hashes included, for Linux and this version of Python (``3.12``)."""
    target = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux",
              "platform_system": "Linux", "os_name": "posix", "platform_machine": "x86_64",
              "platform_python_implementation": "CPython"}  # fmt: skip
    found = {}
    for block in re.split(r"\n(?=\S)", lock.read_text()):
        head = re.match(r"([A-Za-z0-9_.-]+)==(\S+)(?: ; ([^\\]*))?", block)
        if head is None or head[1] in LEFT_OUT or (head[3] and not Marker(head[3].strip()).evaluate(target)):
            continue
        found[head[1]] = re.sub(r" ; [^\\]*(?= \\)", "", block)
    return found


def pack(folder: Path, pythons: list[str]) -> str:
    """Download every wheel of the lock for each version of Python; returns what it came to."""
    folder.mkdir(parents=True, exist_ok=True)
    for python in pythons:
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write("\n".join(pinned(python).values()))
            file.flush()
            platforms = [word for name in PLATFORMS for word in ("--platform", name)]
            subprocess.run([
                sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", "-r", file.name,
                "--only-binary", ":all:", "--python-version", python, *platforms, "--dest", str(folder),
            ], check=True)  # fmt: skip
    wheels = list(folder.glob("*.whl"))
    return f"{len(wheels)} wheels, {sum(each.stat().st_size for each in wheels) / 2**20:.0f} MiB, in {folder}"


def lacking() -> list[str]:
    """Packages of the lock that this Python has in no version. One that it has stays, whatever its version."""
    python = ".".join(map(str, sys.version_info[:2]))
    return [name for name in pinned(python) if not is_here(name)]


def is_here(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def install(wheels: Path, target: Path) -> str:
    """Put what is lacking into ``target`` from ``wheels`` alone; the image is left as it is."""
    names = lacking()
    if names and not target.exists():
        requirements = [pinned(".".join(map(str, sys.version_info[:2])))[name].split()[0] for name in names]
        subprocess.run([
            sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--find-links", str(wheels),
            "--target", str(target), *requirements,
        ], check=True)  # fmt: skip
    return f"brought: {', '.join(names) or 'nothing, all is there'}"
