"""Where a step's time goes, what the plan foresaw, and the next lever."""

import pytest
from faulty_run import Writer

from muster.report import api
from muster.report.ledger.step_budget import levers

MS = 1_000_000
PARTS = {"compute_ns": 60 * MS, "comm_ns": 25 * MS, "data_wait_ns": 2 * MS, "host_gap_ns": 8 * MS, "stall_ns": 5 * MS}


def run_of(place, *, steps=12, price=10.0, plan=None, straggler=None, parts=PARTS):
    writer = Writer(place / "events")
    submitted = {"spec_digest": "0", "backend": "local", "version": "0"}
    writer.add("client", 0.0, "run.submitted", detail=submitted | ({"plan": plan} if plan else {}))
    writer.add("supervisor", 0.0, "host.allocated", host="host-0",
               detail={"gpus": 2, "role": "active"} | ({} if price is None else {"usd_per_hour": price}))  # fmt: skip
    started = {"world_size": 2, "layout": {"dp_shard": 2}, "hosts": {"host-0": [0, 1]}}
    writer.add("supervisor", 1.0, "attempt.started", attempt=1, detail=started)
    for step in range(1, steps + 1):
        slower = 10 if step <= 2 else 1  # warm-up, which no budget is made of
        detail = {
            "loss": 1.0, "grad_norm": 1.0, "learning_rate": 0.1, "step_ns": 101 * MS * slower, "tokens": 100,
            "supervised_tokens": 100, "padding_tokens": 0,
        }  # fmt: skip
        detail |= {name: ns * slower for name, ns in parts.items()}
        writer.add("host-0", 2.0 + 2.0 * step, "step", attempt=1, rank=0, step=step, detail=detail)
    if straggler is not None:
        detail = {"cause": "host", "evidence": "-", "lag_ns": 20 * MS, "step_ns": 101 * MS, "last": 20, "steps": 20}
        writer.add("supervisor", 40.0, "straggler.named", attempt=1, rank=1, host="host-0", step=9,
                   detail=detail | straggler)  # fmt: skip
    writer.close()
    return api.load(place)


def test_the_parts_sum_to_the_step(tmp_path):
    found = run_of(tmp_path).document.step_budget
    assert (found.steps, found.step_s) == (10, pytest.approx(0.101))
    assert sum(found.parts_s.values()) == pytest.approx(found.step_s)
    assert found.parts_s == pytest.approx(
        {"compute": 0.06, "communication": 0.025, "data_wait": 0.002, "host_gap": 0.008, "checkpoint": 0.005,
         "rest": 0.001}
    )  # fmt: skip


def test_the_levers_and_what_they_are_worth(tmp_path):
    found = run_of(tmp_path).document.step_budget
    assert [lever.part for lever in found.levers] == ["communication", "host_gap", "checkpoint", "data_wait"]
    assert found.levers[0].worth_share == pytest.approx(25 / 101)
    assert found.levers[0].usd_per_day == pytest.approx(25 / 101 * 240)


def test_a_straggler_is_a_lever_of_its_own(tmp_path):
    """Of the 25 ms inside collectives 20 are the wait for it."""
    found = run_of(tmp_path, straggler={}).document.step_budget
    assert [(lever.part, round(lever.worth_s * 1e3)) for lever in found.levers[:3]] == [
        ("straggler", 20), ("host_gap", 8), ("communication", 5),
    ]  # fmt: skip


def test_uneven_work_is_no_lever(tmp_path):
    found = run_of(tmp_path, straggler={"cause": "tokens"}).document.step_budget
    assert "straggler" not in [lever.part for lever in found.levers]


def test_beside_the_plan(tmp_path):
    items = {"matrices": 0.04, "memory traffic": 0.01, "padding": 0.0, "sharding": 0.02, "optimizer": 0.005,
             "snapshots": 0.001}  # fmt: skip
    result = run_of(tmp_path, plan={"step_s_by_item": items})
    found = result.document.step_budget
    assert found.planned_step_s == pytest.approx(0.076)
    assert found.planned_s == pytest.approx({"compute": 0.055, "communication": 0.02, "checkpoint": 0.001})
    text = api.render_table(result, width=140)
    row = next(line.split() for line in text.splitlines() if line.startswith("communication"))
    assert row == ["communication", "25.0", "24.8%", "20.0"]


def test_the_table_names_the_next_lever(tmp_path):
    text = api.render_table(run_of(tmp_path), width=140)
    assert "A step of 0.10 s (rank 0, mean of 10)" in text
    assert "next: communication, worth 25% of a step at most, $59.41 a day: larger micro-batches" in text
    assert "planned" not in text


def test_without_a_price_or_a_measurement(tmp_path):
    assert run_of(tmp_path / "a", price=None).document.step_budget.levers[0].usd_per_day is None
    assert run_of(tmp_path / "b", parts={"data_wait_ns": 2 * MS}).document.step_budget is None


def test_nothing_to_save():
    assert levers({"compute": 0.995, "communication": 0.005}, 1.0, lag_s=0.0, usd_per_hour=1.0) == []
    assert levers({}, 0.0, lag_s=0.0, usd_per_hour=None) == []
