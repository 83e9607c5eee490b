"""Whole files of a home: what a pod takes for its run file and code, and what a reader keeps of a run's outputs."""

import contextlib
import io
import tracemalloc
from types import SimpleNamespace

import pytest
from fakes.objects import Objects
from test_home_stream import HOME, home_at

from muster.app.inspect import home_view
from muster.core import resolved_file
from muster.core.errors import BackendError
from muster.core.resolved_file import DamagedRunFile
from muster.core.typed_json import parse_object
from muster.storage.home import files


@pytest.fixture
def store(monkeypatch):
    """Large files are read from the same table."""
    store = Objects()

    @contextlib.contextmanager
    def reading(uri):
        yield io.BytesIO(store.get(uri).data)

    monkeypatch.setattr(files.blobs, "reading", reading)
    return store


def test_run_files_of_this_submission_are_fetched(store, tmp_path):
    home = home_at(tmp_path / "a", store)
    assert not home.fetch()
    home.publish_run_file("1", {"resolved.json": b"{}", "code/task.py": b"pass\n"})
    home.publish_run_file("2", {"resolved.json": b'{"later": 1}'})
    assert home.fetch()
    assert not home.fetch()
    assert (home.local / "resolved.json").read_bytes() == b"{}"
    assert (home.local / "code" / "task.py").read_bytes() == b"pass\n"
    (home.local / "submission").write_text("2\n")
    assert home.fetch()
    assert parse_object((home.local / "resolved.json").read_bytes()) == {"later": 1}


def test_a_run_file_that_was_damaged_there_is_not_taken(store, tmp_path):
    home = home_at(tmp_path / "a", store)
    whole = resolved_file.sealed('{\n "steps": 5\n}\n').encode()
    home.publish_run_file("1", {"resolved.json": whole})
    assert home.fetch()
    home.publish_run_file("1", {"resolved.json": whole.replace(b"5\n}", b"7\n}")})
    with pytest.raises(DamagedRunFile, match=r"run/1/resolved\.json is damaged"):
        home.fetch()
    assert (home.local / "resolved.json").read_bytes() == whole


def test_only_run_files_and_code_are_taken(store, tmp_path):
    """Others write in the bucket as well: a pod's token, home and events are its own."""
    home = home_at(tmp_path / "pod" / "a", store)
    home.publish_run_file("1", {"resolved.json": b"{}", "run.yaml": b"a: 1", "code/task.py": b"pass\n"})
    foreign = ("token", "home", "events/x.0.jsonl", "../../evil", "code/../../../evil", "code", "code//x", "/etc/x")
    for name in foreign:
        store.put(f"{HOME}/run/1/{name}", b"x")
    assert home.fetch() and not home.fetch()
    found = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {f"pod/a/{name}" for name in ("run_id", "resolved.json", "run.yaml", "code/task.py")}


def test_a_module_that_was_removed_is_gone(store, tmp_path):
    home = home_at(tmp_path / "a", store)
    (home.local / "code" / "old").mkdir(parents=True)
    for name in ("shipped.py", "old/__init__.py", "task.py"):
        (home.local / "code" / name).write_text("the first shipment's\n")
    home.publish("run/1/code/task.py", b"being published")
    assert not home.fetch() and (home.local / "code" / "shipped.py").exists(), "it is not there yet"
    home.publish_run_file("1", {"resolved.json": b"{}", "code/task.py": b"2", "code/gone.py": b"2"})
    assert home.fetch() and names(home) == ["gone.py", "task.py"]
    home.publish_run_file("1", {"resolved.json": b"{}", "code/task.py": b"2", "code/gone/now.py": b"a folder"})
    assert home.fetch() and names(home) == ["gone", "gone/now.py", "task.py"]
    home.publish_run_file("1", {"resolved.json": b'{"no": "code"}'})
    assert home.fetch() and names(home) == ["gone", "gone/now.py", "task.py"]
    assert not home.fetch()


def names(home):
    code = home.local / "code"
    return sorted(path.relative_to(code).as_posix() for path in code.rglob("*"))


def test_large_outputs_are_never_in_memory(store, tmp_path, monkeypatch):
    size, files_count = 32 << 20, 4
    for number in range(files_count):
        store.put(f"{HOME}/traces/step-{number}.json", b"")

    class Large(io.RawIOBase):
        left = size

        def read(self, count=-1):
            count = min(count, self.left)
            self.left -= count
            return b"x" * count

    monkeypatch.setattr(files.blobs, "reading", lambda uri: contextlib.nullcontext(Large()))
    home = home_at(tmp_path / "a", store)
    tracemalloc.start()
    try:
        assert home.mirror(home.local, what="outputs") == size * files_count
        assert tracemalloc.get_traced_memory()[1] < size
    finally:
        tracemalloc.stop()
    assert home.mirror(home.local, what="outputs") == 0


def test_what_breaks_off_leaves_nothing_half(store, tmp_path, monkeypatch):
    store.put(f"{HOME}/traces/a.json", b"")

    def read(count):
        raise BackendError("reset")

    monkeypatch.setattr(files.blobs, "reading", lambda uri: contextlib.nullcontext(SimpleNamespace(read=read)))
    home = home_at(tmp_path / "a", store)
    with pytest.raises(BackendError, match="reset"):
        home.mirror(home.local, what="outputs")
    assert not list((home.local / "traces").iterdir())


def test_an_output_that_no_file_can_be_is_said_in_one_line_and_the_rest_comes(store, tmp_path, monkeypatch, capsys):
    for name in ("a", "a/b", "n" * 300, "z"):
        store.put(f"{HOME}/traces/{name}", b"1")
    home = home_at(tmp_path / "a", store)
    monkeypatch.setattr(home_view, "home_of", lambda run, launcher: home)
    monkeypatch.setattr(home_view.backends, "load", lambda backend: None)
    home_view.bring(SimpleNamespace(run_id="run-1", path=home.local), "gke", "outputs")
    assert sorted(path.name for path in (home.local / "traces").iterdir()) == ["a", "z"]
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "not all outputs can be kept" in said
