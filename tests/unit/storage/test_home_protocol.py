"""The protocol of ``storage.home.chunks`` under random schedules, at the granularity of one request.

Each process is a thread that waits before each request until the schedule lets it go on. A request is answered, or not
answered and carried out (lost), or not answered and carried out later, also after its sender was killed. Processes of
one folder follow each other, and a fence comes at any moment.
"""

import contextlib
import threading

import pytest
from fakes.objects import Killed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muster.core.errors import BusyError, ConflictError, MusterError
from muster.core.protocols import Stored
from muster.storage.home import chunks
from muster.storage.home.chunks import ChunkWriter, Fence, chain, offsets_in

FILE = "gs://bucket/runs/run-1/logs/host-0/rank-0.log"
STEPS = 150


class Schedule:
    """Processes that share a bucket; ``choose(n)`` draws below n."""

    def __init__(self, choose):
        self.choose, self.held, self.generations, self.late = choose, {}, 0, []
        self.waiting, self.running, self.changed = {}, set(), threading.Condition()

    # ------------------------------------------------------------ the bucket

    def apply(self, request):
        """Carry out one write; its generation, or None where its condition fails."""
        uri, data, condition = request
        found = self.held.get(uri)
        if condition != (found.generation if found else None):
            return None
        self.generations += 1
        self.held[uri] = Stored(data=data, generation=str(self.generations))
        return str(self.generations)

    @property
    def file(self):
        """What a reader sees."""
        objects = offsets_in({uri: len(found.data) for uri, found in self.held.items()}, FILE)
        return b"".join(self.held[chunks.uri_of(FILE, offset)].data for offset in chain(objects)[0])

    # ------------------------------------------------------------ processes

    def start(self, name, work):
        def run():
            try:
                work(Requests(self, name))
            except (Killed, ConflictError):
                pass
            finally:
                with self.changed:
                    self.running.discard(name)
                    self.changed.notify_all()

        self.running.add(name)
        threading.Thread(target=run, daemon=True).start()

    def settle(self):
        """Wait until every process has ended or waits for its request."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.running <= self.waiting.keys(), 20)

    def step(self, name, *, kill=False):
        """Let one request be carried out, or end its process."""
        with self.changed:
            request, reply = self.waiting.pop(name)
            reply.append(Killed() if kill else self.answer(request))
            if kill and isinstance(request, tuple) and self.choose(2):
                self.late.append(request)
            self.changed.notify_all()
            if not kill:
                self.changed.wait_for(lambda: name not in self.running or name in self.waiting, 20)

    def answer(self, request):
        if callable(request):
            return request()
        fate = self.choose(8)
        if fate == 0:  # it travels on
            self.late.append(request)
            return BusyError("no answer")
        made = self.apply(request)
        if fate == 1:
            return BusyError("no answer")
        return made if made is not None else ConflictError(request[0])


class Requests:
    """The ``Store`` of one process."""

    def __init__(self, schedule, name):
        self.schedule, self.name = schedule, name

    def ask(self, request):
        schedule, reply = self.schedule, []
        with schedule.changed:
            schedule.waiting[self.name] = request, reply
            schedule.changed.notify_all()
            assert schedule.changed.wait_for(lambda: reply, 20)
        if isinstance(reply[0], BaseException):
            raise reply[0]
        return reply[0]

    def list(self, prefix):
        held = self.schedule.held
        return self.ask(lambda: {uri: len(held[uri].data) for uri in sorted(held) if uri.startswith(f"{prefix}/")})

    def get(self, uri, *, start=0):
        return self.ask(lambda: self.schedule.held.get(uri) or FileNotFoundError(uri))

    def put_if_absent(self, uri, data):
        return self.ask((uri, bytes(data), None))

    def put_if(self, uri, data, generation):
        return self.ask((uri, bytes(data), generation))


def play(choose, path):
    """Returns whether a fence was completed."""
    schedule, acknowledged, fenced = Schedule(choose), [0], []
    path.write_bytes(b"")

    def write(store):
        clock = [0.0]
        writer = ChunkWriter(store=store, uri=FILE, path=path, run_id=None, now_s=lambda: clock[0])
        while True:
            try:
                writer.write()
                acknowledged[0] = max(acknowledged[0], writer.end)
                store.ask(lambda: None)  # nothing waits: until there is more
            except ConflictError:
                raise
            except MusterError:
                pass
            clock[0] += choose(2) * 0.7

    def fence(store):
        while True:
            try:
                Fence(store).end_file(FILE, store.list(FILE))
                fenced.append(len(schedule.file))
                return
            except BusyError:
                pass

    schedule.start("writer 0", write)
    began = choose(STEPS)
    writers, line = 1, 0
    for number in range(STEPS):
        schedule.settle()
        if choose(3) == 0 and line < 60:
            with open(path, "ab") as file:
                file.write(b"line %02d\n" % line)
            line += 1
        if number == began:
            schedule.start("fence", fence)
            schedule.settle()
        for request in [schedule.late.pop(choose(len(schedule.late)))] if schedule.late and choose(2) else []:
            schedule.apply(request)
        names = sorted(schedule.waiting)
        if names:
            name = names[choose(len(names))]
            kill = name != "fence" and choose(25) == 0
            schedule.step(name, kill=kill)
            if kill:
                schedule.settle()
                schedule.start(f"writer {writers}", write)
                writers += 1
        schedule.settle()
        held = schedule.file
        assert path.read_bytes().startswith(held), "not what was written"
        assert len(held) >= acknowledged[0], "acknowledged, and not in the file"
        assert not fenced or len(held) == fenced[0], "it grew after the fence"
    for name in list(schedule.waiting):
        schedule.step(name, kill=True)
    schedule.settle()
    return bool(fenced)


def play_two(choose, folder):
    """Two machines write one file at once: each begins with what the home holds, and begins again once it is refused.
    Returns how often one was."""
    schedule, acknowledged, refused = Schedule(choose), [b""], []

    def write(name):
        path = folder / name

        def work(store):
            while True:
                path.write_bytes(store.ask(lambda: schedule.file))
                writer = ChunkWriter(store=store, uri=FILE, path=path, run_id=None, now_s=lambda: 0.0, is_shared=True)
                with contextlib.suppress(ConflictError):
                    while True:
                        with open(path, "ab") as file:
                            file.write(b"of %s\n" % name.encode())
                        with contextlib.suppress(BusyError):
                            writer.write()
                            acknowledged.append(path.read_bytes()[: writer.end])
                refused.append(name)

        return work

    for name in ("a", "b"):
        schedule.start(name, write(name))
    for _ in range(STEPS):
        schedule.settle()
        if schedule.late and choose(2):
            schedule.apply(schedule.late.pop(choose(len(schedule.late))))
        names = sorted(schedule.waiting)
        schedule.step(names[choose(len(names))])
        schedule.settle()
        assert all(schedule.file.startswith(held) for held in acknowledged[-2:]), "acknowledged, and not in the file"
    for name in list(schedule.waiting):
        schedule.step(name, kill=True)
    schedule.settle()
    return len(refused)


@pytest.fixture(scope="module", autouse=True)
def small_objects():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "FULL_BYTES", 40)
        yield


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.randoms(use_true_random=False))
def test_a_file_is_a_prefix_that_holds_what_was_acknowledged_and_ends_at_its_fence(tmp_path_factory, seed):
    play(seed.randrange, tmp_path_factory.mktemp("protocol") / "rank-0.log")


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.randoms(use_true_random=False))
def test_of_two_machines_that_write_one_file_at_once_each_keeps_what_was_acknowledged(tmp_path_factory, seed):
    play_two(seed.randrange, tmp_path_factory.mktemp("two"))
