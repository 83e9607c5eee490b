"""Rows of data files (.jsonl, .json, .csv, .parquet, .txt, each also .gz or .zst, and .arrow)."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import itertools
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from muster.core.errors import AccessError, UsageError, first_line, install_command
from muster.data.files.places import Place, open_place
from muster.data.formats import CONTINUES
from muster.data.source_type import Meter
from muster.data.task import Row

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".txt", ".arrow")
PACKED = (".gz", ".zst")
#: Longest text of a CSV field, in characters: Python's own limit of 128 Ki is less than a document may have.
_FIELD_CHARACTERS = 1 << 30
#: A few kilobytes of .gz or .zst can unpack to one line that takes all memory. A longer row is refused; of CSV it is
#: counted in characters.
ROW_BYTES = 1 << 30
#: More of a packed file that is read as a whole is refused. The file unpacked has no limit: its size is plain to see.
WHOLE_BYTES = 2 << 30
#: A longer text file comes in pieces of about this many characters.
TEXT_CHARACTERS = 1 << 22
_READ_BYTES = 1 << 20
_BATCH_ROWS = 512


def read_rows(path: Place, meter: Meter | None = None) -> Iterator[Row]:
    """Rows of one file, by its suffix; a ``.txt`` file is one row of text, or several in a row.

    Raises:
        UsageError: unknown suffix, or a line that is not a JSON object, names a key twice or holds half a character
            (a lone surrogate); with its number.
        AccessError, BackendError: the file may not be read, or its bucket does not answer.
    """
    return (row for _, row in _placed_rows(path, meter))


def locate(files: Sequence[Place], index: int) -> str:
    """Where row ``index`` (from 0) of several files is: ``file:line`` (of .jsonl), ``file, row N``."""
    places = (place for path in files for place, _ in _placed_rows(path, None))
    return next(itertools.islice(places, index, None), f"row {index + 1}")


def read_files(files: Sequence[Place], limit: int | None = None, meter: Meter | None = None) -> Iterator[Row]:
    """The first ``limit`` rows of several files, in their order; errors as ``read_rows`` has them.

    ``meter`` starts at 0 and follows."""
    if meter is not None:
        meter.bytes = 0
    yield from itertools.islice(itertools.chain.from_iterable(read_rows(path, meter) for path in files), limit)


def _placed_rows(path: Place, meter: Meter | None) -> Iterator[tuple[str, Row]]:
    name = path.name
    packed = next((end for end in PACKED if name.endswith(end)), "")
    suffix = Path(name.removesuffix(packed)).suffix
    if suffix not in SUFFIXES:
        raise UsageError(
            f"{path}: cannot read files of kind {suffix or 'without suffix'!r}",
            hint=f"use one of {', '.join(SUFFIXES)}, the first five also .gz or .zst",
        )
    try:
        with open_place(path, meter) as raw, _unpacked(path, raw, packed) as file:
            if suffix == ".jsonl":
                yield from ((f"{path}:{number}", row) for number, row in _jsonl_rows(path, file))
            elif suffix == ".csv":
                yield from ((f"{path}:{number}", row) for number, row in _csv_rows(path, file))
            elif suffix == ".txt":
                for number, row in enumerate(_text_rows(file), start=1):
                    yield str(path) if number == 1 and CONTINUES not in row else f"{path}, row {number}", row
            else:
                kinds = {".parquet": _parquet_rows, ".arrow": _arrow_rows, ".json": _json_rows}
                rows = kinds[suffix](path, file)
                yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows, start=1))
    except PermissionError as error:
        raise AccessError(f"{path} may not be read", hint="check its permissions") from error
    except UnicodeDecodeError as error:
        raise _not_utf8(str(path), error) from error
    except (EOFError, OSError, zlib.error) as error:
        raise UsageError(f"{path} cannot be read: {first_line(error)}") from error


def _not_utf8(place: str, error: UnicodeDecodeError) -> UsageError:
    byte, before = error.object[error.start], error.object[: error.start][-20:].decode(errors="replace")
    encoding = "UTF-16" if error.encoding.startswith("utf-16") or byte >= 0xFE else "LATIN1"
    return UsageError(
        f"{place}: not UTF-8: byte 0x{byte:02x} after {before!r}",
        hint=f"iconv -f {encoding} -t UTF-8 FILE > NEW converts it, if {encoding} is what it was written in",
    )


def _unpacked(path: Place, file: IO[bytes], packed: str) -> IO[bytes]:
    if packed == ".gz":
        return cast(IO[bytes], gzip.open(file, "rb"))
    if packed == ".zst":
        stream = _pyarrow(path, "zstd").CompressedInputStream(file, "zstd")
        return cast(IO[bytes], io.BufferedReader(stream, _READ_BYTES))
    return file


def _pyarrow(path: Place, what: str) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise UsageError(f"{path}: reading {what} needs pyarrow", hint=install_command("data")) from error
    return pyarrow


def _text_rows(file: IO[bytes]) -> Iterator[Row]:
    """The whole text, or pieces that end with a line where there is one; all but the last have ``CONTINUES``."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    text, is_last = "", False
    while not is_last:
        data = file.read(_READ_BYTES)
        is_last = not data
        text += decoder.decode(data, is_last)
        if not is_last and len(text) >= TEXT_CHARACTERS:
            cut = text.rfind("\n", 0, TEXT_CHARACTERS) + 1 or TEXT_CHARACTERS
            yield {"text": text[:cut], CONTINUES: True}
            text = text[cut:]
    yield {"text": text}


