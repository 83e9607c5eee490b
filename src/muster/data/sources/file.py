"""Local files, identified by their content."""

from __future__ import annotations

from pathlib import Path

from muster.config.sources import FileSource
from muster.core.errors import UsageError
from muster.core.typed_json import JsonObject
from muster.data.row_files import find_files, identify, locate, read_files
from muster.data.source_type import OpenedSource, SourceType


def _open(section: FileSource) -> OpenedSource:
    files = find_files(section.path)
    heldout = find_files(section.heldout_path) if section.heldout_path else None
    identity = section.model_dump(exclude={"path", "heldout_path", "database"})
    if section.database:
        if not Path(section.database).expanduser().is_file():
            raise UsageError(f"database {section.database!r} does not exist", hint="check data.sources[].database")
        identity["database"] = identify(Path(section.database).expanduser())
    identity["files"] = [identify(path) for path in files]
    identity["heldout_files"] = [identify(path) for path in heldout] if heldout else None
    return OpenedSource(
        type=SOURCE,
        section=section,
        label=repr(section.path),
        identity=identity,
        rows=lambda: read_files(files, section.limit),
        heldout_rows=(lambda: read_files(heldout)) if heldout else None,
        locate=lambda index, is_heldout: locate(heldout or files if is_heldout else files, index),
    )


def _scoring_context(section: FileSource) -> JsonObject:
    return {"database": str(Path(section.database).expanduser())} if section.database else {}


SOURCE = SourceType(section=FileSource, open=_open, task="text2sql", scoring_context=_scoring_context)
