"""The supervisor's part in a home in a bucket: takeover, status, end. The bucket is a table, the clock virtual."""

import contextlib
import json
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fakes.chains import check_directory
from fakes.clock import VirtualClock
from fakes.objects import Objects
from waiting import eventually

from muster.core.errors import BackendError, BusyError, ConflictError, MusterError
from muster.core.event_log import read
from muster.protocol.client import SupervisorStatus
from muster.storage.home import HOME_FILE, BucketHome
from muster.supervise.process import home_sync, lease
from muster.supervise.process.home_sync import Reporter, SupervisorHome
from muster.supervise.recovery.inputs import End

URI = "gs://bucket/runs/run-1"
STATUS = SupervisorStatus(phase="run", reason="training", attempt=1, step=7)
DONE = End(exit_code=0, outcome="succeeded", reason="done")


class Pods:
    """Supervisors in folders of their own, which share ``store``."""

    def __init__(self, tmp_path, monkeypatch):
        self.root, self.store, self.clock = tmp_path, Objects(), VirtualClock()
        monkeypatch.setattr(home_sync, "open_home", lambda folder: BucketHome(folder, URI, self.store, self.store))

    def supervisor(self, pod, *, job="job-1", submission="1"):
        folder = self.root / pod
        folder.mkdir(exist_ok=True)
        for name, text in {"run_id": "run-1", HOME_FILE: URI, "submission": submission}.items():
            (folder / name).write_text(text + "\n")
        return SupervisorHome(folder, job=job, clock=self.clock)

    def take_over(self, pod, **more):
        """Once the last one's lease is out."""
        self.clock.sleep(60)
        found = self.supervisor(pod, **more)
        events = found.take_over("run-1", ("127.0.0.1", 1))
        return found, found.open_log("run-1"), [event.detail["text"] for event in events]

    def record(self, name):
        return json.loads(self.store.get(f"{URI}/{name}.json").data)


@pytest.fixture
def pods(tmp_path, monkeypatch):
    return Pods(tmp_path, monkeypatch)


def say(log, *texts):
    for text in texts:
        log.append("run.message", detail={"text": text})


def killed(log):
    """Nothing ships what it left; its locks are gone with it."""
    log.close()
    log.sealer.release()


def test_the_next_term_closes_the_log_of_the_last_one_and_reads_it(pods):
    _, first, _ = pods.take_over("a")
    say(first, "one")
    assert first.sync()
    second, log, events = pods.take_over("b")
    assert events == ["one"] and second.lease.term == 2 and log.name == "supervisor.2.jsonl"
    say(first, "what a supervisor decides whose machine was away")
    with pytest.raises(ConflictError, match="ended by a later process"):
        first.sync()
    third, _, events = pods.take_over("c")
    assert events == ["one"] and third.lease.term == 3


@pytest.mark.parametrize("how", ["removed", "emptied"])
@pytest.mark.parametrize("told", [True, False])
def test_a_lost_lease_sets_no_term_back(pods, how, told):
    """``told``: whether the last takeover noted which terms it had ended."""
    for pod, term in (("a", 1), ("b", 2)):
        found, log, _ = pods.take_over(pod)
        say(log, f"in term {term}")
        assert found.lease.term == term and log.sync()
    if how == "removed":
        pods.store.delete(f"{URI}/lease.json")
    else:
        pods.store.put(f"{URI}/lease.json", b"")
    if not told:
        pods.store.delete(f"{URI}/ended/supervisor")
    third, log, events = pods.take_over("c")
    assert (third.lease.term, log.name, events) == (3, "supervisor.3.jsonl", ["in term 1", "in term 2"])
    assert "lease.json was" in third.lease.repairs[0]


def test_a_killed_supervisor_s_successor_in_its_folder_brings_home_what_it_wrote(pods):
    _, first, _ = pods.take_over("a")
    say(first, "one")
    first.sync()
    say(first, "two")
    killed(first)
    _, _, events = pods.take_over("a")
    assert events == ["one", "two"]
    _, _, events = pods.take_over("b")
    assert events == ["one", "two"], "it is in the home"


