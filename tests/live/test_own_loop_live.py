"""Somebody else's loop under our agents: a killed rank costs no step, a stop saves, a resume goes on."""

import signal
from pathlib import Path

import pytest
from cluster import LiveRun, checkpoint_hash

from muster.core.spec import RunSpec

pytestmark = [pytest.mark.live, pytest.mark.timeout(180)]

SCRIPT = Path(__file__).parents[2] / "examples" / "own_loop.py"


def spec(tmp_path, steps=200):
    script = tmp_path / "own_loop.py"
    script.write_text(SCRIPT.read_text().replace("STEPS = 200", f"STEPS = {steps}"))
    return RunSpec.model_validate(
        {
            "name": "own",
            "command": [str(script)],
            "checkpoint": {"every_steps": 50},
            "resources": {"device": "cpu", "ranks_per_host": 2, "threads_per_rank": 1},
        }
    )


def test_kills_cost_no_step_and_no_bit(tmp_path):
    (tmp_path / "plain").mkdir()
    with LiveRun(tmp_path / "plain", spec(tmp_path, 400)) as run:
        run.start()
        assert run.wait() == 0, run.story()
    with LiveRun(tmp_path / "killed", spec(tmp_path, 400)) as run:
        run.start()
        for step in (60, 180):
            run.wait_for_step(step)
            run.kill_rank(1)
        assert run.wait() == 0, run.story()
        assert run.actions() == ["restart", "restart"], run.story()
    assert checkpoint_hash(tmp_path / "plain" / "checkpoints") == checkpoint_hash(tmp_path / "killed" / "checkpoints")


def test_a_stop_saves_and_a_second_start_goes_on(tmp_path):
    with LiveRun(tmp_path / "run", spec(tmp_path, 2000)) as run:
        run.start()
        run.wait_for_step(30)
        run.supervisor.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.story()
        stopped_at = run.step()
    with LiveRun(tmp_path / "run", spec(tmp_path, stopped_at + 20)) as run:
        run.start()
        assert run.wait() == 0, run.story()
        (restored,) = {event.step for event in run.events("checkpoint.restored")}
        assert restored >= 30
        assert run.step() == stopped_at + 20


TRAINER = Path(__file__).parents[2] / "examples" / "hf_trainer.py"


def trainer_spec(output):
    return RunSpec.model_validate(
        {
            "name": "hf",
            "command": [str(TRAINER), str(output)],
            "checkpoint": {"every_steps": 0},
            "resources": {"device": "cpu", "ranks_per_host": 2, "threads_per_rank": 1},
        }
    )


def test_a_hugging_face_trainer_with_a_callback_loses_no_step_and_no_bit(tmp_path):
    with LiveRun(tmp_path / "plain", trainer_spec(tmp_path / "whole")) as run:
        run.start()
        assert run.wait() == 0, run.story()
    with LiveRun(tmp_path / "killed", trainer_spec(tmp_path / "survived")) as run:
        run.start()
        run.wait_for_step(20)
        run.kill_rank(1)
        assert run.wait() == 0, run.story()
        assert run.actions() == ["restart"], run.story()
        assert run.events("recovered")[0].detail["redone_steps"] <= 1
        steps = [event.step for event in run.events("step")]
        assert sorted(set(steps)) == list(range(1, 61)), "every step, and none beyond"
    whole, survived = (tmp_path / name / "model.safetensors" for name in ("whole", "survived"))
    assert whole.read_bytes() == survived.read_bytes()


def test_what_the_callback_adds_is_under_fifteen_lines():
    lines = TRAINER.read_text().splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("class Survive"))
    end = next(number for number in range(begin + 1, len(lines)) if lines[number] and not lines[number].startswith(" "))
    added = [line for line in lines[begin:end] if line.strip()]
    added += [line for line in lines if ("muster.run" in line and "import" in line) or "callbacks=" in line]
    assert len(added) < 15
