"""Rows as people have them: Arrow folders, Zstandard, folders of files, globs in a bucket, long text files."""

import json
import uuid

import fsspec
import pytest

from muster.config import load
from muster.config.sections.sources import FileSource
from muster.core.errors import UsageError
from muster.data.files import row_files
from muster.data.files.places import find_files, identify
from muster.data.files.row_files import locate, read_rows
from muster.data.prepare import prepare
from muster.data.source_type import open_source

pyarrow = pytest.importorskip("pyarrow")
ROWS = [{"prompt": f"row {number}", "completion": "ü" * number, "tags": ["a", None]} for number in range(1, 1501)]


def rows_of(path, **more):
    return list(open_source(FileSource(type="file", path=str(path), **more)).rows())


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def packed(data):
    return pyarrow.compress(data, codec="zstd", asbytes=True)


def write_arrow(path, rows, *, stream=True):
    table = pyarrow.Table.from_pylist(rows)
    make = pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file
    with pyarrow.OSFile(str(path), "wb") as file, make(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=700)


def saved_to_disk(folder, shards):
    """As ``Dataset.save_to_disk`` lays it out: its shards in the order of state.json, not of their names."""
    folder.mkdir(parents=True)
    names = [f"data-{chr(ord('b') - number)}.arrow" for number in range(len(shards))]
    for name, rows in zip(names, shards, strict=True):
        write_arrow(folder / name, rows)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0", "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


@pytest.mark.parametrize("stream", [True, False])
def test_an_arrow_file_of_either_format(tmp_path, stream):
    write_arrow(tmp_path / "a.arrow", ROWS, stream=stream)
    assert rows_of(tmp_path / "a.arrow") == ROWS
    assert locate([tmp_path / "a.arrow"], 1400) == f"{tmp_path}/a.arrow, row 1401"


def test_a_folder_that_save_to_disk_wrote(tmp_path):
    saved_to_disk(tmp_path / "set", [ROWS[:800], ROWS[800:]])
    assert rows_of(tmp_path / "set") == rows_of(f"{tmp_path}/set/") == ROWS
    (tmp_path / "set" / "data-a.arrow").unlink()
    with pytest.raises(UsageError, match=r"lacks data-a\.arrow"):
        rows_of(tmp_path / "set")


def test_a_dictionary_of_splits_is_told_apart(tmp_path):
    saved_to_disk(tmp_path / "all" / "train", [ROWS[:3]])
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(UsageError, match="holds the splits train, test") as caught:
        rows_of(tmp_path / "all")
    assert caught.value.hint.startswith(f"path: {tmp_path}/all/train")
    assert rows_of(tmp_path / "all" / "train") == ROWS[:3]


def test_a_selection_of_rows_is_refused(tmp_path):
    saved_to_disk(tmp_path / "set", [ROWS[:3]])
    (tmp_path / "set" / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": "data-b.arrow"}], "_indices_data_files": [{"filename": "i.arrow"}]})
    )
    with pytest.raises(UsageError, match="selection of rows") as caught:
        rows_of(tmp_path / "set")
    assert "flatten_indices" in caught.value.hint


def test_a_folder_of_one_kind(tmp_path):
    (tmp_path / "b.jsonl.zst").write_bytes(packed(lines(ROWS[1:2])))
    (tmp_path / "a.jsonl.zst").write_bytes(packed(lines(ROWS[:1])))
    (tmp_path / "README.md").write_text("not rows")
    assert rows_of(tmp_path) == ROWS[:2]
    (tmp_path / "c.csv").write_text("text\nx\n")
    with pytest.raises(UsageError, match=r"several kinds: \.csv, \.jsonl\.zst"):
        rows_of(tmp_path)


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.json.zst", "a.csv.zst", "a.txt.zst"])
def test_zstandard(tmp_path, name):
    content, expected = {
        "a.jsonl.zst": (lines(ROWS), ROWS),
        "a.json.zst": (json.dumps(ROWS).encode(), ROWS),
        "a.csv.zst": ('prompt,completion\na,"b\nü"\n'.encode(), [{"prompt": "a", "completion": "b\nü"}]),
        "a.txt.zst": ("a\nü".encode(), [{"text": "a\nü"}]),
    }[name]
    half = len(content) // 2
    (tmp_path / name).write_bytes(packed(content[:half]) + packed(content[half:]))  # two frames, as `cat` joins files
    assert rows_of(tmp_path / name) == expected


