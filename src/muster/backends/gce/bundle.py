"""``python -m muster.backends.gce.bundle WHEELS OUT``: packs the software of hosts, named by its own SHA-256.

WHEELS is a folder of wheels, pip's own among them (in a clone: ``pip wheel -w WHEELS '.[gcs,...]' pip``). Hosts
install what is listed, offline and by its hashes; what the boot image brings (torch) stays visible to them.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import sys
import tarfile
from pathlib import Path

from muster.core.errors import DISTRIBUTION, UsageError


def pack(wheels: Path, out: Path, *, python: Path | None = None) -> Path:
    """Write ``OUT/SHA256.tar.gz`` and return its path; the same wheels give the same bytes.

    ``python``: a folder with a stand-alone ``bin/python3``, for images whose own is older than 3.11.

    Raises:
        UsageError: no wheels, no wheel of pip, none of Muster, or no Python in ``python``.
    """
    found = sorted(wheels.glob("*.whl"))
    named = {path.name.partition("-")[0].lower() for path in found}
    for needed, source in ("pip", "pip"), (DISTRIBUTION, "'.[gcs,data,train]', in a clone of Muster"):
        if needed.replace("-", "_") not in named:
            raise UsageError(f"{wheels} has no wheel of {needed}", hint=f"pip wheel --wheel-dir {wheels} {source}")
    if python is not None and not (python / "bin" / "python3").exists():
        raise UsageError(f"{python} has no bin/python3", hint="a stand-alone Python's folder")
    out.mkdir(parents=True, exist_ok=True)
    half = out / ".bundle.new"
    with half.open("wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as zipped:
        with tarfile.open(fileobj=zipped, mode="w") as packed:
            text = "".join(_requirement(path) for path in found if not path.name.startswith("pip-")).encode()
            entry = tarfile.TarInfo("requirements.txt")
            entry.size, entry.mode = len(text), 0o644
            packed.addfile(entry, io.BytesIO(text))
            for path in found:
                packed.add(path, f"wheels/{path.name}", filter=_plain)
            if python is not None:
                packed.add(python, "python", filter=_plain)
    with half.open("rb") as file:
        target = out / f"{hashlib.file_digest(file, 'sha256').hexdigest()}.tar.gz"
    half.replace(target)
    return target


def _requirement(wheel: Path) -> str:
    name, version, *_ = wheel.name.split("-")
    return f"{name}=={version} --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Nothing of who packed it, and when."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mtime = 0
    return entry


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--python", type=Path, help="folder of a stand-alone Python, for images older than 3.11")
    given = parser.parse_args()
    try:
        print(pack(given.wheels, given.out, python=given.python))
    except UsageError as error:
        print(f"error: {error}\nhint: {error.hint}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
