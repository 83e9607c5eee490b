"""Whole files of a home in a bucket: run files that replace the submitted one, and what a run leaves behind."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from muster.core.errors import ConflictError, MusterError
from muster.core.protocols import Store
from muster.storage import uris
from muster.storage.store import blobs

#: File of a local run folder with the number of its submission: run files of other submissions do not concern it.
SUBMISSION_FILE = "submission"
#: Folders of a run that are brought to the home file by file. What every host makes alike is written once.
ALIKE = ("tokenizer",)
OUTPUTS = (*ALIKE, "traces", "tensorboard")
#: A file is brought once it has not changed for this time, in seconds; all are, at the end.
QUIET_S = 60.0
#: Larger files (traces of a profiler) are not read into memory.
AT_ONCE_BYTES = 8 << 20


def publish_run_file(store: Store, home: str, submission: str, named: Mapping[str, bytes]) -> None:
    """Put a corrected run file, and code, for the processes of ``submission``; ``resolved.json`` comes last."""
    for name in sorted(named, key=lambda name: (name == "resolved.json", name)):
        store.put(uris.join(home, "run", submission, name), named[name])


def fetch_run_file(store: Store, home: str, local: Path) -> bool:
    """Bring the newest run file of the local folder's submission; whether anything was new."""
    try:
        submission = (local / SUBMISSION_FILE).read_text().strip() or "1"
    except FileNotFoundError:
        submission = "1"
    return _bring(store, uris.join(home, "run", submission), local, replace=True) > 0


def fetch_outputs(store: Store, home: str, into: Path) -> int:
    """Bring what the run left behind and ``into`` lacks; bytes."""
    return sum(_bring(store, uris.join(home, folder), into / folder, replace=False) for folder in OUTPUTS)


def _bring(store: Store, uri: str, into: Path, *, replace: bool) -> int:
    named: dict[str, Path] = {}
    for found in store.list(uri):
        inside = PurePosixPath(found[len(uri) + 1 :])
        if inside.is_absolute() or ".." in inside.parts:
            raise MusterError(f"{found} names no file of a run")
        if replace or not (into / inside).exists():
            named[found] = into / inside
    with ThreadPoolExecutor(4) as pool:
        stored = dict(zip(named, pool.map(lambda found: _get(store, found), named), strict=True))
    new = 0
    for found, path in named.items():
        data = stored[found]
        if data is not None and not (path.is_file() and path.read_bytes() == data):
            replace_bytes(path, data)
            new += max(1, len(data))
    return new


def _get(store: Store, uri: str) -> bytes | None:
    try:
        return store.get(uri).data
    except FileNotFoundError:
        return None


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
