"""The metrics page: what Prometheus' own parser reads is what the events say."""

from __future__ import annotations

from typing import Any

import pytest

from muster.core.events import Event
from muster.core.incidents import KINDS
from muster.report.exposition import Family, RunMetrics, text_format

parser = pytest.importorskip("prometheus_client.parser", reason="prometheus-client is not installed")

SECOND = 1_000_000_000
STEP = {
    "loss": 2.5, "grad_norm": 1.0, "learning_rate": 0.1, "step_ns": 2 * SECOND, "tokens": 100,
    "supervised_tokens": 90, "padding_tokens": 0, "data_wait_ns": SECOND // 4, "stall_ns": SECOND // 2, "mfu": 0.4,
}  # fmt: skip


def event(
    kind: str, at_s: float, *, step: int | None = None, host: str = "supervisor", attempt: int = 1, **detail: Any
) -> Event:
    return Event(
        run_id="r", seq=0, mono_ns=0, wall_ns=int(at_s * SECOND), host=host, kind=kind, attempt=attempt, step=step,
        detail=detail,
    )  # fmt: skip


def read(metrics: RunMetrics, at_s: float) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """(name, labels besides the run) -> value, by the outside parser."""
    found = {}
    for family in parser.text_string_to_metric_families(metrics.page(int(at_s * SECOND))):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("run") == metrics.run_id
            found[sample.name, tuple(sorted(labels.items()))] = sample.value
    return found


def folded(*events: Event, run_id: str = "demo-1") -> RunMetrics:
    metrics = RunMetrics(run_id)
    for one in events:
        metrics.add(one)
    return metrics


def test_a_run_that_has_said_nothing_has_no_step():
    found = read(folded(), 1.0)
    assert found["muster_tokens_total", ()] == 0 and found["muster_finished", ()] == 0
    assert not [name for name, _ in found if name in ("muster_step", "muster_loss", "muster_step_seconds")]


def test_every_kind_of_incident_begins_at_0():
    """A series that is born with 1 has no increase: the alert for the first incident would never fire."""
    before = read(folded(), 1.0)
    kinds = {labels[0][1] for name, labels in before if name == "muster_incidents_total"}
    assert {"rank_exit", "rank_hang", "host_lost"} <= kinds and set(KINDS.names()) == kinds
    assert not any(before["muster_incidents_total", (("kind", kind),)] for kind in kinds)


def test_steps_and_their_parts():
    hosts = {"host-0": [0, 1]}
    found = read(
        folded(
            event("attempt.started", 1, attempt=3, world_size=2, layout={}, hosts=hosts),
            event("step", 2, step=1, **STEP),
            event("step", 3, step=2, **{**STEP, "loss": 2.25}, snapshot_step=2, peer_step=1),
            event("step", 9, step=3, **STEP, snapshot_step=2, peer_step=2),
        ),
        10.0,
    )
    assert found["muster_step", ()] == 3 and found["muster_step_seconds", ()] == 2.0
    assert (found["muster_attempt", ()], found["muster_ranks", ()]) == (3, 2)
    assert found["muster_tokens_total", ()] == 300 and found["muster_mfu_ratio", ()] == 0.4
    assert found["muster_step_part_seconds", (("part", "data_wait"),)] == 0.25
    assert found["muster_step_part_seconds", (("part", "checkpoint"),)] == 0.5
    assert found["muster_checkpoint_age_seconds", (("tier", "memory"),)] == 7.0, "since step 2 came there"
    assert found["muster_checkpoint_age_seconds", (("tier", "peer"),)] == 1.0


