"""Rows of data files (.jsonl, .json, .parquet, .txt, each also .gz), and what identifies a file's content."""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, cast

from muster.core.errors import AccessError, UsageError
from muster.core.typed_json import JsonObject
from muster.data.task import Row

SUFFIXES = (".jsonl", ".json", ".parquet", ".txt")
#: Files up to this size are identified by their whole content; larger ones by size, time and both ends.
_HASHED_WHOLE_BYTES = 256 * 2**20
_END_BYTES = 2**20


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


def read_files(files: Sequence[Path], limit: int | None = None) -> Iterator[Row]:
    """The first ``limit`` rows of several files, in their order; errors as ``read_rows`` has them."""
    return itertools.islice(itertools.chain.from_iterable(read_rows(path) for path in files), limit)


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
        files = sorted(file for file in root.glob(str(path.relative_to(path.anchor))) if file.is_file())
        if files:
            return files
        raise UsageError(f"no file matches {pattern!r}", hint="check data.sources[].path")
    reason = "is a folder; give a glob such as 'folder/*.jsonl'" if path.is_dir() else "does not exist"
    raise UsageError(f"data file {pattern!r} {reason}", hint="check data.sources[].path")


def identify(path: Path) -> JsonObject:
    """What identifies a file's content in a fingerprint."""
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
            rows = json.load(file)
        except ValueError as error:
            raise UsageError(f"{path}: not JSON: {error}", hint="one object a line is .jsonl") from error
    if isinstance(rows, dict):
        lists = [value for value in rows.values() if isinstance(value, list)]
        rows = lists[0] if len(lists) == 1 else rows
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UsageError(f"{path}: expected a list of objects")
    yield from rows


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
