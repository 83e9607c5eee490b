"""Runs of the trainer for TPUs, with JAX's CPU devices for chips: a killed rank, and moves to torch and back."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from cluster import LiveRun, spec_of
from trainranks import Outcome, run_attempt, small

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]

TWO_CHIPS = "--xla_force_host_platform_device_count=2"
STEPS = 6


def on_chips(**changes):
    """Two hosts of two chips."""
    return spec_of(**{
        "resources.device": "tpu", "resources.hosts": 2, "resources.ranks_per_host": 1, "env.XLA_FLAGS": TWO_CHIPS,
        "training.deterministic": False, "training.micro_batch_size": 6, "training.steps": 30, **changes,
    })  # fmt: skip


@pytest.mark.parametrize(
    "slices", [1, pytest.param(2, marks=pytest.mark.soak)], ids=["one slice", "two slices as replicas"]
)
def test_a_killed_rank_costs_no_applied_step_and_no_bit(tmp_path, slices):
    def on_slices(**changes):
        return on_chips(**{"parallelism.dp_replicate": slices, **changes})

    with LiveRun(tmp_path / "whole", on_slices(**{"training.profile.trace_step": 3})) as run:
        run.start()
        assert run.wait() == 0, run.story()
        wanted, state = run.losses(), run.final_hash()
    assert len(list((tmp_path / "whole").rglob("traces/step-3.rank-*.xplane.pb"))) == 2
    with LiveRun(tmp_path / "killed", on_slices(**{"env.JAX_LOG_COMPILES": "1"})) as run:
        run.start()
        for step, rank in ((6, 1), (14, 0)):  # rank 0 holds JAX's coordinator
            run.wait_for_step(step)
            run.kill_rank(rank)
            run.wait_until(lambda step=step: run.step() >= step + 4, "recovery")
        assert run.wait() == 0, run.story()
        assert run.recoveries() == ["restart"] * 2, run.story()
        assert all(event.detail["redone_steps"] <= 1 for event in run.events("incident.resolved")), run.story()
        assert run.losses() == wanted and len(wanted) == 30
        assert run.final_hash() == state
        for rank, attempt in ((0, 2), (1, 2), (0, 3), (1, 3)):
            told = (run.dir / "logs" / f"rank-{rank}.a{attempt}.log").read_text()
            assert "compilation cache hit for 'jit_step'" in told, (rank, attempt)


def trained(folder: Path, device: str, ranks: int, steps: int) -> dict[int, float]:
    """Losses by step, of a model that learns something."""
    spec = small(
        folder / "cache", training__steps=steps, training__global_batch_size=8, training__micro_batch_size=2,
        training__deterministic=False, training__optimizer__schedule="constant",
        training__optimizer__learning_rate=2e-3, resources__device=device,
    )  # fmt: skip
    outcome = run_attempt(folder / device, spec, ranks=ranks)
    assert set(outcome.codes) == {0}, outcome.errors[0]
    return outcome.losses


def test_fifty_steps_in_two_processes_are_the_torch_trainers(tmp_path, monkeypatch):
    """Two hosts of two chips each, which sum by gloo, against one process of torch on the same batches."""
    monkeypatch.setenv("XLA_FLAGS", TWO_CHIPS)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
        wanted = fresh.submit(trained, tmp_path / "torch", "cpu", 1, 50).result()
        found = fresh.submit(trained, tmp_path / "jax", "tpu", 2, 50).result()
    assert sorted(found) == sorted(wanted) == list(range(1, 51))
    assert wanted[50] < 0.8 * wanted[1], "something is learned"
    apart = max(abs(found[step] - loss) for step, loss in wanted.items())
    assert 0.0 < apart <= 1e-5, apart


def moved(folder: Path, devices: tuple[str, str], ranks: int, tp: int = 1) -> tuple[list[int | None], dict[int, float]]:
    """Half of the steps on the first device, the rest on the second, from the checkpoint: its step, and losses."""
    outcome: Outcome | None = None
    for device, steps in zip(devices, (STEPS // 2, STEPS), strict=True):
        spec = small(
            folder / "cache", training__steps=steps, training__micro_batch_size=3, training__deterministic=False,
            training__optimizer__schedule="constant", checkpoint__dir=str(folder / "checkpoints"),
            resources__device=device, parallelism__tp=tp if device == "tpu" else 1,
        )  # fmt: skip
        outcome = run_attempt(folder / f"{device}-{steps}", spec, ranks=ranks if device == "tpu" else 1)
        assert set(outcome.codes) == {0}, outcome.errors[0]
    assert outcome is not None
    return [event.step for event in outcome.of("checkpoint.restored")], outcome.losses


@pytest.mark.parametrize(
    ("devices", "tp"),
    [(("tpu", "cpu"), 2), pytest.param(("cpu", "tpu"), 1, marks=pytest.mark.soak)],
    ids=["to torch from tensor parallel", "to JAX"],
)
def test_a_run_moves_by_its_checkpoint(tmp_path, monkeypatch, devices, tp):
    monkeypatch.setenv("XLA_FLAGS", f"--xla_force_host_platform_device_count={tp}")
    # Ranks are forks, and of a process that has used JAX they have its chips, whatever the variable says.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
        _, wanted = fresh.submit(moved, tmp_path / "stays", ("cpu", "cpu"), 1).result()
        restored, found = fresh.submit(moved, tmp_path / "moves", devices, 2, tp).result()
    assert restored == [STEPS // 2]
    assert sorted(found) == sorted(wanted) == list(range(STEPS // 2 + 1, STEPS + 1))
    assert all(abs(found[step] - loss) <= 1e-5 for step, loss in wanted.items())