def test_what_was_written_after_another_one_s_takeover_is_no_part_of_the_run(pods):
    """The machine came back, and its folder with it: what its first supervisor had not sealed was not acted on."""
    _, first, _ = pods.take_over("a")
    say(first, "one")
    first.sync()
    say(first, "never sealed")
    killed(first)
    _, second, events = pods.take_over("b")
    say(second, "two")
    second.sync()
    assert events == ["one"]
    third, _, events = pods.take_over("a")
    assert events == ["one", "two"]
    assert all(found.problem is None for found in check_directory(third.run_dir / "events", run_id="run-1").values())


def test_a_supervisor_that_waits_does_not_take_what_lives(pods):
    pods.take_over("a")
    other = pods.supervisor("b")
    other.lease._vacant = lambda record: False
    with pytest.raises(ConflictError, match="holds this run"):
        other.take_over("run-1", ("127.0.0.1", 1))


def test_the_end_is_known_to_a_supervisor_of_the_same_job(pods):
    first, log, _ = pods.take_over("a")
    first.finish(log, DONE, STATUS)
    assert pods.record("lease")["address"] is None, "given back"
    again, _, _ = pods.take_over("b")
    assert again.ended([]).exit_code == 0 and again.ended([]).term == 1
    assert pods.take_over("c", job="job-2")[0].ended([]) is None
    assert pods.take_over("d", submission="2")[0].ended([]) is None
    assert pods.take_over("e", job="")[0].ended([]) is None


def test_who_stands_by_does_not_get_the_run_while_its_log_is_read(pods, monkeypatch):
    first, _, _ = pods.take_over("a")
    monkeypatch.setattr(lease, "LEASE_S", 0.6)
    first.lease.renew()

    def long_log():
        for _ in range(4):
            before = pods.record("lease")["expires_mono_ns"]
            pods.clock.sleep(0.4)
            eventually(lambda before=before: pods.record("lease")["expires_mono_ns"] > before)
            with pytest.raises(ConflictError, match="holds this run"):
                pods.supervisor("b").take_over("run-1", ("127.0.0.1", 1))
            yield from ()

    assert first.ended(long_log()) is None


def test_who_stands_by_does_not_get_the_run_while_its_end_is_still_shipped(pods, monkeypatch):
    first, log, _ = pods.take_over("a")
    monkeypatch.setattr(home_sync, "LEASE_S", 0.3)
    renewals, known = [], []
    renew = first.lease.renew
    monkeypatch.setattr(first.lease, "renew", lambda: (renewals.append(f"{URI}/end.json" in pods.store.held), renew()))
    first._sync = SimpleNamespace(stop=lambda timeout_s: time.sleep(0.5), trouble=None)
    monkeypatch.setattr(first.lease, "give_back", lambda: known.append(pods.record("end")["exit_code"]))
    first.finish(log, DONE, STATUS)
    assert len(renewals) >= 3 and all(renewals[1:]) and known == [0], "the first one is for the end's own sake"


def finished(log, home, code=0):
    """The supervisor is killed after it has sealed its last word, before anything else."""
    log.append("supervisor.started", detail={"term": home.lease.term, "pid": 1, **home.allocation})
    log.append("run.finished", detail={"outcome": "succeeded", "exit_code": code, "reason": "done"})
    assert log.sync()


def events_of(pod):
    return [event for _, event in read(pod.run_dir / "events")]


def test_a_run_whose_supervisor_was_killed_before_its_end_was_put_is_not_started_anew(pods):
    first, log, _ = pods.take_over("a")
    finished(log, first)
    second = pods.supervisor("b")
    pods.clock.sleep(60)
    before = second.take_over("run-1", ("127.0.0.1", 1))
    ended = second.ended(before)
    assert ended is not None and (ended.exit_code, ended.reason, ended.term) == (0, "done", 2)
    assert pods.record("end")["exit_code"] == 0, "the launcher sees it too"


@pytest.mark.parametrize("other", [{"job": "job-2"}, {"submission": "2"}])
def test_an_end_of_another_submission_ends_nothing(pods, other):
    first, log, _ = pods.take_over("a")
    finished(log, first)
    pods.clock.sleep(60)
    second = pods.supervisor("b", **other)
    assert second.ended(second.take_over("run-1", ("127.0.0.1", 1))) is None
    assert f"{URI}/end.json" not in pods.store.held


