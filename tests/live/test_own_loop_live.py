"""Somebody else's loop under our agents: a killed rank costs no step, a stop saves, a resume goes on; what is a rank's
own comes back to that rank, from memory, from another host and from the disk."""

import signal
from pathlib import Path

import pytest
from cluster import RUN_ID, LiveRun, checkpoint_hash

from muster.checkpoint_format.snapshot_ring import Ring
from muster.config.spec import RunSpec
from muster.protocol.exit_codes import UNSUPERVISED
from muster.storage.memory_dir import left_over

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
        assert run.recoveries() == ["restart", "restart"], run.story()
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


# ---------------------------------------------------------------- what differs between ranks

#: Each rank draws as often a step as its number says, from a generator of its own: a loader that came back in another
#: rank's state, or a step too old or new, changes every loss from there on. After step ``PAUSE`` all wait for a file.
OWN = """
import sys, time
from pathlib import Path
import torch
import torch.distributed as dist
import muster.run as muster

STEPS, PAUSE, NAME = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo")
rank = dist.get_rank()


class Loader:
    def __init__(self):
        self.drawn, self.generator = 0, torch.Generator().manual_seed(100 + rank)

    def draw(self):
        self.drawn += 1
        return torch.rand(4, generator=self.generator, dtype=torch.float64)

    def state_dict(self):
        return {"drawn": self.drawn, "generator": self.generator.get_state()}

    def load_state_dict(self, found):
        self.drawn = found["drawn"]
        self.generator.set_state(found["generator"])


weights, loader = torch.zeros(4, dtype=torch.float64), Loader()
state = {"weights": weights, NAME.format(rank=rank): loader}
step = muster.restore(state)
assert loader.drawn == step * (rank + 1), (loader.drawn, step)
while step < STEPS and not muster.should_stop():
    step += 1
    for _ in range(rank + 1):
        drawn = loader.draw()
    dist.all_reduce(drawn)
    weights += drawn
    time.sleep(0.03)
    muster.save(step, state)
    muster.heartbeat(step, loss=float(weights.sum()))
    while step == PAUSE and not (Path(__file__).parent / "go").exists():
        time.sleep(0.01)
muster.finish(step, state)
dist.destroy_process_group()
"""


def own_spec(folder, steps, *, name="rank{rank}.loader", pause=0, **resources):
    (folder / "own.py").write_text(OWN)
    return RunSpec.model_validate(
        {
            "name": "own",
            "command": [str(folder / "own.py"), str(steps), str(pause), name],
            "checkpoint": {"every_steps": 10},
            "resources": {"device": "cpu", "ranks_per_host": 2, "threads_per_rank": 1, **resources},
            "recovery": {"heartbeat_timeout_s": 2.0},
        }
    )


def unfailed(steps):
    """Step -> loss as hex, of two ranks that nothing happens to."""
    torch = pytest.importorskip("torch")
    generators = [torch.Generator().manual_seed(100 + rank) for rank in range(2)]
    weights, losses = torch.zeros(4, dtype=torch.float64), {}
    for step in range(1, steps + 1):
        total = torch.zeros(4, dtype=torch.float64)
        for rank, generator in enumerate(generators):
            for _ in range(rank + 1):
                drawn = torch.rand(4, generator=generator, dtype=torch.float64)
            total += drawn
        weights += total
        losses[step] = float(weights.sum()).hex()
    return losses


def test_a_ranks_own_state_comes_back_from_memory_and_disk_and_all_ranks_take_one_checkpoint(tmp_path):
    with LiveRun(tmp_path / "run", own_spec(tmp_path, 4000)) as run:
        run.start()
        run.wait_for_step(15)
        run.kill_rank(1)
        run.wait_for_step(45)
        run.supervisor.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.story()
        assert run.events("incident.resolved")[0].detail["redone_steps"] == 0, run.story()
        stopped_at = run.step()
    folders = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    older, newest = (int(folder.name[5:13]) for folder in folders[-2:])
    assert newest >= stopped_at
    shard = folders[-1] / "rank-00001.shard"  # read by one rank alone, and refused by both
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with LiveRun(tmp_path / "run", own_spec(tmp_path, stopped_at + 10)) as run:
        run.start()
        assert run.wait() == 0, run.story()
        from_disk = [event for event in run.events("checkpoint.restored") if event.detail["tier"] == "disk"]
        assert {(event.rank, event.step) for event in from_disk} == {(0, older), (1, older)}, run.story()
        assert "checksum" in run.events("checkpoint.rejected")[-1].detail["reason"]
        assert run.losses() == unfailed(stopped_at + 10), "bit for bit"


