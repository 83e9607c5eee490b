"""Rows from files of every kind and from the hub; everything unreadable is one clear error."""

import errno
import gzip
import json
import re
from types import SimpleNamespace

import pytest

from muster.config import host_checks
from muster.config.sections.sources import FileSource, HubSource, glob_of
from muster.config.spec import RunSpec
from muster.core.errors import AccessError, BackendError, MusterError, UsageError
from muster.data import hub
from muster.data.files.places import find_files, identify
from muster.data.files.row_files import locate, read_rows
from muster.data.source_type import open_source
from muster.tasks.text2sql.source import Text2SqlSource

ROWS = [{"prompt": "a", "completion": "b"}, {"prompt": "ü", "completion": "d"}]


def write(path, rows=ROWS):
    """``rows`` in the kind of file that ``path`` names."""
    name = path.name.removesuffix(".gz")
    if name.endswith(".parquet"):
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), path)
        data = path.read_bytes()
    elif name.endswith(".jsonl"):
        data = "".join(json.dumps(row) + "\n" for row in rows).encode() + b"\n"
    elif name.endswith(".json"):
        data = json.dumps(rows).encode()
    else:
        data = "\n".join(row["prompt"] for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)
    return path


@pytest.mark.parametrize("zipped", ["", ".gz"])
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_every_kind_of_file(tmp_path, suffix, zipped):
    assert list(read_rows(write(tmp_path / f"rows{suffix}{zipped}"))) == ROWS


@pytest.mark.parametrize("name", ["t.txt", "t.txt.gz"])
def test_a_text_file_is_one_row(tmp_path, name):
    assert list(read_rows(write(tmp_path / name))) == [{"text": "a\nü"}]


def test_json_may_wrap_its_list(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"version": 1, "data": ROWS}))
    assert list(read_rows(tmp_path / "a.json")) == ROWS


BROKEN = {
    "a.jsonl": (b'{"a": 1}\n{"a": \n', r"a\.jsonl:2: not JSON"),
    "b.jsonl": (b"[1]\n", r"b\.jsonl:1: a row must be an object, got list"),
    "c.json": (b"{", "not JSON"),
    "d.json": (b"3", "expected a list of objects"),
    "e.xls": (b"a,b", r"cannot read files of kind '\.xls'"),
    "f.jsonl.gz": (b"not gzip", "cannot be read"),
    "g.parquet": (b"not parquet", "not a readable Parquet file"),
    "h.jsonl": ('{"a": "b"}\n'.encode("utf-16"), r"h\.jsonl:1: not UTF-8: .*iconv -f UTF-16"),
    "i.jsonl": (b'{"a": 1}\n\n{"a": "b \\udc80 c"}\n', r"i\.jsonl:3: half a character \(\\udc80, a lone surrogate\)"),
    "j.jsonl": (b'{"a": [{"\\ud83d": 1}]}\n', r"j\.jsonl:1: half a character"),
    "k.jsonl": (b'{"a": "\xed\xa0\x80"}\n', r"k\.jsonl:1: not UTF-8: byte 0xed"),
    "s.jsonl": (b'{"a": 1}\n{"a": "caf\xe9"}\n', r"s\.jsonl:2: not UTF-8: byte 0xe9 after .*caf.*iconv -f LATIN1"),
    "t.csv": (b"a\ncaf\xe9\n", r"t\.csv: not UTF-8: byte 0xe9"),
    "u.txt": (b"caf\xe9\n", r"u\.txt: not UTF-8: byte 0xe9"),
    "v.json": (b'[{"a": "caf\xe9"}]', r"v\.json: not UTF-8: byte 0xe9"),
    "l.json": (b'[{"a": "ok"}, {"a": "\\ud800"}]', r"l\.json, row 2: half a character"),
    "m.jsonl": (b'{"a": 1, "b": 2}\n{"a": 1, "a": 1}\n', r"m\.jsonl:2: key 'a' occurs twice"),
    "n.jsonl.gz": (gzip.compress(b'{"m": [{"role": 1, "role": 2}]}\n'), r"n\.jsonl\.gz:1: key 'role' occurs twice"),
    "o.json": (b'[{"a": 1}, {"b": {"c": 1, "c": 1}}]', r"o\.json, row 2: key 'c' occurs twice"),
    "p.json": (b'{"version": 1, "version": 2, "data": [{"a": 1}]}', r"p\.json: key 'version' occurs twice"),
    "r.jsonl.gz": (gzip.compress(b'{"a": 1}\n' * 50, mtime=0)[:14] + b"\x07" * 40, "cannot be read: .*decompressing"),
    "q.jsonl": (b'{"a": 1}\n' + b'{"a": ' + b"[" * 100_000 + b"\n", r"q\.jsonl:2: not JSON"),
}


