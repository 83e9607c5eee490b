"""A step whose batch is never finite is left out (``context.skip_steps``): it counts, and nothing of it is learned."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from muster.config.spec import RunSpec
from muster.core.batch_schedule import BatchSchedule
from muster.core.event_details.kinds import KINDS
from muster.train import loop, micro_batches
from muster.train.baseline import BaselineWindow
from muster.train.data_feed.batch_reader import Round, StepWork
from muster.train.distributed.reduce import FloatReducer, ReduceGroups
from muster.train.measurement.metrics import Peak, Phases, StepLog
from muster.train.optim.adamw import AdamW
from muster.train.optim.nonfinite import NotFinite
from muster.train.state.state_hash import StateHashes
from muster.train.state.training_state import TrainingState
from muster.train.training_run import TrainingRun

STEPS, BAD = 5, 3
SPEC = RunSpec.model_validate(
    {
        "name": "x",
        "training": {"steps": STEPS, "global_batch_size": 2, "optimizer": {"learning_rate": 0.1, "warmup_steps": 2}},
        "checkpoint": {"every_steps": 0},
        "evaluation": {"at_start": False},
    }
)


def batch(step: int, index: int) -> Tensor:
    found = torch.randn(4, generator=torch.Generator().manual_seed(10 * step + index))
    return found.mul(float("nan")) if (step, index) == (BAD, 1) else found


class Reader:
    """Two micro-batches a step; remembers what was asked for."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def take(self, step: int) -> StepWork:
        self.taken.append(step)
        rounds = tuple(Round(index=i, sequences=(i,), batch=batch(step, i), scale=1.0) for i in range(2))  # type: ignore[arg-type]
        return StepWork(step=step, rounds=rounds, micro_batches=2, rows=2, tokens=8, supervised_tokens=4,
                        padding_tokens=1, padding_rounds=0, model_flops=1e6)  # fmt: skip


class AgentClient:
    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.beats: list[int] = []

    def emit(self, kind: str, *, step: int | None = None, phase: str | None = None, **detail: Any) -> None:
        if kind == "step":
            self.steps.append({"step": step, **detail})

    def beat(self, step: int) -> None:
        self.beats.append(step)

    def pause_requested(self) -> bool:
        return False


def nothing(*_: Any, **__: Any) -> None:
    return None


@pytest.fixture(autouse=True)
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss_sum(model, batch, *, chunk_tokens, scale):  # type: ignore[no-untyped-def]
        return model(batch).square().sum()

    monkeypatch.setattr(micro_batches, "loss_sum", loss_sum)


def a_run(*skip_steps: int) -> tuple[Any, AgentClient]:
    torch.manual_seed(5)
    model, agent, cpu = nn.Linear(4, 2), AgentClient(), torch.device("cpu")
    named = dict(model.named_parameters())
    optimizer = AdamW(named, SPEC.training.optimizer)
    state = TrainingState(named, optimizer)
    quiet: Any = SimpleNamespace(
        begin=nothing, end=nothing, step=nothing, poll=nothing, prepare=nothing, close=nothing, start=nothing,
        command=nothing,
        due=lambda step: False, due_by_clock=lambda: False, copies_arrived=lambda: True, deferred=False,
        any_rank_saving=lambda: False, saver=SimpleNamespace(busy=False, poll=nothing),
        rate=SimpleNamespace(mtbf_s=86_400.0),
    )  # fmt: skip
    hashes = StateHashes(state, every_steps=1, replica=0, groups=ReduceGroups(), group=None)
    reader: Any = Reader()
    run = TrainingRun(
        spec=SPEC, context=SimpleNamespace(skip_steps=skip_steps), agent=agent, device=cpu, model=model, state=state,  # type: ignore[arg-type]
        world=SimpleNamespace(rank=0, control=None), optimizer=optimizer,  # type: ignore[arg-type]
        reducer=FloatReducer(model, ReduceGroups(), accumulate_locally=False), reader=reader, consensus=quiet,
        log=StepLog(agent=agent, rank=0, device=cpu, peak=Peak(flops=None, ranks=1)),  # type: ignore[arg-type]
        phases=Phases(agent), evaluator=quiet, saves=quiet, snapshots=None, hashes=hashes,  # type: ignore[arg-type]
        baseline=BaselineWindow.planned(0, resumed_at=0, world_size=1), profiler=quiet, collector=quiet,
        last_step=STEPS, batch_schedule=BatchSchedule.of(2), update=loop.update,
    )  # fmt: skip
    return run, agent


