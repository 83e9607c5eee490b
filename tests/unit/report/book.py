"""A history written by hand, for the tests of its judge and of its replay."""

import hashlib
import json
from pathlib import Path

import xxhash

SECOND = 1_000_000_000
LAYOUT = {"dp_replicate": 1, "dp_shard": 2, "tp": 1}


class Book:
    """Writes a run's folder by hand: events at given seconds, chains as docs/reference/events.md says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, list[dict]] = {}
        self.spec = {"training": {"deterministic": True, "global_batch_size": 4}, "checkpoint": {"dir": None}}

    def add(self, file, at_s, kind, *, attempt=1, host="host-0", rank=None, step=None, **detail):
        line = {"run_id": "r", "attempt": attempt, "mono_ns": int(at_s * SECOND), "wall_ns": int(at_s * SECOND),
                "host": host, "kind": kind, "detail": detail}  # fmt: skip
        line |= {key: value for key, value in (("rank", rank), ("step", step)) if value is not None}
        self.files.setdefault(file, []).append(line)
        return line

    def step(self, at_s, step, *, attempt=1, loss=None, **detail):
        loss = 5.0 - step / 10 if loss is None else loss
        counts = {"rows": 4, "tokens": 40, "supervised_tokens": 20, "padding_tokens": 0}
        detail = {"loss": loss, "grad_norm": 1.0, "learning_rate": 0.1, "step_ns": SECOND // 10} | counts | detail
        return self.add(f"host-0.{attempt}.jsonl", at_s, "step", attempt=attempt, step=step, rank=0, **detail)

    def boss(self, at_s, kind, *, term=1, **more):
        return self.add(f"supervisor.{term}.jsonl", at_s, kind, **more)

    def write(self) -> Path:
        (self.folder / "events").mkdir(parents=True, exist_ok=True)
        (self.folder / "resolved.json").write_text(json.dumps(self.spec))
        for name, lines in self.files.items():
            prev = hashlib.sha256(f"muster:r:{name}".encode()).hexdigest()
            data = b""
            for seq, line in enumerate(lines):
                raw = (json.dumps({**line, "seq": seq, "prev": prev}, sort_keys=True) + "\n").encode()
                prev = hashlib.sha256(raw).hexdigest()
                data += raw
            (self.folder / "events" / name).write_bytes(data)
        return self.folder

    def checkpoint(self, step, *, attempt=1, data=b"weights"):
        folder = self.folder / "checkpoints"
        prefix = f"step-{step:08d}.a{attempt}"
        (folder / prefix).mkdir(parents=True)
        sums = xxhash.xxh3_64_intdigest(data).to_bytes(8, "little")
        (folder / prefix / "rank-0.bin").write_bytes(data + sums)
        (folder / prefix / "index.json").write_bytes(b"{}")
        (folder / "commits").mkdir(exist_ok=True)
        shard = {"name": "rank-0.bin", "bytes": len(data) + 8, "checksum": {"value": xxhash.xxh3_64_hexdigest(sums)}}
        index = {"name": "index.json", "bytes": 2, "checksum": {"value": xxhash.xxh3_64_hexdigest(b"{}")}}
        marker = {"prefix": prefix, "files": [shard], "index": index}
        (folder / "commits" / f"step-{step:08d}.json").write_text(json.dumps({"body": marker}))
        return folder / prefix / "rank-0.bin"


def sound(folder: Path) -> Book:
    """A run of 6 steps with a killed rank after step 3: everything about it is sound."""
    found = Book(folder)
    found.boss(0.0, "supervisor.started", term=1, attempt=0, **{})
    found.files["supervisor.1.jsonl"][0]["detail"] = {"term": 1, "pid": 1}
    found.boss(0.1, "host.allocated", attempt=0, gpus=2, role="active")
    found.boss(0.2, "attempt.started", world_size=2, layout=LAYOUT, hosts={"host-0": [0, 1]}, resume_step=-1)
    for step in (1, 2, 3):
        found.step(0.5 + step / 10, step)
    found.boss(0.9, "incident.detected", incident_id="i1", incident="rank_exit", evidence="killed", step=3)
    found.boss(0.9, "incident.decided", incident_id="i1", action="restart", reason="sound")
    found.boss(1.0, "attempt.started", attempt=2, world_size=2, layout=LAYOUT, hosts={"host-0": [0, 1]},
               resume_step=3, cause="i1")  # fmt: skip
    for step in (4, 5, 6):
        found.step(1.0 + step / 10, step, attempt=2)
    found.boss(1.41, "incident.resolved", attempt=2, incident_id="i1", lost_ns=SECOND // 2)
    found.boss(2.0, "run.finished", attempt=2, outcome="succeeded", exit_code=0, reason="done")
    found.boss(2.0, "host.released", attempt=2, reason="succeeded")
    found.checkpoint(6, attempt=2)
    return found


def line_of(book, kind, nth=0):
    return [line for lines in book.files.values() for line in lines if line["kind"] == kind][nth]
