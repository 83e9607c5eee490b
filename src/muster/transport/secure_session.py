"""Authenticated JSON frames between supervisor, agents and clients. Sans-I/O: bytes in, messages out.

Both ends know the run's token. Each proves it without sending it (HMAC over both ends' nonces), and every
frame afterwards carries a MAC over its number, so that nothing can be forged, replayed or reordered by
somebody on the network. Contents are readable on the wire: no secret travels in a message. JSON alone is
decoded; nothing unpickles.

Handshake::

    server -> client   nonce_s (32 bytes)
    client -> server   nonce_c (32) + HMAC(token, "client" + nonce_s + nonce_c)
    server -> client   HMAC(token, "server" + nonce_c + nonce_s)
    frames             length (4, big endian) + MAC (16) + JSON
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import stat
import struct
from collections.abc import Mapping
from typing import Any

from muster.core.errors import AccessError

NONCE_BYTES = 32
PROOF_BYTES = 32
MAC_BYTES = 16
MAX_FRAME_BYTES = 16 * 1024 * 1024
_LENGTH = struct.Struct(">I")
_COUNTER = struct.Struct(">Q")


def _hmac(key: bytes, *parts: bytes) -> bytes:
    return hmac.new(key, b"\x00".join(parts), hashlib.sha256).digest()


class Session:
    """One end of a connection.

    Feed it what arrives (``receive``) and send what it asks for (``outgoing``). Until ``ready``, messages
    given to ``send`` wait.

    Raises (from ``receive``):
        AccessError: the other end does not know the token, or a frame was tampered with.
    """

    def __init__(self, token: bytes, *, server: bool) -> None:
        self._token = token
        self._server = server
        self._buffer = bytearray()
        self._out = bytearray()
        self._waiting: list[Mapping[str, Any]] = []
        self._mine = secrets.token_bytes(NONCE_BYTES)
        self._theirs = b""
        self._send_key = b""
        self._receive_key = b""
        self._sent = 0
        self._received = 0
        self.ready = False
        if server:
            self._out += self._mine

    def outgoing(self) -> bytes:
        """Bytes to put on the wire now; empties the queue."""
        data = bytes(self._out)
        self._out.clear()
        return data

    def send(self, message: Mapping[str, Any]) -> None:
        """Queue a message."""
        if not self.ready:
            self._waiting.append(message)
            return
        payload = json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode()
        mac = _hmac(self._send_key, _COUNTER.pack(self._sent), payload)[:MAC_BYTES]
        self._sent += 1
        self._out += _LENGTH.pack(len(payload)) + mac + payload

    def receive(self, data: bytes) -> list[dict[str, Any]]:
        """Take bytes from the wire; return the whole messages they complete."""
        self._buffer += data
        if not self.ready and not (self._handshake_server() if self._server else self._handshake_client()):
            return []
        result = []
        while (message := self._frame()) is not None:
            result.append(message)
        return result

    def _take(self, count: int) -> bytes | None:
        if len(self._buffer) < count:
            return None
        data = bytes(self._buffer[:count])
        del self._buffer[:count]
        return data

    def _handshake_server(self) -> bool:
        data = self._take(NONCE_BYTES + PROOF_BYTES)
        if data is None:
            return False
        self._theirs, proof = data[:NONCE_BYTES], data[NONCE_BYTES:]
        if not hmac.compare_digest(proof, _hmac(self._token, b"client", self._mine, self._theirs)):
            raise AccessError("a connection did not prove that it knows the run's token")
        self._out += _hmac(self._token, b"server", self._theirs, self._mine)
        self._start(nonce_s=self._mine, nonce_c=self._theirs)
        return True

    def _handshake_client(self) -> bool:
        if not self._theirs:
            nonce = self._take(NONCE_BYTES)
            if nonce is None:
                return False
            self._theirs = nonce
            self._out += self._mine + _hmac(self._token, b"client", self._theirs, self._mine)
        proof = self._take(PROOF_BYTES)
        if proof is None:
            return False
        if not hmac.compare_digest(proof, _hmac(self._token, b"server", self._mine, self._theirs)):
            raise AccessError("the other end did not prove that it knows the run's token")
        self._start(nonce_s=self._theirs, nonce_c=self._mine)
        return True

    def _start(self, *, nonce_s: bytes, nonce_c: bytes) -> None:
        to_server = _hmac(self._token, b"c2s", nonce_s, nonce_c)
        to_client = _hmac(self._token, b"s2c", nonce_s, nonce_c)
        self._send_key, self._receive_key = (to_client, to_server) if self._server else (to_server, to_client)
        self.ready = True
        waiting, self._waiting = self._waiting, []
        for message in waiting:
            self.send(message)

    def _frame(self) -> dict[str, Any] | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > MAX_FRAME_BYTES:
            raise AccessError(f"a frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
        whole = self._take(_LENGTH.size + MAC_BYTES + length)
        if whole is None:
            return None
        mac, payload = whole[_LENGTH.size : _LENGTH.size + MAC_BYTES], whole[_LENGTH.size + MAC_BYTES :]
        if not hmac.compare_digest(mac, _hmac(self._receive_key, _COUNTER.pack(self._received), payload)[:MAC_BYTES]):
            raise AccessError("a frame's MAC does not fit: altered, replayed or reordered")
        self._received += 1
        result = json.loads(payload)
        if not isinstance(result, dict):
            raise AccessError("a frame does not hold a JSON object")
        return result


def read_token(path: str) -> bytes:
    """The run's token from its file.

    Raises:
        AccessError: absent, empty, or readable by others.
    """
    try:
        mode = os.stat(path).st_mode
        with open(path, "rb") as file:
            token = file.read().strip()
    except OSError as error:
        raise AccessError(f"cannot read the run's token {path}: {error.strerror}") from error
    if stat.S_IMODE(mode) & 0o077:
        raise AccessError(f"{path} can be read by others (mode {stat.S_IMODE(mode):o})", hint=f"chmod 600 {path}")
    if len(token) < 32:
        raise AccessError(f"{path} holds no token")
    return token