def _jsonl_rows(path: Place, file: IO[bytes]) -> Iterator[tuple[int, Row]]:
    """(line, row)."""
    reader = _Reader()
    for number, line in enumerate(iter(lambda: file.readline(ROW_BYTES + 1), b""), start=1):
        if len(line) > ROW_BYTES:
            raise _long_row(f"{path}:{number}")
        if not line.strip():
            continue
        try:
            row = reader.read(line)
        except UnicodeDecodeError as error:
            raise _not_utf8(f"{path}:{number}", error) from error
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise UsageError(f"{path}:{number}: a row must be an object, got {type(row).__name__}")
        reader.refuse(row, f"{path}:{number}")
        yield number, row


def _csv_rows(path: Place, file: IO[bytes]) -> Iterator[tuple[int, Row]]:
    """(line that a row ends on, row): the first line names the columns, every value is text."""
    csv.field_size_limit(_FIELD_CHARACTERS)
    with io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        lines = _Lines(path, text)
        reader = csv.reader(lines, strict=True)
        try:
            names = next(reader, [])
            if len(set(names)) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise UsageError(f"{path}:1: column {twice!r} occurs twice", hint="rename one of them")
            for values in reader:
                lines.characters = 0
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


class _Lines:
    """A text's lines; ``characters``: read since the reader set it to 0, at the end of a row."""

    def __init__(self, path: Place, text: IO[str]) -> None:
        self._path, self._text = path, text
        self._number = self.characters = 0

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = self._text.readline(ROW_BYTES + 1)
        if not line:
            raise StopIteration
        self._number += 1
        self.characters += len(line)
        if self.characters > ROW_BYTES:
            raise _long_row(f"{self._path}:{self._number}")
        return line


def _long_row(place: str) -> UsageError:
    return UsageError(f"{place}: a row of more than {ROW_BYTES / 2**30:g} GiB", hint="is it what was meant to be here?")


def _whole(path: Place, file: IO[bytes]) -> bytes:
    """The whole content; raises UsageError where it is packed and unpacks to more than ``WHOLE_BYTES``."""
    if not path.name.endswith(PACKED):
        return file.read()
    data = file.read(WHOLE_BYTES + 1)
    if len(data) > WHOLE_BYTES:
        raise UsageError(
            f"{path} unpacks to more than {WHOLE_BYTES / 2**30:g} GiB, and such a file is read as a whole",
            hint="unpack it first if that is right; .jsonl is read row by row",
        )
    return data


def _json_rows(path: Place, file: IO[bytes]) -> Iterator[Row]:
    reader = _Reader()
    try:
        rows = reader.read(_whole(path, file))
    except UnicodeDecodeError:
        raise
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


def _parquet_rows(path: Place, file: IO[bytes]) -> Iterator[Row]:
    _pyarrow(path, "Parquet")
    import pyarrow.parquet as parquet

    with _pyarrow_errors(path, "Parquet"):
        whole = file if file.seekable() and not path.name.endswith(PACKED) else io.BytesIO(_whole(path, file))
        for batch in parquet.ParquetFile(whole).iter_batches(batch_size=_BATCH_ROWS):
            yield from _batch_rows(batch)


def _arrow_rows(path: Place, file: IO[bytes]) -> Iterator[Row]:
    """Of Arrow's stream format, which Hugging Face's datasets writes, or of its file format."""
    pyarrow = _pyarrow(path, "Arrow")
    with _pyarrow_errors(path, "Arrow"):
        begin = file.read(6)
        file.seek(0)
        if begin == b"ARROW1":
            reader = pyarrow.ipc.open_file(file)
            batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        else:
            batches = iter(pyarrow.ipc.open_stream(file))
        for batch in batches:
            yield from _batch_rows(batch)


def _batch_rows(batch: Any) -> Iterator[Row]:
    # pyarrow believes the offsets in a file: unchecked, wrong ones read other memory of this process, or end it.
    batch.validate(full=True)
    for first in range(0, batch.num_rows, _BATCH_ROWS):
        yield from batch.slice(first, _BATCH_ROWS).to_pylist()


@contextmanager
def _pyarrow_errors(path: Place, what: str) -> Iterator[None]:
    """What pyarrow raises for a file with wrong bytes, as one line of ours."""
    import pyarrow

    try:
        yield
    except MemoryError as error:
        raise UsageError(f"{path}: not a readable {what} file: it asks for more memory than there is") from error
    # Of Python's own: a moment out of the years that it has (OverflowError), text that is not UTF-8 (ValueError).
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:
        raise UsageError(f"{path}: not a readable {what} file: {first_line(error)}") from error
