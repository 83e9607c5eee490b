"""Files here or in a bucket, identified by their content."""

from __future__ import annotations

import glob
from pathlib import Path

from muster.config.sections.sources import FileSource, glob_of
from muster.core.errors import UsageError
from muster.core.typed_json import Json, JsonObject
from muster.data.files.places import find_files, identify, size_of
from muster.data.files.row_files import locate, read_files
from muster.data.formats import fields, fill
from muster.data.source_type import Meter, OpenedSource, SourceType


def _open(section: FileSource) -> OpenedSource:
    files = find_files(section.path)
    heldout = find_files(section.heldout_path) if section.heldout_path else None
    identity = section.model_dump(exclude={"path", "heldout_path", "database"})
    if section.database:
        identity["database"] = _databases(section.database)
    identity["files"] = [identify(path) for path in files]
    identity["heldout_files"] = [identify(path) for path in heldout] if heldout else None
    meter = None if section.limit else Meter(total=sum(map(size_of, files)))
    return OpenedSource(
        type=SOURCE,
        section=section,
        label=repr(section.path),
        identity=identity,
        rows=lambda: read_files(files, section.limit, meter),
        read=meter,
        heldout_rows=(lambda: read_files(heldout)) if heldout else None,
        locate=lambda index, is_heldout: locate(heldout or files if is_heldout else files, index),
    )


def _databases(pattern: str) -> JsonObject:
    """What identifies the database, or those of all rows, with the changes in its write-ahead log."""
    full = str(Path(pattern).expanduser())
    if glob_of(full) == full:
        paths = {"": Path(fill(full, {}))}
    else:
        start = full.partition("{")[0]  # what is before it says where they are, not what
        found = map(Path, sorted(glob.glob(glob_of(full))))
        paths = {str(path).removeprefix(start): path for path in found if path.is_file()}
    if not paths or not all(path.is_file() for path in paths.values()):
        raise UsageError(f"database {pattern!r} does not exist", hint="check data.sources[].database")
    logs = {f"{name}{end}": Path(f"{path}{end}") for name, path in paths.items() for end in ("-wal", "-journal")}
    files: dict[str, Json] = {name: identify(path) for name, path in {**paths, **logs}.items() if path.is_file()}
    return {"columns": fields(full), "files": files}


def _scoring_context(section: FileSource) -> JsonObject:
    return {"database": str(Path(section.database).expanduser())} if section.database else {}


SOURCE = SourceType(section=FileSource, open=_open, task="text2sql", scoring_context=_scoring_context)
