"""Files that people write, and what schedulers and clouds answer: see ``targets``."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from fuzzing.running import Target
from muster.backends.gke.manifests import kueue_configuration
from muster.backends.gke.operate.exec_stream import exit_code
from muster.backends.google.http import parse_reply
from muster.backends.log_forwarder import _names
from muster.backends.slurm import parse
from muster.backends.vertex.job_state import cause, custom_job, sentence, web_links
from muster.backends.vertex.on_host.meeting import seat
from muster.catalog.rows import prices_from
from muster.config import load
from muster.core.errors import BackendError, RunFileError, UsageError
from muster.core.flops import ModelShape
from muster.core.typed_json import Unreadable, parse_object
from muster.data.files import row_files
from muster.plan import plan_file
from muster.simulate import scenario

# ---------------------------------------------------------------- files that people write


RUN_FILE = b"""\
name: demo
model:
  config: {model_type: llama, hidden_size: 64, num_attention_heads: 4}
  tokenizer: {kind: word, vocab_size: 512}
data:
  sources: [{type: text2sql, rows: 100}]
training: {steps: 100, optimizer: {learning_rate: 1.0e-3}}
resources: {device: cpu, ranks_per_host: 2, hosts: 2}
checkpoint: {every_steps: auto}
recovery: {policy: default}
limits: {max_usd: 12.5, deadline: "2999-01-01T00:00:00Z"}
"""


def what_people_write(folder: Path) -> Iterator[Target]:
    yield Target(
        name="a run file",
        samples=(RUN_FILE, RUN_FILE + b"backend: slurm\n", b"name: x\ncommand: [train.py]\nresources: {hosts: 1}\n"),
        read=lambda data: load.load(_file(folder / "run.yaml", data), environment=False),
        raises=(RunFileError, UsageError),
        share=0.1,
    )
    rows = {
        "rows.jsonl": b'{"prompt": "a", "completion": "b"}\n{"prompt": "c", "completion": "d"}\n',
        "rows.json": b'{"rows": [{"prompt": "a", "completion": "b"}]}',
        "rows.txt": b"plain text\n",
        "rows.csv": b'prompt,completion\n"a, b","c\nd"\ne,f\n',
        "rows.jsonl.gz": gzip.compress(b'{"prompt": "a", "completion": "b"}\n' * 20, mtime=0),
    }
    for name, sample in rows.items():
        yield Target(
            name=f"data: {name}",
            samples=(sample,),
            read=lambda data, name=name: list(row_files.read_rows(_file(folder / name, data))),
            raises=(UsageError,),
        )
    trace = b'{"metadata": {"gap_seconds": 300}, "data": [16, 16, 15, 12, 16]}'
    yield Target(
        name="a capacity trace",
        samples=(trace,),
        read=lambda data: scenario.read_trace(_file(folder / "trace.json", data)),
        raises=(UsageError,),
    )
    config = (
        b'{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 9,'
        b' "intermediate_size": 99}'
    )
    yield Target(
        name="a model's config.json",
        samples=(config,),
        read=lambda data: ModelShape.from_config(parse_object(data)),
        raises=(UsageError, Unreadable),
    )
    prices = b"machine,mode,region,usd_per_gpu_hour,low,high\na3-highgpu-8g,spot,us-central1,3.1,2.0,4.0\n"
    yield Target(
        name="prices",
        samples=(prices,),
        read=lambda data: list(prices_from(data.decode("utf-8", "replace"), source="prices.csv")),
        raises=(UsageError,),
    )
    spec = load.loads(RUN_FILE.decode(), environment=False).spec.model_dump(mode="json")
    plan = {
        "format": plan_file.FORMAT,
        "spec_digest": plan_file.digest(spec),
        "spec": spec,
        "run_text": "x",
        "run_file": "r",
    }
    yield Target(
        name="a plan",
        samples=(json.dumps(plan).encode(),),
        read=lambda data: dict(plan_file.read(data.decode("utf-8", "replace"), source="plan.json")["spec"]),
        raises=(UsageError,),
    )


def _file(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


# ---------------------------------------------------------------- what schedulers and clouds answer


def answers() -> Iterator[Target]:
    reply = b'{"error": {"code": 409, "message": "exists", "details": [{"reason": "x"}]}, "items": [{"a": 1}]}'
    yield Target(name="Google's and Kubernetes' answers", samples=(reply, b"<html>502</html>"), read=_reply, raises=())
    status = (
        b'{"status": "Success"}',
        b'{"status": "Failure", "details": {"causes": [{"reason": "ExitCode", "message": "3"}]}}',
    )
    yield Target(name="the end of an exec", samples=status, read=_status, raises=(BackendError,))
    yield Target(
        name="Kueue's configuration",
        samples=(
            b"apiVersion: config.kueue.x-k8s.io/v1beta1\nkind: Configuration\nwaitForPodsReady: {enable: true}\n",
        ),
        read=lambda data: kueue_configuration.parsed(data.decode("utf-8", "replace")),
        raises=(),
        share=0.2,
    )
    nodes = b"NodeName=n1 State=IDLE+DRAIN Gres=gpu:h100:8(S:0-1),nvme:1 Reason=bad disk [root@2026]\n"
    rows = b"JobID|State|ExitCode\n12|COMPLETED|0:0\n13|NODE_FAIL|1:0\n"
    queue = f"{parse.RECORD}12{parse.UNIT}PENDING{parse.UNIT}Priority\n".encode()
    yield Target(
        name="Slurm's output",
        samples=(nodes, rows, queue, b"Submitted batch job 12\n", b"12;cluster\n", b"gpu:2K"),
        read=lambda data: _slurm(data.decode("utf-8", "replace")),
        raises=(),
        share=2,
    )
    record = (
        b'{"name": "projects/1/locations/us-central1/customJobs/7", "state": "JOB_STATE_FAILED", "labels": {"a": "b"},'
        b' "createTime": "2026-11-18T10:00:00.123Z", "endTime": "2026-11-18T11:00:00Z", "error": {"code": 3, "message":'
        b' "The replica workerpool1-1 exited with a non-zero status of 1."}, "webAccessUris": {"workerpool0-0": "x"}}'
    )
    yield Target(name="Vertex AI's jobs", samples=(record,), read=_custom_job, raises=(), share=0.5)
    cluster = (
        b'{"cluster": {"workerpool0": ["cmle-training-workerpool0-ab-0:2222"], "workerpool1": ["b:2222"]},'
        b' "environment": "cloud", "task": {"type": "workerpool1", "index": 0, "trial": ""}, "job": "{}"}'
    )
    yield Target(
        name="CLUSTER_SPEC",
        samples=(cluster,),
        read=lambda data: seat(data.decode("utf-8", "replace"), hosts=2),
        raises=(BackendError,),
        share=0.5,
    )
    event = b"\x01\x00\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x10\x00\x00\x00agent.log\x00\x00\x00\x00\x00\x00\x00"
    yield Target(name="the kernel's file events", samples=(event * 2,), read=_names, raises=())


def _reply(data: bytes) -> None:
    for code in (200, 404, 409, 503):
        reply = parse_reply(code, data)
        assert isinstance(reply.message, str) and isinstance(reply.body, dict)


def _status(data: bytes) -> object:
    with suppress(ValueError, RecursionError):  # what is no object is the caller's
        found = json.loads(data)
        return exit_code(found) if isinstance(found, dict) else None
    return None


def _custom_job(data: bytes) -> None:
    body = parse_reply(200, data).body
    job = custom_job(body)
    web_links(body)
    assert cause(job, 0.0) is None or job.final
    assert "\n" not in sentence(job, 0.0)


def _slurm(text: str) -> None:
    list(parse.records(text, ("a", "b", "c")))
    for row in parse.pairs(text):
        parse.gpus(row.get("Gres", ""))
        parse.node_usable(row.get("State", ""))
    parse.gpus(text)
    parse.job_id(text)
    parse.accounting(text)
