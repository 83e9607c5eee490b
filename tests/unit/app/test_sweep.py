"""Sweeps: what ``--over`` takes, what limits leave, and a sweep over trials that are not run, killed at any moment."""

import json
import math
import os
import signal
import sys
from types import SimpleNamespace

import pytest

from muster.app.sweep import ranges, sweep, trial
from muster.app.sweep.definition import define
from muster.app.sweep.optimizer import Optimizer
from muster.app.sweep.sweep import Budget
from muster.config.spec import Limits
from muster.core.errors import BackendError, BusyError, ConflictError, MusterError, RunFileError, UsageError
from muster.core.events import Event
from muster.core.types import JobState, JobStatus
from muster.storage import run_registry, sweep_record

RUN_FILE = """\
name: tune
model: {config: {model_type: llama}}
data: {sources: [{type: random}]}
training: {steps: 100, optimizer: {learning_rate: 1e-4}}
resources: {device: cpu}
"""
RATE = "training.optimizer.learning_rate"
HOUR = 3600 * 10**9


@pytest.fixture
def run_file(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    (tmp_path / "run.yaml").write_text(RUN_FILE)
    return str(tmp_path / "run.yaml")


# ---------------------------------------------------------------- ranges


def test_what_over_takes(run_file):
    rate, batch, sets, drop = ranges.parse(
        [
            f"{RATE}=1e-4..1e-2:log", "training.global_batch_size=8..32:8", "training.optimizer.schedule=cosine,linear",
            "training.optimizer.weight_decay=0..1",
        ],
        run_file, [],
    )  # fmt: skip
    assert (rate.low, rate.high, rate.log, rate.whole) == (1e-4, 1e-2, True, False)
    assert batch.whole and batch.every() == [8, 16, 24, 32]
    assert sets.choices == ("cosine", "linear") and not drop.whole
    with pytest.raises(UsageError, match="a grid needs steps"):
        drop.every()


@pytest.mark.parametrize(
    "text, said",
    [
        ("training.learning_rate=1..2", "unknown key"),
        (f"{RATE}=0..1e-3", "must be"),
        ("training.global_batch_size=0.5..4", "training.global_batch_size: must be a whole number"),
        (f"{RATE}=1e-3..1e-4", "is not below"),
        (f"{RATE}=-1..1:log", "above 0"),
        (f"{RATE}=1e-4..1e-3:lg", "neither `log` nor a step"),
        (f"{RATE}=a..b", "both ends of a range are numbers"),
        (f"{RATE}=1e-4", "two different values"),
        (f"{RATE}=1e-4,1e-4", "two different values"),
        (RATE, "names no values"),
        ("limits.max_usd=1..2", "same for all trials"),
        ("run_dir=a,b", "same for all trials"),
    ],
)
def test_a_wrong_range_is_told_in_a_line_before_anything_starts(run_file, tmp_path, text, said):
    with pytest.raises((UsageError, RunFileError)) as caught:
        define(run_file, [], [text], trials=2)
    assert said in str(caught.value)
    assert not (tmp_path / "home").exists()


def test_a_key_cannot_be_given_and_swept_over_or_swept_over_twice(run_file):
    with pytest.raises(UsageError, match="is given and swept over"):
        ranges.parse([f"{RATE}=1e-4,1e-3"], run_file, [f"{RATE}=1e-2"])
    with pytest.raises(UsageError, match="twice"):
        ranges.parse([f"{RATE}=1e-4,1e-3"] * 2, run_file, [])


# ---------------------------------------------------------------- what is chosen


@pytest.mark.parametrize("seed", range(5))
def test_the_first_trials_of_one_key_are_in_every_part_of_its_range(run_file, seed):
    (over,) = ranges.parse([f"{RATE}=1e-4..1e-2:log"], run_file, [])
    optimizer = Optimizer([over], sampler="tpe", pruner="none", seed=seed, parallel=1)
    shares = [math.log(optimizer.next()[RATE] / 1e-4, 100) for _ in range(10)]
    assert {int(share * 3) for share in shares[:4]} == {0, 1, 2}, "the first four, all thirds"
    assert len({int(share * 5) for share in shares}) == 5 and min(shares) >= 0 and max(shares) < 1


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_trials_differ_by_the_seed_and_are_the_same_after_a_restart(run_file, sampler):
    over = ranges.parse([f"{RATE}=1e-4..1e-2:log", "training.global_batch_size=8..64:8"], run_file, [])

    def chosen(seed, known=()):
        optimizer = Optimizer(over, sampler=sampler, pruner="none", seed=seed, parallel=1)
        for number, values in enumerate(known):
            optimizer.known(values)
            optimizer.end(number, 1.0)
        return [optimizer.next() for _ in range(12 - len(known))]

    values = chosen(0)
    assert chosen(1) != values
    assert chosen(0, values[:5])[:5] == values[5:10]
    assert {each["training.global_batch_size"] for each in values} <= set(range(8, 65, 8))


def test_a_missing_optuna_is_noticed_before_a_folder_is_made(run_file, tmp_path, monkeypatch):
    definition = define(run_file, [], [f"{RATE}=1e-4,1e-3"], trials=2)
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UsageError, match="needs optuna"):
        sweep.sweep(definition, tell=print)
    assert not (tmp_path / "home" / "sweeps").exists()


