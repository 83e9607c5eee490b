"""Folders of runs as somebody might send them to break who reads them, and every reading verb on each.

::

    python tools/hostile.py FOLDER              makes all kinds below FOLDER
    python tools/hostile.py FOLDER --try        and reads each by every verb; a line for each that misbehaves
    python tools/hostile.py FOLDER --try KIND   one kind

A verb misbehaves where it takes longer than ``LIMIT_S``, or more than ``LIMIT_BYTES`` beyond what the program itself
takes, prints a character that a terminal obeys, ends as a bug does, or shows the file outside. Each verb runs in a
process of its own, forked from one that has imported the command line.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import os
import pkgutil
import re
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import muster.app.inspect
import muster.backends.local
import muster.cli
import muster.report.render
from muster.config.load import loads
from muster.core.typed_json import JsonObject
from muster.storage import run_registry

LIMIT_S, LIMIT_BYTES = 10.0, 300 << 20
RUN_ID = "hostile-20261130-101500-ab12"
SECOND = 10**9
WALL = 1_795_256_100 * SECOND
#: What a terminal obeys, or shows in another order than it is written.
TEXTS = {
    "escapes": "\x1b]0;owned\x07\x1b[31mred\x1b[2J",
    "c1": "\x9b31m\x9d0;owned\x9c",
    "nul": "a\x00b",
    "bidi": "user\u202e\u2066txt.exe\u2069",
    "returns": "fine\rerror\b\b\b\nhint: rm -rf /\x0b\x0c\x85\u2028",
    "markup": "[red]x[/nope] </script><!--*/ /*DATA*/ {{x}} %s {0}",
}
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
SECRET = "the content of a file outside"
RUN_FILE = """\
name: hostile
model:
  config: {model_type: llama, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 4, intermediate_size: 64}
  tokenizer: {kind: word, vocab_size: 256}
data: {sources: [{type: text2sql, rows: 40}]}
training: {steps: 60, sequence_length: 64, global_batch_size: 2}
resources: {device: cpu, ranks_per_host: 1}
"""
VERBS: Mapping[str, tuple[str, ...]] = {
    "list": ("status",),
    "status": ("status", "RUN"),
    "status --json": ("status", "RUN", "--json"),
    "events": ("events", "RUN"),
    "events --json": ("events", "RUN", "--json"),
    "logs": ("logs", "RUN"),
    "why": ("why", "RUN"),
    "why --from": ("why", "--from", "RUN/captures"),
    "report": ("report", "RUN"),
    "report --html": ("report", "RUN", "--html", "-o", "PAGE"),
    "compare": ("compare", "RUN", "SOUND"),
    "checkpoints": ("checkpoints", "RUN"),
    "metrics": ("metrics", "RUN"),
}


@dataclass(frozen=True)
class Misbehaviour:
    kind: str
    verb: str
    problem: str

    def __str__(self) -> str:
        return f"{self.kind}: muster {self.verb}: {self.problem}"


# ---------------------------------------------------------------- a sound run


def history(words: str = "fine", *, incidents: int = 1, host: str = "host-0") -> dict[str, list[JsonObject]]:
    """The events of a short run by file, with ``words`` wherever a run's processes put text of others."""
    files: dict[str, list[JsonObject]] = {}

    def add(name: str, at_s: float, kind: str, detail: JsonObject, **more: object) -> None:
        line = {"run_id": RUN_ID, "attempt": 1, "mono_ns": int(at_s * SECOND), "wall_ns": WALL + int(at_s * SECOND)}
        line |= {"host": name.split(".", maxsplit=1)[0], "kind": kind, "detail": detail} | more
        files.setdefault(name, []).append(line)

    boss, agent = "supervisor.1.jsonl", "host-0.1.jsonl"
    submitted = {"spec_digest": "0" * 64, "backend": "local", "version": words, "name": words, "argv": ["x", words]}
    add("client.0.jsonl", 0, "run.submitted", submitted)
    add(boss, 1, "supervisor.started", {"term": 1, "pid": 17, "submission": "1", "address": words})
    add(boss, 2, "host.allocated", {"gpus": 1, "role": "active"}, host=host)
    add(boss, 3, "run.message", {"text": words})
    add(agent, 3, "agent.started", {"pid": 30, "ranks": 1}, host=host)
    counts = {"rows": 4, "tokens": 40, "supervised_tokens": 20, "padding_tokens": 0}
    for step in range(1, 41):
        figures = {"loss": 5.0 - step / 10, "grad_norm": 1.0, "learning_rate": 0.1, "step_ns": SECOND // 10, **counts}
        add(agent, 4 + step / 10, "step", figures, rank=0, step=step, host=host)
    for number in range(incidents):
        at, name = 9 + number / 1000, f"i{number}"
        last = {"signature": words, "exception": words, "message": words, "hint": words}
        found = {"incident_id": name, "incident": "rank_exit", "evidence": words, **last}
        add(agent, at, "rank.exited", {"exit_code": 1, "reason": words}, rank=0, host=host)
        add(boss, at, "incident.detected", found, rank=0, host=host)
        add(boss, at, "incident.decided", {"incident_id": name, "action": "restart", "reason": words})
        add(boss, at, "incident.resolved", {"incident_id": name, "lost_ns": 1000})
    end = 11 + incidents / 1000
    add(boss, end, "run.finished", {"outcome": "failed", "exit_code": 1, "reason": words, "final_step": 40})
    return files


def write_log(run: Path, name: str, lines: Sequence[JsonObject]) -> None:
    """One file of events, chained as docs/reference/events.md says."""
    previous = hashlib.sha256(f"muster:{RUN_ID}:{name}".encode()).hexdigest()
    (run / "events").mkdir(exist_ok=True)
    with open(run / "events" / name, "wb") as file:
        for number, line in enumerate(lines):
            raw = (json.dumps({**line, "seq": number, "prev": previous}, sort_keys=True) + "\n").encode()
            previous = hashlib.sha256(raw).hexdigest()
            file.write(raw)


def sound(run: Path, words: str = "fine", *, run_file: str = RUN_FILE, **given: int | str) -> Path:
    """A run that has failed, with a log, a capture and a checkpoint's marker."""
    resolved = loads(run_file).spec.model_dump_json(indent=1) + "\n"
    run_registry.create(RUN_ID, run, run_file=run_file, resolved=resolved)
    for name, lines in history(words, **given).items():  # type: ignore[arg-type]
        write_log(run, name, lines)
    job = {"version": 1, "run_id": RUN_ID, "backend": "local", "submission": 1, "submitted_wall_ns": WALL}
    (run / "job.json").write_text(json.dumps({**job, "state": "started", "cwd": words, "tasks": {}}))
    (run / "logs" / "rank-0.1.log").write_bytes(words.encode("utf-8", "surrogatepass") + b"\n")
    for folder in ("captures", "checkpoints/commits", "memory"):
        (run / folder).mkdir(parents=True)
    stack = f'Thread 0x01 (most recent call first):\n  File "{words}", line 1 in {words}\n'
    (run / "captures" / "rank-0.txt").write_text(stack, errors="surrogatepass")
    (run / "checkpoints/commits/step-00000020.json").write_text(json.dumps({"body": {"prefix": words}, "format": 1}))
    return run


# ---------------------------------------------------------------- what makes it hostile

#: Files that a reader opens.
READ = (
    "run_id", "format", "run.yaml", "resolved.json", "job.json", "lease.json", "home", "token", "metrics.json",
    "events/supervisor.1.jsonl", "events/host-0.1.jsonl", "logs/rank-0.1.log", "captures/rank-0.txt",
    "checkpoints/fence.json", "checkpoints/commits/step-00000020.json", "memory/host-0.json",
)  # fmt: skip


def _pipes(run: Path, name: str) -> None:
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)


