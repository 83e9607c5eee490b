"""Events on their way to people: who takes them holds up neither who hands them over nor another taker."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from waiting import eventually

from muster.app import supervisor as supervisor_program
from muster.app.run import event_writer
from muster.app.run.event_writer import MOST_WAITING, EventWriter, JsonLines, Lines, Sink
from muster.core.events import Event
from muster.core.processes import forgiving
from muster.core.typed_json import JsonObject
from muster.storage import run_output

STEP: JsonObject = {
    "loss": 2.5, "grad_norm": None, "learning_rate": None, "step_ns": 10**8, "tokens": None, "supervised_tokens": None,
    "padding_tokens": None,
}  # fmt: skip


def event(step: int | None = None, text: str = "", kind: str = "run.message") -> Event:
    detail: JsonObject = STEP if step is not None else {"text": text}
    return Event(
        run_id="r", attempt=1, seq=0, mono_ns=0, wall_ns=0, host="h", kind="step" if step is not None else kind,
        step=step, detail=detail,
    )  # fmt: skip


class Hook(Sink):
    """Calls a function with each event of one kind."""

    def __init__(self, kind, call):
        self.kind, self.call = kind, call

    def event(self, event):
        if event.kind == self.kind:
            self.call(event)


class Kept(Sink):
    """Keeps what it gets; ``gate`` holds it up."""

    name = "the reader"
    shows_run = True

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.told: list[object] = []
        self.gate = threading.Event()
        self.gate.set()
        self.error: BaseException | None = None

    def event(self, event: Event) -> None:
        self.gate.wait(30)
        if self.error is not None:
            raise self.error
        self.events.append(event)

    def left_out(self, count: int) -> None:
        if self.error is not None:
            raise self.error
        self.told.append(count)

    def end(self, code: int | None) -> None:
        self.told.append(("end", code))


class Gone:
    """Of sinks that are gone, why."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def __call__(self, sink: Sink, why: str) -> None:
        self.told.append(why)


def test_everything_in_order_to_everyone_then_the_end() -> None:
    one, two = Kept(), Kept()
    asked: list[Event] = []
    writer = EventWriter([one, two, Hook("run.waiting", asked.append)], on_gone=Gone())
    given = [event(step=number) for number in range(500)] + [event(kind="run.waiting")]
    for each in given:
        writer.put(each)
    assert writer.close(75)
    assert one.events == two.events == given and asked == given[-1:]
    assert one.told == [("end", 75)]


def test_a_sink_that_is_held_up_holds_up_nobody_and_loses_the_oldest_steps() -> None:
    stuck, free = Kept(), Kept()
    stuck.gate.clear()
    writer = EventWriter([stuck, free], on_gone=Gone())
    writer.put(event(step=0))  # what it is held up in
    eventually(lambda: not writer._outlets[0].waiting, 10)
    before = time.monotonic()
    writer.put(event(text="kept"))
    for number in range(1, MOST_WAITING + 50):
        writer.put(event(step=number))
        if number % 100 == 0:
            eventually(lambda: not writer._outlets[1].waiting, 10)
    assert time.monotonic() - before < 10
    eventually(lambda: len(free.events) == MOST_WAITING + 51, 20)
    stuck.gate.set()
    assert writer.close(0)
    assert stuck.told[0] == 50
    assert [each.step for each in stuck.events] == [0, None, *range(51, MOST_WAITING + 50)]


def test_without_steps_the_oldest_of_anything_is_left_out() -> None:
    stuck = Kept()
    stuck.gate.clear()
    writer = EventWriter([stuck], on_gone=Gone())
    writer.put(event(text="first"))
    eventually(lambda: not writer._outlets[0].waiting, 10)
    for number in range(MOST_WAITING + 3):
        writer.put(event(text=str(number)))
    stuck.gate.set()
    assert writer.close(0)
    assert [each.detail["text"] for each in stuck.events][:2] == ["first", "3"] and stuck.told[0] == 3


