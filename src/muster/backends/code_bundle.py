"""The user's own code, packed and shipped with a run: no image is rebuilt for a changed script.

``pack`` is done where the user sits, ``unpack`` where the run is. What is packed is the work folder (``workdir``) or,
for pods, the folder of the run's script, with the files of its policy and its setup; the run file then names them below
the run's folder. A work folder's name there is its content's digest: changed code is a changed run.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath

from muster.config.spec import RunSpec
from muster.core.errors import UsageError

FOLDER = "code"
"""Below the run's folder."""
LIMIT_BYTES = 700_000
"""Packed. It travels in a config map, which holds 1 MiB with everything in base64."""
SHARED_LIMIT_BYTES = 100_000_000
"""Packed, where the run's folder is on a disk that its hosts share."""
PASSED_OVER = {"__pycache__", "node_modules", "wandb", "runs", "checkpoints", "venv", "env", "build", "dist"}


def pack(spec: RunSpec, run_dir: str, *, limit_bytes: int = LIMIT_BYTES) -> tuple[RunSpec, bytes | None]:
    """The run file as the hosts see it, and the code as a tar.gz; None where everything is the image's.

    The same files give the same bytes.

    Raises:
        UsageError: more code than fits; a link out of the work folder.
    """
    below = f"{run_dir}/{FOLDER}"
    files: dict[str, Path] = {}
    changes: dict[str, object] = {}
    script = Path(spec.command[0]) if spec.command and spec.command[0] != "-m" else None
    if spec.workdir is not None:
        folder = Path(spec.workdir)
        files = _of_work_folder(folder)
        name = _digest(files, limit_bytes, folder)
        files = {f"{name}/{path}": file for path, file in files.items()}
        changes["workdir"] = f"{below}/{name}"
    elif script is not None and script.is_file():
        files |= {str(path.relative_to(script.parent)): path for path in _below(script.parent)}
        files[script.name] = script
        changes["command"] = [f"{below}/{script.name}", *(spec.command or [])[1:]]
    policy = Path(spec.recovery.policy) if spec.recovery.policy.endswith(".py") else None
    if policy is not None and policy.is_file():
        files[f"policy/{policy.name}"] = policy
        changes["recovery"] = spec.recovery.model_copy(update={"policy": f"{below}/policy/{policy.name}"})
    setup = Path(spec.setup) if isinstance(spec.setup, str) and os.path.isabs(spec.setup) else None
    if setup is not None and setup.is_file():
        files[f"setup/{setup.name}"] = setup
        changes["setup"] = f"{below}/setup/{setup.name}"
    if not changes:
        return spec, None
    data = _archived(files, limit_bytes, Path(spec.workdir) if spec.workdir else script or policy or setup)
    return spec.model_copy(update=changes), data


def described(data: bytes) -> str:
    """What was packed, in one line: ``workdir: 12 files, 34.5 kB packed``."""
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as packed:
        count = sum(1 for entry in packed if not entry.isdir())
    return f"workdir: {count} file{'s' * (count != 1)}, {len(data) / 1000:,.1f} kB packed"


def unpack(data: bytes, run_dir: Path) -> None:
    """Put the code below ``run_dir``, whole: what an older shipment left is gone.

    Raises:
        UsageError: it holds something else than files and links that stay in it; nothing is changed.
    """
    fresh, there = run_dir / f".{FOLDER}.new", run_dir / FOLDER
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as packed:
        try:
            _extract(packed, fresh.resolve())
        except UsageError:
            shutil.rmtree(fresh)
            raise
    # Not atomic, and need not be: nothing reads it before the run (or its restart) starts.
    shutil.rmtree(there, ignore_errors=True)
    fresh.rename(there)


