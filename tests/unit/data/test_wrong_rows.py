"""Rows' files that say wrong things of themselves, as ``tests/fuzzing`` found them; few bytes that unpack to many."""

import gzip
import json

import pytest

from muster.core.errors import UsageError
from muster.data.files import row_files
from muster.data.files.places import find_files
from muster.data.files.row_files import read_rows

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
LATE = pyarrow.array([2**62], pyarrow.timestamp("us"))


def refusal(path, data):
    path.write_bytes(data)
    with pytest.raises(UsageError) as caught:
        list(read_rows(path))
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value).removeprefix(f"{path.parent}/")


def arrow(batch, compression=None):
    sink = pyarrow.BufferOutputStream()
    options = pyarrow.ipc.IpcWriteOptions(compression=compression)
    with pyarrow.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def test_offsets_that_run_backwards_are_not_followed(tmp_path):
    """pyarrow checks none by itself: a text of -3 bytes was a SystemError, one of a billion the end of the process."""
    offsets = pyarrow.array([0, 5, 2], pyarrow.int32()).buffers()[1]
    text = pyarrow.StringArray.from_buffers(2, offsets, pyarrow.py_buffer(b"hello"))
    said = refusal(tmp_path / "a.arrow", arrow(pyarrow.record_batch({"text": text})))
    assert said.startswith("a.arrow: not a readable Arrow file: ")


def test_a_moment_that_python_does_not_have(tmp_path):
    assert "date value out of range" in refusal(tmp_path / "a.arrow", arrow(pyarrow.record_batch({"at": LATE})))
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table({"at": LATE}), sink)
    said = refusal(tmp_path / "a.parquet", sink.getvalue().to_pybytes())
    assert said == "a.parquet: not a readable Parquet file: date value out of range"


def test_a_column_that_says_it_unpacks_to_more_than_there_is(tmp_path):
    data = bytearray(arrow(pyarrow.record_batch({"text": ["a" * 5000]}), "zstd"))
    length = data.rindex(b"\x28\xb5\x2f\xfd") - 8  # before the frame's own first bytes
    data[length : length + 8] = (2**62).to_bytes(8, "little")
    assert "more memory than there is" in refusal(tmp_path / "a.arrow", data)


def test_several_lines_of_pyarrow_become_one(tmp_path):
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table({"text": ["a"]}), sink)
    data = bytearray(sink.getvalue().to_pybytes())
    data[4:24] = b"\xff" * 20  # the head of the first page
    assert "a.parquet" in refusal(tmp_path / "a.parquet", data)


@pytest.mark.parametrize("name", ["state.json", "dataset_dict.json"])
def test_a_deep_list_in_an_arrow_folder(tmp_path, name):
    (tmp_path / name).write_text('{"splits": ' + "[" * 100_000)
    with pytest.raises(UsageError, match=f"{name} is not readable JSON"):
        find_files(str(tmp_path))


@pytest.mark.parametrize("end", ["gz", "zst"])
def test_a_long_row_is_refused_before_it_takes_all_memory(tmp_path, monkeypatch, end):
    monkeypatch.setattr(row_files, "ROW_BYTES", 1000)
    pack = gzip.compress if end == "gz" else lambda data: pyarrow.compress(data, codec="zstd", asbytes=True)
    row = json.dumps({"text": "a" * 900}).encode() + b"\n"
    (tmp_path / f"fits.jsonl.{end}").write_bytes(pack(row * 3))
    assert len(list(read_rows(tmp_path / f"fits.jsonl.{end}"))) == 3
    said = refusal(tmp_path / f"a.jsonl.{end}", pack(row + b"a" * 2000))
    assert said.startswith(f"a.jsonl.{end}:2: a row of more than")
    (tmp_path / f"fits.csv.{end}").write_bytes(pack(b"text\n" + b"abcdefghi\n" * 300))
    assert len(list(read_rows(tmp_path / f"fits.csv.{end}"))) == 300
    said = refusal(tmp_path / f"a.csv.{end}", pack(b"text\n" + b'"a\nb",' * 1000))
    assert f"a.csv.{end}:" in said and "a row of more than" in said


def test_what_is_read_as_a_whole_has_a_limit_where_it_is_packed(tmp_path, monkeypatch):
    monkeypatch.setattr(row_files, "WHOLE_BYTES", 1000)
    rows = json.dumps([{"text": "a" * 2000}]).encode()
    for name in ("a.json.gz", "a.parquet.gz"):
        assert "unpacks to more than" in refusal(tmp_path / name, gzip.compress(rows))
    (tmp_path / "a.json").write_bytes(rows)
    assert len(list(read_rows(tmp_path / "a.json"))) == 1
