"""What a run's machines, places and pages are told through pipes, buckets and sockets: see ``targets``."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

from fakes.any_message import example

from fuzzing.running import Target
from muster.app.run import metrics_page
from muster.app.run.script_output import _shown
from muster.app.web import watch_page
from muster.backends import letters, mailbox, run_folder
from muster.backends.gce import reason
from muster.backends.gce.compute import over
from muster.backends.gce.provision import _instance
from muster.backends.gke.operate.log_follow import LogPosition
from muster.backends.google.http import parse_reply
from muster.backends.google.request_log import RequestLog
from muster.backends.log_forwarder import severity_of, writer_of
from muster.backends.vertex.on_host import presence
from muster.core import resolved_file, typed_json
from muster.core.errors import AccessError
from muster.core.resolved_file import DamagedRunFile
from muster.core.typed_json import Record, Unreadable
from muster.health.hang.analysis import analyse
from muster.health.hang.captures import evidence_of
from muster.health.hang.evidence import RankEvidence
from muster.health.hang.stack_groups import StackGroup
from muster.health.machine.report import ProbeLine
from muster.health.network.expected import Past
from muster.health.network.figures import HostLine, Order
from muster.protocol.replicator_orders import ReplicatorRecord
from muster.storage import run_secrets
from muster.tasks.text2sql.judge import Ask, Said

RECORDS: tuple[type[Record], ...] = (
    mailbox.Letter, mailbox.Answer, letters.Command, letters.Outcome, run_folder._Stored,
    RequestLog, presence.HostRecord, ReplicatorRecord, ProbeLine, HostLine, Order, Past,
    RankEvidence, StackGroup, Ask, Said,
)  # fmt: skip


def between_machines(folder: Path) -> Iterator[Target]:
    for cls in RECORDS:
        yield Target(
            name=f"a record: {cls.__module__.removeprefix('muster.')}.{cls.__name__}",
            samples=(typed_json.encode(example(cls)),),
            read=lambda data, cls=cls: typed_json.decode(cls, data),
            raises=(Unreadable,),
            share=0.5,
        )
    yield Target(
        name="resolved.json",
        samples=(resolved_file.sealed('{\n"a": 1\n}').encode(), b'{"a": 1}'),
        read=lambda data: resolved_file.unsealed(data, "resolved.json"),
        raises=(DamagedRunFile,),
    )
    yield Target(
        name="the run's secrets",
        samples=(b'{"TOKEN": "x"}\n',),
        read=lambda data: _secrets(folder, data),
        raises=(AccessError,),
        share=0.5,
    )
    lines = (
        b"[rank-0.a1] loss 3",
        b"2026-01-02T03:04:05.678Z [rank-0.a1] error: x",
        b'{"severity": "INFO", "message": "m"}',
    )
    yield Target(name="a pod's output", samples=lines, read=_pod_output, raises=())
    yield Target(
        name="a script's line", samples=(b"50%|##   |\r60%|###  | \x1b[31mred\x1b[0m\n",), read=_shown, raises=()
    )
    yield Target(
        name="what a machine told of its start",
        samples=(b"1767225600 image pulled\n",),
        read=lambda data: reason.read_report(data.decode(errors="replace")),
        raises=(),
    )
    instance = (
        b'{"name": "muster-x-1-ab", "status": "RUNNING", "labels": {"muster-run": "muster-x"}, "metadata": {"items": '
        b'[{"key": "created-by", "value": "g"}]}, "creationTimestamp": "2026-01-01T00:00:00.000-08:00"}'
    )
    operation = (
        b'{"name": "operation-1", "status": "DONE", "error": {"errors": [{"code": "ZONE_RESOURCE_POOL_EXHAUSTED"}]}}'
    )
    yield Target(name="Compute Engine's rows", samples=(instance, operation), read=_compute, raises=(), share=0.5)


# ---------------------------------------------------------------- pages


class _Wire:
    """A connection that has brought everything and takes everything."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, *_: object) -> io.BytesIO:
        return io.BytesIO(self._data)

    def settimeout(self, seconds: float) -> None: ...

    def sendall(self, data: bytes) -> None: ...


class _Owner:
    """A page's, without a run behind it."""

    port, key, token, looks = 8080, "k" * 43, "t" * 43, watch_page.Looks([], 1.0)

    def exchange(self, code: str) -> str | None:
        return self.key if code == "c" else None

    def page(self) -> str:
        return "muster_step 1\n"


class _Page:
    owner, shell = _Owner(), b"<html></html>"


