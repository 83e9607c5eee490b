"""What hosts used: on the report's page over time, on the metrics page as it is now."""

import pytest
from faulty_run import Writer, write

from muster.core.events import Event
from muster.report import api
from muster.report.exposition import RunMetrics
from muster.report.render.series import series

MIB = 1 << 20


def usage(writer, host, at_s, step, *, attempt=1, **detail):
    given = {"steps": 5, "interval_ns": 10**10, "cpu_ns": 5 * 10**9, **detail}
    writer.add(host, at_s, "host.usage", step=step, attempt=attempt, detail=given)


@pytest.fixture
def run(tmp_path):
    write(tmp_path / "events")
    return tmp_path


def columns(run):
    return series(api.load(run).ledger)["usage"]


def add(run, *rows):
    writer = Writer(run / "events")
    for host, at_s, step, attempt, detail in rows:
        usage(writer, host, at_s, step, attempt=attempt, **detail)
    writer.close()


def test_a_run_that_says_nothing_has_empty_columns(run):
    assert columns(run) and not any(columns(run).values())


def test_the_mean_host_and_the_one_that_is_furthest_from_it(run):
    gpus = {"gpu_busy": [1.0, 0.5], "gpu_memory_bytes": [1, 2]}
    add(
        run,
        ("usage-0", 40.0, 10, 1, {"busy": 0.25, "memory_bytes": MIB, "received_bytes": 50, "sent_bytes": 50, **gpus}),
        ("usage-1", 40.0, 10, 1, {"busy": 0.75, "memory_bytes": 3 * MIB, "received_bytes": 100, "sent_bytes": 0}),
        ("usage-0", 90.0, 20, 1, {"busy": 0.5, "cpu_ns": 10**10}),
        ("usage-0", 95.0, 21, 2, {"busy": 0.5}),
    )
    found = columns(run)
    assert [round(value) for value in found["t"]] == [
        round(found["t"][0]),
        *(round(found["t"][0]) + n for n in (50, 55, 55)),
    ]
    assert found["busy"] == [0.5, 0.5, None, 0.5] and found["busy_most"] == [0.75, 0.5, None, 0.5]
    assert found["cpu_s"] == [1.0, 2.0, None, 1.0]
    assert found["memory_bytes"] == [2 * MIB, None, None, None] and found["memory_most_bytes"][0] == 3 * MIB
    assert found["network_bytes"] == [20, None, None, None], "in and out, in a step"
    assert found["gpu_busy"][0] == 0.75 and found["gpu_busy_least"] == [0.5, None, None, None]
    assert found["gpu_memory_bytes"][0] == 1.5 and found["gpu_memory_most_bytes"] == [2, None, None, None]


def test_the_metrics_page_has_each_hosts_newest_and_counts_its_bytes():
    metrics = RunMetrics("demo-1")
    for step, host, detail in (
        (5, "host-0", {"received_bytes": 100, "sent_bytes": 7, "busy": 0.5}),
        (
            10,
            "host-0",
            {"received_bytes": 50, "sent_bytes": 1, "busy": 0.25, "gpu_busy": [0.9], "gpu_memory_bytes": [MIB]},
        ),
        (10, "host-1", {"memory_bytes": 2 * MIB}),
    ):
        given = {"steps": 5, "interval_ns": 10**10, "cpu_ns": 5 * 10**9, **detail}
        metrics.add(
            Event(
                run_id="r",
                seq=0,
                mono_ns=0,
                wall_ns=0,
                host=host,
                kind="host.usage",
                attempt=1,
                step=step,
                detail=given,
            )
        )
    found = {
        (family.name.removeprefix("muster_"), *labels.values()): value for family, labels, value in metrics.samples(1)
    }
    assert found["host_processor_ratio", "host-0"] == 0.25 and ("host_processor_ratio", "host-1") not in found
    assert found["step_processor_seconds", "host-1"] == 1.0
    assert found["host_network_bytes_total", "host-0", "received"] == 150
    assert found["host_network_bytes_total", "host-0", "sent"] == 8
    assert found["host_memory_bytes", "host-1"] == 2 * MIB
    assert found["gpu_utilization_ratio", "host-0", "0"] == 0.9 and found["gpu_memory_bytes", "host-0", "0"] == MIB
    names = [family.name for family, _, _ in metrics.samples(1)]
    assert all(
        name not in names[: names.index(name)] for name, before in zip(names[1:], names, strict=False) if name != before
    )
