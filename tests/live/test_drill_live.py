"""``muster drill`` as a user types it, with ``muster watch`` in two other terminals: a pipe and a real one."""

import json
import os
import pty
import select
import subprocess
import sys
import time

import pytest

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]

RUN_FILE = """\
name: drill
model:
  config: {model_type: llama, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 4, intermediate_size: 64,
           vocab_size: 256}
  dtype: float32
data:
  sources: [{type: random, rows: 400}]
training: {steps: 100, sequence_length: 64, global_batch_size: 6, deterministic: true}
evaluation: {at_start: false, num_sequences: 0, samples: 0}
checkpoint: {every_steps: 0}
resources: {device: cpu, ranks_per_host: 2, threads_per_rank: 1}
output: {tensorboard: false, peak_tflops: 0.1}
"""
MUSTER = (sys.executable, "-P", "-m", "muster.cli.main")


@pytest.fixture
def shell(tmp_path):
    (tmp_path / "run.yaml").write_text(RUN_FILE)
    env = {**os.environ, "MUSTER_HOME": str(tmp_path / "home"), "TERM": "xterm-256color", "COLUMNS": "150"}

    def start(*words, **streams):
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | streams
        return subprocess.Popen([*MUSTER, *words], cwd=tmp_path, env=env, **streams)

    return start


def test_a_drill_says_what_had_to_happen_and_what_did_while_two_watch(shell, tmp_path):
    drill = shell("drill", "run.yaml", "--fault", "rank-kill", "--seed", "7", "--json")
    run_id = ""
    while not run_id:
        words = drill.stderr.readline().split()
        assert words, drill.communicate()
        run_id = words[1] if words[0] == "run" else ""
    piped = shell("watch", run_id)
    primary, secondary = pty.openpty()
    terminal = shell("watch", run_id, stdin=secondary, stdout=secondary, stderr=secondary, start_new_session=True)
    os.close(secondary)
    shown = read_all(primary, terminal)

    out, err = drill.communicate(timeout=200)
    assert drill.returncode == 0, out + err
    found = json.loads(out)
    assert found["as_expected"] and found["invariants_broken"] == []
    assert os.listdir(tmp_path / "home" / "runs") == [], "nothing is left of it"
    assert found["seen"]["noticed"] == ["rank_exit"] and found["seen"]["done"] == ["restart"]
    assert found["seen"]["redone_steps"] <= 1 and 0 < found["seen"]["lost_s"] < 60
    assert "killed by SIGKILL" in found["seen"]["sentences"][0]

    lines = piped.communicate(timeout=30)[0].splitlines()
    assert piped.returncode == 0
    assert any(line.startswith("incident i1: rank_exit") for line in lines), lines
    assert any(line.startswith("recovered from i1") for line in lines), lines
    assert any(line.startswith("attempt 1: 2 ranks") for line in lines), lines
    assert "\x1b[" not in "".join(lines)

    text = shown.decode(errors="replace")
    assert "host-0" in text and "training" in text and "memory" in text and "last incidents" in text, text[-3000:]


def read_all(fd, process):
    """What a terminal shows until its program ends."""
    shown, until = b"", time.monotonic() + 200
    while time.monotonic() < until:
        ready, _, _ = select.select([fd], [], [], 0.2)
        try:
            data = os.read(fd, 1 << 16) if ready else b""
        except OSError:
            break
        shown += data
        if not data and process.poll() is not None:
            break
    os.close(fd)
    assert process.wait(10) == 0, shown.decode(errors="replace")[-2000:]
    return shown
