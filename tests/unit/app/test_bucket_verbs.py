"""The verbs about a run whose home is a bucket: what they read of it, how often, and what they write first."""

import json
from dataclasses import dataclass, field, replace

import pytest
from fakes.objects import Objects
from test_verbs import RUN_FILE, Paper

from muster.app import remote_entrypoint
from muster.app.inspect import checkpoints, logs, report, status, watch
from muster.app.run import stop, submit
from muster.config import load
from muster.core import event_log
from muster.core.errors import BackendError, MusterError
from muster.core.event_log import EventLog
from muster.core.typed_json import encode
from muster.core.types import JobState
from muster.protocol.client import SupervisorStatus
from muster.protocol.lease import HomeStatus
from muster.protocol.pipes import ReadFolder
from muster.storage.home import HOME_FILE, BucketHome

URI = "gs://bucket/runs/r"


@dataclass
class Bucketed(Paper):
    """``Paper``, whose runs live in a bucket of this machine's reach."""

    store: Objects = field(default_factory=Objects)
    folders: dict = field(default_factory=dict)
    asked: int = 0

    @property
    def remote(self):
        return self

    def submit(self, request):
        folder = submit.run_registry.find(request.run_id).path
        self.folders[request.run_id] = folder
        (folder / HOME_FILE).write_text(URI + "\n")
        log = self.home(request.run_id).open_log(request.run_id, "client", 0)
        assert log.sync()
        log.close()
        return super().submit(request)

    def home(self, run_id):
        folder = self.folders.get(run_id)
        return BucketHome(folder, URI, self.store, self.store) if folder is not None else None

    def mirror(self, run_id, folder):
        home = self.home(run_id)
        return home.mirror(folder.parent) if home is not None else 0

    def ask(self, run_id, message, **_):
        self.asked += 1
        raise BackendError("no pod")


