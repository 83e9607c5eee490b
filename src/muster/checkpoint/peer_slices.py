"""Shards in other hosts' memory, read in slices: only the blocks that the tensors asked for lie in are fetched.

At the other end is that host's replicator (``replicator.transfer``), which has compared the version with its checksum
and sends the sums of its blocks first. Every block is compared with its sum here before a byte of it is used.
"""

from __future__ import annotations

import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from muster.checkpoint_format.checksum import SUM_BYTES, block_sum, checksum_of
from muster.checkpoint_format.reader import Shard
from muster.checkpoint_format.shards import ShardHeader, check_places, decode_header
from muster.core.errors import BackendError, CheckpointError, MusterError
from muster.core.snapshots import SnapshotCopy, SnapshotNotIntact
from muster.protocol.codec import reader_of
from muster.protocol.hello import Refused
from muster.protocol.ranks import ShardSource
from muster.protocol.replicator_peers import (
    REPLICATOR_PEERS,
    Absent,
    Go,
    NotIntact,
    PeerHello,
    PeerMessage,
    ReadSlices,
    SlicesFollow,
    WantBlocks,
)
from muster.protocol.values import Address
from muster.protocol.version import MINE
from muster.transport.secure_session import run_token
from muster.transport.stream import Stream

#: Ranges that are asked for at a time, at least one: memory that a rank needs besides its state.
BATCH_BYTES = 16 << 20
#: A replicator that died is back within this time, on the same port.
RESTART_S = 2.0
#: A version is read whole by its host before its first slice is sent: 100 GB at 2 GB/s.
TIMEOUT_S = 60.0
#: Hosts that are asked at a time what they hold.
_PARALLEL = 16
#: Of one version, of 16 TB: what a damaged number may claim in memory here is bounded.
_MAX_BLOCKS = 1 << 27
_decode = reader_of(REPLICATOR_PEERS)
_Result = TypeVar("_Result")
_Stream: TypeAlias = Stream[PeerMessage]


class PeerMemory:
    """Other hosts' memory, one connection each. Close it after the last read."""

    def __init__(self, run_dir: str) -> None:
        self._run_dir = run_dir
        self._hosts: dict[Address, _Host] = {}
        self._batch = _Batch()

    def open(self, sources: Mapping[int, ShardSource]) -> dict[int, tuple[ShardHeader, Shard]]:
        """What each of these holds, and a way to read of it.

        Raises (and so does every read):
            SnapshotNotIntact: its host has it no longer or found it damaged, or what came does not match its sums.
            BackendError: its host cannot be reached, which says nothing about what it holds.
            AccessError: the run's token cannot be read.
        """
        if not sources:
            return {}
        token = run_token(self._run_dir)
        of_host: dict[Address, list[int]] = defaultdict(list)
        for rank, source in sources.items():
            if source.address is not None:
                of_host[source.address].append(rank)
        self._hosts = {address: _Host(address, token) for address in of_host}

        def describe(address: Address) -> list[tuple[int, tuple[ShardHeader, Shard]]]:
            return [(rank, _opened(self._hosts[address], sources[rank], self._batch)) for rank in of_host[address]]

        with ThreadPoolExecutor(min(_PARALLEL, len(of_host))) as pool:
            return {rank: opened for found in pool.map(describe, of_host) for rank, opened in found}

    @property
    def bytes_received(self) -> int:
        """Descriptions, sums and blocks so far."""
        return sum(host.bytes_received for host in self._hosts.values())

    def close(self) -> None:
        for host in self._hosts.values():
            host.close()


class _Host:
    """One replicator. A connection that breaks is made again, for a moment."""

    def __init__(self, address: Address, token: bytes) -> None:
        self.address, self._token = address, token
        self._stream: _Stream | None = None
        self.bytes_received = 0

    def ask(self, talk: Callable[[_Stream], _Result]) -> _Result:
        """What ``talk`` returns; it is called again on a new connection where one breaks. Raises OSError, MusterError,
        ValueError."""
        until: float | None = None
        while True:
            try:
                if self._stream is None:
                    self._stream = self._connected()
                return talk(self._stream)
            except ConnectionError:
                self.close()
                until = until or time.monotonic() + RESTART_S
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _connected(self) -> _Stream:
        sock = socket.create_connection(self.address, timeout=TIMEOUT_S)
        stream = Stream(sock, self._token, server=False, decode=_decode, timeout_s=TIMEOUT_S)
        stream.send(PeerHello(version=MINE))
        return stream


@dataclass
class _Batch:
    """The blocks that came last, of whichever shard: shards are read one after another."""

    of: _RemoteShard | None = None
    runs: dict[range, memoryview] = field(default_factory=dict)
    """Blocks that are here -> their bytes."""


