"""Where rows come from: hub data sets, local files, the text-to-SQL generator. Each row is a plain mapping.

Random tokens are a source too, but never rows: `prepare` makes their sequences directly.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from muster.config.spec import AnySource, FileSource, HubSource, RandomSource, Text2SqlSource
from muster.core.errors import AccessError, UsageError
from muster.data import hub
from muster.tasks.text2sql import generator

Row = dict[str, Any]

SUFFIXES = (".jsonl", ".json", ".parquet", ".txt")
#: Files up to this size are identified by their whole content; larger ones by size, time and both ends.
_HASHED_WHOLE_BYTES = 256 * 2**20
_END_BYTES = 2**20
#: Generated rows kept in memory, about 1.5 kB each.
_KEPT_ROWS = 50_000


@dataclass(frozen=True)
class OpenedSource:
    """A source whose files have been found: what it is (for the fingerprint) and its rows."""

    source: AnySource
    identity: dict[str, Any]
    rows: Callable[[], Iterator[Row]]
    heldout_rows: Callable[[], Iterator[Row]] | None
    """None: the source has no held-out part of its own."""
    expected_rows: int | None = None


def open_source(source: AnySource) -> OpenedSource:
    """Find the source's files and identify their content; reads no rows yet.

    Raises:
        UsageError: no such file, or a kind of file that cannot be read.
        AccessError: a private or missing hub data set, an unreadable file.
        BackendError: the hub cannot be reached.
    """
    if isinstance(source, Text2SqlSource):
        return _open_text2sql(source)
    if isinstance(source, FileSource):
        return _open_files(source)
    if isinstance(source, HubSource):
        return _open_hub(source)
    assert isinstance(source, RandomSource)
    return OpenedSource(source=source, identity=source.model_dump(), rows=lambda: iter(()), heldout_rows=None)


def read_rows(path: Path) -> Iterator[Row]:
    """Rows of one file, by its suffix; a ``.txt`` file is one row of text.

    Raises:
        UsageError: unknown suffix, or a line that is not a JSON object (with its number).
        AccessError: the file may not be read.
    """
    name = path.name.removesuffix(".gz")
    suffix = Path(name).suffix
    try:
        if suffix == ".parquet":
            yield from _parquet_rows(path)
        elif suffix == ".jsonl":
            yield from _jsonl_rows(path)
        elif suffix == ".json":
            yield from _json_rows(path)
        elif suffix == ".txt":
            with _open(path) as file:
                yield {"text": file.read().decode("utf-8", "replace")}
        else:
            raise UsageError(
                f"{path}: cannot read files of kind {suffix or 'without suffix'!r}",
                hint=f"use one of {', '.join(SUFFIXES)}, each also .gz",
            )
    except PermissionError as error:
        raise AccessError(f"{path} may not be read", hint="check its permissions") from error
    except (gzip.BadGzipFile, EOFError, UnicodeDecodeError, OSError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error


def find_files(pattern: str) -> list[Path]:
    """The files of a path or glob, sorted.

    Raises:
        UsageError: there is none.
    """
    path = Path(pattern).expanduser()
    if path.is_file():
        return [path]
    if any(mark in pattern for mark in "*?["):
        root = Path(path.anchor) if path.is_absolute() else Path()
        found = sorted(each for each in root.glob(str(path.relative_to(path.anchor))) if each.is_file())
        if found:
            return found
        raise UsageError(f"no file matches {pattern!r}", hint="check data.sources[].path")
    reason = "is a folder; give a glob such as 'folder/*.jsonl'" if path.is_dir() else "does not exist"
    raise UsageError(f"data file {pattern!r} {reason}", hint="check data.sources[].path")


def identify(path: Path) -> dict[str, Any]:
    """What stands for a file's content in a fingerprint."""
    try:
        size = path.stat().st_size
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            if size <= _HASHED_WHOLE_BYTES:
                while block := file.read(2**20):
                    digest.update(block)
                return {"bytes": size, "sha256": digest.hexdigest(), "suffix": path.name.split(".", 1)[-1]}
            digest.update(file.read(_END_BYTES))
            file.seek(-_END_BYTES, io.SEEK_END)
            digest.update(file.read())
            modified = path.stat().st_mtime_ns
    except PermissionError as error:
        raise AccessError(f"{path} may not be read", hint="check its permissions") from error
    return {"bytes": size, "ends_sha256": digest.hexdigest(), "modified_ns": modified, "path": str(path.resolve())}