def test_without_being_told_the_run_stops_before_the_update() -> None:
    run, agent = a_run()
    with pytest.raises(NotFinite, match=f"step {BAD}"):
        loop.train(run)
    assert [event["step"] for event in agent.steps] == [1, 2]


def test_the_step_counts_and_its_batch_does_not() -> None:
    run, agent = a_run(BAD)
    assert loop.train(run) is None
    assert run.state.step == STEPS and run.reader.taken == [1, 2, 3, 4, 5], "order of the data as ever"
    assert [event["step"] for event in agent.steps] == [1, 2, 3, 4, 5]
    assert BAD in agent.beats, "the watchdog and the replicator hear of it"
    event = agent.steps[BAD - 1]
    assert event["skipped"] is True and event["skipped_tokens"] == 8 and event["rows"] == 2
    assert (event["tokens"], event["supervised_tokens"], event["loss"], event["grad_norm"]) == (0, 0, None, None)
    detail = set(event) - {"step"}
    assert set(KINDS["step"].required()) <= detail <= set(KINDS["step"].required()) | set(KINDS["step"].optional())
    assert not any("skipped" in each for each in agent.steps if each["step"] != BAD)


def test_the_state_is_as_if_the_batch_had_never_been() -> None:
    """Weights and moments by hand: updates 1, 2, 4 and 5, each with its own step's rate and bias correction."""
    run, agent = a_run(BAD)
    loop.train(run)
    other, _ = a_run()
    for step in (1, 2, 4, 5):
        other.reducer.begin(micro_batches=2)
        for index in range(2):
            loss = other.model(batch(step, index)).square().sum()
            loss.backward()
            other.reducer.add_loss(loss)
        _, norm, fault = other.reducer.finish()
        scale = loop.clip_scale(norm, SPEC.training.optimizer.max_grad_norm)
        rate = agent.steps[step - 1]["learning_rate"]
        other.optimizer.step(step=step, learning_rate=rate, scale=scale, skip=fault.float())
    for name, tensor in run.state.local_tensors().items():
        assert torch.equal(tensor, other.state.local_tensors()[name]), name
    rates = [event["learning_rate"] for event in agent.steps]
    assert rates[BAD - 1] not in (rates[BAD - 2], rates[BAD]), "the schedule goes on through it"


def test_every_step_but_the_left_out_one_changes_the_hash_by_more_than_its_number() -> None:
    run, agent = a_run(BAD)
    loop.train(run)
    assert len({event["state_hash"] for event in agent.steps}) == STEPS


def test_an_agent_that_is_woken_for_the_snapshots_copy_finds_the_steps_event_there() -> None:
    """One wake for both: the event first, which takes some time to make, then at once that the copy may start."""
    run, agent = a_run(BAD)
    told: list[tuple[str, int | None]] = []
    agent.emit = lambda kind, *, step=None, **_: told.append((kind, step))  # type: ignore[method-assign]
    agent.beat = lambda step: told.append(("beat", step))  # type: ignore[method-assign]
    run.snapshots = SimpleNamespace(
        save=nothing, before_change=nothing, copy_is_pending=lambda: False, newest_steps=dict,
        overlapped_s=0.0, waited_s=0.0, takes_s=0.0,
    )  # fmt: skip
    run.consensus.snapshot_every = lambda: 1
    loop.train(run)
    for step in range(2, STEPS):  # a phase begins with the first one
        assert told.index(("beat", step + 1)) == told.index(("step", step)) + 1
