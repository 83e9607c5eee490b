"""Everything that a run needs of a project's quotas is looked at before anything is made."""

import pytest
from fakes.project import INSTALLED, cloud, session, where

from muster.backends.gke.provision.quota import quotas
from muster.backends.gke.provision.up import up
from muster.core.errors import CapacityError

MEGA = {"machine": "a3-megagpu-8g", "mode": "on_demand"}
PLENTY = 10**6


def refused(match, of, **faults):
    google = cloud(**faults)
    with pytest.raises(CapacityError, match=match) as caught:
        up(of, session(google), INSTALLED, workers=1)
    assert google.creations == [] and "iam-admin/quotas?project=example-project" in caught.value.hint
    return str(caught.value)


@pytest.mark.parametrize(
    ("site", "metric", "limit", "used", "words"),
    [
        ({"mode": "spot"}, "GPUS_ALL_REGIONS", 0, 0, "all regions: limit 0, 0 in use; 16 GPUs"),
        (MEGA, "NETWORKS", 15, 7, "all regions: limit 15, 7 in use; 9 more networks"),
        (MEGA, "SUBNETWORKS", 100, 92, "limit 100, 92 in use; 9 more subnetworks"),
        (MEGA, "FIREWALLS", 100, 93, "limit 100, 93 in use; 8 more firewalls"),
        (MEGA, "IN_USE_ADDRESSES", 3, 0, "us-central1: limit 3, 0 in use; 4 addresses of nodes"),
        (MEGA, "SSD_TOTAL_GB", 500, 0, "limit 500, 0 in use; 600 GB of pd-balanced"),
        ({"mode": "spot"}, "HDB_TOTAL_GB", 300, 0, "limit 300, 0 in use; 400 GB of hyperdisk-balanced"),
        ({"mode": "spot"}, "HYPERDISK_BALANCED_TOTAL_GB", 300, 0, "400 GB of hyperdisk-balanced"),
        ({"mode": "spot"}, "PREEMPTIBLE_LOCAL_SSD_GB", 375, 0, "limit 375, 0 in use; 24000 GB of local SSD"),
        ({"machine": "a2-ultragpu-8g", "mode": "on_demand"}, "LOCAL_SSD_TOTAL_GB", 3000, 0, "6000 GB of local SSD"),
        ({"machine": "a2-highgpu-8g", "mode": "on_demand"}, "A2_CPUS", 100, 0, "limit 100, 0 in use; 192 CPUs"),
        ({"mode": "spot"}, "CPUS", 4, 0, "limit 4, 0 in use; 8 CPUs of supervisors"),
    ],
)
def test_each_that_is_short_is_said_with_its_limit_use_and_need(site, metric, limit, used, words):
    said = refused(f"quota {metric} in ", where(**site), limits={metric: (limit, used)})
    assert words in said
    up(where(**site), session(cloud(limits={metric: (PLENTY, used)})), INSTALLED, workers=1)


def test_all_that_are_short_are_said_at_once():
    said = refused("GPUS_ALL_REGIONS", where(**MEGA), limits={"GPUS_ALL_REGIONS": (0, 0), "NETWORKS": (5, 1)})
    assert "; quota NETWORKS in all regions: limit 5, 1 in use; 9 more networks are needed" in said


def test_what_others_use_now_counts_for_what_is_made_now_alone():
    used = {"GPUS_ALL_REGIONS": (16, 16), "IN_USE_ADDRESSES": (4, 4)}
    up(where(mode="spot"), session(cloud(limits=used)), INSTALLED, workers=1)
    refused("NETWORKS", where(mode="spot"), limits={"NETWORKS": (15, 14)})


def test_networks_that_are_there_are_not_counted_twice():
    google = cloud()
    up(where(**MEGA), session(google), INSTALLED, workers=1)
    google.limits = {"NETWORKS": (9, 9), "SUBNETWORKS": (9, 9)}
    for key in [key for key in google.store if "/clusters/" in key]:
        del google.store[key]
    up(where(**MEGA), session(google), INSTALLED, workers=1)


def test_nodes_of_a_reservation_draw_on_no_quota_of_gpus_or_local_ssds():
    limits = {"GPUS_ALL_REGIONS": (0, 0), "LOCAL_SSD_TOTAL_GB": (0, 0), "PREEMPTIBLE_LOCAL_SSD_GB": (0, 0)}
    up(where(mode="reservation"), session(cloud(limits=limits)), INSTALLED, workers=1)


def test_a_preemptible_quota_of_nothing_means_that_the_plain_one_counts():
    of = {"machine": "a2-ultragpu-8g", "mode": "spot"}
    limits = {"PREEMPTIBLE_LOCAL_SSD_GB": (0, 0), "LOCAL_SSD_TOTAL_GB": (PLENTY, 0)}
    up(where(**of), session(cloud(limits=limits)), INSTALLED, workers=1)
    refused("LOCAL_SSD_TOTAL_GB", where(**of), limits={**limits, "LOCAL_SSD_TOTAL_GB": (375, 0)})


def test_local_ssds_of_later_machines_have_a_quota_by_family():
    name = "local_ssd_total_storage_per_vm_family"
    here = (("region", "us-central1"), ("vm_family", "A3"))
    refused(f"quota {name} in us-central1: limit 375; 12000 GB are needed", where(**MEGA), quotas={name: {here: 375}})
    other = {name: {(("region", "us-central1"), ("vm_family", "Z3")): 375, (): 375}}
    up(where(**MEGA), session(cloud(quotas=other)), INSTALLED, workers=1)


def test_what_is_in_use_of_a_gpus_own_quota_is_said():
    google = cloud(quotas={"nvidia_l4_gpus": {(): 16}}, limits={"NVIDIA_L4_GPUS": (16, 12)})
    google.enabled.add("compute.googleapis.com")
    found = quotas(where("g2-standard-48", "on_demand"), session(google))
    assert found[0].sentence() == "quota nvidia_l4_gpus in us-central1: limit 16, 12 in use; 8 GPUs are needed"