# ---------------------------------------------------------------- limits


def held(kind, hours, usd=None, host="host-0"):
    detail = {"gpus": 1, "role": "active", "usd_per_hour": usd} if kind == "host.allocated" else {"reason": "over"}
    return Event(
        run_id="r", attempt=1, seq=0, mono_ns=0, wall_ns=int(hours * HOUR), host=host, kind=kind, detail=detail
    )


def test_dollars_are_set_aside_for_each_trial_and_what_one_leaves_is_for_others():
    budget = Budget(Limits(max_usd=100), 0.0, 4)
    assert [budget.share(number, 0) for number in range(4)] == [25.0] * 4
    assert not budget.allows(4, 0), "all of it is set aside"
    budget.note(0, [held("host.allocated", 0, 10.0), held("host.released", 1)])
    budget.spent(0)
    assert budget.share(4, HOUR) == pytest.approx(15.0), "what the first one left"
    assert sum(budget._shares.values()) + 10 <= 100


def test_hours_are_those_in_which_any_trial_holds_a_host():
    budget = Budget(Limits(max_hours=3), 0.0, 2)
    budget.note(0, [held("host.allocated", 0), held("host.released", 1)])
    budget.note(1, [held("host.allocated", 0.5), held("host.released", 1.5)])
    assert budget.reached(10 * HOUR) is None
    assert budget.limits_of(2, None, 10 * HOUR) == ("limits.max_hours=1.5",)
    budget.note(2, [held("host.allocated", 10)])
    assert budget.limits_of(1, None, 11 * HOUR) == ("limits.max_hours=1.5",), "its own hour and the half that is left"
    assert budget.reached(int(11.6 * HOUR)) == "limits.max_hours 3"


# ---------------------------------------------------------------- the loop

optuna = pytest.importorskip("optuna")


class World:
    """Trials that take four looks, whose loss is their learning rate's distance from 1e-3."""

    def __init__(self, monkeypatch):
        self.runs, self.started, self.now_s = {}, [], 0.0
        self.fate = {}
        self.at_look = lambda count: None
        self.looks = 0
        monkeypatch.setattr(trial, "start", self.start)
        monkeypatch.setattr(trial, "find", lambda number, run_id: self.runs.get(number) if run_id else None)

    def start(self, number, loaded, gpus):
        self.started.append(number)
        rate = loaded.spec.training.optimizer.learning_rate
        self.runs[number] = Fake(self, number, abs(rate - 1e-3) * 1000)
        return self.runs[number]

    def monotonic_ns(self):
        return int(self.now_s * 1e9)

    wall_ns = monotonic_ns

    def sleep(self, seconds):
        self.now_s += seconds
        self.looks += 1
        self.at_look(self.looks)


