"""Files that go on after a reboot, or on another machine: each boot is placed by its own clock."""

import random
from dataclasses import replace

import pytest
from faulty_run import SECOND
from random_runs import Pen

from muster.report.ledger.fold import fold

UPTIME_S = 30 * 86400


def run_with_a_reboot(*, offsets):
    """Submitted, stopped after 10 s, the machine booted at 20 s, continued at 25 s by the same files' writers."""
    pen = Pen(random.Random(0))
    at = UPTIME_S * SECOND

    def add(writer, seconds, kind, **more):
        pen.add(writer, at + int(seconds * SECOND), kind, **more)

    host = {"gpus": 1, "role": "active"}
    add("client", 0, "run.submitted", detail={"spec_digest": "0", "backend": "local", "version": "0"})
    add("supervisor", 1, "host.allocated", host="h", detail=host)
    add("h", 1, "agent.started", detail={"pid": 1, "ranks": 1})
    add("h", 9, "agent.ended", detail={"reason": "stopped"})
    add("supervisor", 10, "host.released", host="h")
    pen.offset = dict.fromkeys(("client", "supervisor", "h"), at + 20 * SECOND)
    add("client", 25, "run.submitted", detail={"spec_digest": "0", "backend": "local", "version": "0"})
    first, pen.files["supervisor.1.jsonl"] = pen.files["supervisor.1.jsonl"], []
    add("supervisor", 26, "host.allocated", host="h", detail=host)
    if offsets:
        add("supervisor", 26.5, "clock.offset", host="h", detail={"offset_ns": 0, "error_ns": 1000})
    add("h", 26, "agent.started", detail={"pid": 1, "ranks": 1})
    add("h", 30, "phase", rank=0, detail={"phase": "start"})
    add("supervisor", 35, "host.released", host="h")
    pen.files["supervisor.2.jsonl"] = pen.files["supervisor.1.jsonl"]
    pen.files["supervisor.1.jsonl"] = first
    return pen


@pytest.mark.parametrize("offsets", [False, True])
def test_a_reboot_adds_no_uptime(offsets):
    ledger = fold(run_with_a_reboot(offsets=offsets).files)
    assert ledger.queue_ns == SECOND
    assert ledger.end_ns - ledger.begin_ns == 35 * SECOND
    assert ledger.held_spans == [(ledger.begin_ns + SECOND, ledger.begin_ns + 10 * SECOND),
                                 (ledger.begin_ns + 26 * SECOND, ledger.begin_ns + 35 * SECOND)]  # fmt: skip
    placed = [(timed.t_ns - ledger.begin_ns) // SECOND for timed in ledger.events if timed.file.startswith("h.")]
    assert placed == [1, 9, 26, 30]


def test_an_event_that_comes_late_is_no_boot():
    pen = Pen(random.Random(0))
    for seconds, kind in ((0, "agent.started"), (5, "phase"), (3, "phase"), (6, "phase")):
        detail = {"pid": 1, "ranks": 1} if kind == "agent.started" else {"phase": "start"}
        pen.add("h", seconds * SECOND, kind, detail=detail)
    (name,) = pen.files
    pen.files[name][3] = replace(
        pen.files[name][3], wall_ns=pen.files[name][3].wall_ns + 3600 * SECOND
    )  # clock stepped
    assert [timed.t_ns // SECOND for timed in fold(pen.files).events] == [0, 3, 5, 6]


@pytest.mark.parametrize("set_by_s", [-3600, 3600])
def test_a_rank_that_comes_late_after_the_clock_was_set_is_no_boot(set_by_s):
    """Its steps were placed an hour before the others: the report of a whole run ended at the step of that moment."""
    pen = Pen(random.Random(0))
    for number, seconds in enumerate((0, 4, 8, 7, 9, 12)):
        detail = {"phase": "start"} if number else {"pid": 1, "ranks": 1}
        pen.add("h", seconds * SECOND, "phase" if number else "agent.started", detail=detail)
    (events,) = pen.files.values()
    events[2:] = [replace(event, wall_ns=event.wall_ns + set_by_s * SECOND) for event in events[2:]]
    assert [timed.t_ns // SECOND for timed in fold(pen.files).events] == [0, 4, 7, 8, 9, 12]
