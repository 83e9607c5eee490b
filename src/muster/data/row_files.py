"""Rows of data files (.jsonl, .json, .csv, .parquet, .txt, each also .gz), and what identifies a file's content."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, cast

from muster.core.errors import AccessError, UsageError
from muster.core.typed_json import JsonObject
from muster.data.task import Row

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".txt")
#: Longest text of a CSV field, in characters: Python's own limit of 128 Ki is less than a document may have.
_FIELD_CHARACTERS = 1 << 30
#: Files up to this size are identified by their whole content; larger ones by size, time and both ends.
_HASHED_WHOLE_BYTES = 256 * 2**20
_END_BYTES = 2**20


def read_rows(path: Path) -> Iterator[Row]:
    """Rows of one file, by its suffix; a ``.txt`` file is one row of text.

    Raises:
        UsageError: unknown suffix, or a line that is not a JSON object, names a key twice or holds half a character
            (a lone surrogate); with its number.
        AccessError: the file may not be read.
    """
    return (row for _, row in _placed_rows(path))


def locate(files: Sequence[Path], index: int) -> str:
    """Where row ``index`` (from 0) of several files stands: ``file:line`` (of .jsonl), ``file, row N``."""
    places = (place for path in files for place, _ in _placed_rows(path))
    return next(itertools.islice(places, index, None), f"row {index + 1}")


def _placed_rows(path: Path) -> Iterator[tuple[str, Row]]:
    name = path.name.removesuffix(".gz")
    suffix = Path(name).suffix
    try:
        if suffix == ".parquet":
            yield from ((f"{path}, row {number}", row) for number, row in enumerate(_parquet_rows(path), start=1))
        elif suffix == ".jsonl":
            yield from ((f"{path}:{number}", row) for number, row in _jsonl_rows(path))
        elif suffix == ".csv":
            yield from ((f"{path}:{number}", row) for number, row in _csv_rows(path))
        elif suffix == ".json":
            yield from ((f"{path}, row {number}", row) for number, row in enumerate(_json_rows(path), start=1))
        elif suffix == ".txt":
            with _open(path) as file:
                yield str(path), {"text": file.read().decode("utf-8", "replace")}
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


def _jsonl_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """(line, row)."""
    reader = _Reader()
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = reader.read(line)
            except (ValueError, RecursionError) as error:
                raise UsageError(f"{path}:{number}: not JSON: {error}") from error
            if not isinstance(row, dict):
                raise UsageError(f"{path}:{number}: a row must be an object, got {type(row).__name__}")
            reader.refuse(row, f"{path}:{number}")
            yield number, row


def _csv_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """(line that a row ends on, row): the first line names the columns, every value is text."""
    csv.field_size_limit(_FIELD_CHARACTERS)
    with _open(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        reader = csv.reader(text, strict=True)
        try:
            names = next(reader, [])
            if len(set(names)) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise UsageError(f"{path}:1: column {twice!r} occurs twice", hint="rename one of them")
            for values in reader:
                if not values:
                    continue
                if len(values) != len(names):
                    raise UsageError(
                        f"{path}:{reader.line_num}: {len(values)} values for {len(names)} columns",
                        hint="values that hold commas, quotes or line ends stand in double quotes",
                    )
                yield reader.line_num, dict(zip(names, values, strict=True))
        except csv.Error as error:
            raise UsageError(f"{path}:{reader.line_num}: not CSV: {error}") from error


def _json_rows(path: Path) -> Iterator[Row]:
    reader = _Reader()
    with _open(path) as file:
        try:
            rows = reader.read(file.read())
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}: not JSON: {error}", hint="one object a line is .jsonl") from error
    if isinstance(rows, dict):
        reader.refuse_key(rows, str(path))
        lists = [value for value in rows.values() if isinstance(value, list)]
        rows = lists[0] if len(lists) == 1 else rows
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UsageError(f"{path}: expected a list of objects")
    for number, row in enumerate(rows, start=1):
        reader.refuse(row, f"{path}, row {number}")
        yield row


class _Reader:
    """JSON of people's rows, with what JSON readers let through: keys that occur twice, halves of characters."""

    def __init__(self) -> None:
        self._twice: dict[int, tuple[object, str]] = {}
        """By identity: the objects with a repeated key, and that key."""
        self._has_surrogates = False

    def read(self, data: bytes) -> object:
        """Raises ValueError (also for bytes that are not UTF-8) and RecursionError."""
        text = data.decode(json.detect_encoding(data))
        self._twice.clear()
        self._has_surrogates = _SURROGATE.search(text) is not None
        return json.loads(text, object_pairs_hook=self._object)

    def refuse(self, row: object, place: str) -> None:
        """Raises UsageError where a part of ``row`` cannot be taken as it is."""
        if not self._twice and not self._has_surrogates:
            return
        for part in _parts(row):
            self.refuse_key(part, place)
            if isinstance(part, str):
                try:
                    part.encode()
                except UnicodeEncodeError as error:
                    half = f"\\u{ord(part[error.start]):04x}"
                    raise UsageError(
                        f"{place}: half a character ({half}, a lone surrogate) in {ascii(part)[:80]}",
                        hint="the other half was cut off when the row was written: remove or repair it",
                    ) from error

    def refuse_key(self, part: object, place: str) -> None:
        """Raises UsageError where a key of this very object occurs twice."""
        if id(part) in self._twice:
            raise UsageError(f"{place}: key {self._twice[id(part)][1]!r} occurs twice", hint="keep one of them")

    def _object(self, pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) < len(pairs):
            counts = Counter(name for name, _ in pairs)
            self._twice[id(found)] = found, next(name for name, count in counts.items() if count > 1)
        return found


#: An escape that is half of a character, alone or not.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _parts(value: object) -> Iterator[object]:
    """``value`` and everything in it, keys too."""
    yield value
    if isinstance(value, dict):
        for name, item in value.items():
            yield name
            yield from _parts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _parts(item)


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