def test_a_whole_character_in_two_escapes_is_one(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"a": "\\ud83d\\ude00 \\\\ud800"}\n')
    assert list(read_rows(tmp_path / "a.jsonl")) == [{"a": "\U0001f600 \\ud800"}]


def test_a_row_is_found_again_by_its_number(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n\n{"text": "b"}\n')
    write(tmp_path / "b.json", [{"text": "c"}, {"text": "d"}])
    write(tmp_path / "h.jsonl", [{"text": "e"}])
    places = [
        locate([tmp_path / "a.jsonl", tmp_path / "b.json"], index).removeprefix(f"{tmp_path}/") for index in range(4)
    ]
    assert places == ["a.jsonl:1", "a.jsonl:3", "b.json, row 1", "b.json, row 2"]
    section = FileSource(type="file", path=str(tmp_path / "a.jsonl"), heldout_path=str(tmp_path / "h.jsonl"))
    opened = open_source(section)
    assert [opened.locate(*place)[-9:] for place in ((1, False), (0, True))] == ["a.jsonl:3", "h.jsonl:1"]


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_named(tmp_path, name):
    content, message = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError) as refused:
        list(read_rows(tmp_path / name))
    assert re.search(message, f"{refused.value} {refused.value.hint}")


def test_globs_are_sorted_and_limits_hold(tmp_path):
    write(tmp_path / "b.jsonl", [{"text": "b"}])
    write(tmp_path / "a.jsonl", [{"text": "a"}, {"text": "aa"}])
    opened = open_source(FileSource(type="file", path=str(tmp_path / "*.jsonl"), limit=2))
    assert [row["text"] for row in opened.rows()] == ["a", "aa"]
    assert opened.heldout_rows is None


@pytest.mark.parametrize(
    ("pattern", "message"),
    [("none.jsonl", "does not exist"), ("no*.jsonl", "no file matches"), (".", "is a folder")],
)
def test_missing_files_are_named(tmp_path, monkeypatch, pattern, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message):
        find_files(pattern)


def test_identity_is_the_content_not_the_place(tmp_path):
    first, second = write(tmp_path / "a.jsonl"), write(tmp_path / "b.jsonl")
    assert identify(first) == identify(second)
    write(second, ROWS[:1])
    assert identify(first) != identify(second)


def test_a_missing_database_is_named(tmp_path):
    path = write(tmp_path / "a.jsonl")
    with pytest.raises(UsageError, match="database"):
        open_source(FileSource(type="file", path=str(path), database=str(tmp_path / "none.sqlite")))


def test_a_database_may_be_named_by_columns(tmp_path):
    path = write(tmp_path / "a.jsonl")
    pattern = str(tmp_path / "db" / "{db_id}" / "{db_id}.sqlite")
    section = FileSource(type="file", path=str(path), database=pattern)
    assert glob_of(pattern) == str(tmp_path / "db" / "*" / "*.sqlite") and glob_of("a{{b}}.sqlite") == "a{{b}}.sqlite"
    spec = RunSpec.model_validate({"name": "x", "data": {"sources": [section.model_dump()]}})
    missing = [each.message for each in host_checks.problems(spec) if "database" in each.key]
    assert missing == [f"no file {pattern}"]
    with pytest.raises(UsageError, match="does not exist"):
        open_source(section)
    (tmp_path / "db" / "x").mkdir(parents=True)
    (tmp_path / "db" / "x" / "x.sqlite").touch()
    assert not [each for each in host_checks.problems(spec) if "database" in each.key]
    assert open_source(section).identity["database"]["columns"] == ["db_id", "db_id"]
    wrong = [FileSource(type="file", path="a.txt", database=name).problems() for name in ("{a", "a}b", "{}", "{{a}")]
    assert [each.key for problems in wrong for each in problems] == ["database"] * 4


def test_generated_rows_have_their_columns():
    opened = open_source(Text2SqlSource(type="text2sql", rows=3, heldout_rows=2))
    rows = list(opened.rows())
    assert len(rows) == 3 and len(list(opened.heldout_rows())) == 2
    assert {"question", "schema", "ddl", "sql", "prompt", "completion"} <= set(rows[0])
    assert rows[0]["ddl"].startswith("CREATE TABLE")