def _extract(packed: tarfile.TarFile, folder: Path) -> None:
    """As ``extractall(filter="data")``, which Python has from 3.11.4 on: Debian 12 has 3.11.2. ``folder`` is new."""
    links = []
    for entry in packed:
        path = folder / entry.name
        if not path.parent.resolve().is_relative_to(folder) or ".." in PurePosixPath(entry.name).parts:
            raise UsageError(f"the code that was shipped holds {entry.name!r}, which leads out of it")
        if path.exists() or path.is_symlink() or not (entry.isfile() or entry.issym()):
            raise UsageError(f"the code that was shipped holds {entry.name!r}, which is no file, or is there twice")
        path.parent.mkdir(parents=True, exist_ok=True)
        if entry.issym():
            path.symlink_to(entry.linkname)
            links.append(path)
            continue
        data = packed.extractfile(entry)
        assert data is not None
        path.write_bytes(data.read())
        path.chmod(0o755 if entry.mode & 0o100 else 0o644)
    for path in links:  # last: where a link leads depends on the others
        if not path.resolve().is_relative_to(folder):
            raise UsageError(f"the code that was shipped holds the link {path.name!r}, which leads out of it")


def _below(folder: Path, *, links: bool = False) -> Iterator[Path]:
    """Files of a folder that may be code: nothing hidden or built; without ``links`` none, and nothing large."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in PASSED_OVER or (path.is_symlink() and not links):
            continue
        if path.is_dir() and not path.is_symlink():
            if not (path / "pyvenv.cfg").exists():
                yield from _below(path, links=links)
        elif links or (path.is_file() and path.stat().st_size <= LIMIT_BYTES * 4):
            yield path


def _of_work_folder(folder: Path) -> dict[str, Path]:
    """Its files: those that git does not ignore where it is a git tree, else those of ``_below``.

    Raises:
        UsageError: a link leads out of it.
    """
    listed = _listed_by_git(folder)
    if listed is None:
        listed = [str(path.relative_to(folder)) for path in _below(folder, links=True)]
    found: dict[str, Path] = {}
    for name in sorted(listed):
        path, parts = folder / name, PurePosixPath(name).parts
        if any(part == ".git" or part == ".env" or part.startswith(".env.") for part in parts):
            continue  # secrets travel by `secrets`
        if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
            hint = "copy what it names into the folder, or have .gitignore name it"
            raise UsageError(f"workdir: the link {name} leads out of {folder} (to {os.readlink(path)})", hint=hint)
        if path.is_symlink() or path.is_file():
            found[name] = path
    return found


def _listed_by_git(folder: Path) -> list[str] | None:
    """What git would add; None: no git tree, or no git here."""
    argv = ["git", "-C", str(folder), "ls-files", "-co", "-z", "--exclude-standard"]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except OSError:
        return None
    return [os.fsdecode(name) for name in done.stdout.split(b"\0") if name] if done.returncode == 0 else None


def _digest(files: Mapping[str, Path], limit_bytes: int, folder: Path) -> str:
    return hashlib.sha256(_archived(files, limit_bytes, folder)).hexdigest()[:16]


def _archived(files: Mapping[str, Path], limit_bytes: int, place: Path | None) -> bytes:
    """Raises UsageError where it is more than ``limit_bytes``; what cannot be less is not read at all."""
    sizes = {name: path.lstat().st_size for name, path in files.items()}
    data = b""
    if sum(sizes.values()) <= 20 * limit_bytes:
        data = archive(
            {name: path if path.is_symlink() else path.read_bytes() for name, path in files.items()},
            programs={name for name, path in files.items() if os.access(path, os.X_OK)},
        )
        if len(data) <= limit_bytes:
            return data
    largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
    size = f"{len(data)} bytes packed" if data else f"{sum(sizes.values())} bytes"
    raise UsageError(
        f"the code in {place} is {size}, at most {limit_bytes} are shipped (largest: {', '.join(largest)})",
        hint="put the script into a folder of its own, or its data into the bucket, or let .gitignore name it",
    )


def archive(files: Mapping[str, bytes | Path], *, programs: Collection[str] = ()) -> bytes:
    """A tar.gz; the same files give the same bytes. A path is a link, ``programs`` may be executed."""
    raw = io.BytesIO()
    with gzip.GzipFile(fileobj=raw, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as packed:
        for name, data in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            if isinstance(data, Path):
                entry.type = tarfile.SYMTYPE
                entry.linkname = os.path.relpath(data.resolve(), data.parent.resolve())
                packed.addfile(entry)
                continue
            entry.size, entry.mode = len(data), 0o755 if name in programs else 0o644
            packed.addfile(entry, io.BytesIO(data))
    return raw.getvalue()
