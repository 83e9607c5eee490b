"""Authenticated frames between supervisor, agents and clients. Sans-I/O: bytes in, frames out.

Both ends know the run's token. Each proves it without sending it (HMAC over both ends' nonces), and every
frame afterwards carries a MAC over its number, so that nothing can be forged, replayed or reordered by
an attacker on the network. Contents are readable on the wire: no secret travels in a message.

Handshake::

    server -> client   nonce_s (32 bytes)
    client -> server   nonce_c (32) + HMAC(token, "client" + nonce_s + nonce_c)
    server -> client   HMAC(token, "server" + nonce_c + nonce_s)
    frames             length (4, big endian) + MAC (16) + a message (``protocol.codec``)
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
import struct

from muster.core import environment
from muster.core.errors import AccessError
from muster.protocol.codec import MAX_BYTES

NONCE_BYTES = 32
PROOF_BYTES = 32
MAC_BYTES = 16
_LENGTH = struct.Struct(">I")
_COUNTER = struct.Struct(">Q")


def _hmac(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"\x00".join(parts), "sha256")


def _mac(keyed: hmac.HMAC, number: int, frame: bytes) -> bytes:
    made = keyed.copy()
    made.update(_COUNTER.pack(number) + b"\x00" + frame)
    return made.digest()[:MAC_BYTES]


class Session:
    """One end of a connection.

    Feed it what arrives (``frames``) and send what it asks for (``outgoing``). Until ``ready``, frames
    given to ``send`` wait.

    Raises (from ``frames``):
        AccessError: the other end does not know the token, or a frame was tampered with.
    """

    def __init__(self, token: bytes, *, server: bool) -> None:
        self._token = token
        self._server = server
        self._buffer = bytearray()
        self._out = bytearray()
        self._waiting: list[bytes] = []
        self._mine = secrets.token_bytes(NONCE_BYTES)
        self._theirs = b""
        self._sending = self._receiving = hmac.new(token, digestmod="sha256")
        """With the key of each direction, once ``ready``. A copy costs half of what setting one up costs each time."""
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

    def send(self, frame: bytes) -> None:
        """Queue one frame."""
        if not self.ready:
            self._waiting.append(frame)
            return
        mac = _mac(self._sending, self._sent, frame)
        self._sent += 1
        self._out += _LENGTH.pack(len(frame)) + mac + frame

    def frames(self, data: bytes) -> list[bytes]:
        """Take bytes from the wire; return the whole frames they complete."""
        self._buffer += data
        if not self.ready and not (self._handshake_server() if self._server else self._handshake_client()):
            return []
        result = []
        while (frame := self._frame()) is not None:
            result.append(frame)
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
        keys = (to_client, to_server) if self._server else (to_server, to_client)
        self._sending, self._receiving = (hmac.new(key, digestmod="sha256") for key in keys)
        self.ready = True
        waiting, self._waiting = self._waiting, []
        for frame in waiting:
            self.send(frame)

    def _frame(self) -> bytes | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > MAX_BYTES:
            raise AccessError(f"a frame of {length} bytes is over the limit of {MAX_BYTES}")
        whole = self._take(_LENGTH.size + MAC_BYTES + length)
        if whole is None:
            return None
        mac, payload = whole[_LENGTH.size : _LENGTH.size + MAC_BYTES], whole[_LENGTH.size + MAC_BYTES :]
        if not hmac.compare_digest(mac, _mac(self._receiving, self._received, payload)):
            raise AccessError("a frame's MAC does not fit: altered, replayed or reordered")
        self._received += 1
        return payload


def token_for_pages(token: bytes) -> str:
    """The token for reading a run's metrics page: derived from the run's token, which cannot be derived from it."""
    return _hmac(token, b"metrics page").hex()


def run_token(run_dir: str | os.PathLike[str]) -> bytes:
    """The token of the run whose folder this process has: from the file that the environment names (MUSTER_TOKEN_FILE,
    a Secret's), else from the folder. Raises AccessError as ``read_token``."""
    given = environment.current().token_file
    return read_token(str(given), linked=True) if given else read_token(os.path.join(run_dir, "token"))


def read_token(path: str, *, linked: bool = False) -> bytes:
    """The run's token from its file.

    ``linked``: the file may be a link, as files of a mounted Secret are (the kubelet exchanges what they lead to).

    Raises:
        AccessError: absent, empty, a link, another user's, or readable by others.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | (0 if linked else os.O_NOFOLLOW)
    try:
        with open(os.open(path, flags), "rb") as file:
            status = os.fstat(file.fileno())
            token = file.read().strip()
    except OSError as error:
        raise AccessError(f"cannot read the run's token {path}: {error.strerror}") from error
    # The folder's owner too: a share may give every file to one user (NFS with all_squash).
    if status.st_uid not in (0, os.geteuid(), os.stat(os.path.dirname(path) or ".").st_uid):
        raise AccessError(f"{path} belongs to another user (uid {status.st_uid})")
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise AccessError(f"{path} can be read by others (mode {mode:o})", hint=f"chmod 600 {path}")
    if len(token) < 32:
        raise AccessError(f"{path} holds no token")
    return token