def test_what_differs_under_one_name_is_refused_at_the_first_save(tmp_path):
    with LiveRun(tmp_path / "run", own_spec(tmp_path, 4000, name="loader")) as run:
        run.start()
        assert run.wait() == 2, run.story()
        reason = run.events("run.finished")[-1].detail["reason"]
        assert "loader.drawn differs between ranks 0 and 1" in reason, run.story()
        assert run.step() == 0 and not run.events("checkpoint.begun")


def test_a_lost_host_costs_no_step_whose_copy_was_there(tmp_path):
    """kill -9 of every process of the host: once while all ranks wait, once in the midst of steps."""
    spec = own_spec(tmp_path, 120, pause=30, hosts=2, ranks_per_host=1, spare_hosts=2)
    with LiveRun(tmp_path / "run", spec) as run:
        run.start()
        run.wait_for_step(30)
        run.wait_until(
            lambda: len({e.host for e in run.events("phase.changed") if e.phase == "spare"}) == 2, "two spares"
        )
        rings = [run.memory(run.ranks()[rank][1]) / f"own.r1s2t1p1c1e1.{rank}.ring" for rank in (0, 1)]
        run.wait_until(lambda: all(Ring.open(ring).copied() == (30, 1) for ring in rings), "both copies of step 30")
        run.signal_host(run.ranks()[1][1])
        (tmp_path / "go").touch()
        run.wait_until(lambda: len(run.events("incident.resolved")) == 1, "the first recovery")
        run.wait_for_step(60)
        run.signal_host(run.ranks()[0][1])
        assert run.wait() == 0, run.story()
        # Its rank's end may be known before its own: the restart that was decided for that becomes the swap.
        assert [action for action in run.recoveries() if action != "restart"] == ["swap", "swap"], run.story()
        assert run.events("attempt.started")[1].detail["resume_step"] == 30, run.story()
        assert run.events("incident.resolved")[0].detail["redone_steps"] == 0, run.story()
        # The newest copy may have been on its way: what the run had said to be there counts.
        told = max(event.detail.get("peer_step", 0) for event in run.events("step") if event.attempt == 2)
        assert run.events("attempt.started")[2].detail["resume_step"] >= told > 30, run.story()
        assert run.losses() == unfailed(120), "bit for bit"


def test_without_a_supervisor_a_host_writes_what_only_its_memory_holds_before_it_leaves(tmp_path, monkeypatch):
    (tmp_path / "soon").mkdir()
    soon = "from muster.agent import unsupervised\nunsupervised.GRACE_PERIOD_S = 1.5\n"
    (tmp_path / "soon" / "sitecustomize.py").write_text(soon)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "soon"), prepend=":")
    with LiveRun(tmp_path / "run", own_spec(tmp_path, 4000)) as run:
        run.start()
        run.wait_for_step(10)
        run.supervisor.kill()
        run.supervisor.wait()
        run.supervisor = None
        alone_from = run.step()
        run.wait_for_step(alone_from + 75)  # longer than the wait: it has not begun while ranks train
        run.kill_rank(1)
        assert run.agents["host-0"].wait(60) == UNSUPERVISED, run.story()
        committed = run.events("checkpoint.committed")[-1]
        # Killed as soon as rank 0 had told of a step, rank 1 may not have saved that one yet.
        assert committed.step >= run.step() - 1 > alone_from + 70, run.story()
        assert left_over(run.dir, RUN_ID) == ([], [])
        monkeypatch.undo()
        run.start()
        run.wait_until(lambda: run.step() > committed.step + 5, "steps beyond", 60)
        assert {event.step for event in run.events("checkpoint.restored")} == {committed.step}, run.story()
        steps = run.losses()
        assert steps == {step: loss for step, loss in unfailed(max(steps)).items() if step in steps}, "bit for bit"


# ---------------------------------------------------------------- the Hugging Face Trainer


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
        for step in (13, 40):  # inside the first epoch and inside the second
            run.wait_for_step(step)
            run.kill_rank(1)
        assert run.wait() == 0, run.story()
        assert run.recoveries() == ["restart", "restart"], run.story()
        assert all(event.detail["redone_steps"] <= 1 for event in run.events("incident.resolved"))
        steps = [event.step for event in run.events("step")]
        assert sorted(set(steps)) == list(range(1, 61)), "every step, and none beyond"
    whole, survived = (tmp_path / name / "model.safetensors" for name in ("whole", "survived"))
    assert whole.read_bytes() == survived.read_bytes()
