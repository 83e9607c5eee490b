"""Write the locks anew: ``python tools/lock.py [--upgrade]``. Needs uv on the PATH (``pip install uv``).

    requirements/run.lock                                  what `./setup.sh run` installs: muster[train,data]
    requirements/all.lock                                  every extra, tests and checks included
    src/muster/backends/gke/provision/requirements.lock    what the image of a run holds

Each names every package with its version and the SHA-256 of every file of it, for Linux and macOS and every Python that
Muster runs on; ``pip --require-hashes`` takes nothing else. Without ``--upgrade`` the versions that a lock has stay.

Torch is not in them. Which build of it is right depends on the machine (CPU, CUDA 12, CUDA 13), each comes from an
index of its own, and one version has other files in each: its version is pinned in constraints.txt (for the image in
the catalog's versions.yaml), its files by the index that it comes from. What CUDA builds bring with them follows torch.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ALL = ROOT / "requirements" / "all.lock"
LOCKS = {
    ALL: ("train", "data", "gcs", "s3", "tpu", "gke", "inspect", "gke-test", "test", "dev"),
    ROOT / "requirements" / "run.lock": ("train", "data"),
    ROOT / "src/muster/backends/gke/provision/requirements.lock": ("train", "data", "gcs", "gke"),
}
#: What torch's CPU build asks for; its CUDA builds bring their own packages besides.
OF_TORCH = ("filelock", "typing-extensions>=4.10", "sympy>=1.13.3", "networkx>=2.5.1", "jinja2", "fsspec")
NO_TORCH = "torch ; sys_platform == 'never'\n"
HEADER = "# Written by tools/lock.py from pyproject.toml; do not edit. Torch is apart: see there.\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that pyproject.toml allows")
    upgrade = parser.parse_args().upgrade
    built_with = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    for lock, extras in LOCKS.items():
        code = write(lock, extras, besides=(*OF_TORCH, *built_with), upgrade=upgrade)
        if code:
            return code
    return 0


def write(lock: Path, extras: tuple[str, ...], *, besides: tuple[str, ...], upgrade: bool) -> int:
    """``ALL`` is written first: the others take its versions."""
    with tempfile.TemporaryDirectory() as folder:
        files = {"besides.in": "\n".join(besides), "override.txt": NO_TORCH, "pins.txt": pins(lock, upgrade=upgrade)}
        for name, text in files.items():
            (Path(folder) / name).write_text(text)
        return subprocess.call([
            "uv", "pip", "compile", str(ROOT / "pyproject.toml"), f"{folder}/besides.in",
            "--constraint", f"{folder}/pins.txt", "--override", f"{folder}/override.txt",
            *(word for extra in extras for word in ("--extra", extra)),
            "--universal", "--python-version", "3.11", "--generate-hashes", "--no-emit-package", "torch",
            "--no-annotate", "--no-header", "--no-emit-index-url", "--no-emit-find-links", "--quiet",
            "--output-file", str(Path(folder) / "lock"),
        ], stdout=subprocess.DEVNULL) or keep(lock, (Path(folder) / "lock").read_text())  # fmt: skip


def pins(lock: Path, *, upgrade: bool) -> str:
    """Versions that are given: the pinned tools', and those of a lock that was written before."""
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    known = [line for line in constraints if not line.startswith("torch")]
    if ALL.exists() and not (upgrade and lock == ALL):
        lines = ALL.read_text().splitlines()
        known += [line.removesuffix("\\").strip() for line in lines if "==" in line and not line.startswith("#")]
    return "\n".join(known)


def keep(lock: Path, text: str) -> int:
    lock.parent.mkdir(exist_ok=True)
    lock.write_text(HEADER + text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