class _RemoteShard:
    """One version in another host's memory."""

    def __init__(self, host: _Host, source: ShardSource, follows: SlicesFollow, sums: bytes, batch: _Batch) -> None:
        self._host, self._source, self._sums, self._batch = host, source, sums, batch
        self._size, self._block = follows.slot_bytes, follows.block_bytes
        self._expected: list[tuple[int, int]] = []

    def expect(self, ranges: Sequence[tuple[int, int]]) -> None:
        self._expected = list(reversed(ranges))

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes ``start`` to ``stop`` of the version."""
        wanted = self._blocks(start, stop)
        held = self._held(wanted)
        if held is None:
            self._batch.runs.clear()  # before the next ones take as much memory
            self._batch.of, self._batch.runs = self, self._fetched(list(self._next(start, stop)))
            held = self._held(wanted)
            assert held is not None
        at = held.start * self._block
        return self._batch.runs[held][start - at : stop - at]

    def _held(self, wanted: range) -> range | None:
        runs = self._batch.runs if self._batch.of is self else ()
        return next((run for run in runs if run.start <= wanted.start and wanted.stop <= run.stop), None)

    def _next(self, start: int, stop: int) -> Iterator[range]:
        """The blocks of this range and of those that will be read after it, up to ``BATCH_BYTES``, in runs."""
        ranges = [(start, stop)]
        while self._expected and self._expected[-1] != (start, stop):
            self._expected.pop()  # those before it were in blocks that are here
        left = BATCH_BYTES - (stop - start)
        for following in reversed(self._expected[:-1]):
            left -= following[1] - following[0]
            if left < 0:
                break
            ranges.append(following)
        run: range | None = None
        for blocks in sorted((self._blocks(*each) for each in ranges), key=lambda blocks: blocks.start):
            if run is not None and blocks.start <= run.stop:
                run = range(run.start, max(run.stop, blocks.stop))
                continue
            if run is not None:
                yield run
            run = blocks
        if run is not None:
            yield run

    def _blocks(self, start: int, stop: int) -> range:
        return range(start // self._block, -(-stop // self._block))

    def _fetched(self, runs: list[range]) -> dict[range, memoryview]:
        order = WantBlocks(
            file=self._source.path, copy=self._source.copy, runs=tuple((run.start, len(run)) for run in runs)
        )

        def talk(stream: _Stream) -> dict[range, memoryview]:
            stream.send(order)
            result = {}
            for run in runs:
                result[run] = memoryview(bytearray(min(run.stop * self._block, self._size) - run.start * self._block))
                stream.receive_bytes(result[run])
                self._host.bytes_received += len(result[run])
            return result

        result = _ask(self._host, self._source.copy, talk)
        for run, data in result.items():
            for number, block in enumerate(run):
                expected = self._sums[block * SUM_BYTES : (block + 1) * SUM_BYTES]
                if block_sum(data[number * self._block : (number + 1) * self._block]) != expected:
                    reason = f"block {block} does not match its checksum on arrival"
                    raise _not_intact(self._host, self._source.copy, reason)
        return result


def _opened(host: _Host, source: ShardSource, batch: _Batch) -> tuple[ShardHeader, Shard]:
    def talk(stream: _Stream) -> tuple[SlicesFollow, bytes]:
        stream.send(ReadSlices(file=source.path, copy=source.copy))
        answer = stream.receive()
        if isinstance(answer, Refused):
            raise BackendError(answer.reason)
        if isinstance(answer, NotIntact):
            raise CheckpointError(answer.reason)
        if isinstance(answer, Absent):
            raise CheckpointError("it is no longer there")
        if not isinstance(answer, SlicesFollow):
            raise BackendError(f"the host answered {type(answer).__name__}")
        count = -(-answer.slot_bytes // max(1, answer.block_bytes))
        if count > _MAX_BLOCKS:
            raise CheckpointError(f"{answer.slot_bytes} bytes in blocks of {answer.block_bytes} cannot be")
        sums = bytearray(count * SUM_BYTES)
        stream.send(Go())
        stream.receive_bytes(memoryview(sums))
        host.bytes_received += len(answer.header) + len(sums)
        if checksum_of(sums) != answer.sums:
            raise CheckpointError("the sums of its blocks do not match their checksum")
        return answer, bytes(sums)

    follows, sums = _ask(host, source.copy, talk)
    try:
        header = decode_header(follows.header.encode())
        check_places(header.tensors, follows.slot_bytes)
    except CheckpointError as error:
        raise _not_intact(host, source.copy, str(error)) from error
    remote = _RemoteShard(host, source, follows, sums, batch)
    held = tuple(chunk for chunk in header.tensors if chunk.bytes)
    return header, Shard(held, remote.read, source.path, remote.expect)


def _ask(host: _Host, copy: SnapshotCopy, talk: Callable[[_Stream], _Result]) -> _Result:
    try:
        return host.ask(talk)
    except CheckpointError as error:
        raise _not_intact(host, copy, str(error)) from error
    except (OSError, MusterError, ValueError) as error:  # of the way there, or of this host
        raise BackendError(_not_fetched(host, copy, str(error) or type(error).__name__)) from error


def _not_intact(host: _Host, copy: SnapshotCopy, reason: str) -> SnapshotNotIntact:
    return SnapshotNotIntact(_not_fetched(host, copy, reason), copies=(copy,))


def _not_fetched(host: _Host, copy: SnapshotCopy, reason: str) -> str:
    what = f"the snapshot of step {copy.step} of rank {copy.rank} at {host.address[0]}"
    return f"{what} could not be fetched: {reason}"
