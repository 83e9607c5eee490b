"""What a person did on purpose is no fault, and the figures do not contradict each other."""

from __future__ import annotations

from pathlib import Path

from muster.core.clock import SystemClock
from muster.core.event_log import EventLog
from muster.report import api
from muster.report.render.document import next_steps
from muster.report.render.series import series

S = 10**9


class Hand(SystemClock):
    """A clock that is set by hand."""

    now_ns = 10**18

    def wall_ns(self) -> int:
        return self.now_ns

    def monotonic_ns(self) -> int:
        return self.now_ns


def attempt(folder: Path, clock: Hand, number: int, *, first: int, asked: bool, outcome: str = "stopped") -> None:
    """20 steps of a second each on one host, then the rank leaves with 130; ``asked``: somebody had asked it to."""
    supervisor, host = (EventLog("r-1", folder, name, number, clock=clock) for name in ("supervisor", "host-0"))
    host.append("host.allocated", detail={"gpus": 1, "role": "active", "usd_per_hour": 0.0})
    layout = {"world_size": 1, "layout": {}, "hosts": {"host-0": [0]}}
    supervisor.append("attempt.started", detail={**layout, **({"resume_step": first - 1} if first > 1 else {})})
    host.append("phase.changed", rank=0, phase="train")
    figures = {"tokens": 100, "supervised_tokens": 1, "padding_tokens": 0, "grad_norm": 1.0, "learning_rate": 1e-3}
    for step in range(first, first + 20):
        clock.now_ns += S
        host.append("step", step=step, rank=0, detail={**figures, "loss": 1.0, "step_ns": S})
    if asked:
        way = {"outcome": "stopped", "exit_code": 130, "source": "muster stop", "save": True, "deadline_s": 30.0}
        supervisor.append("run.stopping", detail={**way, "by_user": True})
    clock.now_ns += S
    host.append("rank.exited", rank=0, detail={"exit_code": 130})
    clock.now_ns += 5 * S
    supervisor.append("run.finished", detail={"outcome": outcome, "exit_code": 130, "reason": "so it is"})
    host.append("host.released", detail={"reason": "over"})
    supervisor.close(), host.close()


def test_a_stop_that_somebody_asked_for_is_not_broken_and_unnoticed(tmp_path: Path):
    for name, asked in (("asked", True), ("fell", False)):
        attempt(tmp_path / name, Hand(), 1, first=1, asked=asked)
        spent = api.load(tmp_path / name).document.categories
        assert (spent["detect"].host_s == 0) is asked and (spent["idle"].host_s > 0) is asked


def test_active_is_never_below_purchased_though_nothing_was_held_for_a_day(tmp_path: Path):
    clock = Hand()
    attempt(tmp_path, clock, 1, first=1, asked=True)
    clock.now_ns += 86_400 * S
    attempt(tmp_path, clock, 2, first=21, asked=True, outcome="succeeded")
    goodput = api.load(tmp_path, reference_tokens_per_s=100.0).document.goodput
    assert goodput.active is not None and goodput.purchased is not None and goodput.wall is not None
    assert goodput.active >= goodput.purchased > 0.5 > goodput.wall


def test_what_to_do_next_is_at_most_three_lines_each_from_a_figure(tmp_path: Path):
    attempt(tmp_path, Hand(), 1, first=1, asked=True)
    found = api.load(tmp_path)
    lines = next_steps(found.document)
    assert lines[0] == "muster recover r-1 continues it", "no step of it can be restored"
    assert any(line.startswith("77% of the host time went to redone") for line in lines) and len(lines) <= 3
    assert "What to do next" in api.render_table(found)


def test_the_curve_of_goodput_ends_at_its_figure_and_knows_the_pause(tmp_path: Path):
    clock = Hand()
    attempt(tmp_path, clock, 1, first=1, asked=True)
    clock.now_ns += 86_400 * S
    attempt(tmp_path, clock, 2, first=21, asked=True, outcome="succeeded")
    found = api.load(tmp_path, reference_tokens_per_s=100.0)
    drawn = series(found.ledger)
    curve, pauses = drawn["goodput"], drawn["pauses"]
    assert [end - begin for begin, end in pauses] == [86_400.0]
    assert not any(begin < t < end for begin, end in pauses for t in curve["t"]), "nothing is drawn in a pause"
    assert curve["active"][-1] == round(found.document.goodput.active or 0.0, 5)
    assert None not in curve["lately"]
    assert drawn["steps"]["seen"][-1] == 4000 and drawn["steps"]["step"][-1] == 40
    assert all(active >= bought for active, bought in zip(curve["active"], curve["purchased"], strict=True))