class Fake(trial.Trial):
    def __init__(self, world, number, loss):
        super().__init__(number=number, run=SimpleNamespace(run_id=f"tune-{number}"))
        self.world, self.final, self.state = world, loss, JobState.RUNNING
        self.code = None

    def look(self):
        fate = self.world.fate.get((self.number, self.step))
        if fate is not None and self.state is JobState.RUNNING:
            del self.world.fate[self.number, self.step]
            self.state, self.code = fate
        elif self.state is JobState.RUNNING:
            self.step += 1
            self.losses[self.step] = self.final + 4 - self.step
            self.state = JobState.SUCCEEDED if self.step == 4 else JobState.RUNNING
        return JobStatus(state=self.state, reason="as it went", exit_code=self.code)

    def continue_(self, gpus, overrides=()):
        if len(self._recovered_at) >= 3 and self._recovered_at[-3] >= self.step:
            raise MusterError("continued 3 times without a new step")
        self._recovered_at.append(self.step)
        self.state = JobState.RUNNING

    def end_early(self, why, *, save):
        self.ending = not save
        self.state = JobState.STOPPED


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch)


def swept(run_file, world, *, trials=6, overrides=(), over=(f"{RATE}=1e-4..1e-2:log",), **more):
    told = []
    given = define(run_file, list(overrides), list(over), trials=trials, **more)
    return sweep.sweep(given, tell=told.append, clock=world), told


def test_all_trials_run_and_bad_ones_are_ended_early(run_file, world):
    over = (f"{RATE}=1e-3,1.1e-3,1.2e-3,1.3e-3,5e-3,6e-3",)
    result, told = swept(run_file, world, sampler="grid", over=over, trials=9)
    states = [known.state for known in result.record.trials]
    assert (result.exit_code, states) == (0, ["complete"] * 4 + ["pruned"] * 2), "a grid ends with its last point"
    assert min(known.loss for known in result.record.trials if known.loss is not None) == 0.0
    assert any("ended early: held-out loss" in line for line in told)
    assert all(len(line) <= 120 for line in told)


@pytest.mark.parametrize("at", range(1, 12))
def test_killed_at_any_look_it_goes_on_with_the_same_trials(run_file, world, at):
    class Killed(BaseException):
        pass

    def kill(count):
        if count == at:
            raise Killed

    wanted = None
    for attempt in range(2):
        world.at_look = kill if attempt == 0 else lambda count: None
        try:
            result, _ = swept(run_file, world, trials=3, parallel=2, pruner="none")
            wanted = result
        except Killed:
            assert attempt == 0
    assert wanted.exit_code == 0 and [known.state for known in wanted.record.trials] == ["complete"] * 3
    assert sorted(world.started) == [0, 1, 2], "none was begun twice"


def test_values_are_the_same_whether_it_was_killed_or_not(run_file, world, tmp_path, monkeypatch):
    first = [known.values for known in swept(run_file, world, trials=14)[0].record.trials]
    again = World(monkeypatch)
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "other"))
    for trials in (5, 11, 14):
        result, _ = swept(run_file, again, trials=trials)
    assert [known.values for known in result.record.trials] == first


def test_a_trial_that_lost_its_machine_goes_on_and_one_that_cannot_has_failed(run_file, world):
    world.fate = {(0, 2): (JobState.PREEMPTED, 75), (1, 1): (JobState.FAILED, None), (2, 1): (JobState.FAILED, 1)}
    result, told = swept(run_file, world, trials=3, pruner="none")
    assert [known.state for known in result.record.trials] == ["complete", "complete", "failed"]
    assert "trial 0: lost its machine; it goes on from step 2" in told and "trial 2 has failed: as it went" in told


def test_a_back_end_that_does_not_answer_for_a_while_decides_nothing(run_file, world, monkeypatch):
    """A controller of Slurm that restarts; trials go on meanwhile."""
    silent = {3, 4, 5}
    look = Fake.look

    def unreachable(self):
        if world.looks in silent:
            raise BackendError("Unable to contact slurm controller\nmore")
        return look(self)

    monkeypatch.setattr(Fake, "look", unreachable)
    result, told = swept(run_file, world, trials=2, parallel=2, pruner="none")
    assert (result.exit_code, [known.state for known in result.record.trials]) == (0, ["complete"] * 2)
    assert [line for line in told if "cannot be read" in line] == [
        f"trial {number}: its status cannot be read: Unable to contact slurm controller" for number in (0, 1)
    ], "each once"


