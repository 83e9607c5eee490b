"""The box in a run's home: letters that are lost, doubled, put back, foreign, late or taken by a host that dies."""

import threading
import time
from dataclasses import replace

import pytest

from muster.backends import mailbox
from muster.backends.mailbox import Answer, Box, Letter
from muster.core.errors import BackendError, ConflictError, UsageError
from muster.core.typed_json import decode, encode
from muster.storage.store import MemoryStore

HOME = "memory://bucket/runs/llama"
URI, ANSWER = f"{HOME}/mail/supervisor.json", f"{HOME}/mail/supervisor.answer.json"


class Clock:
    """Wall and monotonic time that sleeping moves; ``during`` happens at the next sleep."""

    def __init__(self):
        self.now_s, self.during = 1_000_000.0, []

    def monotonic_ns(self):
        return int(self.now_s * 1e9)

    def sleep(self, seconds):
        self.now_s += seconds
        if self.during:
            self.during.pop(0)()


class World:
    def __init__(self):
        self.store, self.clock, self.done = MemoryStore(), Clock(), []

    def box(self, *, name="supervisor", run_id="llama", token=b"t" * 32, store=None):
        store = store or self.store
        return Box(store=store, home=HOME, name=name, run_id=run_id, token=token, clock=self.clock,
                   wall_ns=self.clock.monotonic_ns)  # fmt: skip

    def act(self, kind, text):
        self.done.append((kind, text))
        return f"done {text}"

    def serve(self, box=None):
        return (box or self.box()).serve_once(self.act)

    def ask(self, text="stop", *served, timeout_s=30.0):
        """Asked while each of ``served`` happens at one look."""
        self.clock.during = list(served)
        return self.box().send("ask", text, timeout_s=timeout_s)


@pytest.fixture(autouse=True)
def empty():
    """The store is of the whole process."""
    for uri in MemoryStore().list(HOME):
        MemoryStore().delete(uri)


@pytest.fixture
def world():
    return World()


def test_a_letter_is_answered_and_acted_on_once(world):
    host = world.box()
    assert world.ask("stop", lambda: world.serve(host)) == "done stop"
    assert world.ask("again", lambda: world.serve(host)) == "done again"
    assert not world.serve(host) and not world.serve(), "also by a host that has just taken over"
    assert world.done == [("ask", "stop"), ("ask", "again")]


def test_most_looks_are_one_read(world):
    host, reads = world.box(), []
    world.ask("stop", lambda: world.serve(host))
    get = world.store.get
    world.store.get = lambda uri: (reads.append(uri), get(uri))[1]
    assert not world.serve(host)
    assert reads == [URI]


def test_what_nobody_took_is_never_done_later(world):
    with pytest.raises(BackendError, match="no host of llama took the question in 30 s"):
        world.ask()
    assert not world.serve() and not world.done
    assert "withdrawn" in decode(Answer, world.store.get(ANSWER).data).error
    assert world.ask("again", world.serve) == "done again"


def test_a_host_that_takes_it_at_the_last_moment_is_not_called_nobody(world):
    def withdraw(letter, generation):
        world.serve()
        return real(letter, generation)

    sender = world.box()
    real, sender._withdraw = sender._withdraw, withdraw
    with pytest.raises(BackendError, match="taken and not answered in 30 s: it may have been done"):
        sender.send("ask", "stop", timeout_s=30.0)
    assert world.done == [("ask", "stop")]


def test_a_letter_whose_sender_died_is_not_done_after_its_time(world):
    world.box()._post("ask", "stop", world.clock.monotonic_ns() + 30 * 10**9)
    world.clock.now_s += 30 + mailbox.SKEW_S + 1
    assert world.serve() and not world.done


def test_a_mac_that_is_no_ascii_keeps_nobody_out(world):
    letter = Letter(number=1, id="x", kind="ask", text="stop", until_wall_ns=2**62, mac="ä" * 64)
    world.store.put(URI, encode(letter))
    world.store.put(ANSWER, encode(Answer(number=1, id="x", mac="ä" * 64)))
    assert not world.serve() and not world.done
    assert world.ask("stop", world.serve) == "done stop"


def test_a_letter_is_acted_on_once_even_if_its_answer_is_deleted(world):
    host = world.box()
    assert world.ask("stop", lambda: world.serve(host)) == "done stop"
    letter = world.store.get(URI).data
    world.store.delete(ANSWER)
    world.store.put(URI, letter)  # another generation: it is looked at again
    assert not world.serve(host) and world.done == [("ask", "stop")]


