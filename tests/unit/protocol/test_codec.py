"""Every message comes back as it was sent; nothing else is a message."""

import json
import subprocess
import sys
from dataclasses import MISSING, fields

import pytest
from fakes.any_message import JSON, example, messages
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muster.core import typed_json
from muster.core.typed_json import Unreadable
from muster.protocol import tables
from muster.protocol.client import StopRun
from muster.protocol.codec import MAX_BYTES, encode, kind_of, reader_of
from muster.protocol.to_agent import TO_AGENT, Ping, Shutdown
from muster.protocol.to_supervisor import FROM_AGENT, GREETING, AgentHello, HostNotice
from muster.protocol.version import MINE

VERSION = typed_json.encode(MINE)
OURS = json.loads(VERSION)
SENT = [(channel, cls) for channel in tables.CHANNELS for cls in channel.messages]
SENT_IDS = [f"{channel.name}: {kind_of(cls)}" for channel, cls in SENT]
FILES = [cls for _, cls in tables.FILES]
FEW = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize(("channel", "cls"), SENT, ids=SENT_IDS)
def test_every_message_comes_back_as_it_was_sent(channel, cls):
    read = reader_of(channel)

    @FEW
    @given(messages(cls))
    def there_and_back(message):
        assert read(encode(message)) == message

    there_and_back()


@pytest.mark.parametrize("cls", FILES, ids=kind_of)
def test_every_file_comes_back_as_it_was_written(cls):
    @FEW
    @given(messages(cls))
    def there_and_back(record):
        assert typed_json.decode(cls, typed_json.encode(record)) == record

    there_and_back()


@pytest.mark.parametrize(("channel", "cls"), SENT, ids=SENT_IDS)
def test_a_field_that_is_wrong_missing_or_unknown_is_named(channel, cls):
    read, kind = reader_of(channel), kind_of(cls)
    good = json.loads(encode(example(cls)))[1]

    def reason(given):
        with pytest.raises(Unreadable) as refusal:
            read(json.dumps([kind, given]).encode())
        return str(refusal.value)

    assert "surplus" in reason({**good, "surplus": 1})
    for field in fields(cls):
        if field.default is MISSING and field.default_factory is MISSING:
            lacking = {name: value for name, value in good.items() if name != field.name}
            assert f"{kind}: {field.name}" in reason(lacking)
        for wrong in ({"no": ["such"]}, [[["thing"]]]):  # no field is an object or a list of such
            if not (isinstance(wrong, dict) and isinstance(good[field.name], dict)) and field.name != "more":
                assert f"{kind}: {field.name}" in reason({**good, field.name: wrong})


def test_the_kinds_of_a_channel_have_names_of_their_own():
    for channel in tables.CHANNELS:
        kinds = [kind_of(cls) for cls in channel.messages]
        assert len(set(kinds)) == len(kinds)


@pytest.mark.parametrize(("channel", "cls"), SENT, ids=SENT_IDS)
def test_a_message_of_another_channel_is_unreadable(channel, cls):
    frame = encode(example(cls))
    for other in tables.CHANNELS:
        if cls not in other.messages:
            with pytest.raises(Unreadable, match=f"has no message {kind_of(cls)}"):
                reader_of(other)(frame)


@settings(max_examples=300, deadline=None)
@given(
    st.binary(max_size=60)
    | JSON.map(lambda value: json.dumps(value).encode())
    | st.tuples(st.sampled_from([kind_of(cls) for _, cls in SENT]), JSON).map(lambda pair: json.dumps(pair).encode())
)
def test_anything_else_is_unreadable_and_nothing_worse(frame):
    for channel in tables.CHANNELS:
        try:
            message = reader_of(channel)(frame)
        except Unreadable as refusal:
            assert len(str(refusal).splitlines()) == 1
        else:
            assert type(message) in channel.messages


@pytest.mark.parametrize(
    "frame",
    [
        b"", b"[]", b'["ping"]', b'["ping",]', b'["ping",{}]', b'["ping",{"number":1.5}]', b'["ping",{"number":true}]',
        b'["ping",{"number":"1"}]', b'["ping",{"number":9223372036854775808}]', b'["ping",{"number":-1}]',
        b'["ping",{"number":1}],["ping",{"number":1}]', b'["ping",{"number":1},{}]', b'{"t":"ping","id":1}',
        b'["ping",{"number":' + b"1" * 5000 + b"}]", b'["ping",' + b"[" * 100_000 + b"]" * 100_000 + b"]",
        b'["ping",{"number":1}]\xff', b'["shutdown",{"reason":"\xff"}]', b'["shutdown",{"reason":"\\ud800"}]',
    ],
)  # fmt: skip
def test_what_is_no_message_is_unreadable(frame):
    with pytest.raises(Unreadable):
        reader_of(TO_AGENT)(frame)


@pytest.mark.parametrize("grace_s", ["NaN", "Infinity", "-Infinity", "-1", "1e300", '"1"', "null", "false"])
def test_no_time_overflows(grace_s):
    with pytest.raises(Unreadable, match="grace_s"):
        reader_of(FROM_AGENT)(b'["host_notice",{"notice":"n","source":"s","grace_s":%s}]' % grace_s.encode())
    read = reader_of(FROM_AGENT)(b'["host_notice",{"notice":"n","source":"s","grace_s":60}]')
    assert read == HostNotice(notice="n", source="s", grace_s=60.0)


def test_a_layout_that_is_none_is_refused():
    held = {"step": 1, "attempt": 1, "rank": 0, "layout": "r1s2", "host": "h", "tier": "memory"}
    with pytest.raises(Unreadable, match=r"snapshots\.0\.layout"):
        reader_of(GREETING)(
            json.dumps(["agent_hello", {"version": OURS, "host": "h", "pid": 1, "snapshots": [held]}]).encode()
        )


def test_no_frame_is_over_the_limit():
    with pytest.raises(ValueError, match=r"shutdown of .* is over the limit"):
        encode(Shutdown(reason="x" * MAX_BYTES))
    with pytest.raises(Unreadable, match="over the limit"):
        reader_of(TO_AGENT)(b'["shutdown",{"reason":"' + b"x" * MAX_BYTES + b'"}]')


def test_defaults_fill_what_a_frame_leaves_out():
    assert reader_of(GREETING)(b' [ "agent_hello" , {"version": %s, "host": "h", "pid": 7} ] ' % VERSION) == AgentHello(
        version=MINE, host="h", pid=7
    )
    assert json.loads(encode(StopRun())) == [
        "stop_run", {"source": "muster stop", "save": True, "force": False, "again": False},
    ]  # fmt: skip
    assert encode(Ping(number=3)) == b'["ping",{"number":3}]'


THREADS = """
import threading
from muster.protocol.codec import encode, reader_of
from muster.protocol.to_supervisor import FROM_AGENT, GREETING, AgentHello, HostNotice
from muster.protocol.version import MINE
frames = [encode(AgentHello(version=MINE, host=f"host-{number}", pid=number)) for number in range(50)]
start, wrong = threading.Barrier(16), []
def work():
    read = reader_of(GREETING)
    start.wait()
    for number, frame in enumerate(frames):
        message = read(frame)
        if message != AgentHello(version=MINE, host=f"host-{number}", pid=number) or encode(message) != frame:
            wrong.append(message)
    reader_of(FROM_AGENT)(encode(HostNotice(notice="n", source="s", grace_s=1.0)))
threads = [threading.Thread(target=work) for _ in range(16)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(len(wrong))
"""


def test_many_threads_may_read_the_first_message_of_a_process_at_once():
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("0\n", 0), done.stderr
