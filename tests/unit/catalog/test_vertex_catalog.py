"""The table of Vertex AI: names that its API knows, GPUs as the machines have them, quota metrics, the fee."""

import json

import pytest
from fakes.discovery import folder

from muster.catalog import gke, rows, vertex
from muster.core.errors import UsageError


def test_every_accelerator_is_one_that_the_api_knows():
    documents = folder()
    if documents is None:
        pytest.skip("google-api-python-client is not installed")
    schemas = json.loads((documents / "aiplatform.v1.json").read_text())["schemas"]
    known = schemas["GoogleCloudAiplatformV1MachineSpec"]["properties"]["acceleratorType"]["enum"]
    named = {one.accelerator.name for one in vertex.machines().values() if one.accelerator}
    assert named and named <= set(known)


def test_machines_have_the_gpus_and_chips_that_they_have_elsewhere():
    """The same hardware is rented by GKE, whose table has another origin."""
    for machine in vertex.machines().values():
        if machine.chip is None:
            continue
        family, same = gke.find(machine.name, None)
        assert (machine.gpus, machine.chips) == (same.gpus, same.chips), machine.name
        assert machine.chip == family.accelerator.removesuffix("-MEGA"), machine.name
        assert machine.chip in rows.accelerators()


@pytest.mark.parametrize(
    ("machine", "mode", "metric"),
    [
        ("a3-highgpu-8g", "on_demand", "custom_model_training_nvidia_h100_gpus"),
        ("a3-highgpu-8g", "flex_start", "custom_model_training_preemptible_nvidia_h100_gpus"),
        ("a3-megagpu-8g", "spot", "custom_model_training_preemptible_nvidia_h100_mega_gpus"),
        ("g2-standard-48", "reservation", "custom_model_training_nvidia_l4_gpus"),
    ],
)
def test_quota_metrics(machine, mode, metric):
    accelerator = vertex.machines()[machine].accelerator
    assert accelerator is not None and accelerator.metric(mode) == f"aiplatform.googleapis.com/{metric}"


def test_flex_start_is_offered_where_google_offers_it():
    able = {one.name for one in vertex.machines().values() if "flex_start" in one.modes}
    assert "a4-highgpu-8g" in able and "g2-standard-96" in able
    assert not {name for name in able if name.startswith(("g4-", "n1-", "e2-", "a3-mega"))}


def test_found_by_machine_by_accelerator_or_refused():
    assert vertex.find("a3-megagpu-8g", "H100").accelerator.name == "NVIDIA_H100_MEGA_80GB"
    assert vertex.find(None, "b200").name == "a4-highgpu-8g"
    with pytest.raises(UsageError, match="several machines") as error:
        vertex.find(None, "H100")
    assert "a3-highgpu-8g" in error.value.hint and "a3-megagpu-8g" in error.value.hint
    with pytest.raises(UsageError, match="no machine 'a3-highgpu-9g'") as error:
        vertex.find("a3-highgpu-9g", None)
    assert "a3-highgpu-8g" in error.value.hint
    with pytest.raises(UsageError, match="no accelerator 'TPU-v5p'"):
        vertex.find(None, "TPU-v5p")
    with pytest.raises(UsageError, match="several machines") as error:
        vertex.find(None, "TPU-v5e")
    assert "ct5lp-hightpu-8t" in error.value.hint


def test_the_fee_of_the_bill_and_the_assumed_ones():
    """A bill of August 2025 for an a3-highgpu-8g, Iowa: on demand 101.5429684 an hour, of which 0.5356164 is its disk;
    with flex-start 52.0306163, of which 0.5356164 is the disk and 38.3200385 the machine with its local SSDs."""
    billed = vertex.fee("a3-highgpu-8g", "us-central1")
    assert billed is not None and billed.billed
    assert 8 * billed.usd_per_gpu_hour == pytest.approx(52.0306163 - 0.5356164 - 38.3200385, abs=1e-3)
    listed = {(row.machine, row.mode, row.region): row for row in rows.shipped_prices()}
    on_demand = listed["a3-highgpu-8g", "on_demand", "us-central1"]
    assert 8 * (on_demand.low + billed.usd_per_gpu_hour) == pytest.approx(101.5429684 - 0.5356164, rel=1e-3)
    mega = vertex.fee("a3-megagpu-8g", "us-central1")
    assert mega is not None and not mega.billed and mega.usd_per_gpu_hour == pytest.approx(0.15 * 11.6751)
    assert vertex.fee("a4-highgpu-8g", "us-central1") is None, "not sold on demand: nothing to take a share of"
