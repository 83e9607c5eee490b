"""A rank that keeps coming last is named once, with its host, cause and cost; uneven work blames no host."""

import dataclasses

import pytest
from fakes.virtual_run import actions, cluster, events_of, kinds, spec

from muster.protocol.values import RankEvent
from muster.supervise.recovery.inputs import FromHost
from muster.supervise.replay.rebuild_state import rebuild_state

STEP = {
    "loss": 1.0, "grad_norm": 1.0, "learning_rate": 1.0, "step_ns": 121_000_000, "tokens": 1, "supervised_tokens": 1,
    "padding_tokens": 0,
}  # fmt: skip


def pace(rank, *, slow, tokens=1000, **more):
    given = {
        "rank": rank, "steps": 20, "last": 20 if slow else 0, "ahead_us": 0 if slow else 20_000, "ahead_spread_us": 50,
        "late_us": 120_000 if slow else 100_000, "wait_us": 1000 if slow else 21_000, "data_us": 0, "stall_us": 0,
        "gap_us": 20_000 if slow else 0, "tokens": tokens,
    }  # fmt: skip
    return given | more


def run_with(paces, *, price=None):
    """Rank 0's event of a step carries ``paces`` at 20, 22 and 24 seconds."""
    found = cluster(spec(hosts=3), steps=100)
    found.machine._ctx.settings = dataclasses.replace(found.machine.settings, usd_per_host_hour=price)

    def report():
        state, now_ns = found.machine.state, found.now_ns
        event = RankEvent(
            kind="step", attempt=state.attempt, rank=0, step=state.last_applied_step, mono_ns=now_ns, wall_ns=now_ns,
            detail=STEP | {"pace": paces},
        )  # fmt: skip
        found.give(FromHost(host="host-0", message=event))

    for second in (20.0, 22.0, 24.0):
        found.at(second, report)
    return found


def test_it_is_named_once_and_training_goes_on():
    found = run_with([pace(rank, slow=rank == 1) for rank in range(3)], price=10.0)
    assert found.run().exit_code == 0
    ((_, named),) = kinds(found, "straggler.named")
    assert (named.host, named.rank, named.detail["cause"]) == ("host-1", 1, "host")
    assert (named.detail["lag_ns"], named.detail["step_ns"]) == (20_000_000, 121_000_000)
    assert named.detail["usd_per_day"] == pytest.approx(20 / 121 * 3 * 240, abs=0.01)
    ((_, incident),) = kinds(found, "incident.detected")
    assert (incident.detail["incident"], incident.host) == ("straggler", "host-1")
    assert incident.detail["evidence"].startswith("host-1: rank 1 came last in 20 of 20 steps, 20.0 ms after")
    assert actions(found) == ["ignore"]
    assert len(kinds(found, "attempt.started")) == 1


def test_without_a_price_it_has_no_cost():
    found = run_with([pace(rank, slow=rank == 1) for rank in range(3)])
    found.run()
    ((_, named),) = kinds(found, "straggler.named")
    assert "usd_per_day" not in named.detail


def test_uneven_work_is_no_incident():
    found = run_with([pace(rank, slow=rank == 1, tokens=1300 if rank == 1 else 1000, gap_us=0) for rank in range(3)])
    found.run()
    ((_, named),) = kinds(found, "straggler.named")
    assert (named.host, named.rank, named.detail["cause"]) == (None, 1, "tokens")
    assert not kinds(found, "incident.detected")


@pytest.mark.parametrize("unread", ["no list", [{"rank": 1}], [{**pace(0, slow=True), "steps": "many"}]])
def test_figures_that_cannot_be_read_name_nobody(unread):
    found = run_with(unread)
    assert found.run().exit_code == 0
    assert not kinds(found, "straggler.named")


def test_equal_ranks_are_named_by_nobody():
    found = run_with([pace(rank, slow=False, last=7) for rank in range(3)])
    found.run()
    assert not kinds(found, "straggler.named")


def test_where_processors_are_shared_that_is_said_once_and_nobody_is_named():
    found = run_with([pace(rank, slow=rank == 1, gap_us=40_000) for rank in range(3)])
    assert found.run().exit_code == 0
    assert not kinds(found, "straggler.named") and not kinds(found, "incident.detected")
    told = [event.detail["text"] for _, event in kinds(found, "run.message") if "not assessed" in event.detail["text"]]
    assert len(told) == 1 and "processors shared" in told[0]


def test_a_new_supervisor_knows_who_was_named():
    found = run_with([pace(rank, slow=rank == 1) for rank in range(3)])
    known = []

    def look():
        for state in (found.machine.state, rebuild_state(events_of(found))):
            known.append((state.progress.stragglers, state.hosts["host-1"].failures_ns))

    found.at(25.0, look)
    found.run()
    assert known == [({(1, "host")}, [])] * 2
