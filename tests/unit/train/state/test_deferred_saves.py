"""Training waits for no save: one that is due while another is under way comes after it, on every rank alike."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from muster.config.spec import CheckpointSpec  # noqa: E402
from muster.core.intervals import FailureRate  # noqa: E402
from muster.protocol.ranks import Command  # noqa: E402
from muster.train.state import saving  # noqa: E402
from muster.train.state.saving import RETRY_S, Saves  # noqa: E402
from muster.train.training_run import TrainingRun  # noqa: E402


class Saver:
    """A saver whose save is under way for as long as the test says."""

    def __init__(self):
        self.begun, self.put, self.busy = [], [], False

    def save(self, step, state, extra):
        self.begun.append(step)

    def put_off(self, step):
        self.put.append(step)

    def poll(self): ...


@pytest.fixture
def run():
    saves = Saves(saver=Saver(), spec=CheckpointSpec(every_steps=4), state=SimpleNamespace(sharded=dict), extra={},
                  rate=FailureRate.at_scale(1))  # fmt: skip
    agreed = SimpleNamespace(saving=False)
    found = SimpleNamespace(
        saves=saves, saver=saves.saver, agreed=agreed, last_step=40, world=SimpleNamespace(rank=0),
        baseline=SimpleNamespace(covers=lambda step: False), state=SimpleNamespace(step=0),
        consensus=SimpleNamespace(any_rank_saving=lambda: agreed.saving), flush_pending_metrics=lambda: None,
    )  # fmt: skip
    return found


def steps(run, first, last):
    for step in range(first, last + 1):
        if TrainingRun.checkpoint_is_due(run, step):
            run.saves.save(step)


def test_a_save_that_is_due_meanwhile_comes_as_soon_as_the_other_is_done(run):
    steps(run, 1, 4)
    assert run.saver.begun == [4]
    run.agreed.saving = True
    steps(run, 5, 13)
    assert run.saver.begun == [4] and run.saver.put == [8, 12], "and somebody hears of it"
    run.agreed.saving = False
    steps(run, 14, 20)
    assert run.saver.begun == [4, 14, 16, 20]


def test_the_last_step_is_no_matter_of_the_count(run):
    run.saves.deferred = True
    assert not TrainingRun.checkpoint_is_due(run, 40)


def test_an_order_to_save_waits_too_but_a_stop_does_not(run):
    run.agreed.saving = True
    TrainingRun.save(run, 7, Command(kind="save"))
    assert run.saver.put == [7] and run.saves.deferred
    with pytest.raises(AttributeError):  # it goes on to the save itself, for which this stand-in has no link
        TrainingRun.save(run, 7, Command(kind="stop"))


def test_a_save_that_failed_is_tried_again_before_the_count_asks_for_it(run, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(saving.time, "monotonic", lambda: now[0])
    run.saves.save(4)
    run.saves.failed()
    now[0] += RETRY_S - 1
    assert not TrainingRun.wants_save(run)
    now[0] += 2
    assert TrainingRun.wants_save(run)
    run.saver.busy = True
    assert not TrainingRun.wants_save(run)
    run.saver.busy = False
    run.saves.save(6)
    assert not TrainingRun.wants_save(run), "that one has not failed"
