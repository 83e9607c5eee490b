"""Status and report say the same about the same log, however the run went."""

import pytest
from faulty_run import Writer, write

from muster.report import api, log_folder
from muster.report.log_folder import progress


def both(place):
    """(what status shows, what the report shows) of a run's folder."""
    summary, report = progress(log_folder.read(place)), api.load(place).to_json()
    return (
        (summary.speed.tokens_per_s, summary.speed.mfu, summary.tokens, summary.final_loss),
        (report["tokens_per_s"], report["mfu"], report["tokens"], report["final_loss"]),
    )


@pytest.mark.parametrize("finish", [True, False])
def test_a_run_with_a_restart_and_a_swap(tmp_path, finish):
    """It steps back to a checkpoint in between: what was lost counts in neither."""
    write(tmp_path / "events", finish=finish)
    status, report = both(tmp_path)
    assert status == pytest.approx(report, rel=1e-9)
    assert status[0] > 0 and status[2] == 60 * 65_536


STEP = {"loss": 2.0, "grad_norm": 1.0, "learning_rate": 0.1, "tokens": 50, "supervised_tokens": 50, "padding_tokens": 0}


def small_run(place, steps):
    """One rank, ``steps`` of 1, 2, 3... seconds; its writer, still open, and the time."""
    writer, at = Writer(place / "events"), 2.0
    began = {"world_size": 1, "layout": {}, "hosts": {"host-0": [0]}}
    writer.add("supervisor", 1.0, "attempt.started", attempt=1, detail=began)
    for step in range(1, steps + 1):
        at += step
        detail = {**STEP, "loss": 2.0 / step, "step_ns": step * 10**9, "mfu": 0.4 / step}
        writer.add("host-0", at, "step", attempt=1, rank=0, step=step, detail=detail)
    return writer, at


def test_a_run_that_failed_keeps_what_can_be_restored(tmp_path):
    writer, at = small_run(tmp_path, 12)
    saved = {"tier": "disk", "uri": "x", "bytes": 1}
    writer.add("host-0", at + 1, "checkpoint.committed", attempt=1, rank=0, step=8, detail=saved)
    ended = {"outcome": "failed", "exit_code": 1, "reason": "made up"}
    writer.add("supervisor", at + 2, "run.finished", detail=ended)
    writer.close()
    status, report = both(tmp_path)
    assert status[:3] == pytest.approx(report[:3], rel=1e-9)
    assert (status[3], report[3]) == (2.0 / 12, 2.0 / 8), "status shows how far it came"
    assert status[2] == 8 * 50
    assert status[0] == pytest.approx((50 / 5 + 50 / 6) / 2), "the median of steps 3 to 8"


def test_before_any_clean_step_the_first_ones_count(tmp_path):
    writer, _ = small_run(tmp_path, 1)
    writer.close()
    status, report = both(tmp_path)
    assert status == pytest.approx(report)
    assert status == (50.0, 0.4, 50, 2.0)
