"""The log behind a report: edited, torn, still being written, on clocks that disagree, split over supervisors."""

import json
import shutil
from dataclasses import replace

import pytest
from faulty_run import SECOND, Writer, write
from random_runs import plausible

from muster.core.errors import UsageError
from muster.report import api
from muster.report.ledger.fold import fold
from muster.report.ledger.time_axis import align


@pytest.fixture
def run_dir(tmp_path):
    write(tmp_path / "events")
    return tmp_path


def test_chains_are_verified(run_dir):
    found = api.load(run_dir).to_json()
    assert found["log"]["verified"] and found["log"]["problems"] == []
    assert len(found["log"]["files"]) == 5


def test_an_edited_line_is_found_and_said(run_dir):
    path = run_dir / "events" / "host-0.1.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"tokens":65536', b'"tokens":99999', 1))
    report = api.load(run_dir)
    found = report.to_json()
    assert not found["log"]["verified"]
    assert "host-0.1.jsonl" in found["log"]["problems"][0]
    assert "breaks the chain" in api.render_table(report)


def test_a_dropped_line_is_found(run_dir):
    path = run_dir / "events" / "supervisor.1.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:5] + lines[6:]))
    assert not api.load(run_dir).to_json()["log"]["verified"]


def test_a_file_cut_short_at_a_line_is_found_by_the_head_that_was_cited(tmp_path):
    writer = Writer(tmp_path / "events")
    for second in range(4):
        writer.add("host-0", float(second), "run.message", attempt=1, detail={"text": "here"})
    cited = {"host-0.1.jsonl": writer.logs["host-0.1"].head}
    writer.add("supervisor", 5.0, "log.hash_heads", detail={"heads": cited})
    writer.close()
    assert api.load(tmp_path).to_json()["log"]["verified"]
    path = tmp_path / "events" / "host-0.1.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    found = api.load(tmp_path).to_json()
    assert not found["log"]["verified"] and "cited is missing" in found["log"]["problems"][0]
    path.unlink()
    assert not api.load(tmp_path).to_json()["log"]["verified"]


def test_a_torn_last_line_is_tolerated(run_dir):
    whole = api.load(run_dir).to_json()
    path = run_dir / "events" / "host-0.1.jsonl"
    with path.open("ab") as file:
        file.write(b'{"attempt":3,"detail":{"loss"')
    found = api.load(run_dir).to_json()
    assert found["log"]["verified"]
    assert found["log"]["files"]["host-0.1.jsonl"]["torn_bytes"] == 29
    assert found["tokens"] == whole["tokens"]


def test_an_unreadable_line_is_left_out_and_said(run_dir):
    path = run_dir / "events" / "host-1.1.jsonl"
    path.write_bytes(path.read_bytes() + b"not json\n")
    found = api.load(run_dir).to_json()
    assert not found["log"]["verified"]
    (damage,) = found["damaged"]
    assert damage["file"] == path.name and damage["reason"].startswith("not an event")
    assert any(note.startswith(f"{path.name}:{damage['line']}: not an event") for note in found["notes"])


def test_an_event_with_an_edited_value_of_a_wrong_type_is_left_out(run_dir):
    path = run_dir / "events" / "supervisor.1.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"world_size":4', b'"world_size":"four"', 1))
    found = api.load(run_dir).to_json()
    assert [damage["reason"] for damage in found["damaged"]] == ["it was changed: the next line cites another one"]
    assert any("breaks the chain" in problem for problem in found["log"]["problems"])


def test_an_event_without_what_its_kind_requires_is_left_out(run_dir):
    path = run_dir / "events" / "supervisor.1.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"incident_id":"i1",', b"", 1))
    found = api.load(run_dir).to_json()
    assert len(found["damaged"]) == 1
    assert found["host_time"]["identity_error"] == 0


def test_no_log_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="no event log"):
        api.load(tmp_path)


def test_an_events_folder_and_a_single_file_can_be_read_too(run_dir):
    whole = api.load(run_dir).to_json()
    assert api.load(run_dir / "events").to_json() == whole
    alone = api.load(run_dir / "events" / "host-0.1.jsonl").to_json()
    assert alone["steps"] == 60 and alone["host_time"]["identity_error"] == 0


def test_a_copy_gives_the_same_years_later(run_dir, tmp_path_factory):
    copy = tmp_path_factory.mktemp("archive") / "run"
    shutil.copytree(run_dir, copy)
    assert api.load(copy).to_json() == api.load(run_dir).to_json()