@pytest.mark.parametrize("error", [BrokenPipeError(errno.EPIPE, "Broken pipe"), ValueError("oops"), SystemExit(1)])
def test_a_sink_that_raises_is_gone_which_is_told_once_and_the_others_go_on(error: BaseException) -> None:
    bad, good, gone = Kept(), Kept(), Gone()
    bad.error = error
    writer = EventWriter([bad, good], on_gone=gone)
    for number in range(3):
        writer.put(event(step=number))
    assert writer.close(0)
    assert len(gone.told) == 1 and gone.told[0].startswith("the reader takes no more (")
    assert len(good.events) == 3 and bad.told == []


def test_a_sink_may_go_on_without_what_is_broken() -> None:
    class Silent(Kept):
        def gone(self, why: str) -> bool:
            self.error = None
            return True

    sink, gone = Silent(), Gone()
    sink.error = BrokenPipeError(errno.EPIPE, "Broken pipe")
    writer = EventWriter([sink], on_gone=gone)
    for number in range(3):
        writer.put(event(step=number))
    assert writer.close(1)
    assert gone.told == ["the reader takes no more (Broken pipe)"]
    assert [each.step for each in sink.events] == [1, 2] and sink.told == [("end", 1)]


def test_a_full_disk_leaves_events_out_and_says_how_many_once_there_is_room() -> None:
    sink, gone = Kept(), Gone()
    sink.error = OSError(errno.ENOSPC, "No space left on device")
    writer = EventWriter([sink], on_gone=gone)
    for number in range(3):
        writer.put(event(step=number))
    eventually(lambda: writer._outlets[0].left_out == 3, 10)
    sink.error = None
    writer.put(event(step=3))
    assert writer.close(0)
    assert [each.step for each in sink.events] == [3] and sink.told == [3, ("end", 0)] and not gone.told


def test_the_end_waits_for_a_sink_that_moves_and_gives_up_on_one_that_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_writer, "PATIENCE_S", 1.0)

    class Slow(Kept):
        def event(self, event: Event) -> None:
            time.sleep(0.1)
            super().event(event)

    slow = Slow()
    writer = EventWriter([slow], on_gone=Gone())
    for number in range(20):
        writer.put(event(step=number))
    assert writer.close(0) and len(slow.events) == 20, "2 s in all, 0.1 s without anything taken"
    stuck = Kept()
    stuck.gate.clear()
    writer = EventWriter([stuck], on_gone=Gone())
    writer.put(event(step=0))
    before = time.monotonic()
    assert not writer.close(0)
    assert time.monotonic() - before < 10
    stuck.gate.set()


def test_last_words_may_take_longer_than_an_event() -> None:
    class Wordy(Kept):
        def end(self, code: int | None) -> None:
            time.sleep(event_writer.PATIENCE_S + 1.0)
            super().end(code)

    wordy = Wordy()
    assert EventWriter([wordy], on_gone=Gone()).close(0)
    assert wordy.told == [("end", 0)]


def test_a_sink_that_shows_nothing_does_not_decide_whether_the_run_was_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_writer, "PATIENCE_S", 0.2)
    shown, stuck = Kept(), Kept()
    stuck.shows_run = False
    stuck.gate.clear()
    writer = EventWriter([shown, stuck], on_gone=Gone())
    writer.put(event(step=0))
    eventually(lambda: not writer._outlets[1].waiting, 10)
    assert writer.close(0) and shown.told == [("end", 0)]
    stuck.gate.set()


STOPPED = """
import time
from muster.app import supervisor as supervisor_program
from muster.app.run import event_writer
event_writer.WORDS_PATIENCE_S = 1.5
class Slow(event_writer.Sink):
    shows_run = True
    def end(self, code):
        print("ending", flush=True)
        for _ in range(8):
            time.sleep(0.1)
print(event_writer.EventWriter([Slow()], on_gone=print).close(0), flush=True)
"""


