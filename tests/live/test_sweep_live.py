"""A sweep typed by a user: killed, its trials' processes killed, stopped and gone on with; every trial a real run."""

import json
import signal
import subprocess

import pytest
from verbs import MUSTER, Shell
from waiting import eventually
from watched import Watched

from muster.core import processes
from muster.core.processes import Process

pytestmark = [pytest.mark.live, pytest.mark.timeout(280)]

RUN_FILE = """\
name: tune
model:
  config: {model_type: llama, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 4, intermediate_size: 64}
  tokenizer: {kind: word, vocab_size: 256}
  dtype: float32
data:
  sources: [{type: text2sql, rows: 300, heldout_rows: 30}]
training: {steps: 200, sequence_length: 64, global_batch_size: 2, optimizer: {schedule: constant}}
evaluation: {at_start: false, num_sequences: 8, samples: 0, final_num_questions: 0, every_steps: 20}
checkpoint: {every_steps: 40}
resources: {device: cpu, ranks_per_host: 1, threads_per_rank: 1}
output: {tensorboard: false}
"""
WORDS = ("sweep", "run.yaml", "--over", "training.optimizer.learning_rate=1e-4,1e-2,3e-2", "--sampler", "grid")


class Sweep:
    """One in a folder of its own."""

    def __init__(self, folder, *more):
        self.shell, self.words = Shell(folder), (*WORDS, *more)
        (folder / "run.yaml").write_text(RUN_FILE)
        self.folder = folder / "home" / "sweeps" / "tune"
        self.watched = {}

    def start(self):
        log = (self.shell.folder / "told").open("a")
        return subprocess.Popen(
            [*MUSTER, *self.words], cwd=self.shell.folder, env=self.shell.env, stdout=log, stderr=log
        )

    @property
    def trials(self):
        try:
            return json.loads((self.folder / "sweep.json").read_text())["trials"]
        except FileNotFoundError:
            return []

    def step(self, number):
        # One a trial: no line of its events is parsed twice, beside the trials that are waited for.
        return self.watched.setdefault(number, Watched(self.folder / f"trial-{number:03d}")).step()

    def told(self):
        return (self.shell.folder / "told").read_text()


def test_a_killed_sweep_goes_on_and_so_does_a_trial_that_lost_its_machine(tmp_path):
    sweep = Sweep(tmp_path, "--trials", "3", "--parallel", "2")
    first = sweep.start()
    try:
        eventually(lambda: len(sweep.trials) >= 2 and all(trial["run_id"] for trial in sweep.trials[:2]), 60)
        eventually(lambda: sweep.step(0) >= 60, 150)
        first.kill()
        first.wait()
        lost = processes.labelled(sweep.trials[0]["run_id"])
        assert any("muster.app.supervisor" in process.argv for process in lost)
        kill(lost)  # its machine: supervisor, agent and ranks at once
        again = sweep.start()
        assert again.wait(200) == 0, sweep.told()
    finally:
        for trial in sweep.trials:
            kill(processes.labelled(trial["run_id"]))
    trials = sweep.trials
    assert [trial["number"] for trial in trials] == [0, 1, 2]
    assert len({trial["run_id"] for trial in trials}) == 3, "no trial was begun twice"
    assert {trial["state"] for trial in trials} <= {"complete", "pruned"}
    assert "trial 0: goes on from step" in sweep.told() or "trial 0: lost its machine" in sweep.told()
    shown = json.loads(sweep.shell.run("status", "tune", "--json").stdout)
    best = min((trial for trial in trials if trial["loss"] is not None), key=lambda trial: trial["loss"])
    assert shown["best"] == best["number"]
    run = next(trial["run"] for trial in shown["trials"] if trial["number"] == 0)
    assert run["step"] == 200, "it went on to its end"
    assert "3 trials (3 complete)" in sweep.shell.run("status").stdout
    compared = sweep.shell.run("compare", "tune").stdout
    assert "training.optimizer.learning_rate" in compared and best["run_id"] in compared.splitlines()[0]


def kill(found: list[Process]) -> None:
    processes.send(found, signal.SIGKILL)


def test_ctrl_c_saves_its_trials_the_same_words_go_on_and_limits_hold_for_all(tmp_path):
    sweep = Sweep(tmp_path, "--trials", "2")
    running = sweep.start()
    eventually(lambda: sweep.trials and sweep.trials[0]["run_id"] and sweep.step(0) >= 20, 150)
    running.send_signal(signal.SIGINT)
    assert running.wait(60) == 130, sweep.told()
    (stopped,) = sweep.trials
    eventually(lambda: not processes.labelled(stopped["run_id"]), 30)  # the last to leave is the supervisor's keeper
    assert "another sweep" in sweep.shell.run(*sweep.words, "--seed", "1", code=2).stderr

    sweep.words = (*sweep.words, "limits.max_hours=0.0001")
    assert sweep.start().wait(60) == 130
    assert "limits.max_hours 0.0001 was reached" in sweep.told() and len(sweep.trials) == 1

    sweep.words = sweep.words[:-1]
    assert sweep.start().wait(200) == 0, sweep.told()
    assert [trial["state"] for trial in sweep.trials] == ["complete", "complete"]
    assert sweep.trials[0]["run_id"] == stopped["run_id"] and "trial 0: goes on from step" in sweep.told()