def test_a_run_that_was_preempted_or_went_on_is_not_ended(pods):
    first, log, _ = pods.take_over("a")
    finished(log, first, code=75)
    pods.clock.sleep(60)
    second = pods.supervisor("b")
    assert second.ended(second.take_over("run-1", ("127.0.0.1", 1))) is None
    finished(second.open_log("run-1"), second, code=1)
    pods.clock.sleep(60)
    third = pods.supervisor("c")
    third.take_over("run-1", ("127.0.0.1", 1))
    third.open_log("run-1").append("supervisor.started", detail={"term": 3, "pid": 1, **third.allocation})
    assert third.ended(events_of(third)) is None


def test_the_end_is_put_before_anything_is_waited_for_and_only_with_the_lease(pods):
    first, log, _ = pods.take_over("a")
    first.declare(DONE)
    assert pods.record("end")["exit_code"] == 0
    puts = pods.store.counts["put"]
    first.finish(log, DONE, STATUS)
    assert pods.store.counts["put"] == puts + 1, "given back; the end is not put twice"
    second, _, _ = pods.take_over("b")
    pods.take_over("c")
    with pytest.raises(ConflictError):
        second.declare(End(exit_code=1, outcome="failed", reason="late"))
    assert pods.record("end")["exit_code"] == 0


def test_one_host_s_damaged_file_keeps_no_supervisor_from_taking_over(pods):
    first, log, _ = pods.take_over("a")
    say(log, "one")
    log.sync()
    host = first.home.open_log("run-1", "host-0", 1)
    say(host, "lost")
    assert host.sync()
    (of_host,) = [uri for uri in pods.store.held if "/events/host-0/" in uri]
    pods.store.put(of_host, b"damaged\n")
    second, _, events = pods.take_over("b")
    assert events == ["one"]
    assert len(second.damage) == 1 and of_host in second.damage[0]


@pytest.mark.parametrize("how", ["changed", "missing"])
def test_a_damaged_file_of_a_supervisor_is_refused_by_a_takeover_elsewhere(pods, how):
    """A run's state is what its supervisors' events say. In the folder of who wrote it nothing is damaged."""
    _, first, _ = pods.take_over("a")
    for text in ("one", "two", "three"):
        say(first, text)
        assert first.sync()
    uri = sorted(uri for uri in pods.store.held if "/events/supervisor.1/" in uri)[1]
    held = pods.store.held.pop(uri)
    if how == "changed":
        pods.store.held[uri] = replace(held, data=held.data.replace(b'"prev"', b'"next"'))
    killed(first)
    with pytest.raises(MusterError, match=uri) as refused:
        pods.take_over("b")
    assert "restore it" in refused.value.hint
    if how == "changed":
        assert pods.take_over("a")[2] == ["one", "two", "three"]
    pods.store.held[uri] = held
    assert pods.take_over("c")[2] == ["one", "two", "three"]


def test_a_takeover_that_takes_longer_than_a_lease_keeps_it(pods, monkeypatch):
    monkeypatch.setattr(lease, "LEASE_S", 0.3)
    _, log, _ = pods.take_over("a")
    say(log, "one")
    log.sync()
    second, renewed = pods.supervisor("b"), []
    renew, mirror = second.lease.renew, second.home.mirror
    monkeypatch.setattr(second.lease, "renew", lambda: (renewed.append(1), renew())[1])
    monkeypatch.setattr(
        second.home, "mirror", lambda into, **more: (time.sleep(0.5 * second.lease.term), mirror(into, **more))
    )
    pods.clock.sleep(60)
    second.take_over("run-1", ("127.0.0.1", 1))
    assert len(renewed) >= 3
    renewed.clear()
    time.sleep(0.3)
    assert not renewed, "the loop's part from here on"


def test_without_an_end_in_the_home_the_lease_is_kept(pods):
    first, log, _ = pods.take_over("a")
    put = pods.store.put
    pods.store.put = lambda uri, data: refused(uri) if uri.endswith("end.json") else put(uri, data)
    first.finish(log, DONE, STATUS)
    assert pods.record("lease")["address"] is not None
    assert f"{URI}/end.json" not in pods.store.held


def refused(uri):
    raise BackendError(f"{uri}: 503")


def test_lines_that_cannot_be_brought_home_keep_the_supervisor_from_starting(pods):
    _, first, _ = pods.take_over("a")
    say(first, "one")
    killed(first)
    with_faults = pods.store.put_if_absent
    pods.store.put_if_absent = lambda uri, data: refused(uri)
    with pytest.raises(BackendError, match="cannot be brought home"):
        pods.take_over("a")
    pods.store.put_if_absent = with_faults
    assert pods.take_over("a")[2] == ["one"]