def test_parts_that_are_known_have_their_names_and_no_others():
    found = read(folded(event("step", 2, step=1, **STEP, compute_ns=SECOND, comm_ns=SECOND // 5, host_gap_ns=0)), 3.0)
    parts = {labels[0][1]: value for (name, labels), value in found.items() if name == "muster_step_part_seconds"}
    assert parts == {"compute": 1.0, "comm_exposed": 0.2, "data_wait": 0.25, "host_stall": 0.0, "checkpoint": 0.5}


def test_how_far_a_rank_is_behind_while_one_keeps_coming_last():
    def pace(rank: int, ahead_us: int) -> dict[str, int]:
        names = ("ahead_spread_us", "late_us", "wait_us", "data_us", "stall_us", "gap_us", "tokens")
        return {"rank": rank, "steps": 20, "last": 0, "ahead_us": ahead_us, **dict.fromkeys(names, 0)}

    ranks = [pace(0, 9000), pace(1, 10000), pace(2, 0), pace(3, 11000)]
    hosts = {"host-0": [0, 1], "host-1": [2, 3]}
    events = [
        event("attempt.started", 1, world_size=4, layout={}, hosts=hosts),
        event("step", 2, step=1, **STEP, pace=ranks),
    ]
    found = read(folded(*events), 3.0)
    lags = {labels: value for (name, labels), value in found.items() if name == "muster_rank_lag_seconds"}
    assert lags[("host", "host-1"), ("rank", "2")] == pytest.approx(0.010)
    assert lags[("host", "host-0"), ("rank", "0")] == pytest.approx(0.001)
    assert lags[("host", "host-1"), ("rank", "3")] == 0
    ended = read(folded(*events, event("step", 3, step=2, **STEP)), 4.0)
    assert not [name for name, _ in ended if name == "muster_rank_lag_seconds"]


def test_a_step_that_is_taken_again_counts_once_and_a_counter_never_falls():
    before = [event("step", 1, step=step, **STEP) for step in (1, 2, 3)]
    again = [event("checkpoint.restored", 2, step=1, tier="memory", uri=""), event("step", 3, step=2, **STEP)]
    metrics = folded(*before)
    highest = 0.0
    for one in [*again, event("step", 4, step=3, **STEP), event("step", 5, step=4, **STEP)]:
        metrics.add(one)
        count = read(metrics, 6.0)["muster_tokens_total", ()]
        assert count >= highest
        highest = count
    assert highest == 400


def test_incidents_health_dollars_and_the_end():
    fell = {"evidence": "x", "incident": "rank_exit"}
    found = read(
        folded(
            event("host.allocated", 0, host="host-0", gpus=8, role="active", usd_per_hour=36.0),
            event("host.allocated", 0, host="host-1", gpus=8, role="active", usd_per_hour=18.0),
            event("incident.detected", 1, incident_id="i1", **fell),
            event("incident.detected", 2, incident_id="i2", **fell),
            event("incident.resolved", 3, incident_id="i2", lost_ns=SECOND),
            event(
                "host.health",
                4,
                host="host-0",
                incident="host_unhealthy",
                evidence="x",
                resettable=[3],
                verdict="reset",
            ),
            event("host.health", 4, host="host-1", incident="host_unhealthy", evidence="x"),
            event("host.readmitted", 5, host="host-1", reason="x"),
            event("host.released", 100, host="host-1"),
            event("run.finished", 101, outcome="succeeded", exit_code=0, reason="done"),
        ),
        200.0,
    )
    assert found["muster_incidents_total", (("kind", "rank_exit"),)] == 2
    assert found["muster_incident_lost_seconds_total", ()] == 1.0
    assert found["muster_gpu_health", (("class", "reset"), ("gpu", "3"), ("host", "host-0"))] == 1.0
    assert not [labels for name, labels in found if name == "muster_gpu_health" and ("host", "host-1") in labels]
    assert found["muster_usd_total", ()] == pytest.approx(36.0 * 200 / 3600 + 18.0 * 100 / 3600)
    assert found["muster_finished", ()] == 1.0


def test_names_are_read_back_whatever_is_in_them():
    name = 'a"b\\c\nd'
    family = Family("muster_x", "gauge", "a \\ and\na line")
    (read_back,) = parser.text_string_to_metric_families(text_format([(family, {"run": name}, 1.5)]))
    assert read_back.samples[0].labels == {"run": name} and read_back.samples[0].value == 1.5


def test_chips_are_told_by_host_until_it_is_released():
    chips = {"memory_bytes": [7, 8], "busy": [0.5, 0.25]}
    told = [
        event("host.allocated", 1, host="host-1", gpus=0, role="active", usd_per_hour=1.0),
        event("chips.usage", 2, step=3, host="host-1", **chips),
        event("chips.usage", 2, step=3, host="host-0", memory_bytes=[9]),
    ]
    found = {key: value for key, value in read(folded(*told), 3.0).items() if "_tpu_" in key[0]}
    first, second = (("chip", "0"), ("host", "host-1")), (("chip", "1"), ("host", "host-1"))
    other = (("chip", "0"), ("host", "host-0"))
    busy, memory = "muster_tpu_utilization_ratio", "muster_tpu_memory_bytes"
    assert found == {
        (busy, first): 0.5, (busy, second): 0.25, (memory, first): 7, (memory, second): 8, (memory, other): 9,
    }  # fmt: skip
    gone = event("host.released", 4, host="host-1", reason="done")
    assert {key[1] for key in read(folded(*told, gone), 5.0) if "_tpu_" in key[0]} == {other}