def pages() -> Iterator[Target]:
    """What browsers, scrapers and strangers send to the pages."""
    ours = b"Host: 127.0.0.1:8080\r\nOrigin: http://127.0.0.1:8080\r\n"
    watch = (
        b"GET / HTTP/1.1\r\n" + ours + b"\r\n",
        b"POST /session HTTP/1.1\r\n" + ours + b"Content-Length: 1\r\n\r\nc",
        b"POST /data HTTP/1.1\r\n" + ours + b"Authorization: Bearer " + b"k" * 43 + b"\r\n"
        b'Content-Length: 20\r\n\r\n{"have": {"run": 1}}',
    )
    scrape = (b"GET /metrics HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer " + b"t" * 43 + b"\r\n\r\n",)
    for name, samples, handler in (
        ("watch --web", watch, watch_page._Handler),
        ("the metrics page", scrape, metrics_page._Handler),
    ):
        yield Target(
            name=f"a request to {name}",
            samples=samples,
            read=lambda data, handler=handler: handler(_Wire(data), ("127.0.0.1", 1), _Page()),
            raises=(),
            share=0.3,
        )


# ---------------------------------------------------------------- evidence of a hang

_FLIGHT = json.dumps(
    {
        "version": "2.10",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
        "pg_status": {
            "0": {"last_enqueued_collective": 2, "last_started_collective": 2, "last_completed_collective": 1},
        },
        "entries": [
            {"frames": [{"name": "f", "filename": "train.py", "line": 3}], "record_id": 0, "pg_id": 0,
             "process_group": ["0", "default_pg"], "collective_seq_id": 1, "p2p_seq_id": 0, "op_id": 1,
             "profiling_name": "nccl:all_reduce", "time_created_ns": 1, "input_sizes": [[3]], "output_sizes": [[3]],
             "input_dtypes": ["Float"], "output_dtypes": ["Float"], "state": "scheduled", "retired": False,
             "timeout_ms": 600000, "is_p2p": False},
        ],
    }
).encode()  # fmt: skip
_PY_SPY = (
    b'Process 42: python train.py\nPython v3.11.7 (/usr/bin/python3.11)\n\nThread 42 (idle): "MainThread"\n'
    b"    wait (torch/distributed/c10d.py:10)\n    step (train.py:3)\n"
)
_FAULTHANDLER = (
    b'Thread 0x00007f (most recent call first):\n  File "/x/loader.py", line 10 in get\n\n'
    b'Current thread 0x00007e (most recent call first):\n  File "train.py", line 3 in step\n'
)
_STAT = b"42 (python) D 1 42 42 0 -1 4194304 100 0 0 0 10 5 0 0 20 0 4 0 100 1000000 500 18446744073709551615\n"
_RAS = b"""NCCL version 2.29.3 compiled with CUDA 13.0
CUDA runtime version 13000, driver version 13000

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      2          8            1         16       16

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         2         8        16        16   RUNNING      OK

Errors
======

#0-0 (27a079b828ff1a75)  INCOMPLETE
  Missing communicator data from 1 rank
  Rank 5 -- GPU 5 managed by process 483072 on node 172.16.64.213

Warnings
========

#0-0 (27a079b828ff1a75)  MISMATCH
  Communicator ranks have different collective operation counts
  14 ranks have launched up to operation 6650
  1 rank has launched up to operation 6649
  Rank 3 -- GPU 3 managed by process 483070 on node 172.16.64.213
"""


def evidence() -> Iterator[Target]:
    """Files that ``muster why --from`` reads: a rank's, broken, beside another one's, whole."""
    for name, sample in (
        ("a flight recorder", _FLIGHT),
        ("py-spy's stacks", _PY_SPY), ("faulthandler's stacks", _FAULTHANDLER), ("/proc/PID/stat", _STAT),
        ("NCCL's RAS", _RAS),
    ):  # fmt: skip
        yield Target(
            name=f"evidence of a hang: {name}", samples=(sample,), raises=(), share=0.3,
            read=lambda data, sample=sample: analyse(evidence_of([("rank-0", data), ("rank-1", sample)])),
        )  # fmt: skip


def _secrets(folder: Path, data: bytes) -> object:
    path = folder / run_secrets.NAME
    path.write_bytes(data)
    os.chmod(path, 0o600)
    return run_secrets.read(folder)


def _pod_output(data: bytes) -> None:
    position = LogPosition()
    for line in data.splitlines():
        position.fresh(line)
        _, text = writer_of(line.decode(errors="replace"), "pod")
        assert severity_of(text) in ("ERROR", "WARNING", "INFO")


def _compute(data: bytes) -> None:
    body = parse_reply(200, data).body
    over(body)
    found = _instance("zones/us-central1-a", body, "muster-x")
    assert isinstance(found.lives, bool)