def _links(run: Path, name: str, target: str) -> None:
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(target)


def _folder(run: Path, name: str) -> None:
    (run / name).unlink(missing_ok=True)
    (run / name).mkdir()


def _holds(run: Path, name: str, data: bytes) -> None:
    (run / name).unlink(missing_ok=True)
    (run / name).write_bytes(data)


def _sparse(run: Path, name: str) -> None:
    with open(run / name, "ab") as file:
        file.truncate(64 << 30)


def _event(run: Path, **changed: object) -> None:
    """One more line in the log of the host."""
    lines = history()["host-0.1.jsonl"]
    write_log(run, "host-0.1.jsonl", [*lines, {**lines[-1], **changed}])  # type: ignore[dict-item]


def _replaced_folder(run: Path, name: str, target: str) -> None:
    shutil.rmtree(run / name)
    (run / name).symlink_to(target)


def _raw_event(run: Path, line: bytes) -> None:
    with open(run / "events/host-0.1.jsonl", "ab") as file:
        file.write(line + b"\n")


def kinds(secret: str) -> dict[str, Callable[[Path], object]]:
    """Kind -> makes the run in a folder. ``secret``: a file that no verb may show."""

    def changed(change: Callable[..., None], *given: object, **more: object) -> Callable[[Path], object]:
        return lambda run: change(sound(run), *given, **more)

    result: dict[str, Callable[[Path], object]] = {}
    for name, words in TEXTS.items():
        result[f"text-{name}"] = lambda run, words=words: sound(run, words, host=f"h{words}")
    for name in READ:
        result[f"pipe-{name.replace('/', '-')}"] = changed(_pipes, name)
    for name in ("resolved.json", "job.json", "events/host-0.1.jsonl", "logs/rank-0.1.log", "captures/rank-0.txt"):
        result[f"zero-{name.replace('/', '-')}"] = changed(_links, name, "/dev/zero")
        result[f"outside-{name.replace('/', '-')}"] = changed(_links, name, secret)
    for name in ("run.yaml", "events/supervisor.1.jsonl"):
        result[f"sparse-{name.replace('/', '-')}"] = changed(_sparse, name)
    result["sparse-log"] = changed(_sparse, "logs/rank-0.1.log")
    result["folder-events"] = changed(_replaced_folder, "events", "/")
    result["folder-logs"] = changed(_replaced_folder, "logs", str(Path(secret).parent))
    result["folder-job"] = changed(_folder, "job.json")
    nested = b"[" * 200_000
    result["nested-resolved"] = changed(_holds, "resolved.json", b'{"a":' + nested)
    result["nested-job"] = changed(_holds, "job.json", b'{"submission":' + nested)
    result["nested-event"] = changed(_raw_event, b'{"detail":' + nested)
    result["numbers-job"] = changed(_holds, "job.json", b'{"submission": 1e999, "backend": "local"}')
    result["kinds-job"] = changed(_holds, "job.json", b"[1, 2]")
    result["surrogate-event"] = changed(_event, detail={"loss": 1.0, "text": "\ud800"}, kind="run.message")
    result["surrogate-host"] = changed(_event, host="\udfff")
    result["time-far"] = changed(_event, wall_ns=2**62, mono_ns=2**62)
    result["time-negative"] = changed(_event, wall_ns=-(2**62), mono_ns=-(2**62))
    result["step-huge"] = changed(_event, step=2**62)
    result["digits"] = changed(_raw_event, b'{"seq": ' + b"9" * 100_000 + b"}")
    result["long-line"] = lambda run: sound(run, "x" * (1 << 20))
    result["many-incidents"] = lambda run: sound(run, incidents=100_000)
    return result


