"""Two versions do not speak to each other, and say so before anything else is read."""

import json
from dataclasses import replace

import pytest

from muster.core.typed_json import Unreadable, encode
from muster.protocol import codec
from muster.protocol.client import TO_CLIENT
from muster.protocol.hello import Refused, greeting_reader
from muster.protocol.lease import LeaseRecord, read_lease
from muster.protocol.to_supervisor import GREETING, AgentHello, ClientHello
from muster.protocol.version import MINE, OtherVersion, Version, incompatible

OTHER = Version(protocol=MINE.protocol + 1, muster="9.9.9")
GREET = greeting_reader(GREETING, me="the supervisor")
HELLO = AgentHello(version=MINE, host="host-1", pid=7)


def frame(kind, **fields):
    return json.dumps([kind, fields]).encode()


def test_another_release_of_the_same_protocol_is_welcome():
    assert incompatible(MINE, replace(MINE, muster="9.9.9"), me="a", them="b") is None
    newer = replace(HELLO, version=replace(MINE, muster="9.9.9"))
    assert GREET(codec.encode(newer)) == newer


def test_another_protocol_is_refused_with_both_named():
    answer = GREET(codec.encode(replace(HELLO, version=OTHER)))
    assert answer == Refused(
        version=MINE,
        reason=f"the supervisor speaks protocol {MINE.protocol} (muster {MINE.muster}), "
        f"host-1 speaks protocol {MINE.protocol + 1} (muster 9.9.9)",
    )
    assert codec.reader_of(TO_CLIENT)(codec.encode(answer)) == answer
    assert isinstance(GREET(codec.encode(ClientHello(version=OTHER))), Refused)


def test_a_hello_is_refused_for_its_version_before_its_fields_are_read():
    version = {"protocol": OTHER.protocol, "muster": "1.0", "later": True}
    assert (
        f"host-1 speaks protocol {OTHER.protocol} (muster 1.0)"
        in GREET(frame("agent_hi", version=version, host="host-1", x=1)).reason
    )


@pytest.mark.parametrize(
    "version", [None, 1, "1", {}, {"protocol": "1", "muster": "x"}, {"protocol": True, "muster": "x"}]
)
def test_a_hello_without_a_version_is_of_an_older_one(version):
    assert "without a version (an older muster)" in GREET(frame("agent_hello", host="h", pid=1, version=version)).reason


@pytest.mark.parametrize("bad", [b"", b"[]", b"{}", b"7", b'["agent_hello"]', b"\xff", b"[" * 100_000])
def test_what_is_no_hello_is_unreadable(bad):
    with pytest.raises(Unreadable):
        GREET(bad)


def test_a_hello_of_this_version_is_read_strictly():
    with pytest.raises(Unreadable, match="agent_hello: pid"):
        GREET(frame("agent_hello", version=json.loads(encode(MINE)), host="h"))


def test_a_lease_of_another_version_names_both_and_is_read_no_further():
    record = LeaseRecord(
        version=MINE, term=3, address=("10.0.0.1", 4000), pid=7, machine="m", boot_id="b",
        expires_wall_ns=1, expires_mono_ns=2,
    )  # fmt: skip
    assert read_lease(encode(record), me="host-1") == record
    with pytest.raises(OtherVersion, match=r"host-1 speaks .*, the run's supervisor speaks protocol .*9\.9\.9"):
        read_lease(json.dumps({"version": json.loads(encode(OTHER)), "whatever": 1}).encode(), me="host-1")
    with pytest.raises(OtherVersion, match="older muster"):
        read_lease(b'{"term": 1, "address": ["h", 1]}', me="host-1")
    for damaged in (b"", b"[]", b"null", encode(record)[:-9], b'{"version": ' + encode(MINE) + b"}"):
        with pytest.raises(Unreadable):
            read_lease(damaged, me="host-1")
