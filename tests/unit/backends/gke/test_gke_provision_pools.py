"""Pools of nodes: what they are made of, and run files that share one."""

import json

import pytest
from fakes.project import INSTALLED, cloud, killed, session, where

from muster.backends.cluster import Said
from muster.backends.gke.provision.inventory.disks import boot_disk_gb, left_gib, left_of_ssds_gib
from muster.backends.gke.provision.inventory.pools import host_pools
from muster.backends.gke.provision.up import up
from muster.core.errors import CapacityError, ConflictError, UsageError


def pool_of(google, site):
    return next(one for key, one in google.store.items() if key.endswith(f"/nodePools/{site.pool}"))


def made(machine="a4-highgpu-8g", mode="flex_start_queued", **changes):
    google, site = cloud(), where(machine, mode, **changes)
    up(site, session(google), INSTALLED, workers=1)
    return pool_of(google, site)


# ---------------------------------------------------------------- what they are made of


@pytest.mark.parametrize(
    ("machine", "mode", "ssds"),
    [
        ("a4-highgpu-8g", "flex_start_queued", 32),
        ("a3-ultragpu-8g", "spot", 32),
        ("a3-megagpu-8g", "spot", 16),
        ("a3-highgpu-8g", "spot", 16),
        ("a3-highgpu-1g", "spot", 2),
        ("a2-ultragpu-8g", "on_demand", 8),
        ("a2-highgpu-8g", "on_demand", None),
        ("g2-standard-48", "spot", None),
    ],
)
def test_local_ssds_are_asked_for_where_the_machine_has_them(machine, mode, ssds):
    config = made(machine, mode)["config"]
    assert config.get("ephemeralStorageLocalSsdConfig") == (ssds and {"localSsdCount": ssds})


def test_local_ssds_by_the_run_file():
    assert made("g2-standard-48", "spot", local_ssd=4)["config"]["ephemeralStorageLocalSsdConfig"] == {
        "localSsdCount": 4
    }
    assert "ephemeralStorageLocalSsdConfig" not in made("a4-highgpu-8g", "spot", local_ssd=0)["config"]


SMALL = {"source": "meta-llama/Llama-3.1-8B"}


@pytest.mark.parametrize(
    ("machine", "changes", "gib"),
    [
        ("a2-highgpu-8g", {}, 400),
        ("a2-highgpu-8g", {"model": SMALL}, 200),
        ("a2-highgpu-8g", {"local_ssd": 8}, 200),
        ("a2-highgpu-8g", {"model": {"source": "meta-llama/Llama-3.1-70B", "weights": "bucket"}}, 200),
        ("a2-highgpu-8g", {"model": {"source": "gs://example-bucket/llama"}}, 200),
        ("a2-ultragpu-8g", {}, 200),
        ("g2-standard-48", {}, 400),
    ],
)
def test_the_boot_disk_holds_image_and_weights_where_nothing_else_does(machine, changes, gib):
    site = where(machine, "on_demand", **changes)
    assert boot_disk_gb(site.placement) == gib
    assert made(machine, "on_demand", **changes)["config"]["diskSizeGb"] == gib


def test_what_gke_leaves_of_a_boot_disk():
    # Of 100 GiB, 41 go to the system and 10 stay free.
    assert left_gib(100) == pytest.approx(49.0) and left_gib(1000) == pytest.approx(800.0)
    assert left_gib(400) > 141e9 / 2**30 + 60 > left_gib(200)


def test_what_gke_leaves_of_local_ssds():
    assert [left_of_ssds_gib(count) for count in (1, 2, 3, 16)] == pytest.approx([287.5, 600.0, 912.5, 5300.0])


def test_weights_that_no_local_ssd_holds_are_refused_before_anything_is_asked():
    large = {"source": "meta-llama/Llama-3.1-405B"}
    with pytest.raises(UsageError, match=r"needs 9.. GiB .* leaves 600 GiB of 2 local SSDs") as caught:
        where("g2-standard-48", "spot", model=large, local_ssd=2)
    assert caught.value.hint == "model.weights: bucket, or resources.local_ssd: 4"
    where("g2-standard-48", "spot", model=large, local_ssd=4)
    with pytest.raises(UsageError) as caught:
        where("a3-highgpu-1g", "spot", model=large)
    assert caught.value.hint == "model.weights: bucket"
    where("a3-highgpu-1g", "spot", model={**large, "weights": "bucket"})


def test_the_supervisors_disk_holds_an_image_and_their_pool_two_of_each_run():
    google = cloud()
    up(where(), session(google), INSTALLED, workers=1)
    pool = next(one for key, one in google.store.items() if key.endswith("/nodePools/muster-cpu"))
    assert pool["config"]["diskSizeGb"] == 100 and pool["autoscaling"]["totalMaxNodeCount"] == 8