def test_status_is_written_at_changes_of_phase_and_now_and_then(pods):
    first, _, _ = pods.take_over("a")
    first._reporter = reporter = Reporter(home=first.home, clock=pods.clock)
    offered = []
    reporter.offer = lambda status, phase: (offered.append(pods.clock.now_s), Reporter.offer(reporter, status, phase))
    began_s = pods.clock.now_s
    for tenth in range(700):
        phase = "run" if tenth < 20 or tenth > 25 else "draining"
        if first.report_is_due(phase):
            first.report(STATUS, phase)
        assert first.report_ns(phase) > pods.clock.monotonic_ns()
        pods.clock.sleep(0.1)
    assert [round(at - began_s) for at in offered] == [0, 2, 4, 34, 64]
    reporter.start()
    reporter.stop(first._status(STATUS))
    held = pods.record("status")
    assert held["status"]["step"] == 7 and held["term"] == 1


def test_a_deposed_supervisor_s_status_does_not_replace_its_successor_s(pods):
    first, _, _ = pods.take_over("a")
    second, _, _ = pods.take_over("b")
    writers = [Reporter(home=each.home, clock=pods.clock) for each in (first, second)]
    for writer, of in ((writers[0], first), (writers[1], second)):
        writer._put(of._status(STATUS))
    assert writers[0]._put(first._status(STATUS)) is False
    assert pods.record("status")["term"] == 2


def test_a_status_whose_answer_was_lost_ends_no_reports(pods):
    """The write that was given up arrived later: the object is ours, under a generation that nobody was told."""
    first, _, _ = pods.take_over("a")
    reporter = Reporter(home=first.home, clock=pods.clock)
    assert reporter._put(first._status(STATUS))
    pods.store.faults[pods.store.requests] = "lost"
    with pytest.raises(BusyError):
        reporter._put(first._status(replace(STATUS, step=8)))
    assert reporter._put(first._status(replace(STATUS, step=9)))
    assert pods.record("status")["status"]["step"] == 9


def test_a_supervisor_that_leaves_does_not_wait_for_a_bucket_that_is_away(pods):
    first, _, _ = pods.take_over("a")
    first.start()
    pods.store.down = True
    first.report(STATUS, "run")
    began = time.monotonic()
    first.close()
    assert time.monotonic() - began < 1.0


def test_a_folder_gets_no_objects(tmp_path):
    home = SupervisorHome(tmp_path, clock=VirtualClock())
    home.take_over("run-1", ("127.0.0.1", 1))
    with contextlib.closing(home.open_log("run-1")) as log:
        home.start()
        say(log, "one")
        home.report(STATUS, "run")
        home.finish(log, DONE, STATUS)
    home.close()
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file() and "lock" not in path.name) == [
        "lease.json"
    ]
    assert [event.detail["text"] for _, event in read(tmp_path / "events")] == ["one"]


@pytest.mark.parametrize(
    ("code", "submission", "is_over"), [(130, 1, True), (0, 1, True), (75, 1, False), (130, 2, False), (130, 0, False)]
)
def test_a_supervisor_that_comes_after_the_end_of_its_run_in_a_folder(tmp_path, code, submission, is_over):
    """It was slow to start: the one that ended the run gave the lease back meanwhile."""
    (tmp_path / "run_id").write_text("run-1\n")
    (tmp_path / "job.json").write_text(json.dumps({"submission": 1}))
    first = SupervisorHome(tmp_path, clock=VirtualClock())
    first.take_over("run-1", ("127.0.0.1", 1))
    with contextlib.closing(first.open_log("run-1")) as log:
        log.append("supervisor.started", detail={"term": 1, "pid": 1, **first.allocation})
        log.append("run.finished", detail={"outcome": "stopped", "exit_code": code, "reason": "muster stop"})
    first.lease.give_back()
    if submission:
        (tmp_path / "job.json").write_text(json.dumps({"submission": submission}))
    else:  # not submitted: started by hand
        (tmp_path / "job.json").unlink()
    second = SupervisorHome(tmp_path, clock=VirtualClock())
    ended = second.ended(second.take_over("run-1", ("127.0.0.1", 1)))
    assert (ended.exit_code if ended is not None else None) == (code if is_over else None)
