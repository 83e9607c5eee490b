"""What reads bytes that others wrote, each with samples that are right and the errors that it may raise.

A target's ``read`` takes any bytes. Readers of files get one in a folder of their own.
Bodies that lie under a checksum are broken below it, too: a writer of another version, or one that errs, seals them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

from fakes.any_message import example
from fakes.clock import VirtualClock
from fakes.event_details import random_detail

from fuzzing import documents, hardware, machines, rows
from fuzzing.running import Target
from muster.backends.local.launcher import _Job
from muster.backends.slurm.job_outcome import SlurmJob
from muster.checkpoint_format import decoding, fences, manifest, shards, tensor_index
from muster.checkpoint_format.shard_file import StoredFile
from muster.checkpoint_format.snapshot_ring import Ring
from muster.core import event_log, typed_json
from muster.core.errors import AccessError, CheckpointError, MusterError
from muster.core.event_details.kinds import KINDS
from muster.core.event_log import EventLog
from muster.core.events import Event
from muster.core.layout import Layout
from muster.core.typed_json import Unreadable
from muster.core.types import Checksum
from muster.protocol import tables
from muster.protocol.codec import encode, reader_of
from muster.protocol.hello import greeting_reader
from muster.protocol.lease import EndRecord, HomeStatus, LeaseRecord, read_lease, write_lease
from muster.protocol.to_supervisor import GREETING
from muster.protocol.version import MINE
from muster.report.audit import invariants
from muster.storage.home.chunks import chained
from muster.storage.memory_dir import _Place
from muster.transport.secure_session import Session

TOKEN = b"t" * 32
NONCE = b"n" * 32


def targets(folder: Path) -> list[Target]:
    """All of them. ``folder``: where files are put."""
    return [
        *_messages(), *_sessions(), *_records(), *_checkpoints(folder), *_logs(folder),
        *documents.what_people_write(folder), *rows.packed_and_columnar(folder), *documents.answers(),
        *hardware.reports(), *machines.between_machines(folder), *machines.pages(), *machines.evidence(),
    ]  # fmt: skip


# ---------------------------------------------------------------- sockets


def _messages() -> Iterator[Target]:
    for channel in tables.CHANNELS:
        samples = tuple(encode(example(cls)) for cls in channel.messages)
        yield Target(name=f"messages: {channel.name}", samples=samples, read=reader_of(channel), raises=(Unreadable,))
    others = [example(cls) for cls in GREETING.messages]
    hellos = tuple(encode(each) for other in others for each in (other, replace(other, version=MINE)))
    greet = greeting_reader(GREETING, me="the supervisor")
    yield Target(name="a hello of any version", samples=hellos, read=greet, raises=(Unreadable,), share=4)


def _sessions() -> Iterator[Target]:
    """What a peer sends, handshake and frames, byte for byte; the nonces are given so that a whole one is right."""
    for server in (True, False):
        yield Target(
            name=f"a connection's bytes, to the {'server' if server else 'client'}",
            samples=(_transcript(to_server=server),),
            read=lambda data, server=server: _feed(data, server=server),
            raises=(AccessError,),
            share=4,
        )


def _session(*, server: bool) -> Session:
    result = Session(TOKEN, server=server)
    result._mine = NONCE
    result.outgoing()
    if server:
        result._out += NONCE
    return result


def _transcript(*, to_server: bool) -> bytes:
    server, client = _session(server=True), _session(server=False)
    said = {True: bytearray(), False: bytearray()}
    for end in (server, client):
        for frame in (b"a frame", b"", b"x" * 300):
            end.send(frame)
    for _ in range(4):
        for end, other in ((server, client), (client, server)):
            data = end.outgoing()
            said[other is server] += data
            other.frames(data)
    assert server.ready and client.ready
    return bytes(said[to_server])


def _feed(data: bytes, *, server: bool) -> None:
    end = _session(server=server)
    for at in range(0, len(data), 37):
        end.frames(data[at : at + 37])
        end.outgoing()


# ---------------------------------------------------------------- records in a run's home and on its machines


def _records() -> Iterator[Target]:
    for cls in (HomeStatus, EndRecord, _Job, SlurmJob, _Place, StoredFile):
        yield Target(
            name=f"a record: {cls.__name__.strip('_')}",
            samples=(typed_json.encode(example(cls)),),
            read=lambda data, cls=cls: typed_json.decode(cls, data),
            raises=(Unreadable,),
        )
    lease = replace(example(LeaseRecord), version=MINE)
    samples = (write_lease(lease), typed_json.encode(lease))
    # ``OtherVersion`` is a MusterError: it names both versions.
    yield Target(
        name="lease.json",
        samples=samples,
        read=lambda data: read_lease(data, me="me"),
        raises=(Unreadable, MusterError),
    )
    lines = b"".join(json.dumps({"prev": "a" * 64, "seq": number}).encode() + b"\n" for number in range(3))
    yield Target(
        name="lines of an event file in a bucket",
        samples=(lines,),
        read=lambda data: chained(data, "a" * 64),
        raises=(),
    )


# ---------------------------------------------------------------- checkpoints


def _header() -> shards.ShardHeader:
    chunks = shards.pack([("a", "float32", (4, 6), (0, 0), (2, 6)), ("b", "bfloat16", (3,), (0,), (3,))])
    return shards.ShardHeader(
        run_id="run", attempt=1, step=2, rank=0, layout=Layout(dp_shard=2), extra={"rng": [1, 2]}, tensors=chunks
    )


def _checkpoints(folder: Path) -> Iterator[Target]:
    header = _header()
    checksum = Checksum(value="0" * 16)
    files = tuple(StoredFile(name=name, bytes=100, checksum=checksum) for name in ("rank-0.shard", "index.json"))
    marker = manifest.Manifest(
        run_id="run", attempt=1, step=2, layout=header.layout, prefix=manifest.step_prefix(2, 1), bytes=200,
        files=files[:1], index=files[1], created_ns=1, version="1",
    )  # fmt: skip
    fence = fences.Fence(run_id="run", attempt=2, inherited={"step-00000002.json": "run/1"})
    unsealed = fences.Fence(run_id="run", attempt=3, before=fence)
    read_marker = lambda data: manifest.Manifest.decode(data, directory="gs://b/c")  # noqa: E731
    sealed = (
        ("a commit marker", (marker.encode(),), read_marker, manifest.FORMAT, "commit marker"),
        ("fence.json", (fence.encode(), unsealed.encode()), fences.Fence.decode, fences.FORMAT, "fence"),
    )
    for name, samples, read, number, kind in sealed:
        for sample in samples:
            decoding.unseal(sample, reads=number, kind=kind)
        yield Target(name=name, samples=samples, read=read, raises=(CheckpointError,))
        yield Target(
            name=f"{name}, wrong below its checksum",
            samples=tuple(json.dumps(json.loads(sample)["body"]).encode() for sample in samples),
            read=lambda data, read=read, number=number, kind=kind: read(_resealed(data, number, kind)),
            raises=(CheckpointError,),
            share=2,
        )
    index = tensor_index.encode_index([("rank-0.shard", 512, header.tensors)])
    yield Target(
        name="a checkpoint's index",
        samples=(index,),
        read=tensor_index.decode_index,
        raises=(CheckpointError,),
        share=2,
    )
    yield Target(
        name="a shard",
        samples=(shards.preamble(header) + b"\0" * 128,),
        read=_shard,
        raises=(CheckpointError,),
        share=2,
    )
    ring = Ring.create(folder / "sample.ring", header=shards.encode_header(header), slot_bytes=64)
    yield Target(
        name="a snapshot ring",
        samples=((folder / "sample.ring").read_bytes(),),
        read=lambda data: _ring(folder / "ring", data),
        raises=(CheckpointError,),
    )
    del ring


def _resealed(data: bytes, number: int, kind: str) -> bytes:
    try:
        body = typed_json.parse_object(data)
        return decoding.seal(body, format=number, kind=kind)
    except (ValueError, RecursionError):
        raise CheckpointError("no body to seal") from None


def _shard(data: bytes) -> object:
    end, begin = shards.preamble_bytes(data[:16])
    header = shards.decode_header(data[16:end])
    shards.check_places(header.tensors, max(0, len(data) - begin))
    return header


def _ring(path: Path, data: bytes) -> object:
    path.write_bytes(data)
    ring = Ring.open(path)
    found = ring.versions()
    shards.decode_header(ring.header)
    return [ring.checksum(version) for version in found]


# ---------------------------------------------------------------- event logs


def _logs(folder: Path) -> Iterator[Target]:
    events = folder / "log"
    rng = Random(1)
    log = EventLog("run", events, "host-0", 1, clock=VirtualClock())  # a case is the same one on every day
    for kind, cls in sorted(KINDS.items()):
        log.append(kind, step=rng.choice((None, 3)), rank=rng.choice((None, 0)), detail=random_detail(cls, rng))
    log.close()
    sample = (events / log.name).read_bytes()
    lines = tuple(sample.splitlines(keepends=True))
    yield Target(name="an event", samples=lines, read=_event, raises=(ValueError, MusterError), share=4)
    yield Target(
        name="a log's chain",
        samples=(sample,),
        read=lambda data: event_log.verify(data, run_id="run", name=log.name),
        raises=(),
        share=0.2,
    )
    yield Target(name="a log", samples=(sample,), read=lambda data: _log(events, log.name, data), raises=(), share=0.2)
    yield Target(
        name="a log under audit",
        samples=(sample,),
        read=lambda data: _audit(folder / "audited", log.name, data),
        raises=(),
        share=0.05,
    )


def _event(line: bytes) -> object:
    try:
        found = json.loads(line)
    except RecursionError:
        return None  # a reader's own business: see "a log"
    event = Event.from_json(found if isinstance(found, dict) else {})
    return event.read(KINDS[event.kind]) if event.kind in KINDS else None


def _log(events: Path, name: str, data: bytes) -> object:
    (events / name).write_bytes(data)
    return event_log.merged(events)


def _audit(run_dir: Path, name: str, data: bytes) -> object:
    (run_dir / "events").mkdir(parents=True, exist_ok=True)
    (run_dir / "events" / name).write_bytes(data)
    return invariants.check(run_dir)
