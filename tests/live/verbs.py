"""Muster's verbs as a user types them in a shell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from waiting import eventually
from watched import Watched

from muster.core import processes

RUN_FILE = """\
name: verbs
model:
  config: {model_type: llama, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 4, intermediate_size: 64}
  tokenizer: {kind: word, vocab_size: 256}
  dtype: float32
data:
  sources: [{type: text2sql, rows: 400, heldout_rows: 10}]
training:
  {steps: 100000, sequence_length: 64, global_batch_size: 2, deterministic: true, optimizer: {schedule: constant}}
evaluation: {at_start: false, num_sequences: 4, samples: 1, final_num_questions: 4, max_new_tokens: 4}
checkpoint: {every_steps: 1000000}
resources: {device: cpu, ranks_per_host: 2, threads_per_rank: 1}
output: {tensorboard: false}
"""
MUSTER = (sys.executable, "-P", "-m", "muster.cli.main")


class Shell:
    """A user's terminal in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {**os.environ, "MUSTER_HOME": str(folder / "home"), "XDG_CACHE_HOME": str(folder / "cache")}
        self.env.pop("MUSTER_RUN_ID", None)

    def start(self, *words: str, output: int = subprocess.PIPE) -> subprocess.Popen[str]:
        """In the background. A pipe that nobody reads stops who writes to it once it is full: DEVNULL for those."""
        return subprocess.Popen(
            [*MUSTER, *words], cwd=self.folder, env=self.env, stdout=output, stderr=output, text=True
        )

    def run(self, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*MUSTER, *words], cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def status(self, run: str) -> dict:
        return json.loads(self.run("status", run, "--json").stdout)

    def wait_for_step(self, step: int) -> None:
        """Of the run in ``there``: a command for every look would slow down what is waited for."""
        seen = Watched(self.folder / "there")
        eventually(lambda: seen.step() >= step, 90)

    def left(self, run_id: str) -> list[processes.Process]:
        return processes.labelled(run_id)