def test_ctrl_c_while_the_back_end_does_not_answer_still_asks_each_trial_to_save(run_file, world, monkeypatch):
    def interrupt(count):
        if count == 2:
            monkeypatch.setattr(Fake, "look", silent)
            raise KeyboardInterrupt

    def silent(self):
        raise BackendError("no answer")

    world.at_look = interrupt
    monkeypatch.setattr(sweep, "LEAVE_S", 0.0)
    with pytest.raises(KeyboardInterrupt):
        swept(run_file, world, trials=2, parallel=2, pruner="none")
    assert {run.state for run in world.runs.values()} == {JobState.STOPPED}


@pytest.mark.parametrize(("backend", "seconds"), [("local", 1.0), ("slurm", 15.0)])
def test_a_scheduler_that_serves_others_too_is_asked_less_often(run_file, world, backend, seconds):
    swept(run_file, world, trials=1, overrides=[f"backend={backend}", "resources.device=cpu"])
    assert world.now_s == pytest.approx(seconds * world.looks) and world.looks >= 3


def test_ctrl_c_while_a_trial_is_being_submitted_leaves_no_trial_behind(run_file, world, monkeypatch):
    def start(number, loaded, gpus):
        os.kill(os.getpid(), signal.SIGINT)  # at the terminal, while sbatch has the script
        return world.start(number, loaded, gpus)

    monkeypatch.setattr(trial, "start", start)
    with pytest.raises(KeyboardInterrupt):
        swept(run_file, world, trials=2, parallel=2, pruner="none")
    assert [run.state for run in world.runs.values()] == [JobState.STOPPED], "it was asked to end, and no second began"
    assert sweep_record.read(sweep_record.place("tune")).trials[0].run_id == "tune-0"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_does_not_wait_for_the_submission(run_file, world):
    with pytest.raises(KeyboardInterrupt), sweep.uninterrupted():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("it went on")


def test_a_lost_trial_waits_while_the_back_end_cannot_be_asked_to_go_on_with_it(run_file, world, monkeypatch):
    """A controller that is away longer than three tries may take: they count for nothing."""
    busy = iter(range(5))
    go_on = Fake.continue_

    def continue_(self, gpus, overrides=()):
        if next(busy, None) is not None:
            raise BusyError("sbatch: Unable to contact slurm controller\nmore")
        go_on(self, gpus, overrides)

    monkeypatch.setattr(Fake, "continue_", continue_)
    world.fate = {(0, 2): (JobState.PREEMPTED, 75)}
    result, told = swept(run_file, world, trials=1, pruner="none")
    assert [known.state for known in result.record.trials] == ["complete"] and world.now_s > 5 * sweep.AGAIN_S
    assert told.count("trial 0 waits: sbatch: Unable to contact slurm controller") == 5


def refuse_to_end(monkeypatch, times):
    """The back end does not answer the first so many requests to end a trial."""
    deaf, end = iter(range(times)), Fake.end_early

    def end_early(self, why, *, save):
        if next(deaf, None) is not None:
            raise BusyError("no answer")
        end(self, why, save=save)

    monkeypatch.setattr(Fake, "end_early", end_early)


def test_a_trial_that_could_not_be_ended_is_asked_again(run_file, world, monkeypatch):
    over = (f"{RATE}=1e-3,1.1e-3,1.2e-3,1.3e-3,9e-3",)
    refuse_to_end(monkeypatch, 2)
    world.fate = dict.fromkeys([(4, 1), (4, 2)], (JobState.RUNNING, None))
    result, told = swept(run_file, world, sampler="grid", over=over, trials=5)
    assert [known.state for known in result.record.trials] == ["complete"] * 4 + ["pruned"]
    assert told.count("trial 4 could not be ended: no answer") == 1


