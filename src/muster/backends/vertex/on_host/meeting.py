"""The hosts of a job meet at the chief's name, and go on by address.

A name in ``CLUSTER_SPEC`` leads to a service that passes on port 2222 and few others, does not resolve before its host
is up, and may not lead a host to itself. So a host dials the chief by name on 2222 alone, hands over the address of its
own interface, and the chief calls it back there: what all later connections (supervisor, agents, NCCL) rest on has then
been seen to work, or the reason is known at the start. Both ends prove that they know the run's token.
"""

from __future__ import annotations

import functools
import json
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from muster.core.errors import AccessError, BackendError
from muster.core.protocols import Clock
from muster.core.typed_json import Json, JsonObject, Unreadable, at, child, text, texts
from muster.protocol.codec import reader_of
from muster.protocol.hello import MEETING, MET, MeetingHello, Met, Refused, greeting_reader
from muster.protocol.values import Address
from muster.protocol.version import MINE, OtherVersion
from muster.transport.listening import listen_on
from muster.transport.stream import Stream
from muster.transport.stream_server import serve_streams, stop_serving

VARIABLE = "CLUSTER_SPEC"
POOLS = ("workerpool0", "workerpool1")
"""The chief's and the other hosts'; the rest are Google's reduction servers and evaluators."""
PORT = 2222
"""Of every host's service, where none is named."""
METADATA = "169.254.169.254"
"""Every host has a route to it, over the interface that leads to the others."""
CALL_S = 5.0
"""For a connection and its handshake inside one region."""
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 10.0


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A host of the job by its name in the cluster."""

    name: str
    port: int


@dataclass(frozen=True, kw_only=True)
class Seat:
    index: int
    """0: the chief; the others follow in the order of their pool."""
    peers: tuple[Peer, ...]
    """All hosts, this one included, by index; empty for a single host without ``CLUSTER_SPEC``."""

    @property
    def chief(self) -> bool:
        return self.index == 0


def seat(value: str | None, *, hosts: int | None) -> Seat:
    """This host's place, from the variable's value (None: it is not set), in a job of ``hosts`` hosts (None: of as many
    as it names).

    Jobs have shown more forms than Google documents (``job`` as text, ``trial`` missing, further keys, names with and
    without a prefix), so only ``cluster`` and ``task`` are read::

        {"cluster": {"workerpool0": ["cmle-training-workerpool0-ab-0:2222"], "workerpool1": ["...-0:2222"]},
         "environment": "cloud", "task": {"type": "workerpool1", "index": 1, "trial": ""}, "job": "{...}"}

    Raises:
        BackendError: it cannot be read, or it is of another number of hosts.
    """
    if not value or not value.strip():
        if hosts in (1, None):
            return Seat(index=0, peers=())
        raise BackendError(f"{VARIABLE} is not set on one of {hosts} hosts", hint="this is not a worker of Vertex AI")
    spec = _object(value)
    pools = [[_peer(one) for one in texts(spec, "cluster", pool)] for pool in POOLS]
    peers = tuple(peer for pool in pools for peer in pool)
    if hosts is not None and len(peers) != hosts:
        raise BackendError(f"{VARIABLE} names {len(peers)} hosts, and the run has {hosts}: {_short(value)}")
    kind, within = text(spec, "task", "type"), _index(at(spec, "task", "index"))
    if kind not in POOLS or within is None or within >= len(pools[POOLS.index(kind)]):
        raise BackendError(f"{VARIABLE} gives this host no place among them: {_short(value)}")
    return Seat(index=within + (len(pools[0]) if kind == POOLS[1] else 0), peers=peers)


def _object(value: str) -> JsonObject:
    try:
        found = child(json.loads(value))
    except (ValueError, RecursionError) as error:
        raise BackendError(f"{VARIABLE} is no JSON: {_short(value)}") from error
    return found


def _peer(named: str) -> Peer:
    name, colon, port = named.rpartition(":")
    if colon and port.isdecimal() and port.isascii() and 0 < int(port[:6]) < 65536:
        return Peer(name=name, port=int(port))
    return Peer(name=named, port=PORT)


def _index(value: Json) -> int | None:
    """A number, also as text."""
    if isinstance(value, str) and value.isascii() and value.isdecimal():
        value = int(value[:9])
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _short(value: str) -> str:
    return repr(value if len(value) <= 200 else value[:200] + "...")


def own_address(towards: str = METADATA) -> str:
    """The address of the interface that leads to ``towards``; nothing is sent.

    Raises:
        BackendError: none does.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((towards, 80))
        except OSError as error:
            raise BackendError(f"no interface of this host leads to {towards}: {error}") from error
        return str(sock.getsockname()[0])


