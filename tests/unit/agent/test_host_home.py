"""A host's part in a home in a bucket: its loop never waits for the bucket, and its files are its pod's alone."""

import threading
import time
from types import SimpleNamespace

import pytest
from fakes.objects import Objects

from muster.agent import host_home
from muster.agent.host_event_log import HostLog, writer_of
from muster.agent.host_home import HostHome, ship_rest
from muster.core.errors import BusyError
from muster.core.event_log import read
from muster.storage.home import HOME_FILE, BucketHome, FolderHome
from muster.transport.connections import ConnectionPool

URI = "gs://bucket/r"


def bucket_home(folder, store=None):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run_id").write_text("r")
    (folder / HOME_FILE).write_text(URI)
    store = store or Objects()
    return BucketHome(folder, URI, store, store)


@pytest.fixture
def hub():
    found = ConnectionPool(token=b"x" * 32, on_gone=lambda peer, reason: None)
    yield found
    found.shutdown()


def until(hub, condition, limit_s=10.0):
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        hub.run_once(0.05)


def test_a_corrected_run_file_is_waited_for_without_blocking(tmp_path, hub, monkeypatch):
    monkeypatch.setattr(host_home, "AGAIN_S", 0.05)
    home, there, calls = bucket_home(tmp_path), threading.Event(), []

    def fetch():
        calls.append(threading.current_thread().name)
        if not there.is_set():
            raise BusyError("503")
        return True

    home.fetch = fetch
    part, here = HostHome(home=home, hub=hub, on_note=lambda text: None), []
    began = time.monotonic()
    part.fetch(lambda: here.append(threading.current_thread().name))
    assert time.monotonic() - began < 1.0 and not here
    until(hub, lambda: len(calls) >= 2)
    assert not here, "an old file is not taken for the new one"
    there.set()
    until(hub, lambda: here)
    assert here == ["MainThread"] and set(calls) == {"home-fetch"}
    hub.run_once(0.0)
    assert len(here) == 1


def test_why_a_host_waits_for_its_run_file_is_said_once_whatever_it_is(tmp_path, hub, monkeypatch):
    monkeypatch.setattr(host_home, "AGAIN_S", 0.02)
    home, calls, notes, here = bucket_home(tmp_path), [], [], []

    def fetch():
        calls.append(1)
        if len(calls) < 5:
            raise ValueError("a library's own")
        return True

    home.fetch = fetch
    HostHome(home=home, hub=hub, on_note=notes.append).fetch(lambda: here.append(1))
    until(hub, lambda: here)
    assert len(notes) == 1 and "ValueError: a library's own" in notes[0]


def test_in_a_folder_the_run_file_is_there_at_once(tmp_path, hub):
    here = []
    HostHome(home=FolderHome(tmp_path), hub=hub, on_note=here.append).fetch(lambda: here.append("here"))
    assert here == ["here"]


def test_a_home_that_cannot_be_written_is_noted_once_and_so_is_its_return(tmp_path, hub):
    notes, lonely = [], []
    part = HostHome(home=bucket_home(tmp_path), hub=hub, on_note=notes.append)
    part._sync = sync = SimpleNamespace(trouble=None, lonely=lonely.append)
    for trouble in (None, "503", "503", None, None):
        sync.trouble = trouble
        part.watch(trouble is None)
    assert len(notes) == 2 and "503" in notes[0] and "again" in notes[1]
    assert lonely == [False, True, True, False, False]


def test_the_next_pod_of_a_host_does_not_meet_what_a_lost_one_left(tmp_path):
    """Both are host-0; the first one's last line never left its machine."""
    store = Objects()
    first, second = bucket_home(tmp_path / "a", store), bucket_home(tmp_path / "b", store)
    logs = [
        HostLog(home=home, run_id="r", host="host-0", pod=pod) for home, pod in ((first, "pod-a"), (second, "pod-b"))
    ]
    logs[0].note("one")
    ship_rest(first, logs[0].writer)
    logs[0].note("lost")
    logs[1].note("two")
    ship_rest(second, logs[1].writer)
    seen = bucket_home(tmp_path / "seen", store)
    seen.mirror(seen.local)
    found = {name: [event.detail["text"], event.host] for name, event in read(seen.local / "events")}
    assert found == {"pod-a.0.jsonl": ["one", "host-0"], "pod-b.0.jsonl": ["two", "host-0"]}


def test_in_a_folder_a_host_s_files_have_its_name(tmp_path):
    assert writer_of(FolderHome(tmp_path), host="host-0", pod="pod-a") == "host-0"
    assert writer_of(bucket_home(tmp_path), host="host-0", pod="") == "host-0"