def test_a_damaged_file_is_named_with_its_row(tmp_path):
    whole = packed(lines(ROWS))
    (tmp_path / "cut.jsonl.zst").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "no.jsonl.zst").write_bytes(b"no such thing" * 9)
    for name in ("cut", "no"):
        with pytest.raises(UsageError, match=rf"{name}\.jsonl\.zst cannot be read"):
            rows_of(tmp_path / f"{name}.jsonl.zst")
    (tmp_path / "row.jsonl.zst").write_bytes(packed(lines(ROWS[:2]) + b"{"))
    with pytest.raises(UsageError, match=r"row\.jsonl\.zst:3: not JSON"):
        rows_of(tmp_path / "row.jsonl.zst")
    write_arrow(tmp_path / "a.arrow", ROWS)
    data = (tmp_path / "a.arrow").read_bytes()
    (tmp_path / "a.arrow").write_bytes(data[: len(data) // 2])
    with pytest.raises(UsageError, match=r"a\.arrow: not a readable Arrow file|a\.arrow cannot be read"):
        rows_of(tmp_path / "a.arrow")


@pytest.fixture
def bucket():
    uri = f"memory://{uuid.uuid4().hex}"
    yield uri
    fsspec.filesystem("memory").rm(uri, recursive=True)


def put(uri, data):
    with fsspec.open(uri, "wb") as file:
        file.write(data)


def test_a_glob_and_a_folder_in_a_bucket(bucket):
    put(f"{bucket}/rows/b.jsonl.zst", packed(lines(ROWS[700:])))
    put(f"{bucket}/rows/a.jsonl.zst", packed(lines(ROWS[:700])))
    put(f"{bucket}/other/c.jsonl", lines(ROWS[:1]))
    for given in (f"{bucket}/rows/*.zst", f"{bucket}/rows/", f"{bucket}/rows"):
        assert rows_of(given) == ROWS
    assert rows_of(f"{bucket}/other/c.jsonl") == ROWS[:1]
    assert locate(find_files(f"{bucket}/rows/*"), 700) == f"{bucket}/rows/b.jsonl.zst:1"
    with pytest.raises(UsageError, match=r"no object matches 'memory://.*/none\*'"):
        rows_of(f"{bucket}/none*")
    put(f"{bucket}/bad.jsonl", b'{"text": "a"}\n[1]\n')
    with pytest.raises(UsageError, match=r"memory://.*/bad\.jsonl:2: a row must be an object"):
        rows_of(f"{bucket}/bad.jsonl")


def test_parquet_and_arrow_in_a_bucket(bucket, tmp_path):
    saved_to_disk(tmp_path / "set", [ROWS[:800], ROWS[800:]])
    for path in (tmp_path / "set").iterdir():
        put(f"{bucket}/set/{path.name}", path.read_bytes())
    assert rows_of(f"{bucket}/set") == ROWS
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    put(f"{bucket}/a.parquet", (tmp_path / "a.parquet").read_bytes())
    assert rows_of(f"{bucket}/a.parquet") == ROWS


def test_an_object_that_changed_is_other_data(bucket):
    put(f"{bucket}/a.jsonl", lines(ROWS[:1]))
    [place] = find_files(f"{bucket}/a.jsonl")
    before = identify(place)
    assert identify(place) == before
    put(f"{bucket}/a.jsonl", lines(ROWS[1:2]))
    assert identify(place) != before


def test_a_run_trains_on_a_bucket(bucket, make_spec, tmp_path):
    put(f"{bucket}/a.jsonl", lines([{"text": f"word {number}"} for number in range(40)]))
    prepared = prepare(make_spec([{"type": "file", "path": f"{bucket}/*.jsonl"}]), run_dir=tmp_path / "run")
    assert prepared.stats["rows"] == 40


def test_a_long_text_comes_in_pieces_that_end_with_lines(tmp_path, monkeypatch, make_spec):
    monkeypatch.setattr(row_files, "TEXT_CHARACTERS", 1000)
    monkeypatch.setattr(row_files, "_READ_BYTES", 333)
    text = "".join(f"line {number} ü\n" for number in range(400)) + "x" * 2500 + "\nend"
    (tmp_path / "a.txt").write_text(text)
    rows = list(read_rows(tmp_path / "a.txt"))
    assert "".join(row["text"] for row in rows) == text and len(rows) > 6
    assert rows[0]["text"].endswith("\n") and all(len(row["text"]) <= 1000 for row in rows[:-1])
    spec = make_spec([{"type": "file", "path": str(tmp_path / "a.txt")}], on_overlong="split", heldout_fraction=0.0)
    prepared = prepare(spec, run_dir=tmp_path / "run")
    ends = sum(int((sequence.labels == prepared.eos_id).sum()) for sequence in prepared.train)
    assert prepared.stats["rows"] == len(rows) and ends == 1, "the text ends once, not at every piece"


RUN_FILE = """\
name: demo
model: {config: {model_type: llama}, tokenizer: {vocab_size: 300}}
data: {sources: [{type: file, path: PATH}]}
training: {steps: 1}
"""


@pytest.mark.parametrize("path", ["rows", "rows/", "gs://b/rows/*.jsonl.zst", "data/train-*.arrow", "s3://b/rows/"])
def test_run_files_may_name_them(path):
    spec = load.loads(RUN_FILE.replace("PATH", path), environment=False).spec
    assert spec.data.sources[0].path.rstrip("/").endswith(path.rstrip("/"))


@pytest.mark.parametrize("path", ["rows.xls", "rows.arrow.zst", "rows.jsonl.bz2"])
def test_run_files_may_not_name_others(path):
    with pytest.raises(UsageError, match="not a supported kind of file"):
        load.loads(RUN_FILE.replace("PATH", path), environment=False)