@dataclass(kw_only=True)
class Meeting:
    """The chief's side. Hosts come when they are up, minutes apart, and again after their machine was replaced."""

    token: bytes
    log: Callable[[str], None]
    hosts: dict[int, MeetingHello] = field(default_factory=dict)
    """Who was met and reached, by index; the newest start of each."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def serve(self, listener: socket.socket) -> None:
        """Answer until ``stop_serving(listener)``, each host in a thread of its own."""
        read = greeting_reader(MEETING, me="the first host")
        serve_streams(listener, self.token, self._answer, decode=read, peer="hosts of this job", log=self.log)

    def _answer(self, stream: Stream[MeetingHello | Refused]) -> None:
        hello = stream.receive()
        if isinstance(hello, Refused):
            stream.send(hello)
            return
        reason = self._call(hello.address)
        with self._lock:
            before = self.hosts.get(hello.index)
            if not reason:
                self.hosts[hello.index] = hello
        returned = before is not None and before.boot != hello.boot
        if reason:
            self.log(f"host {hello.index} cannot be reached at {hello.address[0]}: {reason}")
        stream.send(Met(reached=not reason, reason=reason, returned=returned))

    def _call(self, address: Address) -> str:
        """Why the host that gave ``address`` does not answer there; empty: it does."""
        try:
            with socket.create_connection(address, timeout=CALL_S) as sock:
                Stream(sock, self.token, server=False, decode=reader_of(MET), timeout_s=CALL_S)
        except (OSError, AccessError) as error:
            return str(error) or type(error).__name__
        return ""


Dial = Callable[[Peer], socket.socket]


def dial(peer: Peer) -> socket.socket:
    """A connection to ``peer`` by its name. Raises OSError."""
    return socket.create_connection((peer.name, peer.port), timeout=CALL_S)


def meet(
    chief: Peer, token: bytes, *, index: int, own: str, boot: str, clock: Clock, limit_s: float, call: Dial = dial
) -> Met:
    """Tell the chief of this host, once it answers; ``own``: the address at which this host is called back.

    Raises:
        BackendError: it did not answer within ``limit_s``.
        OtherVersion: it is of another version of Muster.
    """
    listener = listen_on(own)
    serve = functools.partial(
        serve_streams, listener, token, _hang_up, decode=reader_of(MET), peer="the first host", log=_ignore
    )
    try:
        threading.Thread(target=serve, name="called-back", daemon=True).start()
        hello = MeetingHello(version=MINE, index=index, boot=boot, address=(own, listener.getsockname()[1]))
        return _until_answered(chief, token, hello, clock=clock, limit_s=limit_s, call=call)
    finally:
        stop_serving(listener)


def _until_answered(chief: Peer, token: bytes, hello: MeetingHello, *, clock: Clock, limit_s: float, call: Dial) -> Met:
    began_ns, pause_s = clock.monotonic_ns(), SHORTEST_PAUSE_S
    while True:
        try:
            with call(chief) as sock:
                # The answer comes after the chief has called back, in ``CALL_S`` for its connection and its handshake.
                stream = Stream(sock, token, server=False, decode=reader_of(MET), timeout_s=3 * CALL_S)
                stream.send(hello)
                answer = stream.receive()
        except (OSError, AccessError, Unreadable) as error:
            waited_s = (clock.monotonic_ns() - began_ns) / 1e9
            if waited_s + pause_s > limit_s:
                raise BackendError(
                    f"the first host did not answer at {chief.name}:{chief.port} in {waited_s:.0f} s: {error}",
                    hint="muster logs RUN shows whether it has started",
                ) from error
            clock.sleep(pause_s)
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
            continue
        if isinstance(answer, Refused):
            raise OtherVersion(answer.reason)
        return answer


def _hang_up(stream: Stream[Met | Refused]) -> None:
    """Who called knows that this host is there, and whose it is."""


def _ignore(_line: str) -> None:
    """Strangers that connect during a call of seconds."""
