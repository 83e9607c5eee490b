"""SQLite files as they are, opened for reading alone: with the changes that are still in a write-ahead log.

SQLite itself cannot read such a log without writing: it makes an index next to it, or folds it into the file. So a file
with one (or with the journal of a change that was cut off) is copied with it, and the copy is opened.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import time
from contextlib import closing
from pathlib import Path

from muster.core.errors import MusterError, UsageError

#: What SQLite keeps next to a file while changes are under way, and after a writer was killed.
LOGS = ("-wal", "-journal")
_COPY_TRIES = 5

Marks = tuple[tuple[int, int, int] | None, ...]


def open_database(path: Path) -> sqlite3.Connection:
    """``path``, read-only, as its last committed change left it; nothing is written next to it. Blocks while copying.

    Raises:
        UsageError: no such file, not a database, or written to all the time.
        MusterError: no room for a copy.
    """
    if not path.is_file():
        raise UsageError(f"database {str(path)!r} does not exist", hint="give `database` the path of a SQLite file")
    if not any(size for _, size, _ in filter(None, marks(path)[1:])):
        return _opened(path, path)
    try:
        with tempfile.TemporaryDirectory(prefix="muster-sql-") as folder:
            copy = Path(folder) / "copy.sqlite"
            _copy(path, copy)
            _fold(path, copy)
            return _opened(copy, path)  # open, it outlives its name: a process that is killed leaves nothing
    except OSError as error:
        raise MusterError(
            f"database {str(path)!r} cannot be copied to {tempfile.gettempdir()}: {error.strerror}",
            hint="it has changes in a log file, which reading would write to: make room, set TMPDIR, or close it",
        ) from error


def marks(path: Path) -> Marks:
    """What changes when the database or its log does: (inode, size, time) of each; None where it is absent."""
    return tuple(_mark(f"{path}{ending}") for ending in ("", *LOGS))


def _mark(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _copy(source: Path, copy: Path) -> None:
    """Copy the file and its logs as they were at one moment: copied again where one of them changed meanwhile."""
    for _ in range(_COPY_TRIES):
        before = marks(source)
        for ending, mark in zip(("", *LOGS), before, strict=True):
            Path(f"{copy}{ending}").unlink(missing_ok=True)
            if mark is not None:
                try:
                    shutil.copyfile(f"{source}{ending}", f"{copy}{ending}")
                except FileNotFoundError:
                    break  # the writer has just removed it
        else:
            if marks(source) == before:
                return
        time.sleep(0.2)
    raise UsageError(f"database {str(source)!r} is being written to", hint="name a copy of it that rests")


def _fold(source: Path, copy: Path) -> None:
    """Fold the logs of a copy into it."""
    with closing(sqlite3.connect(copy, isolation_level=None)) as connection:
        try:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            connection.execute("PRAGMA journal_mode = DELETE").fetchone()
        except sqlite3.DatabaseError as error:
            raise UsageError(f"{str(source)!r} is not a SQLite database: {error}") from error


def _opened(path: Path, shown: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
    connection.text_factory = lambda data: data.decode("utf-8", "replace")
    try:
        connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
    except sqlite3.DatabaseError as error:
        connection.close()
        raise UsageError(f"{str(shown)!r} is not a SQLite database: {error}") from error
    return connection
