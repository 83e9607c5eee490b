"""The log of a run's requests: what two clients, hosts that wake and a `down` write into it, and who is killed when."""

import uuid

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.backends.google.request_log import FILE, Request, RequestLogFile
from muster.core.errors import ConflictError
from muster.storage.store import MemoryStore

RUN = "llama-1"


FATES = ["well", "well", "well", "overtaken", "lost", "killed before", "killed after"]


class Killed(BaseException):
    """The process that wrote is no more."""


def ask(file, where="us-central1"):
    """A client's next request; its number and mark."""
    log, generation = file.read()
    log = log.with_request(Request(number=log.next_number, where=where, asked_s=0.0))
    file.write(log, generation)
    return log.last.number, log.mark


@pytest.fixture
def file():
    file = RequestLogFile(store=MemoryStore(), home=f"memory://{uuid.uuid4().hex}")
    file.begin(RUN, 1)
    return file


def test_of_two_jobs_one_trains_and_a_restarted_job_is_the_same(file):
    _, mark = ask(file)
    assert file.claim(mark, "7", 5).owner_began_wall_ns == 5
    assert not file.claim(mark, "8", 6)
    assert file.claim(mark, "7", 9).owner_began_wall_ns == 5, "another host of it, or the same one after a restart"
    assert file.begin(RUN, 1).last.owner == "7", "the same submission again takes nothing from its job"


def test_a_job_of_an_older_request_wakes_late_and_does_nothing(file):
    _, first = ask(file)
    _, second = ask(file, "us-east4")
    assert not file.claim(first, "7", 0) and file.claim(second, "9", 0)
    file.close()
    assert not file.claim(second, "9", 0), "`muster down` came"
    assert file.begin(RUN, 1).closed, "no repeat undoes a `down`"
    assert not file.begin(RUN, 2).closed and not file.claim(second, "9", 0)
    assert ask(file)[0] == 3, "names of machines are never used twice"


def test_without_a_request_no_job_trains(file):
    assert not file.claim("", "7", 0) and not file.claim("first", "7", 0)
    file.store.delete(f"{file.home}/{FILE}")
    assert not file.claim("first", "7", 0) and file.close() is None


class Unkind:
    """A store of several processes. Before a write another one may act; its answer may be lost, which the writer hears
    as a conflict with its own bytes; or the writer is killed before or after it."""

    def __init__(self, draw):
        self.store, self.draw, self.others = MemoryStore(), draw, []

    def get(self, uri):
        return self.store.get(uri)

    def put_if_absent(self, uri, data):
        return self.write(self.store.put_if_absent, uri, data)

    def put_if(self, uri, data, generation):
        return self.write(self.store.put_if, uri, data, generation)

    def write(self, put, *words):
        fate = self.draw(st.sampled_from(FATES))
        if fate == "killed before":
            raise Killed
        if fate == "overtaken" and self.others:
            self.others.pop()()
        result = put(*words)
        if fate == "killed after":
            raise Killed
        if fate == "lost":
            raise ConflictError("the repeated write found another generation: its own")
        return result


class Processes:
    """Clients and hosts of one run, and what each of them was told."""

    def __init__(self, draw):
        self.draw, self.store = draw, Unkind(draw)
        self.file = RequestLogFile(store=self.store, home=f"memory://{uuid.uuid4().hex}")
        self.numbers, self.owners, self.closed = [], {}, set()

    def act(self):
        """One of them does one thing, which another one may interrupt."""
        self.store.others = [self.act_once] * self.draw(st.integers(0, 2))
        self.act_once()

    def act_once(self):
        what = self.draw(st.sampled_from(["begin", "ask", "ask", "close", "claim", "claim"]))
        try:
            getattr(self, what)()
        except (Killed, ConflictError):
            pass

    def begin(self):
        log, _ = self.file.read()
        wanted = 1 if log is None else log.submission + (log.closed and self.draw(st.booleans()))
        assert self.file.begin(RUN, wanted).submission == wanted

    def ask(self):
        log, generation = self.file.read()
        if log is not None and not log.closed:
            request = Request(number=log.next_number, where="r", asked_s=0.0)
            self.file.write(log.with_request(request), generation)
            self.numbers.append(request.number)

    def close(self):
        if (log := self.file.close()) is not None:
            assert log.closed
            self.closed.add(log.submission)

    def claim(self):
        log, _ = self.file.read()
        mark, job = log.mark if log is not None else "none", self.draw(st.sampled_from("78"))
        if request := self.file.claim(mark, job, 0):
            assert request.owner == job == self.owners.setdefault(mark, job), "two jobs train"
            assert log.submission not in self.closed, "a host trains after `muster down`"

    def check(self):
        log, _ = self.file.read()
        if log is not None:
            assert log.closed or log.submission not in self.closed, "a `down` was undone"
            own = [one.number for one in log.requests]
            assert own == sorted(set(own)) and all(number >= log.first_number for number in own)
            assert {one for one in self.numbers if one >= log.first_number} <= set(own), "a request is forgotten"


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_whatever_is_lost_killed_or_overtaken(data):
    """At most one job trains for a request, none after a `down`; no number is used twice, no request forgotten."""
    processes = Processes(data.draw)
    for _ in range(data.draw(st.integers(1, 14))):
        processes.act()
        processes.check()
    assert len(processes.numbers) == len(set(processes.numbers))
