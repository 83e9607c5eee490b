"""The stages of ``benchmarks/recovery.py --stages``: they add up, and each is between the events that it names."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from recovery_stages import STAGES, compiling, medians, stages

from muster.core.events import Event

MS = 1_000_000


def event(kind, at_ms, *, attempt=2, rank=None, step=None, phase=None):
    return Event(
        run_id="r", seq=0, host="h", kind=kind, attempt=attempt, rank=rank, step=step, phase=phase, detail={},
        mono_ns=at_ms * MS, wall_ns=at_ms * MS,
    )  # fmt: skip


def swap(redone=()):
    """A lost host at 1000 ms after step 7, ranks 0 and 1 in the next attempt."""
    told = [
        event("step", 990, attempt=1, step=7),
        event("incident.detected", 1300, attempt=1),
        event("attempt.ended", 1310, attempt=1),
        event("attempt.started", 1340),
        *(event("rank.started", at, rank=rank) for rank, at in enumerate((1342, 1345))),
        *(event("phase.changed", at, rank=rank, phase="restore") for rank, at in enumerate((1400, 1420))),
        *(event("checkpoint.restored", at, rank=rank, step=7) for rank, at in enumerate((1410, 1440))),
        *(event("phase.changed", at, rank=rank, phase="warmup") for rank, at in enumerate((1450, 1450))),
        *(event("step", at, step=step) for at, step in redone),
        event("step", 2000, step=8),
        event("step", 2300, step=9),
    ]
    return told[::-1]  # the log of several writers comes in no order


def test_stages_add_up_to_the_whole_and_end_where_the_slowest_rank_does():
    found = stages(swap(), began_ns=1000 * MS, before=7)
    ms = {name: round(seconds * 1e3) for name, seconds in found.items()}
    assert ms == {
        "notice": 300, "decide": 10, "collect": 30, "place": 5, "join": 75, "restore": 20, "prepare": 10, "step": 550
    }  # fmt: skip
    assert sum(found.values()) == pytest.approx(1.0)


def test_a_redone_step_is_a_stage_of_its_own():
    found = stages(swap(redone=[(1700, 7)]), began_ns=1000 * MS, before=7)
    assert round(found["redo"] * 1e3) == 250 and round(found["step"] * 1e3) == 300
    assert list(found) == list(STAGES)


def test_a_stage_that_a_trial_has_not_counts_as_no_time():
    trials = [stages(swap(redone=redone), began_ns=1000 * MS, before=7) for redone in ([], [], [(1700, 7)])]
    assert medians(trials)["redo"] == 0.0 and medians(trials[2:])["redo"] == pytest.approx(0.25)


def test_what_jax_says_of_its_programs_is_taken_from_the_newest_attempt(tmp_path):
    assert compiling(tmp_path) == {}
    (tmp_path / "rank-0.a9.log").write_text("Finished XLA compilation of jit(step) in 9.0 sec\n")
    (tmp_path / "rank-0.a10.log").write_text(
        "Finished tracing step for jit in 0.5 sec\n"
        "Finished jaxpr to MLIR module conversion jit(step) in 0.25 sec\n"
        "Persistent compilation cache hit for 'jit_step' with key 'jit_step-1'\n"
        "Finished XLA compilation of jit(zeros) in 0.125 sec\n"
        "Finished XLA compilation of jit(step) in 0.25 sec\n"
    )
    (tmp_path / "rank-1.a10.log").write_text("Finished XLA compilation of jit(step) in 7.5 sec\n")
    assert compiling(tmp_path) == {"rank 0 traces": 0.75, "rank 0 compiles": 0.375, "rank 1 compiles": 7.5}
