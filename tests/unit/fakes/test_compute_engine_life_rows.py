"""The played Compute Engine is as unkind as the real one: what becomes of machines, groups and what they use."""

import pytest

discovery = pytest.importorskip("fakes.discovery")
if discovery.folder() is None:
    pytest.skip("google-api-python-client (Google's discovery documents) is not installed", allow_module_level=True)

from fakes.compute_engine.guest import Programs  # noqa: E402
from fakes.compute_engine.instances import host_error, preempt  # noqa: E402
from fakes.compute_engine.operator import ACCOUNT, FLEX, NETWORK, SPOT, SUBNET, ZONE, Operator, machine  # noqa: E402

NONE = {"consumeReservationType": "NO_RESERVATION"}


@pytest.mark.parametrize("asked_s", [None, 120])
def test_row_19_the_notice_is_as_long_as_was_asked_for(asked_s):
    told = []
    user = Operator(
        programs=Programs(acpi=lambda one, left_s: told.append(left_s), kill=lambda one: told.append("kill"))
    )
    notice = {"preemptionNoticeDuration": {"seconds": str(asked_s)}} if asked_s else {}
    guest = user.running("a", scheduling=SPOT | {"instanceTerminationAction": "DELETE"} | notice)
    preempt(user.cloud, user.at("a"))
    assert guest.metadata["preempted"] == "TRUE"
    assert told == ([] if asked_s else [30.0])  # with the shutdown, if it was not asked for
    user.time.sleep((asked_s or 0) + 25)
    assert told == [30.0]
    user.time.sleep(10)
    assert told == [30.0, "kill"] and user.status("a") == 404


def test_row_20_when_it_ends_stands_in_the_api_alone():
    user, told = Operator(), []
    user.cloud.programs.acpi = lambda one, left_s: told.append(left_s)
    limit = {"maxRunDuration": {"seconds": "3600"}}
    guest = user.running("a", scheduling=machine()["scheduling"] | limit)
    found = user.call("GET", f"zones/{ZONE}/instances/a").body["resourceStatus"]["scheduling"]
    assert found["terminationTimestamp"].startswith("2026-11-23T01:00:")
    assert not [value for value in guest.metadata.values() if "2026" in value]
    user.time.sleep(3600)
    assert told == [120.0]
    user.time.sleep(120)
    assert user.status("a") == "TERMINATED"  # stopped, as nobody asked for anything else


def test_row_21_after_a_host_error_the_same_name_comes_back_empty():
    user = Operator()
    guest = user.running("a")
    guest.local_ssd, guest.root["etc"] = {"snapshot": b"x"}, b"kept"
    address, boot = guest.address, guest.boot_id
    host_error(user.cloud, user.at("a"))
    assert user.status("a") == "RUNNING" and not guest.up  # Google has not seen it yet
    user.time.sleep(340)
    assert user.status("a") == "REPAIRING"
    user.time.sleep(200)
    assert user.status("a") == "RUNNING" and guest.up
    assert guest.address == address and guest.boot_id != boot and guest.boots == 2
    assert guest.local_ssd is None and guest.root["etc"] == b"kept"
    user.running("spot", scheduling=SPOT)
    host_error(user.cloud, user.at("spot"))
    user.time.sleep(900)
    assert user.status("spot") == "TERMINATED" and user.insert("spot").status == 409


def test_row_22_a_group_wants_back_what_is_deleted_behind_its_back():
    user = Operator()
    group = user.group()
    user.call("POST", f"{group}/resizeRequests", {"name": "one", "resizeBy": 2})
    user.time.sleep(200)
    first, second = sorted(user.instances())
    assert user.call("GET", group).body["targetSize"] == 2
    user.call("DELETE", f"zones/{ZONE}/instances/{first}")
    user.time.sleep(100)
    assert user.instances().keys() == {second}
    user.time.sleep(60)
    assert user.instances().keys() == {first, second}
    asked = {"instances": [f"zones/{ZONE}/instances/{first}"]}
    assert user.call("POST", f"{group}/deleteInstances", asked).status == 200
    user.time.sleep(600)
    assert user.instances().keys() == {second} and user.call("GET", group).body["targetSize"] == 1