def test_while_the_process_is_stopped_no_patience_is_lost() -> None:
    with subprocess.Popen([sys.executable, "-c", STOPPED], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ending\n"
        child.send_signal(signal.SIGSTOP)
        time.sleep(2.0)
        child.send_signal(signal.SIGCONT)
        assert child.stdout.read() == "True\n"


def test_a_display_is_tended_between_events() -> None:
    class Tended(Kept):
        tend_every_s = 0.01

        def tend(self) -> None:
            self.told.append("tend")

    sink = Tended()
    writer = EventWriter([sink], on_gone=Gone())
    eventually(lambda: len(sink.told) >= 3, 10)
    assert writer.close(None) and sink.told[-1] == ("end", None)


def test_the_log_of_a_supervisor_has_the_lines_that_people_see() -> None:
    text = io.StringIO()
    writer = EventWriter([Lines(text)], on_gone=Gone())
    for each in (event(text="so it is"), event(kind="clock.offset"), event(step=7)):
        writer.put(each)
    assert writer.close(0)
    assert text.getvalue() == "note: so it is\nstep 7  loss  2.5000    0.100 s\n"


def test_output_that_a_full_disk_did_not_take_is_lost_and_its_size_is_said(tmp_path: Path) -> None:
    path = tmp_path / "log"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    stream = forgiving(fd)
    print("before", file=stream)
    kept, full = os.dup(fd), os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, fd)
    print("lost", file=stream)
    print("this too \udc80", file=stream)
    os.dup2(kept, fd)
    print("after", file=stream)
    text = path.read_text()
    assert text == "before\n\n(21 bytes of output are lost: No space left on device)\nafter\n"
    for each in (fd, kept, full):
        os.close(each)
    print("closed", file=stream)


def test_lines_as_json_name_the_run_and_how_bad_it_is():
    stream = io.StringIO()
    lines = JsonLines(stream)
    detail = {"incident_id": "i1", "incident": "rank_exit", "evidence": "rank 1 \u2028 fell"}
    for kind, given in (
        ("run.message", {"text": "hello"}),
        ("incident.detected", detail),
        ("run.finished", {"outcome": "failed", "exit_code": 1, "reason": "x"}),
        ("run.finished", {"outcome": "succeeded", "exit_code": 0, "reason": "x"}),
        ("clock.offset", {"offset_ns": 1, "error_ns": 1}),
    ):
        at = {"mono_ns": 0, "wall_ns": 0, "host": "supervisor"}
        lines.event(Event(run_id="demo-1", attempt=1, seq=0, kind=kind, detail=given, **at))
    found = [json.loads(line) for line in stream.getvalue().split("\n") if line]
    assert [line["severity"] for line in found] == ["INFO", "ERROR", "ERROR", "INFO"]
    assert found[0]["message"] == "note: hello"
    assert found[1]["logging.googleapis.com/labels"] == {"muster_run": "demo-1"}


@pytest.mark.parametrize(("jobset", "asked"), [("js", True), ("js", False), ("", True)])
def test_the_supervisor_of_a_jobset_writes_json_where_it_is_asked_for(tmp_path, monkeypatch, capsys, jobset, asked):
    (tmp_path / "run_id").write_text("demo-1")
    (tmp_path / "resolved.json").write_text(json.dumps({"output": {"json_logs": asked}}))
    detail = {"text": "hello"}
    at = {"attempt": 1, "seq": 0, "mono_ns": 0, "wall_ns": 0, "host": "supervisor"}

    class Said:
        def __init__(self, *, run_dir, **_):
            self.run_dir = run_dir

        def serve(self):
            self.on_event(Event(run_id="demo-1", kind="run.message", detail=detail, **at))
            return 0

    monkeypatch.setattr(supervisor_program, "Supervisor", Said)
    monkeypatch.setattr(supervisor_program.processes, "forgive_outputs", lambda: None)
    monkeypatch.setattr(sys, "argv", ["supervisor", "--run-dir", str(tmp_path), "--run-id", "demo-1"])
    monkeypatch.setenv("MUSTER_JOBSET", jobset)
    with pytest.raises(SystemExit) as ended:
        supervisor_program.main()
    assert ended.value.code == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(run_output.JSON_BEGINS) is bool(jobset and asked), line
