"""Files of rows that pyarrow reads or unpacks, Zstandard, Arrow and Parquet, and the folders of datasets' save_to_disk.

pyarrow is C++ code that trusts much of what a file says of itself: a case here may end the whole process, not one read.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fuzzing.running import Target
from muster.core.errors import UsageError
from muster.data.files import places, row_files

#: A file that says it holds 2**60 rows of nothing may: they are read one by one, and nobody waits for the last.
_ROWS = 5000
_TEXTS = {
    "rows.jsonl": b'{"prompt": "a", "completion": "b"}\n{"prompt": "c", "completion": "d"}\n',
    "rows.json": b'{"rows": [{"prompt": "a", "completion": "b"}]}',
    "rows.txt": b"plain text\n",
    "rows.csv": b'prompt,completion\n"a, b","c\nd"\ne,f\n',
}


def packed_and_columnar(folder: Path) -> Iterator[Target]:
    """None without pyarrow, as the product: it reads such files with it alone."""
    if importlib.util.find_spec("pyarrow") is None:
        return
    yield from _zstandard(folder)
    yield from _arrow(folder)
    yield from _saved_to_disk(folder / "saved")


def _zstandard(folder: Path) -> Iterator[Target]:
    for name, text in _TEXTS.items():
        yield Target(
            name=f"data: {name}.zst",
            samples=(_packed(text), _packed(text[:9]) + _packed(text[9:])),  # two frames, as `cat` joins files
            read=lambda data, name=name: _rows(folder / f"{name}.zst", data),
            raises=(UsageError,),
            share=0.5,
        )
        yield Target(
            name=f"data: {name}.zst, wrong below its compression",
            samples=(text,),
            read=lambda data, name=name: _rows(folder / f"{name}.zst", _packed(data)),
            raises=(UsageError,),
            share=0.5,
        )


def _arrow(folder: Path) -> Iterator[Target]:
    kinds = {"rows.arrow": (_stream(), _stream("zstd"), _stream(file=True)), "rows.parquet": (_parquet(),)}
    for name, samples in kinds.items():
        yield Target(
            name=f"data: {name}",
            samples=samples,
            read=lambda data, name=name: _rows(folder / name, data),
            raises=(UsageError,),
        )
    yield Target(
        name="data: rows.parquet.zst",
        samples=(_packed(_parquet()),),
        read=lambda data: _rows(folder / "rows.parquet.zst", data),
        raises=(UsageError,),
        share=0.5,
    )


def _saved_to_disk(folder: Path) -> Iterator[Target]:
    """The two files that say which others hold the rows; each lies in a folder with two whole shards."""
    shards = ("data-00000-of-00002.arrow", "data-00001-of-00002.arrow")
    state = {"_data_files": [{"filename": name} for name in shards], "_indices_data_files": None, "_split": "train"}
    samples = {"state.json": state, "dataset_dict.json": {"splits": ["train", "test"]}}
    for name, sample in samples.items():
        home = folder / name.partition(".")[0]
        home.mkdir(parents=True)
        for shard in shards:
            (home / shard).write_bytes(_stream())
        yield Target(
            name=f"data: {name} of an Arrow folder",
            samples=(json.dumps(sample).encode(),),
            read=lambda data, path=home / name: _folder(path, data),
            raises=(UsageError,),
        )


def _rows(path: Path, data: bytes) -> object:
    path.write_bytes(data)
    try:
        return list(itertools.islice(row_files.read_rows(path), _ROWS))
    except UsageError as error:
        assert len(str(error).splitlines()) == 1, "pyarrow's messages have several lines, ours one"
        raise


def _folder(path: Path, data: bytes) -> object:
    path.write_bytes(data)
    return list(row_files.read_files(places.find_files(str(path.parent)), _ROWS))


def _packed(data: bytes) -> bytes:
    import pyarrow

    return bytes(pyarrow.compress(data, codec="zstd", asbytes=True))


def _table() -> Any:
    """A column of each kind that rows have: text, numbers, lists, objects, moments, names from a short list, bytes."""
    import pyarrow

    table = pyarrow.table({"prompt": ["a", None, "ü"], "score": [1.5, 2.0, None], "tags": [["a"], [], ["b", None]]})
    table = table.append_column("turn", pyarrow.array([{"role": "user", "turn": 1}] * 3))
    moments = pyarrow.array([0, 1, None], pyarrow.timestamp("us", "UTC"))
    table = table.append_column("at", moments).append_column("raw", pyarrow.array([b"\xff", b"", None]))
    return table.append_column("split", pyarrow.array(["x", "y", "x"]).dictionary_encode())


def _stream(compression: str | None = None, *, file: bool = False) -> bytes:
    import pyarrow

    sink, table = pyarrow.BufferOutputStream(), _table()
    options = pyarrow.ipc.IpcWriteOptions(compression=compression)
    make = pyarrow.ipc.new_file if file else pyarrow.ipc.new_stream
    with make(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=2)
    return bytes(sink.getvalue().to_pybytes())


def _parquet() -> bytes:
    import pyarrow
    import pyarrow.parquet as parquet

    sink = pyarrow.BufferOutputStream()
    parquet.write_table(_table(), sink, row_group_size=2)
    return bytes(sink.getvalue().to_pybytes())