# ---------------------------------------------------------------- the hub


class ConnectionPool:
    """A hub of one data set, without a network."""

    def __init__(self, names, folder, error=None):
        self.names, self.folder, self.error = names, folder, error
        self.asked = []

    def dataset_info(self, name, revision=None):
        if self.error:
            raise self.error
        self.asked.append((name, revision))
        return SimpleNamespace(sha="c0ffee", siblings=[SimpleNamespace(rfilename=each) for each in self.names])

    def hf_hub_download(self, name, file, repo_type, revision):
        assert (repo_type, revision) == ("dataset", "c0ffee")
        return str(write(self.folder / file.replace("/", "_")))


def test_a_hub_split_is_pinned_and_read(tmp_path):
    names = [
        "README.md",
        "data/train-00001-of-00002.parquet",
        "data/train-00000-of-00002.parquet",
        "data/test-0.parquet",
    ]
    fake = ConnectionPool(names, tmp_path)
    source = HubSource(type="hub", name="someone/rows", heldout_split="test", revision="main")
    found = hub.resolve(source, api=fake)
    assert (found.commit, fake.asked) == ("c0ffee", [("someone/rows", "main")])
    assert found.train_names == ("data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet")
    assert found.heldout_names == ("data/test-0.parquet",)
    assert [row for path in found.fetch(found.train_names) for row in read_rows(path)] == ROWS * 2


@pytest.mark.parametrize(
    ("names", "split", "subset", "expected"),
    [
        (["rows.jsonl", "dataset_infos.json"], "train", None, ("rows.jsonl",)),
        (["train.jsonl", "train.parquet", "dev.jsonl"], "train", None, ("train.parquet",)),
        (["en/train-0.parquet", "de/train-0.parquet"], "train", "de", ("de/train-0.parquet",)),
        (["a_train.jsonl", "a_constrained.jsonl"], "train", None, ("a_train.jsonl",)),
        (["train.txt.gz"], "train", None, ("train.txt.gz",)),
    ],
)
def test_files_of_a_split(names, split, subset, expected):
    assert hub.split_files(names, split, subset, "x/y") == expected


def test_a_missing_split_lists_the_files():
    with pytest.raises(UsageError, match="no readable file for split 'dev'") as caught:
        hub.split_files(["train.jsonl", "run.py"], "dev", None, "x/y")
    assert "train.jsonl" in caught.value.hint


def hub_errors():
    errors = pytest.importorskip("huggingface_hub.errors")
    library = errors.HfHubHTTPError.__mro__[1].__module__.split(".")[0]
    if not library.startswith("httpx"):
        pytest.skip(f"this hub client speaks {library}")
    httpx = pytest.importorskip(library)

    def http(kind, status):
        return kind("refused", response=httpx.Response(status, request=httpx.Request("GET", "https://hub.invalid")))

    return [
        (http(errors.RepositoryNotFoundError, 404), AccessError, "does not exist on the hub"),
        (http(errors.GatedRepoError, 403), AccessError, "is gated"),
        (http(errors.HfHubHTTPError, 401), AccessError, "refused"),
        (http(errors.HfHubHTTPError, 503), BackendError, "cannot be reached"),
        (httpx.ConnectError("name not known"), BackendError, "cannot be reached: name not known"),
        (errors.OfflineModeIsEnabled("offline mode"), BackendError, "cannot be reached"),
        (errors.HFValidationError("bad id"), AccessError, "does not exist"),
        (OSError(errno.ENOSPC, "No space left on device"), MusterError, "cannot be stored"),
    ]


@pytest.mark.parametrize("number", range(8))
def test_the_hubs_errors_in_our_words(tmp_path, number):
    error, kind, message = hub_errors()[number]
    with pytest.raises(kind, match=message) as caught:
        hub.resolve(HubSource(type="hub", name="x/y"), api=ConnectionPool([], tmp_path, error))
    assert "\n" not in str(caught.value) and caught.value.hint


def test_our_own_bugs_are_not_the_hubs(tmp_path):
    with pytest.raises(ZeroDivisionError):
        hub.resolve(HubSource(type="hub", name="x/y"), api=ConnectionPool([], tmp_path, ZeroDivisionError()))
