"""A run that begins with what another one has trained: `model.source: RUN`, typed as a user does."""

import json
import re

import pytest
from verbs import Shell

pytestmark = [pytest.mark.live, pytest.mark.timeout(280)]

FIRST = """\
name: first
run_dir: first
model:
  config: {model_type: llama, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 64}
  tokenizer: {kind: word, vocab_size: 300}
  dtype: float32
data: {sources: [{type: text2sql, level: 1, rows: 60, heldout_rows: 8}]}
training: {steps: 8, sequence_length: 128, global_batch_size: 2, optimizer: {learning_rate: 1.0e-2}}
evaluation: {num_questions: 0, final_num_questions: 0, samples: 0, every_steps: 4}
checkpoint: {every_steps: 4}
resources: {device: cpu, ranks_per_host: 1, threads_per_rank: 1}
"""
SECOND = re.sub(r"  config: .*\n  tokenizer: .*\n", "  source: first\n", FIRST.replace(": first", ": second"))


def heldout(folder):
    lines = [line for file in (folder / "events").glob("*.jsonl") for line in file.read_text().splitlines()]
    events = [json.loads(line) for line in lines]
    return {event["step"]: event["detail"]["loss"] for event in events if event["kind"] == "eval"}


def test_the_next_run_begins_where_the_first_one_ended(tmp_path):
    shell = Shell(tmp_path)
    (tmp_path / "first.yaml").write_text(FIRST)
    (tmp_path / "second.yaml").write_text(SECOND)
    shell.run("train", "first.yaml")
    exports = tmp_path / "first" / "exports"
    shell.run("plan", "second.yaml")
    shell.run("submit", "second.yaml", "--dry-run")
    assert not exports.exists(), "only a run that begins needs the weights"
    for revision, words in (("5", "no checkpoint of step 5"), ("worst", "no checkpoint of step worst")):
        refused = shell.run("train", "second.yaml", f"model.revision={revision}", code=2).stderr
        assert words in refused and "best, or one of: 8, 4" in refused and not (tmp_path / "second").exists()
    done = shell.run("train", "second.yaml")
    (folder,) = exports.iterdir()
    assert folder.name == "step-00000008-model" and str(folder) in done.stdout + done.stderr
    assert heldout(tmp_path / "second")[0] == pytest.approx(heldout(tmp_path / "first")[8], rel=1e-4)
    made = folder.stat().st_mtime_ns
    shell.run("train", "second.yaml", "training.steps=10")  # the same run, longer: by the same folder
    assert [each.name for each in exports.iterdir()] == [folder.name] and folder.stat().st_mtime_ns == made
    shell.run("train", "second.yaml", "run_dir=third", "model.revision=4", "training.steps=1")
    assert heldout(tmp_path / "third")[0] == pytest.approx(heldout(tmp_path / "first")[4], rel=1e-4)