@pytest.mark.parametrize(
    ("machine", "mode", "compact"),
    [
        ("a3-megagpu-8g", "on_demand", True),
        ("a3-highgpu-8g", "on_demand", True),
        ("a2-highgpu-8g", "on_demand", True),
        ("a3-megagpu-8g", "spot", False),
        ("a3-megagpu-8g", "flex_start", False),
        ("a3-megagpu-8g", "flex_start_queued", False),
        ("a4-highgpu-8g", "reservation", False),
        ("g2-standard-48", "on_demand", False),
    ],
)
def test_compact_placement_on_demand_alone(machine, mode, compact):
    assert made(machine, mode).get("placementPolicy") == ({"type": "COMPACT"} if compact else None)


def test_fast_socket_on_a2_and_the_newest_driver_on_g4():
    assert made("a2-highgpu-8g", "on_demand")["config"]["fastSocket"] == {"enabled": True}
    assert "fastSocket" not in made("a3-megagpu-8g", "on_demand")["config"]
    (accelerator,) = made("g4-standard-384", "on_demand")["config"]["accelerators"]
    assert accelerator["gpuDriverInstallationConfig"] == {"gpuDriverVersion": "LATEST"}


@pytest.mark.parametrize(
    ("changes", "streams"),
    [({}, True), ({"image_streaming": False}, False), ({"image": "docker.io/a/b:1"}, False), ({"image": None}, True)],
)
def test_images_are_streamed_from_artifact_registry(changes, streams):
    google, site = cloud(), where(**changes)
    up(site, session(google), INSTALLED, workers=1)
    assert pool_of(google, site)["config"].get("gcfsConfig") == ({"enabled": True} if streams else None)
    assert ("containerfilesystem.googleapis.com" in google.enabled) == streams


@pytest.mark.parametrize(
    ("named", "label", "value"),
    [
        ("gpus", "gpus", "gpus"),
        ("projects/other/reservations/gpus", "gpus", "projects/other/reservations/gpus"),
        ("gpus/reservationBlocks/b1", "gpus", "projects/example-project/reservations/gpus/reservationBlocks/b1"),
        (
            "projects/other/reservations/gpus/reservationBlocks/b1",
            "gpus",
            "projects/other/reservations/gpus/reservationBlocks/b1",
        ),
    ],
)
def test_a_reservation_by_name_project_and_block(named, label, value):
    config = made(mode="reservation", reservation=named)["config"]
    assert config["labels"]["cloud.google.com/reservation-name"] == label
    assert config["reservationAffinity"]["values"] == [value]


@pytest.mark.parametrize(("mode", "hosts", "said"), [("spot", 2, True), ("spot", 1, False), ("flex_start", 2, False)])
def test_nodes_that_come_one_by_one_bill_while_the_others_are_waited_for(mode, hosts, said):
    bills = host_pools(where("g2-standard-48", mode, hosts=hosts))[0].bills
    assert ("the first bill while the last is waited for" in bills) == said


# ---------------------------------------------------------------- run files that share one


MODES = ["flex_start_queued", "reservation"]


def size(google, site):
    pool = pool_of(google, site)
    return google.sizes[site.pool] if "autoscaling" not in pool else pool["autoscaling"]["totalMaxNodeCount"]


@pytest.mark.parametrize("mode", MODES)
def test_a_larger_run_file_makes_the_pool_larger_and_a_smaller_one_leaves_it(mode):
    google, larger = cloud(), where(mode=mode, hosts=6)
    up(where(mode=mode), session(google), INSTALLED, workers=1)
    made_before = list(google.creations)
    assert size(google, larger) == 2
    up(larger, session(google), INSTALLED, workers=1)
    assert size(google, larger) == 6
    log = len(google.log)
    up(where(mode=mode), session(google), INSTALLED, workers=1)
    assert size(google, larger) == 6 and google.creations == made_before
    assert not [url for _, url in google.log[log:] if ":set" in url]


@pytest.mark.parametrize("mode", ["spot", "reservation"])
def test_growing_may_be_killed_at_any_request(mode):
    smaller, larger = (where("g2-standard-48", mode, hosts=hosts) for hosts in (2, 6))

    def begun():
        google = cloud()
        up(smaller, session(google), INSTALLED, workers=1)
        return google

    counted = begun()
    start = len(counted.log)
    up(larger, session(counted), INSTALLED, workers=1)
    assert size(counted, larger) == 6
    for number in range(start + 1, len(counted.log) + 1):
        google = begun()
        with killed(google, number):
            up(larger, session(google), INSTALLED, workers=1)
        up(larger, session(google), INSTALLED, workers=1)
        assert size(google, larger) == 6, f"killed after request {number}"
        assert google.creations == counted.creations


def test_nodes_of_a_reservation_that_do_not_come_leave_the_pool_as_it_was():
    google, site = cloud(), where(mode="reservation")
    up(site, session(google), INSTALLED, workers=1)
    google.fail["resize"] = ("GCE_STOCKOUT", "the reservation has two machines")
    with pytest.raises(CapacityError, match="the reservation has two machines"):
        up(where(mode="reservation", hosts=6), session(google), INSTALLED, workers=1)
    assert size(google, site) == 2 and pool_of(google, site)["status"] == "RUNNING"