def test_row_23_a_missing_quota_leaves_a_request_waiting():
    user = Operator(instance_quota=1)
    group = user.group()
    user.call("POST", f"{group}/resizeRequests", {"name": "one", "resizeBy": 2})
    user.time.sleep(7 * 86400)
    found = user.call("GET", f"{group}/resizeRequests/one").body
    assert found["state"] == "ACCEPTED" and "error" not in found["status"]
    assert found["status"]["lastAttempt"]["error"]["errors"][0]["code"] == "QUOTA_EXCEEDED"
    user.cloud.instance_quota, user.cloud.stock[ZONE] = None, 0
    assert "QUOTA_EXCEEDED" in str(user.call("GET", f"{group}/resizeRequests/one").body)  # of an older try
    user.cloud.stock[ZONE] = 2
    user.time.sleep(200)
    found = user.call("GET", f"{group}/resizeRequests/one").body
    assert found["state"] == "SUCCEEDED" and found["status"] == {}


def test_row_24_cancelled_is_only_what_waits_and_machines_may_come_all_the_same():
    user = Operator(stock={ZONE: 0})
    group = user.group()
    for name in ("late", "waits"):
        user.call("POST", f"{group}/resizeRequests", {"name": name, "resizeBy": 1})
    assert user.call("DELETE", f"{group}/resizeRequests/late").status == 400
    user.time.sleep(115)
    user.cloud.stock[ZONE] = 1  # between the cancel and its end
    cancel = user.call("POST", f"{group}/resizeRequests/late/cancel")
    user.time.sleep(200)
    assert user.errors(cancel) and user.call("GET", f"{group}/resizeRequests/late").body["state"] == "SUCCEEDED"
    assert len(user.instances()) == 1
    assert user.call("POST", f"{group}/resizeRequests/late/cancel").status == 400
    cancel = user.call("POST", f"{group}/resizeRequests/waits/cancel")
    user.time.sleep(60)
    assert user.errors(cancel) == [] and user.call("DELETE", f"{group}/resizeRequests/late").status == 200
    assert len(user.instances()) == 1  # deleting a request deletes no machine


def test_row_25_to_use_an_account_is_a_grant_that_takes_its_time():
    user = Operator(actors={})
    account = {"serviceAccounts": [{"email": ACCOUNT, "scopes": ["https://www.googleapis.com/auth/cloud-platform"]}]}
    refused = user.insert("a", **account)
    assert refused.status == 403 and "grant you the iam.serviceAccountUser role" in refused.message
    user.cloud.actors = {ACCOUNT: 90.0}
    assert user.insert("a", **account).status == 403
    user.time.sleep(90)
    assert user.insert("a", **account).status == 200


def test_row_26_whoever_does_not_refuse_eats_a_reservation():
    for affinity, used in (({}, "1"), (NONE, "0"), ({"consumeReservationType": "ANY_RESERVATION"}, "1")):
        user = Operator()
        held = {"count": "2", "instanceProperties": {"machineType": "g2-standard-12"}}
        user.call("POST", f"zones/{ZONE}/reservations", {"name": "theirs", "specificReservation": held})
        user.running("a", reservationAffinity=affinity)
        found = user.call("GET", f"zones/{ZONE}/reservations/theirs").body["specificReservation"]
        assert found.get("inUseCount", "0") == used


def test_row_28_the_driver_comes_later_and_fails_once():
    user = Operator()
    guest = user.running("a")
    user.time.sleep(100)
    assert guest.nvidia_smi(user.time.now_s) == 127
    user.time.sleep(100)
    assert [guest.nvidia_smi(user.time.now_s) for _ in range(3)] == [9, 0, 0]


def test_row_29_leftovers_are_in_any_zone():
    user = Operator()
    user.insert("h0", "us-central1-b")
    user.insert("h1")
    user.time.sleep(60)
    assert user.instances().keys() == {"h0", "h1"}
    assert {one["zone"].rpartition("/")[2] for one in user.instances().values()} == {ZONE, "us-central1-b"}
    here = user.call("GET", f"zones/{ZONE}/instances", filter="labels.muster-run=r1").body["items"]
    assert [one["name"] for one in here] == ["h1"]
    assert user.instances("labels.muster-run=r2") == {}
    assert user.call("GET", "aggregated/instances", filter="???").status == 400


