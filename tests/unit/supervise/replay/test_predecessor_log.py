"""What a supervisor reads before it holds the lease, and what its predecessor still writes until then."""

import pytest
from fakes.chains import check_directory

from muster.core.errors import MusterError
from muster.core.event_log import EventLog, heads
from muster.core.events import Event
from muster.supervise.replay.event_replay import EventReplay
from muster.supervise.replay.rebuild_state import rebuild_state


def note(log, text):
    log.append("run.message", detail={"text": text})


def texts(past):
    return [event.detail["text"] for event in past.in_order()]


def test_what_was_written_meanwhile_is_read_once(tmp_path):
    boss, host = EventLog("r", tmp_path, "supervisor", 1), EventLog("r", tmp_path, "host-0", 0)
    note(boss, "one")
    note(host, "two")
    past = EventReplay(tmp_path)
    past.read_new_events()
    note(boss, "three")
    late = EventLog("r", tmp_path, "host-1", 0)
    note(late, "four")
    past.read_new_events()
    past.read_new_events()
    assert texts(past) == ["one", "two", "three", "four"]


def test_an_event_that_no_supervisor_writes_is_one_line():
    event = Event(
        run_id="r", attempt=1, seq=7, mono_ns=0, wall_ns=0, host="s", kind="run.held", detail={"exit_code": 1}
    )
    with pytest.raises(MusterError, match=r"event 7 of s, attempt 1: detail of run\.held: reason"):
        rebuild_state([event])


def test_a_run_without_events(tmp_path):
    past = EventReplay(tmp_path / "events")
    past.read_new_events()
    assert list(past.in_order()) == []


def test_heads_are_those_of_a_check_that_reads_everything(tmp_path):
    for name, count, length in (("supervisor", 0, 1), ("host-0", 1, 10), ("host-1", 500, 300), ("host-2", 3, 70_000)):
        log = EventLog("r", tmp_path, name, 1)
        for number in range(count):
            note(log, f"{number} " + "x" * length)
        log.close()
    torn = tmp_path / "host-1.1.jsonl"
    torn.write_bytes(torn.read_bytes() + b'{"half')
    (tmp_path / "host-3.1.jsonl").write_bytes(b'{"half')
    checked = {name: verdict.head for name, verdict in check_directory(tmp_path, run_id="r").items()}
    assert len(checked) == 5 and heads(tmp_path, run_id="r") == checked
