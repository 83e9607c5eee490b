"""Refusals and warnings of a run file for Vertex AI, each for the reason that Google's pages give; and its offers."""

import pytest
from vertex_cases import cases, placement, spec

from muster import backends
from muster.app.cluster import render
from muster.backends.vertex.placement import rents
from muster.backends.vertex.run_file_rules import rules, warnings
from muster.catalog import offers, vertex
from muster.config.spec import RunSpec
from muster.core.errors import RunFileError


def problems(of):
    return {problem.key: f"{problem.message} ({problem.hint})" for problem in rules(of)}


@pytest.mark.parametrize("name", cases())
def test_the_examples_are_accepted(name):
    assert problems(cases()[name].spec) == {}


FLEX = {"machine": "a3-highgpu-8g", "mode": "flex_start"}
V5E = {"machine": "ct5lp-hightpu-4t", "device": "tpu"}
ZONAL = "projects/example-project/zones/us-central1-a/reservations/r"


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"machine": "a3-highgpu-9g"}, "resources.machine", "did you mean a3-highgpu"),
        ({"machine": None, "accelerator": "H100"}, "resources.accelerator", "several machines"),
        ({"machine": None}, "resources.machine", "no machine named"),
        ({"mode": "owned"}, "resources.provisioning_model", "nothing there is owned"),
        ({"mode": "calendar"}, "resources.provisioning_model", "reservation"),
        ({"mode": "flex_start_queued"}, "resources.provisioning_model", "flex_start"),
        ({"machine": "g4-standard-48", "mode": "flex_start"}, "resources.provisioning_model", "no flex-start"),
        ({"mode": "flex_start"}, "resources.provisioning_model", "no flex-start for a3-megagpu-8g"),
        ({**FLEX, "limits": {"max_hours": 169}}, "limits.max_hours", "7 days"),
        ({"mode": "reservation"}, "resources.reservation", "names none"),
        ({**FLEX, "reservation": ZONAL}, "resources.reservation", "cannot use a reservation"),
        ({"mode": "spot", "reservation": ZONAL}, "resources.reservation", "cannot use a reservation"),
        ({"mode": "reservation", "reservation": "r"}, "resources.reservation", "its project and zone"),
        (
            {"mode": "reservation", "reservation": ZONAL, "locations": ["us-central1", "us-east4"]},
            "resources.reservation", "is in us-central1, and resources.locations has us-east4",
        ),
        ({"locations": []}, "resources.locations", "names no region"),
        ({"locations": ["us-central1-b"]}, "resources.locations", "locations: [us-central1]"),
        ({"locations": ["here"]}, "resources.locations", "not a region"),
        ({"project": None}, "resources.project", "names no project"),
        ({"image": None}, "resources.image", "no container image"),
        ({"image": "a b"}, "resources.image", "cannot be an image"),
        ({"vertex": {"service_account": None}}, "vertex.service_account", "no secret"),
        ({"run_dir": None}, "run_dir", "gs://BUCKET"),
        ({"run_dir": "s3://bucket/runs"}, "run_dir", "gs://BUCKET"),
        ({"checkpoint": {"dir": "/data/checkpoints"}}, "checkpoint.dir", "only one host"),
        ({"ranks_per_host": 9}, "resources.ranks_per_host", "it has 8"),
        ({"machine": "ct5lp-hightpu-4t"}, "resources.device", "has 4 TPU chips"),
        ({"device": "tpu"}, "resources.device", "has no TPU"),
        ({**V5E, "mode": "flex_start", "hosts": 1}, "resources.provisioning_model", "no flex-start"),
        ({**V5E, "hosts": 3}, "resources.hosts", "are no slices: one has 1 (2x2), 2 (2x4)"),
        ({**V5E, "spare_hosts": 2}, "resources.spare_hosts", "neither spare hosts nor fewer"),
        ({**V5E, "parallelism": {"dp_replicate": 2}}, "parallelism.dp_replicate", "one slice of TPUs"),
        ({**V5E, "parallelism": {"tp": 3}}, "parallelism.tp", "4 chips of a host"),
        ({**V5E, "machine": "ct5p-hightpu-4t"}, "resources.machine", "no machine 'ct5p-hightpu-4t'"),
        ({"device": "cpu"}, "resources.device", "has 8 GPUs"),
        ({"machine": "n1-standard-4", "mode": None, "device": "cuda"}, "resources.device", "has 0 GPUs"),
        (
            {"vertex": {"network": "projects/1/global/networks/n",
                        "network_attachment": "projects/p/regions/us-central1/networkAttachments/n"}},
            "vertex.network_attachment", "remove one",
        ),
        (
            {"vertex": {"tensorboard": "projects/1/locations/us-east4/tensorboards/2"}},
            "vertex.tensorboard", "is in us-east4",
        ),
        ({**FLEX, "vertex": {"reduction_servers": 4}}, "vertex.reduction_servers", "same machine for all"),
        ({"vertex": {"reduction_servers": 4}}, "vertex.reduction_servers", "GPUDirect"),
        (
            {"machine": "a2-highgpu-8g", "vertex": {"reduction_servers": 4}},
            "vertex.reduction_servers", "sharded across hosts",
        ),
        (
            {"machine": "a2-highgpu-8g", "hosts": 1, "vertex": {"reduction_servers": 4}},
            "vertex.reduction_servers", "one host",
        ),
        (
            {"machine": "n1-standard-4", "mode": None, "vertex": {"reduction_servers": 4}},
            "vertex.reduction_servers", "no GPUs",
        ),
    ],
)  # fmt: skip
def test_refused_with_the_reason(changes, key, words):
    given = dict(changes)
    found = problems(spec(given.pop("machine", "a3-megagpu-8g"), given.pop("mode", "spot"), **given))
    assert list(found) == [key] and words in found[key], found


