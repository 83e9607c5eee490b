"""Where data files are: on this machine or in a bucket, by path, glob or folder; and what identifies their content."""

from __future__ import annotations

import glob
import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias, cast

from muster.config.sections.sources import FILE_ENDINGS
from muster.core.errors import AccessError, MusterError, UsageError
from muster.core.typed_json import JsonObject
from muster.storage import uris

if TYPE_CHECKING:
    from muster.data.source_type import Meter

#: Files up to this size are identified by their whole content; larger ones by size, time and both ends.
_HASHED_WHOLE_BYTES = 256 * 2**20
_END_BYTES = 2**20
#: What a bucket says of an object's content, the best first.
_MARKS = ("md5Hash", "crc32c", "ETag", "etag", "generation", "LastModified", "mtime", "created")


@dataclass(frozen=True)
class Remote:
    """An object in a bucket."""

    uri: str

    @property
    def name(self) -> str:
        return uris.name(self.uri)

    def __str__(self) -> str:
        return self.uri


Place: TypeAlias = Path | Remote


def open_place(place: Place, meter: Meter | None = None) -> IO[bytes]:
    """The file for reading, from its start; ``meter`` counts what is read.

    Raises:
        OSError: of a local file.
        AccessError, BackendError, UsageError: the bucket refuses, does not answer, or has no such object.
    """
    if isinstance(place, Remote):
        with _bucket(place.uri) as system:
            raw: Any = system.open(place.uri, "rb")
    else:
        raw = open(place, "rb", buffering=0)  # noqa: SIM115 (the caller closes it)
    read = _Counted(raw, place, meter)
    return cast(IO[bytes], io.BufferedReader(cast(io.RawIOBase, read), 1 << 20))


class _Counted(io.RawIOBase):
    """An open file that says how much of it was read, and a bucket's errors in our words."""

    def __init__(self, raw: Any, place: Place, meter: Meter | None) -> None:
        self._raw, self._place, self._meter = raw, place, meter

    def readinto(self, buffer: Any) -> int:
        if isinstance(self._place, Remote):
            with _bucket(self._place.uri):
                read = self._raw.readinto(buffer)
        else:
            read = self._raw.readinto(buffer)
        if self._meter is not None:
            self._meter.bytes += read or 0
        return int(read or 0)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._raw.seekable())

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._raw.seek(offset, whence))

    def tell(self) -> int:
        return int(self._raw.tell())

    def close(self) -> None:
        self._raw.close()
        super().close()


def size_of(place: Place) -> int:
    """In bytes. Raises OSError, or as ``open_place`` of a bucket."""
    if isinstance(place, Remote):
        with _bucket(place.uri) as system:
            return int(system.info(place.uri)["size"])
    return place.stat().st_size


def find_files(pattern: str) -> list[Place]:
    """The files of a path, a glob or a folder, sorted; of a folder that datasets' ``save_to_disk`` wrote in its order.

    Raises:
        UsageError: there is none, or a folder's files are of several kinds.
        AccessError, BackendError: the bucket refuses or does not answer.
    """
    if not uris.is_local(pattern):
        return _in_bucket(pattern)
    path = Path(pattern).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        names = sorted(each.name for each in path.iterdir() if each.is_file())
        found = _of_folder(pattern, names, lambda name: (path / name).read_text(encoding="utf-8"))
        files: list[Place] = [path / name for name in found]
        return files
    if any(mark in pattern for mark in "*?["):
        files = [Path(each) for each in sorted(glob.glob(str(path), recursive=True)) if os.path.isfile(each)]
        if files:
            return files
        raise UsageError(f"no file matches {pattern!r}", hint="check data.sources[].path")
    raise UsageError(f"data file {pattern!r} does not exist", hint="check data.sources[].path")


def _in_bucket(pattern: str) -> list[Place]:
    with _bucket(pattern) as system:
        if any(mark in pattern for mark in "*?["):
            found = system.glob(pattern)
        elif system.isfile(pattern):
            return [Remote(pattern)]
        else:
            names = {uris.name(each): each for each in system.find(pattern.rstrip("/"), maxdepth=1)}
            chosen = _of_folder(
                pattern, sorted(names), lambda name: system.cat_file(names[name]).decode()
            ) if names else []  # fmt: skip
            found = [names[name] for name in chosen]
        head = f"{pattern.partition('://')[0]}://"
        files: list[Place] = [Remote(head + str(each).lstrip("/")) for each in found]
    if not files:
        raise UsageError(f"no object matches {pattern!r}", hint="check data.sources[].path and the bucket")
    return files if not any(mark in pattern for mark in "*?[") else sorted(files, key=str)