def test_a_longer_run_file_finds_nodes_that_may_stay_as_long():
    google = cloud()
    up(where(limits={"max_hours": 1}), session(google), INSTALLED, workers=1)
    before = json.dumps(google.store, sort_keys=True)
    up(where(limits={"max_hours": 160}), session(google), INSTALLED, workers=1)
    assert json.dumps(google.store, sort_keys=True) == before
    assert pool_of(google, where())["config"]["maxRunDuration"] == "604800s"


def differs(google, site, match):
    before = json.dumps(google.store, sort_keys=True)
    with pytest.raises(ConflictError, match=match) as caught:
        up(site, session(google), INSTALLED, workers=1)
    assert json.dumps(google.store, sort_keys=True) == before and caught.value.hint


def test_what_cannot_be_changed_is_refused_with_the_reason():
    google = cloud()
    up(where(mode="reservation"), session(google), INSTALLED, workers=1)
    differs(google, where(mode="reservation", reservation="other"), "values.0. should be 'other', is 'gpus-in-august'")
    google = cloud()
    up(where("g2-standard-48", "spot", model=SMALL), session(google), INSTALLED, workers=1)
    differs(google, where("g2-standard-48", "spot"), "diskSizeGb should be at least 400 for the weights, is 200")
    differs(google, where("g2-standard-48", "spot", model=SMALL, local_ssd=4), "localSsdCount should be 4, is 0")
    google = cloud()
    up(where("g2-standard-48", "spot"), session(google), INSTALLED, workers=1)
    up(where("g2-standard-48", "spot", model=SMALL), session(google), INSTALLED, workers=1)


def test_what_google_does_not_answer_with_is_no_difference():
    google = cloud()
    up(where("g2-standard-48", "spot"), session(google), INSTALLED, workers=1)
    config = pool_of(google, where("g2-standard-48", "spot"))["config"]
    for name in ("diskType", "diskSizeGb", "reservationAffinity", "fastSocket", "gcfsConfig", "labels"):
        config.pop(name, None)
    up(where("g2-standard-48", "spot"), session(google), INSTALLED, workers=1)
    config["diskType"] = "pd-standard"
    differs(google, where("g2-standard-48", "spot"), "diskType should be 'pd-balanced', is 'pd-standard'")


def test_nodes_of_an_earlier_version_that_end_too_early_are_refused():
    google = cloud()
    up(where(), session(google), INSTALLED, workers=1)
    pool_of(google, where())["config"]["maxRunDuration"] = "7200s"
    differs(google, where(limits={"max_hours": 12}), "maxRunDuration should be at least '4[0-9]*s', is '7200s'")
    up(where(limits={"max_hours": 1}), session(google), INSTALLED, workers=1)


def test_seventy_billion_parameters_do_not_go_on_a_disk_of_200_gb():
    google = cloud()
    up(where("a2-highgpu-8g", "on_demand"), session(google), INSTALLED, workers=1)
    pool_of(google, where("a2-highgpu-8g", "on_demand"))["config"]["diskSizeGb"] = 200
    differs(google, where("a2-highgpu-8g", "on_demand"), "diskSizeGb should be at least 400 for the weights, is 200")


# ---------------------------------------------------------------- what is there and not well

CLUSTER = "v1/projects/example-project/locations/us-central1/clusters/muster"


@pytest.mark.parametrize(
    ("thing", "status"), [("cluster", "DEGRADED"), ("pool", "RUNNING_WITH_ERROR"), ("pool", "ERROR")]
)
def test_what_serves_although_it_is_not_well_stays_and_is_said(thing, status):
    google, site = cloud(), where(mode="reservation")
    up(site, session(google), INSTALLED, workers=1)
    made_before = list(google.creations)
    found = google.store[CLUSTER] if thing == "cluster" else pool_of(google, site)
    found |= {"status": status, "statusMessage": "one machine is ill"}
    google.partly = {site.pool}
    words, log = [], len(google.log)
    up(site, session(google), INSTALLED, workers=1, progress=words.append)
    assert google.creations == made_before and not [url for method, url in google.log[log:] if method == "DELETE"]
    said = [one.text for one in words if isinstance(one, Said) and "one machine is ill" in one.text]
    assert len(said) == 1 and status in said[0]


def test_a_pool_in_error_without_nodes_is_made_anew():
    google, site = cloud(), where(mode="reservation")
    up(site, session(google), INSTALLED, workers=1)
    pool_of(google, site)["status"] = "ERROR"
    up(site, session(google), INSTALLED, workers=1)
    assert google.creations.count(f"nodePools/{site.pool}") == 2 and pool_of(google, site)["status"] == "RUNNING"


def test_a_pool_of_a_reservation_without_the_label_that_runs_ask_for_is_refused():
    google, site = cloud(), where(mode="reservation")
    up(site, session(google), INSTALLED, workers=1)
    pool_of(google, site)["config"]["labels"].pop("cloud.google.com/reservation-name")
    differs(google, site, "labels should have cloud.google.com/reservation-name=gpus-in-august .*has none")