def _open_text2sql(source: Text2SqlSource) -> OpenedSource:
    """Generated rows are read up to three times (tokenizer, tokens, baseline), so the first ones are kept."""
    kept: list[Row] = []

    def made(count: int, *, heldout: bool, start: int = 0) -> Iterator[Row]:
        found = generator.examples(source.level, count - start, source.seed, heldout=heldout, start=start)
        for index, each in enumerate(found, start=start):
            yield {**each.row(), "_index": index, "_shape": each.shape}

    def rows(heldout: bool) -> Iterator[Row]:
        if heldout:
            yield from made(source.heldout_rows, heldout=True)
            return
        count = min(source.rows, source.limit or source.rows)
        yield from kept
        for row in made(count, heldout=False, start=len(kept)):
            if len(kept) == row["_index"] < _KEPT_ROWS:
                kept.append(row)
            yield row

    return OpenedSource(
        source=source,
        identity=source.model_dump(),
        rows=lambda: rows(False),
        heldout_rows=lambda: rows(True),
        expected_rows=min(source.rows, source.limit or source.rows),
    )


def _open_files(source: FileSource) -> OpenedSource:
    files = find_files(source.path)
    heldout = find_files(source.heldout_path) if source.heldout_path else None
    identity = source.model_dump(exclude={"path", "heldout_path", "database"})
    if source.database:
        if not Path(source.database).expanduser().is_file():
            raise UsageError(f"database {source.database!r} does not exist", hint="check data.sources[].database")
        identity["database"] = identify(Path(source.database).expanduser())
    identity["files"] = [identify(path) for path in files]
    identity["heldout_files"] = [identify(path) for path in heldout] if heldout else None
    return OpenedSource(
        source=source,
        identity=identity,
        rows=lambda: _limited(files, source.limit),
        heldout_rows=(lambda: _limited(heldout, None)) if heldout else None,
    )


def _open_hub(source: HubSource) -> OpenedSource:
    found = hub.resolve(source)
    return OpenedSource(
        source=source,
        identity={**source.model_dump(), "commit": found.commit, "files": list(found.train_names)},
        rows=lambda: _limited(found.fetch(found.train_names), source.limit),
        heldout_rows=(lambda: _limited(found.fetch(found.heldout_names), None)) if found.heldout_names else None,
    )


def _limited(files: list[Path], limit: int | None) -> Iterator[Row]:
    rows = itertools.chain.from_iterable(read_rows(path) for path in files)
    return itertools.islice(rows, limit)


def _open(path: Path) -> IO[bytes]:
    if path.name.endswith(".gz"):
        return cast(IO[bytes], gzip.open(path, "rb"))
    return open(path, "rb")


def _jsonl_rows(path: Path) -> Iterator[Row]:
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UsageError(f"{path}:{number}: not JSON: {error}") from error
            if not isinstance(row, dict):
                raise UsageError(f"{path}:{number}: a row must be an object, got {type(row).__name__}")
            yield row


def _json_rows(path: Path) -> Iterator[Row]:
    with _open(path) as file:
        try:
            found = json.load(file)
        except ValueError as error:
            raise UsageError(f"{path}: not JSON: {error}", hint="one object a line is .jsonl") from error
    if isinstance(found, dict):
        lists = [value for value in found.values() if isinstance(value, list)]
        found = lists[0] if len(lists) == 1 else found
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise UsageError(f"{path}: expected a list of objects")
    yield from found


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UsageError(f"{path}: reading Parquet needs pyarrow", hint="pip install 'muster[data]'") from error
    try:
        with _open(path) as file:
            whole = io.BytesIO(file.read()) if path.name.endswith(".gz") else file
            for batch in pyarrow.parquet.ParquetFile(whole).iter_batches(batch_size=4096):
                yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise UsageError(f"{path}: not a readable Parquet file: {error}") from error