def test_while_the_run_runs_open_ends_close_at_the_newest_event(tmp_path):
    write(tmp_path / "events", finish=False)
    found = api.load(tmp_path).to_json()
    assert found["outcome"] is None
    assert found["host_time"]["hosts"]["host-0"]["held_s"] == pytest.approx(found["wall_s"] - 20)
    assert found["host_time"]["identity_error"] == 0
    assert found["cost"]["usd_per_hour_now"] == pytest.approx(48.0)
    assert "not finished" in api.render_table(api.load(tmp_path))


def test_hosts_are_put_on_the_supervisors_clock(run_dir):
    """The hosts' clocks are off by hours; what they did still falls into place to the measured error."""
    ledger = api.load(run_dir).ledger
    assert ledger.lineage.steps.end_ns[0] == 55 * SECOND
    assert ledger.aligned.clock_error_ns["host-0.1.jsonl"] == 40_000


def test_a_stepped_wall_clock_changes_nothing_where_offsets_were_measured():
    files = plausible(5)
    before = fold(files)
    for name in [name for name in files if name.startswith("host-")]:
        files[name] = [replace(event, wall_ns=event.wall_ns + 3600 * SECOND) for event in files[name]]
    after = fold(files)
    measured = {e.host for e in files["supervisor.1.jsonl"] if e.kind == "clock.offset"}
    assert measured
    for host in measured:
        assert after.lanes[host].segments == before.lanes[host].segments


def test_unmeasured_clocks_use_wall_time_and_say_so(tmp_path):
    writer = Writer(tmp_path / "events", offsets_ns={"host-9": 10**12})
    writer.add("supervisor", 0.0, "supervisor.started", detail={"term": 1, "pid": 1})
    writer.add("supervisor", 1.0, "host.allocated", host="host-9", detail={"gpus": 1, "role": "active"})
    writer.add("host-9", 4.0, "agent.started", detail={"pid": 2, "ranks": 1})
    writer.close()
    report = api.load(tmp_path)
    assert report.to_json()["categories"]["provision"]["host_s"] == pytest.approx(3.0)
    assert any("wall clocks" in note for note in report.ledger.notes)


def test_an_agent_that_speaks_before_its_purchase_is_logged_is_not_being_provisioned(tmp_path):
    writer = Writer(tmp_path / "events")
    writer.add("supervisor", 0.0, "supervisor.started", detail={"term": 1, "pid": 1})
    writer.add("host-9", 0.9, "agent.started", detail={"pid": 2, "ranks": 1})
    writer.add("supervisor", 1.0, "host.allocated", host="host-9", detail={"gpus": 1, "role": "active"})
    writer.add("supervisor", 5.0, "run.message", detail={"text": "still here"})
    writer.close()
    spent = api.load(tmp_path).to_json()["categories"]
    assert (spent["provision"]["host_s"], spent["start"]["host_s"]) == (0.0, pytest.approx(4.0))


def test_a_second_supervisor_on_another_machine_goes_on_with_the_axis():
    """Two terms whose monotonic clocks have nothing in common meet through a host that both measured."""
    files = plausible(11)
    events = files["supervisor.1.jsonl"]
    offset = next(e for e in events if e.kind == "clock.offset")
    cut = len(events) // 2
    moved = 987_654_321_000
    second = [replace(e, mono_ns=e.mono_ns + moved, seq=n) for n, e in enumerate(events[cut:])]
    again = dict(offset.detail) | {"offset_ns": offset.detail["offset_ns"] + moved}
    second.insert(0, replace(offset, mono_ns=second[0].mono_ns, wall_ns=second[0].wall_ns, detail=again))
    whole = align(files)
    files["supervisor.1.jsonl"], files["supervisor.2.jsonl"] = events[:cut], second
    split = align(files)
    times = {(t.event.kind, t.event.detail.get("incident_id"), t.event.host): t.t_ns for t in whole.events}
    assert len(split.events) == len(whole.events) + 1
    for timed in split.events:
        key = (timed.event.kind, timed.event.detail.get("incident_id"), timed.event.host)
        if timed.file == "supervisor.2.jsonl" and timed.event.kind in ("incident.detected", "run.finished"):
            assert timed.t_ns == times[key]


def test_documents_hold_nothing_that_json_lacks(run_dir):
    json.dumps(api.load(run_dir).to_json(), allow_nan=False)
