"""Hosts of a job meet at the chief's name and hand over their own address: real sockets on this machine."""

import contextlib
import socket
import threading

import pytest
from fakes.clock import VirtualClock

from muster.backends.vertex.on_host.meeting import CALL_S, Meeting, Peer, meet, own_address
from muster.core.errors import BackendError
from muster.protocol.codec import reader_of
from muster.protocol.hello import MET, MeetingHello, Met, Refused
from muster.protocol.version import MINE, OtherVersion, Version
from muster.transport.listening import listen_on
from muster.transport.stream import Stream
from muster.transport.stream_server import stop_serving

TOKEN = b"t" * 32
CHIEF = Peer(name="cmle-training-workerpool0-ab-0", port=2222)


@pytest.fixture
def chief():
    """A chief on some port, and how its name is dialled; the service in between shows none of its callers."""
    said: list[str] = []
    meeting = Meeting(token=TOKEN, log=said.append)
    listener = listen_on("127.0.0.1")
    threading.Thread(target=meeting.serve, args=(listener,), daemon=True).start()
    at = listener.getsockname()
    yield meeting, (lambda _peer: socket.create_connection(at, timeout=CALL_S)), said
    stop_serving(listener)


def come(call, *, index=1, boot="b1", own="127.0.0.7", limit_s=600.0, clock=None):
    return meet(
        CHIEF, TOKEN, index=index, own=own, boot=boot, clock=clock or VirtualClock(), limit_s=limit_s, call=call
    )


def test_the_name_does_not_resolve_then_refuses_then_leads_to_the_chief(chief):
    meeting, call, _ = chief
    failures = [socket.gaierror(-2, "Name or service not known")] * 3 + [ConnectionRefusedError(111, "refused")]
    clock = VirtualClock()

    def late(peer):
        assert peer == CHIEF, "no other name is dialled, least of all its own"
        if failures:
            raise failures.pop(0)
        return call(peer)

    assert come(late, clock=clock) == Met(reached=True)
    assert clock.now_s == 1 + 2 + 4 + 8
    assert meeting.hosts[1].address[0] == "127.0.0.7", "by its own word: the service's callers all look the same"


def test_a_host_that_comes_back_on_another_machine_is_known_by_its_boot(chief):
    meeting, call, _ = chief
    assert not come(call).returned
    assert not come(call).returned, "the same start again: an answer was lost"
    assert come(call, boot="b2", own="127.0.0.8").returned
    assert (meeting.hosts[1].boot, meeting.hosts[1].address[0]) == ("b2", "127.0.0.8")


def say(call, hello):
    with call(CHIEF) as sock:
        stream = Stream(sock, TOKEN, server=False, decode=reader_of(MET))
        stream.send(hello)
        return stream.receive()


def hello(address, **changes):
    return MeetingHello(**{"version": MINE, "index": 2, "boot": "b", "address": address, **changes})


def test_an_address_that_passes_nothing_is_said_at_the_start(chief):
    meeting, call, said = chief
    with listen_on("127.0.0.7") as closed:
        address = closed.getsockname()
    answer = say(call, hello(address))
    assert not answer.reached and "refused" in answer.reason.lower()
    assert meeting.hosts == {} and "host 2 cannot be reached at 127.0.0.7" in said[-1]


def test_whoever_answers_at_the_address_has_to_know_the_token(chief):
    meeting, call, _ = chief
    with listen_on("127.0.0.7") as listener:

        def impostor():
            with contextlib.suppress(OSError):
                sock, _ = listener.accept()
                with sock, contextlib.suppress(Exception):
                    Stream(sock, b"x" * 32, server=True, decode=reader_of(MET), handshake_s=1.0)

        threading.Thread(target=impostor, daemon=True).start()
        assert not say(call, hello(listener.getsockname())).reached
    assert meeting.hosts == {}


def test_a_stranger_is_not_answered_and_the_next_host_is(chief):
    meeting, call, _ = chief
    with call(CHIEF) as sock, pytest.raises((ConnectionError, TimeoutError)):
        Stream(sock, b"x" * 32, server=False, decode=reader_of(MET), timeout_s=2.0)
    assert come(call).reached and list(meeting.hosts) == [1]


def test_another_version_is_named_and_not_tried_again(chief, monkeypatch):
    _, call, _ = chief
    other = Version(protocol=MINE.protocol + 1, muster="9.9")
    refused = say(call, hello(("127.0.0.7", 1), version=other))
    assert isinstance(refused, Refused) and "9.9" in refused.reason
    monkeypatch.setattr("muster.backends.vertex.on_host.meeting.MINE", other)
    clock = VirtualClock()
    with pytest.raises(OtherVersion, match=r"9\.9"):
        come(call, clock=clock)
    assert clock.now_s == 0


def test_a_chief_that_never_comes_is_named_with_the_last_reason():
    def nobody(_peer):
        raise socket.gaierror(-2, "Name or service not known")

    clock = VirtualClock()
    with pytest.raises(BackendError, match=r"workerpool0-ab-0:2222 in .* s: .*Name or service not known"):
        come(nobody, limit_s=60.0, clock=clock)
    assert 50 <= clock.now_s <= 60


def test_the_own_address_is_the_interfaces_that_leads_there():
    assert own_address("127.0.0.1") == "127.0.0.1"
    with pytest.raises(BackendError, match="no interface"):
        own_address("255.255.255.255")
