"""A client's question to the supervisor, and its answer."""

from __future__ import annotations

import socket

from muster.protocol.client import TO_CLIENT, FromClient, SupervisorStatus
from muster.protocol.codec import reader_of
from muster.protocol.hello import ClientHello, Refused
from muster.protocol.values import Address
from muster.protocol.version import MINE, OtherVersion
from muster.transport.stream import Stream


def ask_supervisor(address: Address, token: bytes, message: FromClient, *, timeout_s: float = 5.0) -> SupervisorStatus:
    """Send one message to the supervisor at ``address`` and return the answer.

    Raises:
        OtherVersion: it speaks another protocol.
        AccessError: the token does not prove us.
        OSError: no answer within ``timeout_s``.
        Unreadable: the answer is none.
    """
    with socket.create_connection(address, timeout=timeout_s) as sock:
        stream = Stream(sock, token, server=False, decode=reader_of(TO_CLIENT), timeout_s=timeout_s)
        stream.send(ClientHello(version=MINE))
        stream.send(message)
        answer = stream.receive()
    if isinstance(answer, Refused):
        raise OtherVersion(answer.reason)
    return answer
