"""A tracker gets every figure once and in order, however often it refuses and however often its process is started."""

import threading

import pytest
from fakes.clock import VirtualClock

from muster.core.errors import UsageError
from muster.core.event_log import EventLog
from muster.trackers import delivery as delivery_module
from muster.trackers.delivery import BATCH, SLOW_S, STUCK_S, Delivery, FigureReader

STEP = {
    "loss": 1.5, "grad_norm": 1.0, "learning_rate": 1e-3, "step_ns": 5, "tokens": 10, "supervised_tokens": 4,
    "padding_tokens": None, "skipped": False, "state_hash": "ab",
}  # fmt: skip


class Service:
    """Keeps what it gets, and takes ``at_once`` figures in a call."""

    buffer_s = 0.0

    def __init__(self, at_once=3):
        self.at_once, self.refuses, self.got, self.closed, self.opened = at_once, "", [], [], 0

    def connect(self):
        self._check()
        self.opened += 1
        return self

    def send(self, figures):
        self._check()
        self.got += figures[: self.at_once]
        return min(self.at_once, len(figures))

    def close(self, outcome):
        self._check()
        self.closed.append(outcome)

    def _check(self):
        if self.refuses:
            raise ConnectionError(self.refuses)

    def steps(self, prefix="train"):
        return [each.step for each in self.got if each.prefix == prefix]


class Run:
    """Its event files and one tracker."""

    def __init__(self, folder, **given):
        self.folder, self.given, self.clock = folder, given, VirtualClock()
        self.clock.now_s = 1e9
        self.service, self.notes, self.logs = Service(), [], {}

    def write(self, steps, *, attempt=1, host="host-0", rank=0, kind="step"):
        if (host, attempt) not in self.logs:
            self.logs[host, attempt] = EventLog(
                run_id="r", directory=self.folder / "events", writer=host, attempt=attempt
            )
        log = self.logs[host, attempt]
        for step in steps:
            detail = STEP | {"loss": attempt + step / 1000} if kind == "step" else {"loss": 2.0, "duration_ns": 7}
            log.append(kind, rank=rank, step=step, detail=detail)

    def delivery(self, *, writer="host-0", every=1, **given):
        return Delivery(
            "mlflow", connect=self.service.connect, reader=FigureReader(self.folder / "events", writer, every),
            record=self.folder / "trackers" / "mlflow.json", report=self.notes.append, clock=self.clock, **given,
        )  # fmt: skip


@pytest.fixture
def run(tmp_path):
    made = Run(tmp_path)
    yield made
    for log in made.logs.values():
        log.close()


def test_numbers_of_rank_0_under_the_names_of_their_event(run):
    run.write([1])
    run.write([1], kind="eval")
    run.write([1], rank=1, host="host-1")
    assert run.delivery().deliver()
    train, held_out = run.service.got
    assert train.values == {
        "train/loss": 1.001, "train/grad_norm": 1.0, "train/learning_rate": 1e-3, "train/step_ns": 5.0,
        "train/tokens": 10.0, "train/supervised_tokens": 4.0,
    }  # fmt: skip
    assert held_out.values == {"eval/loss": 2.0, "eval/duration_ns": 7.0} and held_out.step == 1


def test_of_training_steps_those_that_the_run_file_wants(run):
    run.write(range(1, 8))
    run.write([7], kind="eval")
    assert run.delivery(every=3).deliver()
    assert run.service.steps() == [3, 6] and run.service.steps("eval") == [7]


def test_it_continues_where_the_process_before_was_killed(run):
    run.write(range(1, 10))
    first = run.delivery()
    first.deliver()
    run.write(range(10, 12))
    assert first.deliver() and run.delivery().deliver()
    run.write([12])
    assert run.delivery().deliver()
    assert run.service.steps() == list(range(1, 13))


def test_what_was_refused_is_sent_later_in_order_and_reported_once(run):
    run.write(range(1, 5))
    run.service.refuses = "no route to https://me:secret@host/\n"
    delivery = run.delivery()
    assert not delivery.deliver() and not delivery.deliver()
    restarted = run.delivery()
    assert not restarted.deliver()
    assert run.notes == [
        "mlflow does not accept this run's figures (no route to https://***@host/): training goes on, they are kept "
        "and sent once it does; after the end of the run by muster track RUN"
    ]
    run.clock.sleep(90)
    run.write(range(5, 8))
    run.service.refuses = ""
    assert restarted.deliver() and restarted.deliver()
    assert run.notes[1:] == ["mlflow accepts figures again after 90 s, and has all up to step 7"]
    assert run.service.steps() == list(range(1, 8))
    run.service.refuses = "again"
    run.write([8])
    assert not restarted.deliver() and len(run.notes) == 3


def test_a_tracker_that_fails_is_opened_again(run):
    delivery = run.delivery()
    assert delivery.deliver()
    run.write([1])
    run.service.refuses = "closed"
    delivery.deliver()
    run.service.refuses = ""
    assert delivery.deliver() and run.service.opened == 2 and run.service.steps() == [1]


