"""Data preparation by size of text and number of processes: time, tokens/s, peak memory of all its processes.

    python benchmarks/data_preparation.py [--megabytes 100 500 2000] [--workers 1 2] [--rounds 1] [--kind text chat]

The rows are paragraphs of SHARED/corpora/tiny_shakespeare.txt in a seeded order (chat: as question and answer), the
tokenizer is SHARED/tokenizers/bpe2k (2,000 tokens, real); an empty cache each time. Memory: proportional set size
(pages that processes share count once), summed over the preparation's processes, sampled every 0.1 s; files mapped into
memory count while they are. Numbers of processes take turns. Never part of a test.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

SHARED = Path(os.environ.get("SHARED") or Path(__file__).resolve().parents[1].parent / "shared" / "data")
PROGRAM = """
import json, sys, time
from pathlib import Path
from muster.config.spec import RunSpec
from muster.data.prepare import prepare
import muster.data.tokenise, tokenizers, numpy
place = Path(sys.argv[1])
if __name__ == "__main__":
    spec = RunSpec.model_validate(json.loads((place / "spec.json").read_text()))
    began, stages = time.monotonic(), {}
    def progress(activity, done, total):
        stages.setdefault(activity, round(time.monotonic() - began, 2))
    found = prepare(spec, run_dir=place / "run", progress=progress)
    answer = {"tokens": found.stats["tokens"], "s": time.monotonic() - began, "stages": stages,
              "fingerprint": found.fingerprint}
    (place / "answer.json").write_text(json.dumps(answer))
"""


def write_rows(path: Path, kind: str, megabytes: float) -> None:
    paragraphs = (SHARED / "corpora" / "tiny_shakespeare.txt").read_text().split("\n\n")
    rng = random.Random(0)
    size, written = int(megabytes * 1e6), 0
    with open(path, "w") as file:
        while written < size:
            count = rng.randint(3, 20)
            first = rng.randrange(len(paragraphs) - count)
            line = json.dumps(row(kind, paragraphs[first : first + count])) + "\n"
            written += file.write(line)


def row(kind: str, paragraphs: list[str]) -> dict[str, object]:
    if kind == "text":
        return {"text": "\n\n".join(paragraphs)}
    roles = ("user", "assistant")
    turns = [{"role": roles[at % 2], "content": each} for at, each in enumerate(paragraphs[: len(paragraphs) // 2 * 2])]
    return {"messages": turns}


def measure(rows: Path, kind: str, workers: int) -> dict[str, object]:
    place = Path(tempfile.mkdtemp(dir=rows.parent))
    data = {"sources": [{"type": "file", "path": str(rows)}], "cache_dir": str(place / "cache"), "workers": workers}
    data |= {"on_overlong": "split"} if kind == "text" else {"chat_template": "chatml", "on_overlong": "truncate"}
    spec = {
        "name": "prepared", "training": {"sequence_length": 1024}, "data": data,
        "model": {"config": {"vocab_size": 2048}, "tokenizer": str(SHARED / "tokenizers" / "bpe2k")},
    }  # fmt: skip
    (place / "spec.json").write_text(json.dumps(spec))
    (place / "program.py").write_text(PROGRAM)  # a file: worker processes import the main module
    with subprocess.Popen([sys.executable, str(place / "program.py"), str(place)]) as process:
        peak = max(memory(process), default=0)
    answer: dict[str, object] = json.loads((place / "answer.json").read_text())
    shutil.rmtree(place)
    return {**answer, "peak_mib": round(peak / 2**20), "load": round(os.getloadavg()[0], 1)}


def memory(process: subprocess.Popen[bytes]) -> Iterator[int]:
    """Bytes of the process and its children, time after time, until it ends."""
    parent = psutil.Process(process.pid)
    while process.poll() is None:
        with contextlib.suppress(psutil.Error):
            yield sum(each.memory_full_info().pss for each in (parent, *parent.children(recursive=True)))
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[100, 500, 2000])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--kind", nargs="+", choices=("text", "chat"), default=["text"])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="muster-preparation-") as folder:
        for kind in given.kind:
            for megabytes in given.megabytes:
                rows = Path(folder) / f"{kind}.jsonl"
                write_rows(rows, kind, megabytes)
                found: dict[int, list[float]] = {workers: [] for workers in given.workers}
                for _ in range(given.rounds):
                    for workers in given.workers:
                        seen = measure(rows, kind, workers)
                        found[workers].append(float(str(seen["tokens"])) / float(str(seen["s"])))
                        print(json.dumps({"kind": kind, "mb": megabytes, "workers": workers, **seen}), flush=True)
                rates = {workers: statistics.median(each) for workers, each in found.items()}
                base = rates[given.workers[0]]
                told = (f"{workers}: {rate:,.0f} tokens/s ({rate / base:.2f}x)" for workers, rate in rates.items())
                print(f"{kind}, {megabytes:g} MB, by processes:", "; ".join(told), flush=True)


if __name__ == "__main__":
    main()