def make(root: Path, kind: str) -> Path:
    """The run of that kind below ``root``, in a home of its own with a sound one."""
    home, secret = root / kind, root / "outside" / "secret"
    secret.parent.mkdir(parents=True, exist_ok=True)
    secret.write_text(SECRET)
    os.environ["MUSTER_HOME"] = str(home)
    run = home / "runs" / RUN_ID
    kinds(str(secret))[kind](run)
    return run


# ---------------------------------------------------------------- every verb on each


def tried(root: Path, kind: str, verbs: Sequence[str] = tuple(VERBS)) -> Iterator[Misbehaviour]:
    """What is wrong with how the verbs read it."""
    run = make(root, kind)
    other = sound(root / "sound" / kind)
    os.environ["MUSTER_HOME"] = str(root / kind)
    places = {"PAGE": str(root / f"{kind}.html"), "SOUND": str(other)}
    for verb in verbs:
        argv = [str(run) + word[3:] if word.startswith("RUN") else places.get(word, word) for word in VERBS[verb]]
        yield from (Misbehaviour(kind, verb, problem) for problem in _problems(argv, root / "output"))


def import_verbs() -> None:
    """What verbs import, once, in the process that is forked."""
    for package in (muster.cli, muster.app.inspect, muster.report, muster.report.render, muster.backends.local):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)


def _problems(argv: Sequence[str], output: Path) -> Iterator[str]:
    sys.stdout.flush()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _read(argv, output)
    status, usage, late = 0, None, False
    while usage is None:
        pid, status, used = os.wait4(child, os.WNOHANG)
        usage = used if pid else None
        if usage is None and time.monotonic() - began > 3 * LIMIT_S:
            os.kill(child, signal.SIGKILL)
            late = True
        time.sleep(0.005)
    took_s, took_bytes = time.monotonic() - began, usage.ru_maxrss * 1024 - before
    text = output.read_bytes().decode(errors="surrogateescape")
    cpu_s = usage.ru_utime + usage.ru_stime
    if late or cpu_s > LIMIT_S:
        yield f"took {took_s:.1f} s, {cpu_s:.1f} s of them of the processor"
    if took_bytes > LIMIT_BYTES:
        yield f"took {took_bytes / 2**20:.0f} MiB"
    if os.WIFSIGNALED(status) and not late:
        yield f"was ended by signal {os.WTERMSIG(status)}"
    yield from problems_of(text)


def problems_of(text: str) -> Iterator[str]:
    """What is wrong with what a verb printed."""
    if (obeyed := OBEYED.search(text)) is not None:
        yield f"printed {obeyed[0]!r}: {text[max(0, obeyed.start() - 40) : obeyed.end() + 20]!r}"
    if "error: unexpected " in text or "Traceback" in text:
        yield f"ended as a bug does: {text[-300:]!r}"
    if SECRET in text:
        yield "showed a file outside of the folder"


def _read(argv: Sequence[str], output: Path) -> None:
    """Never returns."""
    from muster.cli import main

    fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = ["muster", *argv]
    with contextlib.suppress(SystemExit):
        main.main()
    os._exit(0)


def main() -> None:
    """Print what misbehaves; exit with 1 where something does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--try", dest="tried", action="store_true")
    parser.add_argument("kinds", nargs="*")
    given = parser.parse_intermixed_args()
    found = 0
    import_verbs()
    for kind in given.kinds or kinds(""):
        if not given.tried:
            print(make(given.folder, kind))
        else:
            for problem in tried(given.folder, kind):
                print(problem, flush=True)
                found += 1
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
