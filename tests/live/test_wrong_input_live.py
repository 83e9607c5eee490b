"""Wrong input that only a started run can find: one clear verdict, the exit code, no process and no memory left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from muster.core import processes

pytestmark = pytest.mark.live

MODEL = Path(__file__).parents[3] / "shared" / "data" / "models" / "stories260k"
RUN_FILE = """\
name: wrong
model:
  config: {model_type: llama, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 4, intermediate_size: 64}
  tokenizer: {kind: word, vocab_size: 128}
  dtype: float32
data:
  sources: [{type: text2sql, rows: 100, heldout_rows: 5}]
training: {steps: 4, sequence_length: 64, global_batch_size: 2}
evaluation: {at_start: false, num_sequences: 0, samples: 0}
resources: {device: cpu, ranks_per_host: 1, threads_per_rank: 1}
output: {tensorboard: false}
"""
PRETRAINED = ["model.config=null", "model.tokenizer=null", "model.source=./weights"]
TEXT = ["data.sources=[{type: file, path: text.txt}]", "data.train_on=all", "data.on_overlong=split"]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "run.yaml").write_text(RUN_FILE)
    (tmp_path / "text.txt").write_text("to be or not to be\n" * 50)
    yield tmp_path


def runs_of(folder: Path) -> Iterator[int]:
    """Living processes of runs in ``folder``."""
    for process in psutil.process_iter(["environ"]):
        if str((process.info["environ"] or {}).get(processes.RUN_DIR, "")).startswith(str(folder)):
            yield process.pid


def train(folder: Path, *overrides: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run to the verdict; nothing of it may be left."""
    before = set(runs_of(folder))
    memory = set(os.listdir("/dev/shm"))
    env = {**os.environ, "MUSTER_HOME": str(folder / "home"), "XDG_CACHE_HOME": str(folder / "cache"), **environment}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "muster.cli.main", "train", "run.yaml", *overrides],
        cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert not set(runs_of(folder)) - before, "processes are left"
    left = [name for name in set(os.listdir("/dev/shm")) - memory if name.startswith("muster-") and _of(folder, name)]
    assert not left, "memory is left"
    assert sum(line.startswith("error: ") for line in done.stderr.splitlines()) == 1, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done


def _of(folder: Path, name: str) -> bool:
    from muster.storage.memory_dir import prefix

    runs = [path.parent for path in folder.rglob("run_id")]
    return any(name.startswith(prefix(run, (run / "run_id").read_text().strip())) for run in runs)


def copy_model(folder: Path) -> Path:
    if not MODEL.is_dir():
        pytest.skip(f"{MODEL} is not here")
    (folder / "weights").mkdir()
    for path in MODEL.iterdir():
        (folder / "weights" / path.name).write_bytes(path.read_bytes())
    return folder / "weights"


def test_truncated_safetensors(folder: Path) -> None:
    weights = copy_model(folder) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    done = train(folder, *PRETRAINED, *TEXT)
    assert done.returncode not in (0, 130)
    assert "model.safetensors" in done.stderr


def test_safetensors_that_are_something_else(folder: Path) -> None:
    (copy_model(folder) / "model.safetensors").write_bytes(b"not safetensors at all" * 100)
    done = train(folder, *PRETRAINED, *TEXT)
    assert done.returncode not in (0, 130)
    assert "model.safetensors" in done.stderr


def test_data_whose_every_label_is_masked(folder: Path) -> None:
    rows = [{"prompt": "a " * 500, "completion": "b"}] * 10
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = train(folder, "data.sources=[{type: file, path: rows.jsonl}]", "data.on_overlong=truncate")
    assert done.returncode == 2
    assert "masked" in done.stderr


def test_a_vocabulary_that_does_not_fit(folder: Path) -> None:
    done = train(folder, "model.config.vocab_size=16")
    assert done.returncode == 2
    assert "vocabulary mismatch" in done.stderr


def test_no_space_left_for_prepared_data(folder: Path) -> None:
    full = folder / "full"
    full.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", full], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("a small file system cannot be mounted here")
    try:
        done = train(folder, f"data.cache_dir={full}", "data.sources.0.rows=5000")
        assert done.returncode not in (0, 130)
        assert "space" in done.stderr
    finally:
        subprocess.run(["umount", full], check=True)