def test_a_wait_of_nothing_is_no_wait():
    """On Vertex 0 waits for ever; on Compute Engine it fails at once."""
    with pytest.raises(ValueError, match="greater than 0"):
        spec(vertex={"max_wait_hours": 0})


@pytest.mark.parametrize("suffix", ["", "/reservationBlocks/b", "/reservationBlocks/b/reservationSubBlocks/s"])
def test_a_reservation_may_be_narrowed_to_a_block(suffix):
    assert problems(spec("a4-highgpu-8g", "reservation", reservation=ZONAL + suffix)) == {}


def test_a_secret_has_a_version():
    with pytest.raises(ValueError, match="hugging_face_secret"):
        spec(vertex={"hugging_face_secret": "projects/p/secrets/hf/versions/latest"})


def test_warned_of_quota_regions_and_what_is_not_documented():
    of = placement(spec("a3-highgpu-8g", "spot", locations=["us-central1", "us-west4"]))
    said = [f"{problem.key}: {problem.message}" for problem in warnings(of)]
    metric = "aiplatform.googleapis.com/custom_model_training_preemptible_nvidia_h100_gpus"
    assert f"resources.hosts: needs 16 of the quota {metric} in us-central1: a new project has 0" in said
    assert any("not offered in us-west4" in one for one in said)
    assert not any("not offered in us-central1" in one for one in said)
    assert any("may be plain TCP" in one for one in said)
    assert any("restarts the whole job" in one for one in said)
    assert any("bucket example-bucket has to be in one region" in one for one in said)
    small = placement(spec("g2-standard-96", "on_demand", model={"source": "meta-llama/Llama-3.1-70B"},
                           vertex={"boot_disk_gb": 150}))  # fmt: skip
    assert any(problem.key == "vertex.boot_disk_gb" for problem in warnings(small))


def test_render_prints_the_requests():
    rendered = render.render(spec(), run_id="llama-1", run_dir=None)
    assert list(rendered.files) == ["custom-job.us-central1.json"]
    with pytest.raises(RunFileError, match="names no region"):
        render.render(spec(locations=[]), run_id="llama-1")


def test_settings_of_other_places_have_no_effect():
    unused = dict(backends.get("vertex").checks.unused(spec()))
    assert {"resources.queue", "resources.cluster", "resources.local_ssd"} <= unused.keys()
    assert set(unused) >= {f"resources.{name}" for name in ("storage", "image_streaming", "node_service_account")}
    assert all(key.partition(".")[2] in type(spec().resources).model_fields for key in unused if "resources." in key)


def test_offers_are_what_vertex_rents_with_its_fee():
    everything = offers.catalogue()
    rented = rents(everything)
    assert {one.offer.backend for one in rented} == {"vertex"}
    assert {one.offer.machine for one in rented} <= vertex.machines().keys()
    assert not {one.offer.mode for one in rented} & {"calendar", "commitment", "owned"}

    def price(options, machine, mode):
        (found,) = [
            one for one in options
            if (one.offer.machine, one.offer.mode, one.offer.location) == (machine, mode, "us-central1")
        ]  # fmt: skip
        return found

    plain, with_fee = (price(each, "a3-highgpu-8g", "flex_start") for each in (everything, rented))
    assert with_fee.offer.usd_per_node_hour == pytest.approx(plain.offer.usd_per_node_hour + 13.175, abs=0.001)
    assert with_fee.price.usd_per_gpu_hour * 8 == pytest.approx(with_fee.offer.usd_per_node_hour)
    assert "fee of 1.6469 (as billed)" in with_fee.price.source
    assert "(assumed)" in price(rented, "a3-megagpu-8g", "spot").price.source
    unknown = price(rented, "a4-highgpu-8g", "spot")
    assert unknown.price is None and unknown.offer.usd_per_node_hour is None, "no fee known, so no price"


def test_a_run_file_moves_between_places_by_one_key():
    """The same keys; what the other place has besides is said to have no effect, not refused."""
    document = cases()["full-8b-two-machines"].spec.model_dump(mode="json", exclude_defaults=True)
    moved = RunSpec.model_validate({**document, "backend": "gke"})
    assert moved.resources == spec("a3-highgpu-8g", "flex_start", locations=["us-central1", "europe-west4"]).resources
    assert problems(RunSpec.model_validate({**document, "backend": "vertex"})) == {}