def test_the_host_that_took_it_dies(world):
    def dies():
        class Dead(BaseException):
            pass

        def act(kind, text):
            raise Dead

        with pytest.raises(Dead):
            world.box().serve_once(act)

    with pytest.raises(BackendError, match="taken and not answered in 30 s: it may have been done"):
        world.ask("stop", dies, world.serve)
    assert not world.done, "no other host does it a second time"


def test_a_refusal_is_told_in_the_hosts_words(world):
    def act(kind, text):
        raise UsageError("no such host", hint="muster status llama")

    with pytest.raises(BackendError, match="no such host") as caught:
        world.ask("x", lambda: world.box().serve_once(act))
    assert caught.value.hint == "muster status llama"


def test_an_old_letter_that_is_put_back_does_nothing(world):
    world.ask("stop", world.serve)
    old = world.store.get(URI).data
    world.ask("status", world.serve)
    world.store.put(URI, old)
    assert not world.serve() and [text for _, text in world.done] == ["stop", "status"]
    world.store.delete(ANSWER)  # whoever may write the bucket may remove this too: then the letter's time is over
    world.clock.now_s += 30 + mailbox.SKEW_S
    world.serve()
    assert [text for _, text in world.done] == ["stop", "status"]


@pytest.mark.parametrize("foreign", [{"token": b"u" * 32}, {"run_id": "other"}, {"name": "host-1"}])
def test_letters_of_others_are_not_read(world, foreign):
    other = world.box(**foreign)
    letter = Letter(number=1, id="x", kind="ask", text="stop", until_wall_ns=world.clock.monotonic_ns() + 10**12)
    world.store.put(URI, encode(replace(letter, mac=other._mac(letter))))
    assert not world.serve() and not world.done
    assert world.ask("stop", world.serve) == "done stop", "and keep nobody out"


def test_letters_and_answers_can_be_read_in_the_bucket_and_the_token_cannot(world):
    """They carry a MAC and are not encrypted: SECURITY.md says so."""
    assert world.ask("ls /data", world.serve) == "done ls /data"
    held = world.store.get(URI).data, world.store.get(ANSWER).data
    assert b"ls /data" in held[0] and b"done ls /data" in held[1]
    assert not [data for data in held if b"t" * 32 in data]


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"number": 1}', b"\xff" * 100])
def test_what_is_no_letter_keeps_nobody_out(world, data):
    world.store.put(URI, data)
    world.store.put(ANSWER, data)
    assert not world.serve()
    assert world.ask("stop", world.serve) == "done stop"


def test_an_answer_of_others_is_not_believed(world):
    def forge():
        letter = decode(Letter, world.store.get(URI).data)
        world.store.put(ANSWER, encode(Answer(number=letter.number, id=letter.id, done=True, text="done")))

    with pytest.raises(BackendError, match="no host"):
        world.ask("stop", forge)


def test_a_write_whose_answer_was_lost_is_the_same_letter(world):
    class Lossy(MemoryStore):
        """The write is carried out, and its repetition finds another generation."""

        def put_if_absent(self, uri, data):
            super().put_if_absent(uri, data)
            raise ConflictError("412")

    world.clock.during = [world.serve]
    assert world.box(store=Lossy()).send("ask", "stop", timeout_s=30) == "done stop"
    assert world.done == [("ask", "stop")]


def test_two_hosts_that_look_at_once_act_once(world):
    first, second = world.box(), world.box()
    letter = Letter(number=1, id="x", kind="ask", text="stop", until_wall_ns=world.clock.monotonic_ns() + 10**12)
    world.store.put(URI, encode(replace(letter, mac=first._mac(letter))))
    # Between the one's look and its taking the other one is faster.
    second._answer = lambda: (world.serve(first), (None, None))[1]
    assert not world.serve(second)
    assert world.done == [("ask", "stop")]


def test_a_second_question_waits_for_the_first(world):
    def both():
        with pytest.raises(BackendError, match="another question waits"):
            world.box().send("ask", "second", timeout_s=3)
        world.serve()

    assert world.ask("first", both) == "done first"
    assert world.ask("third", world.serve) == "done third"


def test_through_real_threads_and_a_real_clock():
    store = MemoryStore()
    box = {"store": store, "home": HOME, "name": "host-0", "run_id": "llama", "token": b"t" * 32}
    ended = threading.Event()

    def host():
        served = Box(**box)
        while not ended.is_set():
            served.serve_once(lambda kind, text: text.upper())
            time.sleep(0.05)

    thread = threading.Thread(target=host)
    thread.start()
    try:
        assert Box(**box).send("exec", "date", timeout_s=20) == "DATE"
    finally:
        ended.set()
        thread.join()
