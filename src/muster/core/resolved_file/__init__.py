"""``resolved.json`` of a run's folder: every key of the run's file with its value, and a checksum of all that.

::

    {
     "checksum": "sha256:<64 hex digits>",
     "name": ...

Every program of a run reads it when it starts, so a flipped bit that leaves it valid JSON (a digit of the learning
rate) would be trained with. The checksum is that of the text without its own line, which is the digest that
``run.submitted`` names. A file without one is taken as it is: an earlier version wrote it, or another program than
Muster (a test's, a chart's). Damage to one place makes no such file of one that has a checksum: what is left of the
line is refused, and so is every key that a run file does not have.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
import time
from pathlib import Path

from muster.core import processes
from muster.core.errors import MusterError
from muster.core.typed_json import parse_object

NAME = "resolved.json"
#: What a damaged one is kept as.
DAMAGED = "resolved.json.damaged"
#: The same text once more: command lines may have changed what ``run.yaml`` says, and their record may be damaged, too.
COPY = "resolved.copy.json"
#: How long a program of the run that reads a damaged file waits for the supervisor to rewrite it, in seconds: the
#: supervisor checks the file three times in a lease's length.
PATIENCE_S = 8.0
_AGAIN_S = 0.2
_LINE = re.compile(rb'\A\{\n "checksum": "sha256:([0-9a-f]{64})",\n')
#: Where that line is, or what is left of it.
_HEAD_BYTES = 100


class DamagedRunFile(MusterError, ValueError):
    """``resolved.json`` is not what was written."""


def digest(text: str) -> str:
    """SHA-256 of the resolved run file ``text``, without a checksum of its own."""
    return hashlib.sha256(text.encode()).hexdigest()


def names(data: bytes, text: str) -> bool:
    """Whether the damaged file ``data`` has ``text``'s checksum: that is what it held then."""
    return digest(text).encode() in data[:_HEAD_BYTES]


def sealed(text: str) -> str:
    """``text``, a JSON object, with its checksum; unchanged where it has one. Raises DamagedRunFile."""
    plain = unsealed(text.encode())
    if not plain.startswith("{\n"):
        plain = "{\n" + plain.lstrip()[1:]
    return f'{{\n "checksum": "sha256:{digest(plain)}",\n{plain[2:]}'


def unsealed(data: bytes, source: object = NAME) -> str:
    """The JSON object in ``data`` without its checksum, which is verified. ``source``: its name in an error.

    Raises:
        DamagedRunFile: it does not fit its checksum, or is not a JSON object.
    """
    found = _LINE.match(data)
    plain = b"{\n" + data[found.end() :] if found else data
    if found is None and (b"sha256:" in data[:_HEAD_BYTES] or b'"checksum"' in data[:_HEAD_BYTES]):
        raise _damaged(source, "the line with its checksum was changed")
    if found is not None and hashlib.sha256(plain).hexdigest().encode() != found[1]:
        raise _damaged(source, "it does not fit its checksum")
    try:
        parse_object(plain)
        return plain.decode()
    except ValueError as error:
        raise _damaged(source, str(error)) from None


def read(run_dir: Path, *, patient: bool = False) -> str:
    """The resolved run file of the run in ``run_dir``, verified, as JSON text without its checksum.

    ``patient``: wait for a file that is damaged or missing in a run's folder: the run's supervisor rewrites it.
    So is a folder that is gone or empty: its disk is away, and a mount point without its disk is an empty folder.

    Raises:
        DamagedRunFile: it is not what was written.
        OSError: it cannot be read.
    """
    until = time.monotonic() + (PATIENCE_S if patient else 0.0)
    while True:
        try:
            return unsealed(processes.read_plain(run_dir / NAME), run_dir / NAME)
        except (DamagedRunFile, FileNotFoundError) as error:
            if time.monotonic() >= until or (isinstance(error, FileNotFoundError) and _holds_no_run(run_dir)):
                raise
        time.sleep(_AGAIN_S)


def _holds_no_run(folder: Path) -> bool:
    """Whether the folder is there, holds something, and no run."""
    with contextlib.suppress(OSError):
        names = {path.name for path in folder.iterdir()}
        return bool(names) and "job.json" not in names
    return False


def write(run_dir: Path, text: str) -> None:
    """Replace it and its copy by ``text`` with its checksum: readers see the old one or all of the new one. Raises
    OSError."""
    for name in (NAME, COPY):
        processes.replace_text(run_dir / name, sealed(text))


def copied(run_dir: Path) -> str | None:
    """What the copy holds, without its checksum; None: there is none that is whole."""
    with contextlib.suppress(OSError, DamagedRunFile):
        data = processes.read_plain(run_dir / COPY)
        return unsealed(data) if _LINE.match(data) else None
    return None


def set_aside(run_dir: Path) -> None:
    """Keep a copy of the damaged one, if any; who reads it meanwhile finds it where it was. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        shutil.copyfile(run_dir / NAME, run_dir / DAMAGED)


def _damaged(source: object, why: str) -> DamagedRunFile:
    return DamagedRunFile(f"{source} is damaged: {why}", hint="muster recover RUN rewrites it")