def test_memory_is_bounded_while_a_tracker_is_away(run):
    run.write(range(1, 3 * BATCH))
    delivery = run.delivery()
    delivery.deliver()
    run.write(range(3 * BATCH, 5 * BATCH))
    run.service.refuses = "away"
    for _ in range(3):
        delivery.deliver()
        assert len(delivery._pending) == BATCH
    run.service.refuses = ""
    delivery.deliver()
    assert run.service.steps() == list(range(1, 5 * BATCH)) and not delivery._pending


@pytest.mark.parametrize("restarted", [False, True])
def test_steps_that_are_taken_again_after_a_loss(run, restarted):
    """The first figures stay, or where the tracker takes others the later ones."""
    run.write(range(1, 9))
    run.write([5, 8], kind="eval")
    first, second = run.delivery(), None
    first.deliver()
    run.write(range(6, 11), attempt=2)
    run.write([8, 10], attempt=2, kind="eval")
    second = run.delivery() if restarted else first
    assert second.deliver()
    assert run.service.steps() == list(range(1, 11)) and run.service.steps("eval") == [5, 8, 10]
    assert all(not each.again for each in run.service.got)
    assert [each.values["train/loss"] for each in run.service.got if each.step == 7] == [1.007]


def test_a_tracker_that_takes_steps_again_is_told_where_they_begin(run):
    run.write(range(1, 9))
    run.write([5, 8], kind="eval")
    delivery = run.delivery(redoes=True)
    delivery.deliver()
    run.write(range(6, 11), attempt=2)
    run.write([8], attempt=2, kind="eval")
    delivery.deliver()
    assert run.service.steps() == [*range(1, 9), *range(6, 11)] and run.service.steps("eval") == [5, 8, 8]
    assert [(each.prefix, each.step) for each in run.service.got if each.again] == [("train", 6)]


def test_another_hosts_files_are_read_once(run):
    """Rank 0 has come here from a host that was lost."""
    run.write([1, 2], host="host-1")
    run.write([3], attempt=2)
    delivery = run.delivery()
    delivery.deliver()
    run.write([4], attempt=2)
    run.write([9], attempt=3, host="host-1")
    delivery.deliver()
    assert run.service.steps() == [1, 2, 3, 4]


def test_a_library_that_is_missing_is_named_once_and_ends_it(run):
    def connect():
        raise UsageError("mlflow is not installed", hint="pip install mlflow")

    run.service.connect = connect
    delivery = run.delivery()
    delivery.serve()
    assert delivery.ended
    assert run.notes == ["mlflow gets no figures: mlflow is not installed (pip install mlflow)"]


def test_the_end_comes_after_all_figures(run):
    run.write([1, 2])
    delivery = run.delivery()
    delivery.finish("stopped")
    delivery.serve()
    assert run.service.steps() == [1, 2] and run.service.closed == ["stopped"] and delivery.ended


@pytest.mark.parametrize("hangs", ["connect", "send"])
def test_a_call_that_does_not_return_is_reported_and_then_counts_as_stuck(run, hangs, monkeypatch):
    called, go_on = threading.Event(), threading.Event()
    call = getattr(run.service, hangs)

    def hang(*given):
        called.set()
        go_on.wait()
        return call(*given)

    monkeypatch.setattr(run.service, hangs, hang)
    monkeypatch.setattr(delivery_module, "READ_EVERY_S", 0.0)
    run.write([1])
    delivery = run.delivery()
    serving = threading.Thread(target=delivery.serve)
    serving.start()
    called.wait()
    assert not delivery.is_stuck() and not run.notes
    run.clock.sleep(SLOW_S + 1)
    assert not delivery.is_stuck() and not delivery.is_stuck()
    assert len(run.notes) == 1 and "no answer for 100 s" in run.notes[0]
    run.clock.sleep(STUCK_S)
    assert delivery.is_stuck()
    delivery.finish("succeeded")
    go_on.set()
    serving.join()
    assert run.service.steps() == [1] and "accepts figures again" in run.notes[1]


def test_what_a_client_may_still_hold_is_sent_again_after_a_kill(run):
    """The same points, so that nothing is lost."""
    run.service.buffer_s = 5.0
    killed = run.delivery()
    for step in range(1, 20):
        run.write([step])
        killed.deliver()
        run.clock.sleep(1)
    run.service.got.clear()
    killed = run.delivery()
    killed.deliver()
    sent = run.service.steps()
    assert sent == list(range(sent[0], 20)) and 5 <= 20 - sent[0] <= 12
    for _ in range(4):
        run.clock.sleep(5)
        killed.deliver()
    run.delivery().deliver()
    assert run.service.steps() == sent, "in the end it has everything"
    run.write([20])
    killed.finish("succeeded")
    killed.serve()
    run.delivery().deliver()
    assert run.service.steps() == [*sent, 20]


def test_a_full_disk_stops_no_delivery(run):
    run.write([1, 2])
    (run.folder / "trackers").write_text("a file in the way")
    delivery = run.delivery()
    assert delivery.deliver() and delivery.deliver()
    assert run.service.steps() == [1, 2]