def test_row_30_a_machine_with_local_disks_waits_an_hour_for_them():
    user = Operator()
    disks = [*machine()["disks"], {"type": "SCRATCH", "autoDelete": True}]
    soon = {"localSsdRecoveryTimeout": {"seconds": "0"}}
    user.running("hour", disks=disks)
    user.running("soon", disks=disks, scheduling=machine()["scheduling"] | soon)
    for name in ("hour", "soon"):
        host_error(user.cloud, user.at(name))
    user.time.sleep(600)
    assert (user.status("hour"), user.status("soon")) == ("REPAIRING", "RUNNING")
    user.time.sleep(3600)
    assert user.status("hour") == "RUNNING"


def test_row_31_a_machine_that_stood_still_wakes_up_as_what_it_was():
    user = Operator()
    old = user.running("old")
    old.frozen = True
    boot = old.boot_id
    user.running("new")
    assert user.status("old") == "RUNNING"  # the API knows nothing of it
    old.frozen = False
    assert old.up and old.boot_id == boot and user.guest("new").boot_id != boot


def test_row_32_things_go_in_one_order():
    user = Operator()
    group = user.group()
    user.call("POST", "global/firewalls", {"name": "muster", "network": NETWORK, "allowed": [{"IPProtocol": "tcp"}]})
    user.running("a")
    user.call("POST", f"{group}/resizeRequests", {"name": "one", "resizeBy": 1})
    user.cloud.stock[ZONE] = 0
    network_path = NETWORK.partition("example-project/")[2]
    order = [
        (f"{group}/resizeRequests/one", [group]),
        (group, ["global/instanceTemplates/queue"]),
        ("global/instanceTemplates/queue", []),
        (f"zones/{ZONE}/instances/a", [f"zones/{ZONE}/disks/a", SUBNET.partition("example-project/")[2], network_path]),
        ("global/firewalls/muster", [network_path]),
        (SUBNET.partition("example-project/")[2], [network_path]),
        (network_path, []),
    ]
    for first, before in order:
        for one in before:
            refused = user.call("DELETE", one)
            assert refused.status == 400 and refused.reasons >= {"resourceInUseByAnotherResource"}, one
        if first.endswith("/one"):
            user.call("POST", f"{group}/resizeRequests/one/cancel")
            user.time.sleep(60)
        assert user.call("DELETE", first).status == 200, first
        user.time.sleep(120)
        assert user.call("GET", first).status == 404
    assert not user.cloud.store


def test_what_is_used_again_while_it_goes_stays():
    user = Operator()
    user.cloud.looks = 2
    url = SUBNET.partition("example-project/")[2]
    going = user.call("DELETE", url)
    user.running("a")
    name = going.body["name"]
    for _ in range(3):
        found = user.call("GET", f"regions/us-central1/operations/{name}").body
    assert found["status"] == "DONE"
    assert found["error"]["errors"][0]["code"] == "RESOURCE_IN_USE_BY_ANOTHER_RESOURCE"
    assert user.call("GET", url).status == 200


def test_waiting_for_one_machine_ends_and_no_wait_is_to_fail_at_once():
    user = Operator(stock={ZONE: 0})
    asked = {"long": "3600", "none": "0"}
    replies = {
        name: user.insert(name, scheduling=FLEX, params={"requestValidForDuration": {"seconds": seconds}})
        for name, seconds in asked.items()
    }
    user.time.sleep(30)
    assert user.errors(replies["none"]) == ["ZONE_RESOURCE_POOL_EXHAUSTED"] and user.status("none") == 404
    assert user.status("long") == "PENDING"
    user.cloud.stock[ZONE] = 1
    user.time.sleep(200)
    assert user.errors(replies["long"]) == [] and user.status("long") == "RUNNING"


def test_labels_and_metadata_change_under_their_fingerprint():
    user = Operator()
    guest = user.running("a")
    url = f"zones/{ZONE}/instances/a"
    found = user.call("GET", url).body
    stale = {"fingerprint": "YQ==", "items": []}
    assert user.call("POST", f"{url}/setMetadata", stale).status == 412
    fresh = {"fingerprint": found["metadata"]["fingerprint"], "items": [{"key": "stage", "value": "go"}]}
    assert user.call("POST", f"{url}/setMetadata", fresh).status == 200
    labels = {"labelFingerprint": found["labelFingerprint"], "labels": {"muster-run": "r2"}}
    assert user.call("POST", f"{url}/setLabels", labels).status == 200
    user.time.sleep(10)
    assert guest.metadata["attributes/stage"] == "go" and "attributes/startup-script" not in guest.metadata
    assert user.instances("labels.muster-run=r2").keys() == {"a"}
