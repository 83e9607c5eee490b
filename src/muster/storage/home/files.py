"""Whole files of a home in a bucket: run files that replace the submitted one, and what a run leaves behind."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from muster.core import resolved_file
from muster.core.errors import ConflictError, MusterError
from muster.core.processes import read_plain
from muster.core.protocols import Store
from muster.storage import uris
from muster.storage.store import blobs

#: File of a local run folder with the number of its submission: run files of other submissions do not concern it.
SUBMISSION_FILE = "submission"
#: What a submission's run file is made of, besides the code in this folder.
RUN_FILES, CODE = ("resolved.json", "run.yaml"), "code"
#: Folders of a run that are brought to the home file by file. What every host makes alike is written once.
ALIKE = ("tokenizer",)
OUTPUTS = (*ALIKE, "traces", "tensorboard")
#: A file is brought once it has not changed for this time, in seconds; all are, at the end.
QUIET_S = 60.0
#: Larger files (traces of a profiler) are not read into memory.
AT_ONCE_BYTES = 8 << 20


def publish_run_file(store: Store, home: str, submission: str, named: Mapping[str, bytes]) -> None:
    """Put a corrected run file, and code, for the processes of ``submission``; ``resolved.json`` comes last.

    Where there is code among them, it is all of it: what was published before and is not in it is removed.
    """
    uri = uris.join(home, "run", submission)
    for name in sorted(named.keys() - {"resolved.json"}):
        store.put(uris.join(uri, name), named[name])
    if any(_is_code(name) for name in named):
        for found in store.list(uris.join(uri, CODE)):
            if found[len(uri) + 1 :] not in named:
                store.delete(found)
    if "resolved.json" in named:
        store.put(uris.join(uri, "resolved.json"), named["resolved.json"])


def fetch_run_file(store: Store, home: str, local: Path) -> bool:
    """Bring the newest run file and code of the local folder's submission; whether anything was new.

    Files of ``RUN_FILES`` and below ``code/``, nothing else; the code is replaced whole. Nothing is brought while the
    first one is still being published (its ``resolved.json`` comes last).

    Raises:
        DamagedRunFile: the home's ``resolved.json`` is not what was published; the one here stays.
    """
    try:
        submission = read_plain(local / SUBMISSION_FILE, most=1 << 10).decode().strip() or "1"
    except FileNotFoundError:
        submission = "1"
    uri = uris.join(home, "run", submission)
    inside = {found[len(uri) + 1 :]: found for found in store.list(uri)}
    wanted = {name: found for name, found in inside.items() if name in RUN_FILES or _is_code(name)}
    if "resolved.json" not in wanted:
        return False
    code = {local / name for name in wanted if _is_code(name)}
    new = _remove_others(local / CODE, code) if code else False
    for name in sorted(wanted, key=lambda name: (name == "resolved.json", name)):
        with suppress(FileNotFoundError):
            data = store.get(wanted[name]).data
            if name == resolved_file.NAME:
                resolved_file.unsealed(data, wanted[name])
            path = local / name
            if not (path.is_file() and path.read_bytes() == data):
                replace_bytes(path, data)
                new = True
    return new


def _is_code(name: str) -> bool:
    """Whether it is the name of a file below ``code/`` of a run's folder."""
    parts = name.split("/")
    return parts[0] == CODE and len(parts) > 1 and not {"", ".", ".."} & set(parts)


def _remove_others(folder: Path, kept: set[Path]) -> bool:
    """Remove what is below ``folder`` but for these files; whether there was any."""
    removed = False
    for at, folders, names in os.walk(folder, topdown=False):
        for path in (Path(at) / name for name in (*folders, *names)):
            if path.is_dir() and not path.is_symlink():
                with suppress(OSError):  # it is not empty
                    path.rmdir()
            elif path not in kept or path.is_symlink():
                path.unlink(missing_ok=True)
                removed = True
    return removed


def fetch_outputs(store: Store, home: str, into: Path) -> int:
    """Bring what the run left behind and ``into`` lacks, one file after the other; bytes.

    Raises:
        OSError: a file cannot be kept here (its name is too long, or a folder's); everything else was brought.
    """
    new = 0
    trouble: list[OSError] = []
    for folder in OUTPUTS:
        uri = uris.join(home, folder)
        for found in store.list(uri):
            inside = PurePosixPath(found[len(uri) + 1 :])
            if inside.is_absolute() or ".." in inside.parts:
                raise MusterError(f"{found} names no file of a run")
            try:
                new += _bring(store, found, into / folder / inside, small=folder in ALIKE)
            except OSError as error:
                trouble.append(error)
    if trouble:
        raise trouble[0]
    return new


def _bring(store: Store, uri: str, path: Path, *, small: bool) -> int:
    """Bytes of one file, if it is not here. Large ones are never whole in memory."""
    if path.exists():
        return 0
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".new-", delete=False) as file:
        try:
            if small:
                file.write(store.get(uri).data)
            else:
                with blobs.reading(uri) as blob:
                    shutil.copyfileobj(blob, file, AT_ONCE_BYTES)
            file.flush()
            os.replace(file.name, path)
        except FileNotFoundError:  # it was removed since it was listed
            os.unlink(file.name)
            return 0
        except BaseException:
            os.unlink(file.name)
            raise
        return file.tell()


def replace_bytes(path: Path, data: bytes) -> None:
    """Readers of ``path`` see all of it or what was there before."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".new-", delete=False) as file:
        file.write(data)
    os.replace(file.name, path)


@dataclass
class Outputs:
    """Brings the files of ``OUTPUTS`` to the home, each version once."""

    store: Store
    home: str
    local: Path
    _sent: dict[Path, int] = field(default_factory=dict)
    """File -> its modification time when it was sent."""

    def send(self, *, all_of_them: bool = False) -> None:
        """What is new and quiet, or everything that is new. Raises as the store; the next call goes on."""
        for path in self._files():
            with suppress(FileNotFoundError):
                changed_ns = path.stat().st_mtime_ns
                quiet = all_of_them or time.time_ns() - changed_ns >= QUIET_S * 1e9
                if quiet and self._sent.get(path) != changed_ns:
                    self._put(path)
                    self._sent[path] = changed_ns

    def _files(self) -> Iterator[Path]:
        for folder in OUTPUTS:
            for path in sorted((self.local / folder).rglob("*")):
                if path.is_file() and not path.is_symlink() and not path.name.startswith("."):
                    yield path

    def _put(self, path: Path) -> None:
        inside = path.relative_to(self.local).as_posix()
        uri = uris.join(self.home, inside)
        if inside.split("/")[0] in ALIKE:
            with suppress(ConflictError):
                self.store.put_if_absent(uri, path.read_bytes())
        elif path.stat().st_size <= AT_ONCE_BYTES:
            self.store.put(uri, path.read_bytes())
        else:
            with open(path, "rb") as file, blobs.writing(uri) as blob:
                shutil.copyfileobj(file, blob, AT_ONCE_BYTES)
