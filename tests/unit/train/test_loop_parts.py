"""What stands around the loop: guard, orders, reading ahead, state, links, saves."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from muster.config.spec import CheckpointSpec, Optimizer, RunSpec
from muster.core import event_log
from muster.core.errors import CheckpointError, MusterError, UsageError
from muster.core.intervals import FailureRate
from muster.core.types import Layout
from muster.protocol.ranks import RESIZE_EXIT_CODE, Command, RankContext
from muster.rank.standalone_client import StandaloneClient
from muster.rank.worker import next_attempt, read_spec, torchrun_context
from muster.train.data_feed.batch_reader import ReadAhead
from muster.train.distributed import step_consensus
from muster.train.distributed.step_consensus import StepConsensus
from muster.train.loop import update
from muster.train.micro_batches import seed_micro_batch
from muster.train.optim.adamw import AdamW
from muster.train.optim.nonfinite import find_bad_micro_batch, must_skip, not_finite_error
from muster.train.state.saving import Saves
from muster.train.state.training_state import TrainingState, named_without_wrappers
from muster.train.training_run import TrainingRun

# ---------------------------------------------------------------- guard


@pytest.mark.parametrize(
    ("loss", "norm", "fault", "skip"),
    [
        (1.0, 2.0, 0.0, 0.0),
        (math.nan, 2.0, 0.0, 1.0),
        (1.0, math.inf, 0.0, 1.0),
        (1.0, 2.0, 1.0, 1.0),
    ],
)
def test_must_skip(loss: float, norm: float, fault: float, skip: float) -> None:
    assert float(must_skip(*(torch.tensor(value, dtype=torch.float64) for value in (loss, norm, fault)))) == skip


def test_blame_names_the_micro_batch() -> None:
    losses = [torch.tensor(1.0), torch.tensor(math.inf), torch.tensor(math.nan)]
    blame = find_bad_micro_batch(losses, [(1, 2), (7,), (9, 8)], rank=3, group=None)
    assert blame is not None
    assert (blame.rank, blame.micro_batch, blame.sequences) == (3, 1, (7,))
    error = not_finite_error(step=12, loss=math.inf, norm=1.0, fault=0.0, culprit=blame, sequences=[1, 2, 7])
    assert str(error).startswith("step 12: loss is inf on rank 3, micro-batch 1 (sequences 7)")
    assert (error.step, error.rank, error.sequences) == (12, 3, (7,))


def test_a_bad_norm_without_a_bad_loss_says_so() -> None:
    losses = [torch.tensor(1.0)]
    assert find_bad_micro_batch(losses, [(4,)], rank=0, group=None) is None
    error = not_finite_error(step=2, loss=1.0, norm=math.nan, fault=0.0, culprit=None, sequences=[4, 9])
    assert "gradient norm is nan" in str(error) and "4 to 9" in str(error)


# ---------------------------------------------------------------- orders


class Quiet:
    def __init__(self, *commands: Command) -> None:
        self.commands = list(commands)

    def next_command(self) -> Command | None:
        return self.commands.pop(0) if self.commands else None


def agreed(*commands: Command, save_now: bool = False) -> Command | None:
    found = StepConsensus(Quiet(*commands), None)  # type: ignore[arg-type]
    found.start(save_now=save_now)
    return found.command()


def test_a_larger_world_waits_for_a_save_under_way_and_nobody_else_does() -> None:
    def asked(code: int, *, saving: bool) -> Command | None:
        found = StepConsensus(Quiet(Command(kind="stop", save=False, exit_code=code)), None)  # type: ignore[arg-type]
        found.start(saving=saving)
        return found.command()

    assert asked(RESIZE_EXIT_CODE, saving=True) is None
    left = asked(RESIZE_EXIT_CODE, saving=False)
    assert left is not None and (left.kind, left.exit_code) == ("stop", RESIZE_EXIT_CODE)
    for code in (75, 130):
        told = asked(code, saving=True)
        assert told is not None and told.exit_code == code


def test_a_growth_that_waited_for_a_save_comes_after_it_and_a_preemption_comes_before() -> None:
    growth = Command(kind="stop", save=False, exit_code=RESIZE_EXIT_CODE)

    def rounds(agent: Quiet, *saving: bool) -> list[int | None]:
        found = StepConsensus(agent, None)  # type: ignore[arg-type]
        codes = []
        for busy in saving:
            found.start(saving=busy)
            told = found.command()
            codes.append(None if told is None else told.exit_code)
        return codes

    assert rounds(Quiet(growth), True, True, False) == [None, None, RESIZE_EXIT_CODE]
    assert rounds(Quiet(growth, Command(kind="stop", exit_code=75)), True, True) == [None, 75]
    # The other rank has heard of the growth alone.
    both = StepConsensus(Quiet(Command(kind="stop", exit_code=75)), None)  # type: ignore[arg-type]
    both.start()
    both._flags = both._flags.maximum(torch.tensor([1, 0, 1, -(1 << 40), 0, 0, 0]))
    told = both.command()
    assert told is not None and (told.exit_code, told.save) == (75, True)


def test_figures_travel_with_the_commands() -> None:
    """Of each the largest; as many as every rank sent."""
    found = StepConsensus(Quiet(Command(kind="stop", exit_code=130)), None)  # type: ignore[arg-type]
    found.start(figures=[3, 0])
    found._flags = found._flags.maximum(torch.tensor([0, 0, 0, -(1 << 40), 0, 0, 0, 2, 9]))
    assert list(found.figures()) == [3, 9]
    told = found.command()
    assert told is not None and told.exit_code == 130
    found.start()
    assert (list(found.figures()), found.command()) == ([], None)


def test_a_deadline_ages_until_it_is_acted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(step_consensus.time, "monotonic", lambda: now)
    found = StepConsensus(Quiet(Command(kind="stop", exit_code=75, deadline_s=15.0, received_s=1000.0)), None)  # type: ignore[arg-type]
    now += 12.0  # the step that was under way when it came
    found.start()
    now += 1.0
    told = found.command()
    assert told is not None and told.deadline_s == pytest.approx(2.0)


def test_orders() -> None:
    assert agreed() is None
    assert agreed(save_now=True) == Command(kind="save", save=True, exit_code=0)
    assert agreed(Command(kind="save")) == Command(kind="save", save=True, exit_code=0)
    told = agreed(Command(kind="stop", exit_code=75, deadline_s=2.5))
    assert told is not None and (told.kind, told.save, told.exit_code) == ("stop", True, 75)
    assert told.deadline_s is not None and 0 < told.deadline_s <= 2.5, "what is left of it"
    assert agreed(Command(kind="stop", save=False, exit_code=130)) == Command(kind="stop", save=False, exit_code=130)


# ---------------------------------------------------------------- reading ahead


def test_reads_in_order_and_ahead() -> None:
    made: list[int] = []

    def make(step: int) -> Any:
        made.append(step)
        return SimpleNamespace(step=step)

    reader = ReadAhead(make, first=3, last=6)
    assert made == [], "no thread before the first take"
    assert [reader.take(step).step for step in range(3, 7)] == [3, 4, 5, 6]
    reader.close()
    assert made == [3, 4, 5, 6]


def test_a_failure_in_the_thread_reaches_the_loop() -> None:
    def make(step: int) -> Any:
        raise MusterError("the disk is gone")

    reader = ReadAhead(make, first=1, last=2)
    with pytest.raises(MusterError, match="disk"):
        reader.take(1)
    reader.close()


def test_close_ends_a_thread_that_waits() -> None:
    reader = ReadAhead(lambda step: SimpleNamespace(step=step), first=1, last=1000)  # type: ignore[arg-type,return-value]
    reader.take(1)
    reader.close()
    assert reader._thread is not None and not reader._thread.is_alive()


# ---------------------------------------------------------------- state


def a_state() -> TrainingState:
    named = {"a.weight": nn.Parameter(torch.ones(2, 3)), "b.weight": nn.Parameter(torch.ones(4))}
    return TrainingState(named, AdamW(named, Optimizer()))


def test_state_goes_round_to_the_bit() -> None:
    one, other = a_state(), a_state()
    generator = torch.Generator().manual_seed(1)
    for tensor in one.local_tensors().values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    other.load(7, {name: tensor.clone() for name, tensor in one.local_tensors().items()})
    assert other.step == 7
    assert list(one.local_tensors()) == list(other.local_tensors()) == list(one.sharded())
    for name, tensor in one.local_tensors().items():
        assert torch.equal(tensor, other.local_tensors()[name])
    assert list(one.local_tensors())[:3] == ["model.a.weight", "model.b.weight", "optimizer.exp_avg.a.weight"]


def test_state_that_does_not_fit_changes_nothing() -> None:
    state = a_state()
    wrong = {name: torch.zeros_like(tensor) for name, tensor in state.local_tensors().items()}
    wrong["optimizer.exp_avg_sq.b.weight"] = torch.zeros(5)
    with pytest.raises(CheckpointError, match=r"exp_avg_sq.b.weight is .*\(5,\)"):
        state.load(3, wrong)
    with pytest.raises(CheckpointError, match=r"lacks model\.a\.weight"):
        state.load(3, {})
    assert state.step == 0 and bool((state.local_tensors()["model.a.weight"] == 1).all())


def test_names_do_not_show_wrappers() -> None:
    parameter = nn.Parameter(torch.ones(1))
    found = named_without_wrappers({"layers.0._checkpoint_wrapped_module._orig_mod.q.weight": parameter})
    assert list(found) == ["layers.0.q.weight"]


# ---------------------------------------------------------------- saves


class Recorder:
    def __init__(self) -> None:
        self.steps: list[int] = []

    def save(self, step: int, state: Any, extra: Any) -> None:
        self.steps.append(step)

    def poll(self) -> None: ...

    def finish(self) -> None: ...


def saves(rate: FailureRate | None = None, **spec: Any) -> Saves:
    return Saves(
        saver=Recorder(),  # type: ignore[arg-type]
        spec=CheckpointSpec(**spec),
        state=a_state(),
        extra={},
        rate=rate or FailureRate.at_scale(1),
    )


def test_saves_by_step_count() -> None:
    found = saves(every_steps=3)
    assert [step for step in range(1, 10) if found.due(step)] == [3, 6, 9]
    assert not saves(every_steps=0).due(3)
    found.save(3)
    found.save(3)
    assert found.saver.steps == [3]  # type: ignore[attr-defined]
    assert not found.due_by_clock()


def test_a_deadline_forbids_a_save_that_would_not_be_done() -> None:
    found = saves()
    found.seconds = 10.0
    assert found.fits(Command(kind="stop"), None)
    assert found.fits(Command(kind="stop", deadline_s=16.0), None)
    assert not found.fits(Command(kind="stop", deadline_s=14.0), None)
    assert not found.fits(Command(kind="stop", save=False), None)


def saved_after(found: Saves, now: list[float], *, stall_s: float, drain_s: float = 0.0) -> float:
    """Save and commit at this moment; seconds until the next save is due by the clock."""
    found.save(found.last_saved + 1)
    found._stall_s = stall_s
    found.committed(drain_s)
    began = now[0]
    while not found.due_by_clock():
        now[0] += 1.0
    return now[0] - began


def test_auto_saves_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("muster.train.state.saving.time.monotonic", lambda: now[0])
    found = saves(FailureRate(prior_s=3600.0), every_steps="auto")
    now[0] += 59.0
    assert not found.due_by_clock()  # nothing has been measured: the first save comes after a minute
    now[0] += 2.0
    assert found.due_by_clock()
    # A second of stall, a failure an hour (61 s of it seen without one): sqrt(2 x 1 x 3661) = 85.6 s.
    assert saved_after(found, now, stall_s=1.0) == 86.0
    # It grows by a factor of two at most, and follows the time that a save is under way.
    assert saved_after(found, now, stall_s=100.0) == 172.0
    assert saved_after(found, now, stall_s=1.0, drain_s=200.0) == 201.0


def test_auto_saves_more_often_where_failures_were_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("muster.train.state.saving.time.monotonic", lambda: now[0])
    quiet, stormy = (FailureRate(prior_s=36_000.0).observed(seconds=36_000.0, failures=n) for n in (0, 9))
    often = saved_after(saves(stormy, every_steps="auto"), now, stall_s=2.0)
    seldom = saved_after(saves(quiet, every_steps="auto"), now, stall_s=2.0)
    assert seldom / often == pytest.approx(10**0.5, rel=0.02)
    copied = saves(stormy, every_steps="auto")
    copied.to_disk = 0.25  # three of four failures leave the host's memory behind
    assert saved_after(copied, now, stall_s=2.0) == pytest.approx(2 * often, rel=0.02)


# ---------------------------------------------------------------- worker, links


def context(tmp_path: Path, rank: int = 0) -> RankContext:
    return RankContext(
        run_id="r",
        run_dir=str(tmp_path),
        attempt=2,
        host="h",
        rank=rank,
        local_rank=rank,
        world_size=2,
        local_world_size=2,
        layout=Layout(dp_shard=2),
        master_addr="127.0.0.1",
        master_port=1,
    )


def test_the_file_link_writes_rank_0_alone(tmp_path: Path) -> None:
    for rank in (0, 1):
        agent = StandaloneClient(context(tmp_path, rank))
        agent.emit("phase.changed", phase="train", step=4)
        agent.beat(4)
        assert agent.next_command() is None
        agent.close()
    (found,) = [event for _, event in event_log.read(tmp_path / "events")]
    assert (found.kind, found.phase, found.step, found.rank, found.attempt) == ("phase.changed", "train", 4, 0, 2)
    assert next_attempt(tmp_path) == 3


def test_places_of_torchrun() -> None:
    spec = RunSpec.model_validate({"name": "x", "parallelism": {"dp_replicate": 2}})
    place = {"RANK": "0", "WORLD_SIZE": "5", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "5"}
    place |= {"MASTER_ADDR": "", "MASTER_PORT": "1"}
    with pytest.raises(UsageError, match="dp_replicate 2 x dp_shard -1 does not fit 5 ranks"):
        torchrun_context(Path("/nowhere"), place, spec)
    with pytest.raises(UsageError, match="RANK is not set"):
        torchrun_context(Path("/nowhere"), {}, spec)


def test_a_folder_without_a_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.core.resolved_file.PATIENCE_S", 0.0)  # an empty folder may be a disk that is away
    with pytest.raises(UsageError, match=r"resolved\.json"):
        read_spec(tmp_path)


def test_dropout_follows_from_the_place_of_a_micro_batch() -> None:
    seen = set()
    for seed, step, index in [(0, 1, 0), (0, 1, 1), (0, 2, 0), (1, 1, 0), (0, 1, 0)]:
        seed_micro_batch(seed, step, index)
        seen.add(float(torch.rand(1)))
    assert len(seen) == 4


def test_a_micro_batch_is_seeded_as_torch_seeds_and_formats_no_stack_for_devices_that_are_not_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(3 * 1_000_003 + 2 * 65_537 + 1 + 1)
    expected = torch.rand(4)
    formatted: list[None] = []
    monkeypatch.setattr("traceback.format_stack", lambda *_: formatted.append(None) or [])
    seed_micro_batch(3, 2, 1)
    assert torch.equal(torch.rand(4), expected) and not formatted


def test_a_step_asks_every_rank_whether_a_copy_is_pending_before_it_sums() -> None:
    """Without the question the snapshots run away from the copies, and a lost host leaves no common step."""
    said: list[Any] = []
    run = SimpleNamespace(
        spec=SimpleNamespace(training=SimpleNamespace(seed=1, loss_chunk_tokens=0, optimizer=None)),
        mixture=None,
        begin_objective=lambda work: None,
        meet_replicas=lambda after: None,
        reducer=SimpleNamespace(begin=lambda **_: None, finish=lambda: said.append("finish") or 1 / 0),
        consensus=SimpleNamespace(start=lambda **words: said.append(words)),
        wants_save=lambda: False,
        snapshots=SimpleNamespace(copy_is_pending=lambda: True),
        pace=SimpleNamespace(wants=lambda: 4),
        pipeline=None,
        saves=SimpleNamespace(saver=SimpleNamespace(busy=False)),
    )
    run.arrivals = SimpleNamespace(arrive=lambda tokens: [tokens])
    run.start_consensus = lambda work: TrainingRun.start_consensus(run, work)  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        update(run, SimpleNamespace(step=3, rounds=(), micro_batches=0, own_tokens=7), 0.1)  # type: ignore[arg-type]
    asked = {"save_now": False, "copy_is_pending": True, "saving": False, "snapshot_every": 4, "figures": [7]}
    assert said == [asked, "finish"]
