"""What a run's bucket costs in requests, and when faster storage is worth its price."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from muster.app.planning import plan as use_case
from muster.catalog import rows
from muster.cli.drawn import plan_table
from muster.plan.bucket import BUCKET_BYTES_PER_S, Weights, advice, requests
from muster.plan.constants import DEFAULT

RUN = """\
name: big
backend: {backend}
model: {{source: meta-llama/Llama-3.1-70B, weights: {weights}}}
data: {{sources: [{{type: random, rows: 100000}}]}}
training: {{steps: 1000, sequence_length: 4096, global_batch_size: 512}}
resources: {{machine: a4-highgpu-8g, hosts: {hosts}}}
"""


def planned(tmp_path, *, backend="gke", weights="hub", hosts=16):
    path = tmp_path / "run.yaml"
    path.write_text(RUN.format(backend=backend, weights=weights, hosts=hosts))
    return use_case.plan(path, (), home=tmp_path / "home")


def test_requests_of_sixteen_hosts_by_hand():
    # 17 writers: events in 4 s and nine logs in 32 s; the lease; status at each change; a list in ten minutes.
    by_hand = 17 * (900 + 9 * 112.5) + 1080 + 1800 + 6
    # The lease in 3 s; six times what is new in ten minutes, at most the newest object and one before it.
    reads = 16 * (1200 + 6 * 2)
    found = requests(16, 8)
    assert found.writes_per_hour == round(by_hand) and found.reads_per_hour == reads
    assert found.usd_per_hour == pytest.approx(by_hand / 1000 * 0.0065 + reads / 1000 * 0.0005, rel=1e-4)
    assert 0.2 < found.usd_per_hour < 0.3 and found.prices == f"memory, {rows.table_date('storage.yaml')}"


def test_the_plan_shows_them_with_their_origin(tmp_path):
    found = planned(tmp_path)
    (line,) = [line for line in plan_table.lines(found) if line.startswith("  bucket")]
    assert f"{found.plan.bucket.writes_per_hour:,} writes and 19,392 reads an hour at most, $0.24/h (memory, " in line
    assert found.plan.to_json()["bucket"]["usd_per_hour"] == found.plan.bucket.usd_per_hour


def test_a_run_that_has_no_bucket_pays_for_none(tmp_path):
    found = planned(tmp_path, backend="slurm")
    assert found.plan.bucket is None and found.plan.storage == ()
    assert not [line for line in plan_table.lines(found) if line.startswith(("  bucket", "  storage"))]


def test_weights_from_the_hub_are_downloaded_by_every_host_from_the_bucket_once(tmp_path):
    found = planned(tmp_path)
    assert "each of 16 hosts downloads 141 GB of weights from the hub" in found.plan.storage[0]
    assert "(2258 GB in all): model.weights: bucket" in found.plan.storage[0]
    assert not any("from the hub" in line for line in planned(tmp_path, weights="bucket").plan.storage)


@pytest.fixture
def of(tmp_path):
    """Advice about a plan of so many hosts, all else as it was planned for sixteen."""
    found = planned(tmp_path, weights="bucket")

    def lines(hosts, weights=141_107_412_992, every_s=None):
        cost = replace(found.chosen.cost, usd_per_hour=90.0 * hosts)
        good = replace(found.chosen.goodput, checkpoint_every_s=every_s or found.chosen.goodput.checkpoint_every_s)
        chosen = SimpleNamespace(num_nodes=hosts, cost=cost, goodput=good, setting=found.chosen.setting)
        return list(advice(found.work, chosen, Weights(bytes_=weights, from_hub=False), DEFAULT))

    return lines


def test_a_cache_pays_where_hosts_together_read_more_than_a_bucket_gives(of):
    least = int(BUCKET_BYTES_PER_S / DEFAULT.store_bytes_per_s_per_node)
    assert not any("Anywhere Cache" in line for line in of(least))
    (line,) = [line for line in of(4 * least) if "Anywhere Cache pays" in line]
    seconds = 141_107_412_992 / DEFAULT.store_bytes_per_s_per_node
    assert f"in {seconds:.0f} s instead of {4 * seconds:.0f} s" in line
    gib, usd = 141_107_412_992 / 2**30, 4 * least * 90.0 * 3 * seconds / 3600
    cost = gib * (0.0032 + 24 * 0.0001233 + 4 * least * 0.0006)
    assert usd > cost and f"worth ${usd:,.0f} of machines for ${cost:.2f} of cache" in line


def test_a_save_that_fills_the_time_between_two_is_said(of):
    assert not any("Rapid" in line for line in of(16, every_s=3600.0))
    (line,) = [line for line in of(16, every_s=60.0) if "Rapid" in line]
    assert "of the 60 s between two" in line and "gRPC alone" in line
