"""A busy store is asked again for a stated time; a write whose answer was lost is known again by its bytes."""

import threading
import time

import pytest
from fakes.clock import VirtualClock
from fakes.objects import Objects

from muster.core.errors import BusyError, ConflictError
from muster.storage.store import AnyStore
from muster.storage.store.patient import LONGEST_WAIT_S, Patient

URI = "gs://bucket/lease.json"


@pytest.fixture
def clock():
    return VirtualClock()


def patient(store, clock, **more):
    return Patient(store, sleep=clock.sleep, now_s=lambda: clock.now_s, **more)


def test_what_is_refused_for_a_while_succeeds(clock):
    store = Objects({number: "refused" for number in range(3)})
    generation = patient(store, clock).put_if_absent(URI, b"mine")
    assert store.held[URI].generation == generation
    assert 0.5 < clock.now_s < 2


def test_it_gives_up_within_its_deadline(clock):
    store = Objects()
    store.down = True
    for call in ("get", "list", "delete"):
        began = clock.now_s
        with pytest.raises(BusyError):
            getattr(patient(store, clock, deadline_s=5.0), call)(URI)
        assert 5.0 - LONGEST_WAIT_S <= clock.now_s - began <= 5.0
    assert store.requests < 3 * 12


@pytest.mark.parametrize("first", [True, False])
def test_a_lost_answer_of_a_conditional_write_is_found_again(clock, first):
    store = Objects()
    before = None if first else store.put(URI, b"before")
    store.faults[store.requests] = "lost"
    mine = patient(store, clock)
    generation = mine.put_if_absent(URI, b"mine") if first else mine.put_if(URI, b"mine", before)
    assert store.held[URI].generation == generation
    assert mine.put_if(URI, b"next", generation)


def test_who_lost_a_race_is_told_so(clock):
    """A rival writes while we wait to ask again."""
    store = Objects()
    before = store.put(URI, b"before")
    store.faults[store.requests] = "refused"
    rival = Patient(store, sleep=lambda s: (clock.sleep(s), store.put(URI, b"theirs")), now_s=lambda: clock.now_s)
    with pytest.raises(ConflictError):
        rival.put_if(URI, b"mine", before)
    assert store.held[URI].data == b"theirs"
    store.put(URI, b"mine")  # equal bytes, and no answer of ours was lost
    with pytest.raises(ConflictError):
        patient(store, clock).put_if_absent(URI, b"mine")


def test_a_request_that_hangs_is_given_up_in_time_but_for_the_first_one():
    going_on, slow = threading.Event(), [0.6]
    store = Objects(took=lambda method: time.sleep(slow.pop()) if slow else going_on.wait(20))
    mine = Patient(store, deadline_s=0.5, answer_s=0.3)
    with pytest.raises(FileNotFoundError):  # gets a token, connects
        mine.get(URI)
    began = time.monotonic()
    with pytest.raises(BusyError, match="no answer"):
        mine.put_if_absent(URI, b"x")
    assert time.monotonic() - began < 2
    going_on.set()


def test_every_bucket_is_met_with_patience():
    store = AnyStore(timeout_s=2.0, patience_s=3.0, answer_s=2.0)
    made = store._of("gs://bucket/x")
    assert isinstance(made, Patient)
    assert (made.deadline_s, made.answer_s) == (3.0, 2.0)
