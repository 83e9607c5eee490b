"""The user's own code, packed and shipped with a run: no image is rebuilt for a changed script.

``pack`` is done where the user sits, ``unpack`` where the run is. What is packed is the folder of the run's script and
the file of its policy; the run file then names them below the run's folder.
"""

from __future__ import annotations

import gzip
import io
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from muster.config.spec import Recovery, RunSpec
from muster.core.errors import UsageError

FOLDER = "code"
"""Below the run's folder."""
LIMIT_BYTES = 700_000
"""Packed. It travels in a config map, which holds 1 MiB with everything in base64."""
PASSED_OVER = {"__pycache__", "node_modules", "wandb", "runs", "checkpoints", "venv", "env", "build", "dist"}


def pack(spec: RunSpec, run_dir: str) -> tuple[RunSpec, bytes | None]:
    """The run file as the hosts see it, and the code as a tar.gz; None where everything is the image's.

    The same files give the same bytes.

    Raises:
        UsageError: more code than fits.
    """
    files: dict[str, Path] = {}
    changes: dict[str, list[str] | Recovery] = {}
    script = Path(spec.command[0]) if spec.command and spec.command[0] != "-m" else None
    if script is not None and script.is_file():
        files |= {str(path.relative_to(script.parent)): path for path in _below(script.parent)}
        files[script.name] = script
        changes["command"] = [f"{run_dir}/{FOLDER}/{script.name}", *(spec.command or [])[1:]]
    policy = Path(spec.recovery.policy) if spec.recovery.policy.endswith(".py") else None
    if policy is not None and policy.is_file():
        files[f"policy/{policy.name}"] = policy
        name = f"{run_dir}/{FOLDER}/policy/{policy.name}"
        changes["recovery"] = spec.recovery.model_copy(update={"policy": name})
    if not files:
        return spec, None
    data = archive({name: path.read_bytes() for name, path in files.items()})
    if len(data) > LIMIT_BYTES:
        largest = sorted(files, key=lambda name: -files[name].stat().st_size)[:3]
        raise UsageError(
            f"the code beside {script or policy} is {len(data)} bytes packed, at most {LIMIT_BYTES} are shipped "
            f"(largest: {', '.join(largest)})",
            hint="put the script into a folder of its own, or its data into the bucket",
        )
    return spec.model_copy(update=changes), data


def unpack(data: bytes, run_dir: Path) -> None:
    """Put the code below ``run_dir``, whole: what an older shipment left is gone."""
    fresh, there = run_dir / f".{FOLDER}.new", run_dir / FOLDER
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as packed:
        packed.extractall(fresh, filter="data")
    # Not atomic, and need not be: nothing reads it before the run (or its restart) is told to start.
    shutil.rmtree(there, ignore_errors=True)
    fresh.rename(there)


def _below(folder: Path) -> Iterator[Path]:
    """Files of a folder that may be code: nothing hidden, built or large; links are passed over."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.is_symlink() or path.name in PASSED_OVER:
            continue
        if path.is_dir():
            if not (path / "pyvenv.cfg").exists():
                yield from _below(path)
        elif path.is_file() and path.stat().st_size <= LIMIT_BYTES * 4:
            yield path


def archive(files: Mapping[str, bytes]) -> bytes:
    """A tar.gz; the same files give the same bytes."""
    raw = io.BytesIO()
    with gzip.GzipFile(fileobj=raw, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as packed:
        for name, data in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o644
            packed.addfile(entry, io.BytesIO(data))
    return raw.getvalue()
