"""Injected faults: by the rank that is named, once (or at one step), and only in a drill."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from muster.rank import fault_injection, worker
from muster.rank.fault_injection import FAULTS, FaultRequests, install
from muster.train.data_feed.batch_reader import Round, StepWork


def request(folder, fault, *, rank=1, always=False):
    (folder / "inject_fault.json").write_text(json.dumps({"fault": fault, "rank": rank, "always": always}))


class Reader:
    def __init__(self):
        self.closed = False

    def take(self, step):
        rounds = tuple(Round(index=index, sequences=(index,), batch=None, scale=0.5) for index in range(2))
        return StepWork(step=step, rounds=rounds, micro_batches=2, rows=2, tokens=8, supervised_tokens=8,
                        padding_tokens=0, padding_rounds=0, model_flops=0.0)  # fmt: skip

    def close(self):
        self.closed = True


class Part:
    """Reducer and optimizer in one: they record their calls."""

    moments = "kept"

    def __init__(self):
        self.calls = []

    def finish(self):
        self.calls.append("finish")
        return "sums"

    def step(self, **values):
        self.calls.append(values)


@pytest.fixture
def run(tmp_path):
    part = Part()
    return SimpleNamespace(
        context=SimpleNamespace(run_dir=str(tmp_path), rank=1), reader=Reader(), reducer=part, optimizer=part
    )


@pytest.mark.parametrize("inject_faults", [False, True])
def test_a_rank_installs_them_only_where_it_is_told_to(monkeypatch, tmp_path, inject_faults):
    run, installed = object(), []
    monkeypatch.setattr(worker, "choose_device", lambda *_: SimpleNamespace(type="cuda"))
    spec = SimpleNamespace(resources=SimpleNamespace(device="cuda"), check=SimpleNamespace(network=False))
    monkeypatch.setattr(worker, "read_spec", lambda *_: spec)
    for name in ("set_numerics", "stay_near", "open_rendezvous", "leave_world", "run_phases"):
        monkeypatch.setattr(worker, name, lambda *_, **__: None)
    for name in ("join_world", "make_components"):
        monkeypatch.setattr(worker, name, lambda *_, **__: SimpleNamespace(aborter=None))
    monkeypatch.setattr(worker, "assemble", lambda *_: run)
    monkeypatch.setattr(fault_injection, "install", installed.append)
    agent = SimpleNamespace(emit=lambda *_, **__: None, on_pause=lambda act: None)
    context = SimpleNamespace(run_dir=str(tmp_path), rank=1, master_addr="", master_port=0)
    assert worker.run_rank(context, agent, inject_faults=inject_faults) == 0
    assert installed == ([run] if inject_faults else [])


def test_a_run_is_unchanged_until_a_fault_is_requested(run):
    install(run)
    assert run.reader.take(3).step == 3 and run.reducer.finish() == "sums"
    run.optimizer.step(step=3, skip=0)
    assert run.optimizer.moments == "kept" and run.reducer.calls == ["finish", {"step": 3, "skip": 0}]
    run.reader.close()
    assert run.reader.closed


def test_an_exception_comes_once_and_only_to_the_rank_that_is_named(run, tmp_path):
    install(run)
    request(tmp_path, "exception", rank=0)
    assert run.reader.take(4).step == 4
    request(tmp_path, "exception", rank=1)
    with pytest.raises(ValueError, match="sample of step 5"):
        run.reader.take(5)
    assert run.reader.take(5).step == 5, "the attempt after it"
    assert (tmp_path / "inject_fault.exception.done").read_text() == "5"


def test_always_means_whenever_that_step_is_taken_and_no_other(run, tmp_path):
    install(run)
    request(tmp_path, "exception", always=True)
    for _ in range(3):
        with pytest.raises(ValueError, match="step 7"):
            run.reader.take(7)
    assert run.reader.take(6).step == 6 and run.reader.take(8).step == 8


def test_a_loss_that_is_no_number_is_one_micro_batch_s(run, tmp_path):
    install(run)
    request(tmp_path, "not-finite")
    first, second = run.reader.take(2).rounds
    assert math.isnan(first.scale) and second.scale == 0.5 and first.sequences == (0,)


@pytest.mark.parametrize(("fault", "before"), [("kill-reduce", []), ("kill-voted", ["finish"])])
def test_a_rank_dies_at_its_moment(run, monkeypatch, tmp_path, fault, before):
    died = []

    def die(pid, number):
        died.append(number)
        raise SystemExit

    monkeypatch.setattr(fault_injection.os, "kill", die)
    install(run)
    request(tmp_path, fault)
    part = run.reducer._part
    with pytest.raises(SystemExit):
        run.reader.take(2)
        run.reducer.finish()
        run.optimizer.step(step=2)
    assert died == [9] and part.calls == before


def test_a_rank_that_dies_after_its_update_has_made_it(run, monkeypatch, tmp_path):
    monkeypatch.setattr(fault_injection.os, "kill", lambda pid, number: (_ for _ in ()).throw(SystemExit))
    install(run)
    request(tmp_path, "kill-updated")
    run.reader.take(2)
    with pytest.raises(SystemExit):
        run.optimizer.step(step=2)
    assert run.reducer._part.calls == [{"step": 2}]


def test_a_slow_rank_stays_slow_and_the_next_attempt_is_not(run, monkeypatch, tmp_path):
    slept = []
    monkeypatch.setattr(fault_injection.time, "sleep", slept.append)
    reader = run.reader
    install(run)
    request(tmp_path, "slow")
    assert [run.reader.take(step).step for step in (3, 4)] == [3, 4] and slept == [fault_injection.SLOW_S] * 2
    run.reader = reader
    install(run)
    run.reader.take(5)
    assert len(slept) == 2


def test_a_flipped_bit_is_the_last_one_of_one_weight_after_one_update(run, tmp_path):
    run.optimizer.named = {"none": torch.nn.Parameter(torch.ones(0, 3)), "w": torch.nn.Parameter(torch.ones(2, 2))}
    install(run)
    request(tmp_path, "flip")
    for step in (2, 3):
        run.reader.take(step)
        run.optimizer.step(step=step)
    weights = run.optimizer.named["w"].detach().view(torch.int32)
    assert (weights - torch.ones(2, 2).view(torch.int32)).tolist() == [[1, 0], [0, 0]]


def test_half_a_file_or_an_unknown_fault_is_ignored(tmp_path):
    requests = FaultRequests(folder=tmp_path, rank=1)
    assert requests.look(1) is None
    (tmp_path / "inject_fault.json").write_text('{"fault": "excep')
    assert requests.look(2) is None
    request(tmp_path, "meteor")
    assert requests.look(3) is None
    request(tmp_path, FAULTS[0])
    assert requests.look(4) == FAULTS[0]
