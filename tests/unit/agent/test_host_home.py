"""A host's part in a home in a bucket: its loop never waits for the bucket, and its files are its pod's alone."""

import threading
import time
from types import SimpleNamespace

import pytest
from fakes.objects import Objects

from muster.agent.edge import home as home_module
from muster.agent.edge.background import Background
from muster.agent.edge.home import HostHome, ship_rest
from muster.agent.edge.host_event_log import HostLog, writer_of
from muster.agent.values.events import Noted
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
def pool():
    found = ConnectionPool(token=b"x" * 32)
    yield found
    found.shutdown()


def fetched(part, pool, limit_s=10.0):
    """What is posted until the run file is there; it is read in the loop's thread."""
    background, posted, end = Background(pool), [], time.monotonic() + limit_s
    background.run("home-fetch", lambda: part.fetch(background) or "here")
    while "here" not in posted:
        assert time.monotonic() < end
        posted += [result for ready in pool.poll(0.05) for result in ready.token.results()]
    return posted


def test_a_corrected_run_file_is_waited_for_without_blocking(tmp_path, pool, monkeypatch):
    """And why is said once, whatever it is."""
    monkeypatch.setattr(home_module, "AGAIN_S", 0.02)
    home, calls = bucket_home(tmp_path), []

    def fetch():
        calls.append(threading.current_thread().name)
        if len(calls) < 5:
            raise BusyError("503") if len(calls) == 1 else ValueError("a library's own")
        return True

    home.fetch = fetch
    posted = fetched(HostHome(home), pool)
    assert posted == [Noted("this host waits for its run file: BusyError: 503"), "here"] and set(calls) == {
        "home-fetch"
    }
    assert len(calls) == 5, "an old file is not taken for the new one"


def test_in_a_folder_the_run_file_is_there_at_once(tmp_path):
    assert HostHome(FolderHome(tmp_path)).is_folder


def test_a_home_that_cannot_be_written_is_told_when_that_changes(tmp_path):
    events, lonely = [], []
    part = HostHome(bucket_home(tmp_path))
    part._sync = sync = SimpleNamespace(trouble=None, seek_supervisor=lonely.append)
    for trouble in (None, "503", "504", None, None):
        sync.trouble = trouble
        events += part.watch(supervised=trouble is None)
    went, came = (event.text for event in events)
    assert "503" in went and "can be written again" in came
    assert lonely == [False, True, True, False, False]


def test_the_next_pod_of_a_host_does_not_meet_what_a_lost_one_left(tmp_path):
    """Both are host-0; the first one's last line never left its machine."""
    store = Objects()
    first, second = bucket_home(tmp_path / "a", store), bucket_home(tmp_path / "b", store)
    logs = [
        HostLog(home=home, run_id="r", host="host-0", pod=pod) for home, pod in ((first, "pod-a"), (second, "pod-b"))
    ]
    logs[0].write("run.message", {"text": "one"})
    ship_rest(first, logs[0].writer)
    logs[0].write("run.message", {"text": "lost"})
    logs[1].write("run.message", {"text": "two"})
    ship_rest(second, logs[1].writer)
    seen = bucket_home(tmp_path / "seen", store)
    seen.mirror(seen.local)
    found = {name: [event.detail["text"], event.host] for name, event in read(seen.local / "events")}
    assert found == {"pod-a.0.jsonl": ["one", "host-0"], "pod-b.0.jsonl": ["two", "host-0"]}


def test_in_a_folder_a_host_s_files_have_its_name(tmp_path):
    assert writer_of(FolderHome(tmp_path), host="host-0", pod="pod-a") == "host-0"
    assert writer_of(bucket_home(tmp_path), host="host-0", pod="") == "host-0"