def test_after_ctrl_c_a_trial_that_could_not_be_asked_is_asked_again(run_file, world, monkeypatch):
    def interrupt(count):
        if count == 1:
            raise KeyboardInterrupt

    refuse_to_end(monkeypatch, 2)
    world.at_look = interrupt
    with pytest.raises(KeyboardInterrupt):
        swept(run_file, world, trials=2, parallel=2, pruner="none")
    assert {run.state for run in world.runs.values()} == {JobState.STOPPED}


def test_a_trial_that_is_lost_again_and_again_without_a_step_is_given_up(run_file, world):
    class Lost(dict):
        def get(self, key, default=None):
            return (JobState.ABSENT, None) if key[0] == 0 else default

        def __delitem__(self, key):
            pass

    world.fate = Lost()
    result, _ = swept(run_file, world, trials=2, pruner="none")
    assert [known.state for known in result.record.trials] == ["failed", "complete"]


def test_where_the_first_trials_all_fail_the_rest_is_not_tried(run_file, world):
    world.fate = {(number, 0): (JobState.FAILED, 1) for number in range(9)}
    result, _ = swept(run_file, world, trials=9)
    assert result.exit_code == 1 and len(result.record.trials) == 3 and "all of the first 3" in result.reason


def test_a_trial_that_a_person_stopped_is_left_alone_until_the_sweep_is_typed_again(run_file, world):
    world.fate = {(0, 2): (JobState.STOPPED, 130)}
    result, _ = swept(run_file, world, trials=2, pruner="none")
    assert result.exit_code == 130 and [known.state for known in result.record.trials] == ["open", "complete"]
    result, told = swept(run_file, world, trials=2, pruner="none")
    assert result.exit_code == 0 and "trial 0: goes on from step 2" in told


def test_ctrl_c_stops_all_of_them_and_they_go_on(run_file, world):
    def interrupt(count):
        if count == 2:
            raise KeyboardInterrupt

    world.at_look = interrupt
    with pytest.raises(KeyboardInterrupt):
        swept(run_file, world, trials=2, parallel=2, pruner="none")
    assert {run.state for run in world.runs.values()} == {JobState.STOPPED}
    world.at_look = lambda count: None
    assert swept(run_file, world, trials=2, parallel=2, pruner="none")[0].exit_code == 0


def test_a_folder_holds_one_sweep_and_one_process_runs_it(run_file, world, tmp_path):
    swept(run_file, world, trials=1)
    for more in ({"seed": 1}, {"overrides": ["training.steps=50"]}, {"over": (f"{RATE}=1e-4..1e-3:log",)}):
        with pytest.raises(UsageError, match="holds another sweep"):
            swept(run_file, world, trials=1, **more)
    assert swept(run_file, world, trials=2, overrides=["limits.max_hours=5"])[0].exit_code == 0
    with run_registry.lock_submit(sweep_record.place("tune"), sweep_record.LOCK):
        with pytest.raises(ConflictError, match="another muster sweep"):
            swept(run_file, world, trials=1)


def test_a_damaged_record_is_one_line(run_file, world):
    folder = sweep_record.place("tune")
    folder.mkdir(parents=True)
    (folder / "sweep.json").write_text(json.dumps({"name": "tune"}))
    with pytest.raises(MusterError, match=r"sweep.json cannot be read"):
        swept(run_file, world, trials=1)


def test_gpus_of_a_machine_are_divided(run_file, world, monkeypatch):
    offer = SimpleNamespace(gpus_per_node=4)
    monkeypatch.setattr("muster.backends.local.launcher.LocalLauncher.offers", lambda self, spec: [offer])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    more = {"overrides": ["resources.device=auto", "resources.ranks_per_host=2"], "trials": 2}
    given = define(run_file, more["overrides"], [f"{RATE}=1e-4,1e-3"], trials=2, parallel=2)
    assert given.shares == ("0,1", "2,3")
    with pytest.raises(UsageError, match="need 6 GPUs"):
        define(run_file, more["overrides"], [f"{RATE}=1e-4,1e-3"], trials=3, parallel=3)