def _of_folder(folder: str, names: Sequence[str], read: Callable[[str], str]) -> list[str]:
    """Which of a folder's files hold its rows. ``read``: a file's text by its name."""
    if "dataset_dict.json" in names:
        splits = _described(folder, "dataset_dict.json", read).get("splits")
        listed = splits if isinstance(splits, list) and splits else ["train"]
        raise UsageError(
            f"data folder {folder!r} holds the splits {', '.join(map(str, listed))}",
            hint=f"path: {folder.rstrip('/')}/{listed[0]}; heldout_path takes another one",
        )
    if "state.json" in names:
        state = _described(folder, "state.json", read)
        files = state.get("_data_files")
        if state.get("_indices_data_files"):
            raise UsageError(
                f"data folder {folder!r} is a selection of rows", hint="save it again after `flatten_indices()`"
            )
        listed = [each.get("filename") for each in files if isinstance(each, dict)] if isinstance(files, list) else []
        missing = [name for name in listed if name not in names]
        if not listed or missing:
            raise UsageError(f"data folder {folder!r} lacks {missing[0] if missing else 'its list of files'}")
        return [str(name) for name in listed]
    kinds = {end: [name for name in names if name.endswith(end)] for end in FILE_ENDINGS}
    present = [end for end, found in kinds.items() if found]
    if len(present) == 1:
        return kinds[present[0]]
    if present:
        raise UsageError(
            f"data folder {folder!r} has files of several kinds: {', '.join(present)}",
            hint=f"choose one: '{folder.rstrip('/')}/*{present[0]}'",
        )
    raise UsageError(f"{folder!r} is a folder without data files", hint=f"one of {', '.join(FILE_ENDINGS)}")


def _described(folder: str, name: str, read: Callable[[str], str]) -> JsonObject:
    try:
        found = json.loads(read(name))
    except (ValueError, RecursionError, OSError) as error:
        raise UsageError(f"{folder.rstrip('/')}/{name} is not readable JSON: {error}") from error
    return found if isinstance(found, dict) else {}


def identify(place: Place) -> JsonObject:
    """What identifies a file's content in a fingerprint. Raises AccessError, and as ``open_place``."""
    suffix = place.name.split(".", 1)[-1]
    if isinstance(place, Remote):
        with _bucket(place.uri) as system:
            info = system.info(place.uri)
        mark = next((name for name in _MARKS if info.get(name)), "")
        by_content = {} if mark in _MARKS[:2] else {"path": place.uri}
        return {"bytes": int(info["size"]), mark: str(info.get(mark)), "suffix": suffix, **by_content}
    try:
        size = place.stat().st_size
        digest = hashlib.sha256()
        with open(place, "rb") as file:
            if size <= _HASHED_WHOLE_BYTES:
                while block := file.read(2**20):
                    digest.update(block)
                return {"bytes": size, "sha256": digest.hexdigest(), "suffix": suffix}
            digest.update(file.read(_END_BYTES))
            file.seek(-_END_BYTES, io.SEEK_END)
            digest.update(file.read())
            modified = place.stat().st_mtime_ns
    except PermissionError as error:
        raise AccessError(f"{place} may not be read", hint="check its permissions") from error
    return {"bytes": size, "ends_sha256": digest.hexdigest(), "modified_ns": modified, "path": str(place.resolve())}


@contextmanager
def _bucket(uri: str) -> Iterator[Any]:
    """fsspec's file system for ``uri``, its errors in our words."""
    from muster.storage.store import blobs

    try:
        yield blobs.filesystem(uri)
    except MusterError:
        raise
    except FileNotFoundError as error:
        raise UsageError(f"{uri} does not exist", hint="check data.sources[].path and the bucket") from error
    except Exception as error:
        raise blobs.translate(uri, error) from error
