"""A full disk at an attempt's end: its last lines are written when there is room again."""

import errno
import os
import threading
from dataclasses import replace

from fakes.chains import check_directory

from muster.agent.edge import host_event_log
from muster.agent.edge.host_event_log import NEWEST, HostLog
from muster.core.event_log import read
from muster.protocol.values import RankEvent
from muster.rank import sent_events
from muster.storage.home import open_home


class Full:
    def __init__(self, inner):
        self.inner, self.full = inner, True

    def write(self, data):
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.inner.write(data)

    def __getattr__(self, name):
        return getattr(self.inner, name)


def test_lines_of_an_older_attempt_are_written_when_there_is_room(tmp_path):
    log = HostLog(home=open_home(tmp_path), run_id="r", host="host-0")
    log.open(1)
    log._log._file = disk = Full(log._log._file)
    log.write("run.message", {"text": "one"})
    log.open(2)
    log.write("run.message", {"text": "two"})
    assert [event.detail["text"] for _, event in read(tmp_path / "events")] == ["two"]
    disk.full = False
    log.write("run.message", {"text": "three"})
    assert [event.detail["text"] for _, event in read(tmp_path / "events")] == ["one", "two", "three"]
    assert all(found.problem is None for found in check_directory(tmp_path / "events", run_id="r").values())


def test_the_end_of_a_host_waits_for_a_full_disk(tmp_path):
    """The run may end while its disk is full: nothing else holds the last steps."""
    log = HostLog(home=open_home(tmp_path), run_id="r", host="host-0")
    disks = []
    for attempt in (1, 2):
        log.open(attempt)
        log._log._file = disk = Full(log._log._file)
        disks.append(disk)
        log.write("run.message", {"text": f"of {attempt}"})
    room = threading.Timer(0.3, lambda: [setattr(disk, "full", False) for disk in disks])
    room.start()
    log.close()
    assert [event.detail["text"] for _, event in read(tmp_path / "events")] == ["of 1", "of 2"]
    assert all(found.problem is None for found in check_directory(tmp_path / "events", run_id="r").values())


def test_the_end_of_a_host_says_what_is_lost(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(host_event_log, "CLOSE_PATIENCE_S", 0.2)
    log = HostLog(home=open_home(tmp_path), run_id="r", host="host-0")
    log.open(1)
    log._log._file = Full(log._log._file)
    log.write("run.message", {"text": "lost"})
    log.close()
    assert "host-0.1.jsonl lacks its last events: No space left on device" in capsys.readouterr().err


def test_an_attempt_begins_on_a_full_disk(tmp_path, monkeypatch):
    """Its file cannot even be made: its first lines are written when there is room again."""
    log = HostLog(home=open_home(tmp_path), run_id="r", host="host-0")
    log.open(1)
    opened = os.open

    def full(path, flags, *rest, **more):
        if flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(path, flags, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", full)
        log.open(2)
        log.write("run.message", {"text": "one"})
    log.write("run.message", {"text": "two"})
    assert [event.detail["text"] for _, event in read(tmp_path / "events")] == ["one", "two"]
    assert (tmp_path / "events" / "host-0.2.jsonl").is_file()


def told(step, mono_ns, *, rank=0, attempt=1):
    return RankEvent(
        kind="run.message",
        attempt=attempt,
        rank=rank,
        step=step,
        phase=None,
        mono_ns=mono_ns,
        wall_ns=7,
        detail={"text": "so far"},
    )


def test_what_ranks_send_a_second_time_is_written_once(tmp_path):
    """Its predecessor was killed with events in its sockets; ranks send those again, and what it had written."""
    first = HostLog(home=open_home(tmp_path), run_id="r", host="host-0")
    first.open(1)
    sent = [told(1, 10), told(2, 20), told(2, 20, rank=1), told(3, 30)]
    assert [first.write_rank(event) for event in sent[:2]] == [True, True]
    first._log.close()
    (tmp_path / "events" / "host-0.1.jsonl").write_bytes(
        (tmp_path / "events" / "host-0.1.jsonl").read_bytes() + b'{"torn'
    )
    second = HostLog(home=open_home(tmp_path), run_id="r", host="host-0")
    second.write("run.message", {"text": "here"})
    second.open(1)
    assert [second.write_rank(event) for event in [*sent, told(4, 40)]] == [False, False, True, True, True]
    second.open(2)
    assert second.write_rank(told(5, 20, attempt=2)), "another attempt has a file of its own"
    events = [(event.step, event.rank) for _, event in read(tmp_path / "events") if event.rank is not None]
    assert events == [(1, 0), (2, 0), (2, 1), (3, 0), (4, 0), (5, 0)]


def test_what_a_rank_that_says_little_sends_again_is_found_far_back(tmp_path):
    """The first rank's steps fill the file; the others keep what they sent for as long."""
    first = HostLog(home=open_home(tmp_path), run_id="r", host="host-0")
    first.open(1)
    early = told(1, 10, rank=1)
    first.write_rank(early)
    for number in range(2100):
        first.write_rank(replace(told(number, 100 + number), detail={"text": "x" * 9000}))
    first._log.close()
    assert (tmp_path / "events" / "host-0.1.jsonl").stat().st_size > 18 << 20
    second = HostLog(home=open_home(tmp_path), run_id="r", host="host-0")
    second.open(1)
    assert not second.write_rank(early)
    assert len(second._before) == 1 + NEWEST and sent_events.KEPT <= NEWEST // 2, "of each, no more than it may send"
