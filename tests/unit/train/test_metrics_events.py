"""A step's event: complete, honest about padding, silent on other ranks."""

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from muster.core.event_details.kinds import KINDS
from muster.data.schedule import plan_step
from muster.data.sequences import Sequence
from muster.train.data_feed.batch_reader import StepWork
from muster.train.distributed.arrivals import StepClock
from muster.train.evaluation.evaluate import Verdict, summary
from muster.train.measurement.metrics import Peak, Pending, Phases, StepLog, StepTimes


class Recorder:
    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def emit(self, kind: str, *, step: int | None = None, phase: str | None = None, **detail: Any) -> None:
        self.events.append((kind, {"step": step, "phase": phase, **detail}))


WORK = StepWork(
    step=3,
    rounds=(),
    micro_batches=3,
    rows=3,
    tokens=1000,
    supervised_tokens=400,
    padding_tokens=24,
    padding_rounds=1,
    model_flops=2e9,
)


def written(rank: int, peak: float | None) -> Recorder:
    agent = Recorder()
    log = StepLog(  # type: ignore[arg-type]
        agent=agent,
        rank=rank,
        device=torch.device("cpu"),
        peak=Peak(flops=peak, ranks=2),
    )
    log._since_ns -= 10**9  # the step took a second
    log.write(WORK, loss=1.5, norm=2.5, learning_rate=1e-3, times=StepTimes(data_wait_ns=5, stall_ns=7))
    return agent


def test_the_event_fits_the_schema_and_its_figures_agree() -> None:
    agent = written(0, 4e9)
    ((kind, detail),) = agent.events
    assert kind == "step" and detail.pop("step") == 3 and detail.pop("phase") is None
    assert set(KINDS["step"].required()) <= set(detail)
    assert set(detail) <= set(KINDS["step"].required()) | set(KINDS["step"].optional())
    seconds = detail["step_ns"] / 1e9
    assert seconds == pytest.approx(1.0, abs=0.2)
    assert detail["tokens_per_s"] == pytest.approx(1000 / seconds)
    assert detail["tflops_per_rank"] == pytest.approx(2e9 / seconds / 2 / 1e12)
    assert detail["mfu"] == pytest.approx(2e9 / seconds / (4e9 * 2))
    assert (detail["data_wait_ns"], detail["stall_ns"], detail["padding_rounds"]) == (5, 7, 1)


def test_the_parts_of_a_step_sum_to_it() -> None:
    """From the second event on: of the first one's beginning nothing is known."""
    agent, clock = Recorder(), StepClock()
    log = StepLog(agent=agent, rank=0, device=torch.device("cpu"), peak=Peak(flops=None, ranks=2))  # type: ignore[arg-type]
    log.clock = clock
    for _ in range(2):
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass
        time.sleep(0.05)
        clock.begin_stall()
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass
        stall_ns = clock.end_stall()
        began = time.monotonic_ns()
        time.sleep(0.03)
        clock.waits.ns += time.monotonic_ns() - began
        log.write(WORK, loss=1.0, norm=1.0, learning_rate=1e-3, times=StepTimes(stall_ns=stall_ns))
    (_, first), (_, second) = agent.events
    assert "comm_ns" not in first
    assert second["compute_ns"] == pytest.approx(0.05e9, rel=0.3)
    assert second["comm_ns"] >= 0.03e9 and second["host_gap_ns"] >= 0.05e9 and second["stall_ns"] >= 0.02e9
    parts = ("compute_ns", "comm_ns", "data_wait_ns", "host_gap_ns", "stall_ns")
    assert sum(second[part] for part in parts) == pytest.approx(second["step_ns"], rel=0.01)


def test_no_mfu_without_a_peak_and_nothing_from_other_ranks() -> None:
    agent = written(0, None)
    assert "mfu" not in agent.events[0][1] and "tflops_per_rank" in agent.events[0][1]
    assert written(1, 4e9).events == []


def test_phases_are_told_when_they_change() -> None:
    agent = Recorder()
    phases = Phases(agent)  # type: ignore[arg-type]
    for phase in ("start", "start", "train", "eval", "train"):
        phases.enter(phase)
    assert [detail["phase"] for _, detail in agent.events] == ["start", "train", "eval", "train"]


def test_pending_keeps_order_and_values() -> None:
    assert Pending([torch.tensor(1.0), torch.tensor(2.0, dtype=torch.float64)]).values() == [1.0, 2.0]


def test_the_padding_tail_is_no_document() -> None:
    ids, lengths = np.zeros(12, dtype=np.int32), np.array([3, 4, 5], dtype=np.int32)
    for tokens, kept in ((7, [3, 4]), (12, [3, 4, 5])):
        assert Sequence(ids, ids, ids, lengths, tokens, tokens).documents.tolist() == kept


def test_accuracies_by_how_answers_were_judged() -> None:
    questions = [SimpleNamespace(metric=name) for name in ("execution_accuracy", "execution_accuracy", "query_match")]
    verdicts = [Verdict(True, False), Verdict(False, True), Verdict(True, False)]
    found = summary(questions, verdicts)  # type: ignore[arg-type]
    assert found == {"questions": 3, "execution_accuracy": 0.5, "query_match": 1.0, "timeouts": 1}
    assert "execution_accuracy" not in summary(questions[2:], verdicts[2:])  # type: ignore[arg-type]


def test_plan_and_padding_agree() -> None:
    plan = plan_step(seed=0, step=1, num_sequences=50, global_batch_size=7, micro_batch_size=2, data_ranks=3)
    assert plan.rounds == 2 and plan.padding_rounds == 2