@pytest.fixture
def bucketed(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    found = Bucketed()
    monkeypatch.setattr("muster.backends.load", lambda name: found)
    return found


@pytest.fixture
def run(bucketed):
    return submit.submit(load.loads(RUN_FILE, ()), argv=["muster", "submit"]).run


def pod(bucketed, run, tmp_path, name="host-0-abc"):
    """(a pod's folder, its log in the home)."""
    folder = tmp_path / name
    folder.mkdir()
    (folder / "run_id").write_text(run.run_id)
    (folder / HOME_FILE).write_text(URI)
    return folder, BucketHome(folder, URI, bucketed.store, bucketed.store).open_log(run.run_id, name, 1)


def say(log, *texts):
    for text in texts:
        log.append("run.message", detail={"text": text})
    assert log.sync()


def put_status(bucketed, monkeypatch, *, age_s=3.0, **changes):
    now_ns = 10**18
    monkeypatch.setattr(status.SystemClock, "wall_ns", lambda self: now_ns)
    said = SupervisorStatus(phase="run", reason="training: step 7 of attempt 2", attempt=2, step=7)
    more = {"loss": 1.5, "tokens": 900, "tokens_per_s": 33.0, "incidents": 1, **changes}
    record = HomeStatus(wall_ns=now_ns - int(age_s * 1e9), term=1, status=said, **more)
    bucketed.store.put(f"{URI}/status.json", encode(record))


def test_status_of_a_bucket_run_is_one_object(bucketed, run, monkeypatch):
    put_status(bucketed, monkeypatch)
    bucketed.store.counts.clear()
    found = status.status(run.run_id)
    assert dict(bucketed.store.counts) == {"get": 1} and not bucketed.asked
    shown = found.to_json()
    assert (shown["now"], shown["step"], shown["loss"]) == ("training: step 7 of attempt 2", 7, 1.5)
    assert (shown["tokens"], shown["tokens_per_s"], shown["incidents"], shown["attempt"]) == (900, 33.0, 1, 2)
    assert shown["name"] == "Demo run" and shown["phase"] == "run"


def test_an_old_status_says_how_old_it_is(bucketed, run, monkeypatch):
    put_status(bucketed, monkeypatch, age_s=61.0)
    assert "as of 61 s ago" in status.status(run.run_id).to_json()["now"]
    put_status(bucketed, monkeypatch, age_s=59.0)
    assert "ago" not in status.status(run.run_id).to_json()["now"]


def test_an_ended_run_keeps_its_last_figures(bucketed, run, monkeypatch):
    put_status(bucketed, monkeypatch, age_s=5000.0)
    bucketed.state = JobState.SUCCEEDED
    shown = status.status(run.run_id).to_json()
    assert shown["step"] == 7 and shown["now"] is None and shown["state"] == "succeeded"


def test_before_the_supervisor_has_written_its_events_are_read(bucketed, run, tmp_path):
    assert status.status(run.run_id).to_json()["name"] == "Demo run"
    assert bucketed.asked == 1


def test_events_are_brought_once_and_then_only_what_is_new(bucketed, run, tmp_path):
    _, log = pod(bucketed, run, tmp_path)
    say(log, "one")
    say(log, "two")
    texts = [event.detail.get("text") for event in logs.events(run.run_id)]
    assert texts[-2:] == ["one", "two"]
    bucketed.store.counts.clear()
    list(logs.events(run.run_id))
    assert bucketed.store.counts["get"] == 0 and bucketed.store.counts["list"] == 1
    say(log, "three")
    bucketed.store.counts.clear()
    assert [event.detail.get("text") for event in logs.events(run.run_id)][-1] == "three"
    assert bucketed.store.counts["get"] == 1


def test_a_report_brings_what_it_is_made_of(bucketed, run, tmp_path):
    _, log = pod(bucketed, run, tmp_path)
    say(log, "one")
    assert report.report(run.run_id) is not None
    assert [path.name for path in run.events.glob("host-0-abc.*")] == ["host-0-abc.1.jsonl"]
    bucketed.store.down = True
    assert report.report(run.run_id) is not None, "what was brought is enough"


def test_what_a_verb_decides_is_in_the_bucket_before_it_acts(bucketed, run):
    submit.log_event(run, "run.message", {"text": "told"})
    seen = BucketHome(run.path.parent / "other", URI, bucketed.store, bucketed.store)
    seen.local.mkdir()
    (seen.local / "run_id").write_text(run.run_id)
    seen.mirror(seen.local)
    kinds = [event.kind for event in event_log.merged(seen.local / "events")]
    assert kinds == ["run.submitted", "run.message"]
    bucketed.store.down = True
    with pytest.raises(MusterError):
        submit.log_event(run, "run.message", {"text": "not told"})


def test_a_run_in_an_unreachable_bucket_can_be_taken_down(bucketed, run):
    bucketed.store.down = True
    assert stop.down(run.run_id).left == ()
    bucketed.store.down = False
    submit.log_event(run, "run.message", {"text": "later"})
    assert bucketed.home(run.run_id).heads(run.run_id)


def test_a_pod_answers_with_everybody_s_events(bucketed, run, tmp_path, monkeypatch):
    _, other = pod(bucketed, run, tmp_path, "host-1-xyz")
    say(other, "elsewhere")
    folder, _ = pod(bucketed, run, tmp_path)
    home = BucketHome(folder, URI, bucketed.store, bucketed.store)
    monkeypatch.setattr(remote_entrypoint, "open_home", lambda path: home)
    place = submit.run_registry.RunDir(path=folder, run_id=run.run_id)

    def names(folder_name="events", **after):
        return [
            part.name for part in remote_entrypoint.answer(place, ReadFolder(folder=folder_name, after=after)).files
        ]

    assert names() == ["client.0.jsonl", "host-1-xyz.1.jsonl"]
    assert not list((folder / "events").glob("host-1*")), "its own files are the supervisor's alone"
    bucketed.store.down = True
    assert names() == ["client.0.jsonl", "host-1-xyz.1.jsonl"], "as far as they were brought"


def test_a_folder_s_entrypoint_reads_the_folder(tmp_path):
    place = submit.run_registry.RunDir(path=tmp_path, run_id="r")
    log = EventLog("r", place.events, "host-0", 1)
    log.append("run.message", detail={"text": "one"})
    (part,) = remote_entrypoint.answer(place, ReadFolder(folder="events", after={})).files
    assert part.name == "host-0.1.jsonl" and not (tmp_path / "seen").exists()
    assert json.loads((place.events / part.name).read_text())["kind"] == "run.message"


def damage(bucketed, writer):
    """Change the first object of its file; its URI."""
    uri = next(uri for uri in bucketed.store.held if f"/events/{writer}/" in uri)
    held = bucketed.store.held[uri]
    bucketed.store.held[uri] = replace(held, data=held.data.replace(b'"prev"', b'"next"', 1))
    return uri


def test_damage_in_the_bucket_is_told_by_every_verb_that_reads(bucketed, run, tmp_path, capsys):
    """And at every look; a bucket out of reach is no damage."""
    _, log = pod(bucketed, run, tmp_path)
    say(log, "one")
    uri = damage(bucketed, "host-0-abc")
    for _ in range(2):
        told = []
        assert list(logs.events(run.run_id, on_damage=told.append))
        for damaged in (told, status.status(run.run_id).damaged, watch.Watcher(run).look().damaged):
            (one,) = damaged
            assert one.file == "events of host-0-abc" and f"{uri} was changed" in one.reason
        (one,) = checkpoints.checkpoints(run.run_id).damaged
        assert f"{uri} was changed" in one.reason
        report.report(run.run_id)
        assert f"{uri} was changed" in capsys.readouterr().err
    bucketed.store.down = True
    assert status.status(run.run_id).damaged == ()


def test_damage_of_the_client_s_own_file_is_refused_until_the_object_is_removed(bucketed, run, tmp_path):
    uri = damage(bucketed, "client")
    with pytest.raises(BackendError, match=f"{uri} was changed"):
        submit.log_event(run, "run.message", {"text": "one"})
    bucketed.store.delete(uri)
    submit.log_event(run, "run.message", {"text": "two"})
    reader = BucketHome(tmp_path / "other", URI, bucketed.store, bucketed.store)
    reader.local.mkdir()
    (reader.local / "run_id").write_text(run.run_id)
    reader.mirror(reader.local)
    kinds = [event.kind for event in event_log.merged(reader.local / "events")]
    assert kinds == ["run.submitted", "run.message", "run.message"]
