"""The played Compute Engine is as unkind as the real one is documented, or was seen, to be: asking for machines."""

import uuid

import pytest

discovery = pytest.importorskip("fakes.discovery")
if discovery.folder() is None:
    pytest.skip("google-api-python-client (Google's discovery documents) is not installed", allow_module_level=True)

from fakes.compute_engine import network  # noqa: E402
from fakes.compute_engine import operator as user_of  # noqa: E402
from fakes.compute_engine.guest import Programs  # noqa: E402
from fakes.compute_engine.operator import FLEX, NETWORK, SPOT, SUBNET, ZONE, Operator, machine  # noqa: E402
from fakes.compute_engine.service import ROOT  # noqa: E402


def test_row_01_an_insert_is_an_operation_and_200_is_no_machine():
    user = Operator(odd_errors={ZONE: ("UNSUPPORTED_OPERATION", "no")})
    failed = user.insert("a")
    good = user.insert("b")
    assert failed.status == good.status == 200
    assert user.status("b") == 404
    user.time.sleep(6)
    assert user.status("b") == "PROVISIONING"
    user.time.sleep(30)
    assert user.errors(failed) == ["UNSUPPORTED_OPERATION"] and user.status("a") == 404
    assert user.errors(good) == [] and user.status("b") == "RUNNING"


def test_row_02_why_a_bulk_request_failed_stands_in_the_operations_of_its_group():
    user = Operator(stock={ZONE: 2}, stockout_code="ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS")
    other = user.insert("x", "us-central1-b")
    whole = user.bulk("h0", "h1", "h2", "h3")
    user.time.sleep(300)
    found = user.operation(whole)
    assert user.errors(whole) == ["VM_MIN_COUNT_NOT_REACHED"] and user.errors(other) == []
    assert "Requested minimum count of 4 VMs could not be created." in str(found)
    assert "resource" not in found["error"]["errors"][0]["message"]
    text = f"operationGroupId={found['operationGroupId']} AND operationType=insert"
    rows = user.call("GET", f"zones/{ZONE}/operations", filter=text).body["items"]
    assert len(rows) == 4
    codes = [row["error"]["errors"][0]["code"] for row in rows if "error" in row]
    assert codes == ["ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS"] * 2


def test_row_03_machines_of_a_request_that_failed_boot_and_vanish():
    booted, ended = [], []
    user = Operator(stock={ZONE: 1}, programs=Programs(boot=lambda one: booted.append(one.name),
                                                       kill=lambda one: ended.append(one.name)))  # fmt: skip
    whole = user.bulk("h0", "h1")
    user.time.sleep(40)
    assert booted == ["h0"] and user.status("h0") == "RUNNING" and user.operation(whole)["status"] == "RUNNING"
    places = user.operation(whole)["instancesBulkInsertOperationMetadata"]["perLocationStatus"]
    assert places[f"zones/{ZONE}"]["status"] == "ROLLING_BACK"
    user.time.sleep(300)
    assert ended == ["h0"] and user.status("h0") == 404
    counts = user.operation(whole)["instancesBulkInsertOperationMetadata"]["perLocationStatus"][f"zones/{ZONE}"]
    assert counts["status"] == "DONE" and counts["deletedVmCount"] == counts["createdVmCount"] == 1


def test_row_04_with_a_lower_minimum_some_stay_and_are_billed():
    user = Operator(stock={ZONE: 3})
    whole = user.bulk("h0", "h1", "h2", "h3", least=1)
    user.time.sleep(40)
    assert user.errors(whole) == []
    counts = user.operation(whole)["instancesBulkInsertOperationMetadata"]["perLocationStatus"][f"zones/{ZONE}"]
    assert (counts["targetVmCount"], counts["createdVmCount"], counts["failedToCreateVmCount"]) == (4, 3, 1)
    assert user.instances().keys() == {"h0", "h1", "h2"}


def test_row_05_a_pattern_goes_on_counting_names_do_not():
    user = Operator()
    body = {"count": "2", "namePattern": "h-###", "instanceProperties": machine()}
    for _ in range(2):
        assert user.call("POST", f"zones/{ZONE}/instances/bulkInsert", body).status == 200
        user.time.sleep(60)
    assert user.instances().keys() == {"h-001", "h-002", "h-003", "h-004"}
    user.bulk("a", "b")
    user.time.sleep(60)
    again = user.bulk("a", "b")
    user.time.sleep(300)
    assert user.errors(again) == ["VM_MIN_COUNT_NOT_REACHED"] and user.status("a") == "RUNNING"


def test_row_06_a_requests_id_is_known_for_a_while():
    user, known = Operator(), user_of.request_id()
    first = user.insert("a", request_id=known)
    user.time.sleep(3000)
    assert user.insert("a", request_id=known).body["name"] == first.body["name"]
    user.time.sleep(1000)
    again = user.insert("a", request_id=known)
    assert again.status == 409 and again.reasons >= {"alreadyExists"}
    assert user.insert("b", request_id="one").status == 400
    assert user.insert("b", request_id=str(uuid.UUID(int=0))).status == 400


def test_row_07_in_bulk_a_machine_has_a_name_of_its_own_and_nothing_else():
    user = Operator()
    body = {"count": "1", "instanceProperties": machine(), "perInstanceProperties": {"h0": {"metadata": {"items": []}}}}
    with pytest.raises(AssertionError, match="unknown field"):
        user.call("POST", f"zones/{ZONE}/instances/bulkInsert", body)
    waits = {"count": "1", "namePattern": "h#", "instanceProperties": machine(params={"requestValidForDuration": {}})}
    with pytest.raises(AssertionError, match="unknown field"):  # nor does it wait for machines
        user.call("POST", f"zones/{ZONE}/instances/bulkInsert", waits)


def test_row_08_quota_and_haste_are_403():
    user = Operator(instance_quota=1)
    user.running("a")
    refused = user.insert("b")
    assert refused.status == 403 and refused.reasons >= {"quotaExceeded"}
    user = Operator()
    replies = [user.insert(f"h{number}") for number in range(21)]
    assert [one.status for one in replies] == [200] * 20 + [403] and "rateLimitExceeded" in replies[-1].reasons
    user.time.sleep(2)
    assert user.insert("h99").status == 200


def test_row_09_a_stock_out_has_many_names():
    for code in ("ZONE_RESOURCE_POOL_EXHAUSTED", "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS"):
        user = Operator(stock={ZONE: 0}, stockout_code=code)
        failed = user.insert("a")
        user.time.sleep(60)
        assert user.errors(failed) == [code]
        details = user.operation(failed)["error"]["errors"][0].get("errorDetails")
        assert (details is not None) == code.endswith("DETAILS")
        if details:
            where = details[0]["errorInfo"]["metadatas"]["zonesAvailable"].split(",")
            assert ZONE not in where and where
    user = Operator(odd_errors={ZONE: ("CODE_OF_NEXT_YEAR", "there is something")})
    failed = user.insert("a")
    user.time.sleep(60)
    assert user.errors(failed) == ["CODE_OF_NEXT_YEAR"]


def test_row_10_a_name_is_busy_until_its_delete_is_over():
    user = Operator()
    user.running("a")
    gone = user.call("DELETE", f"zones/{ZONE}/instances/a")
    user.time.sleep(60)
    assert user.operation(gone)["status"] == "RUNNING" and user.status("a") == "STOPPING"
    assert user.insert("a").status == 409 and user.insert("a2").status == 200
    user.time.sleep(60)
    assert user.status("a") == 404 and user.insert("a").status == 200
    user.cloud.stock[ZONE] = 0
    wait = {"requestValidForDuration": {"seconds": "86400"}}
    user.insert("flex", scheduling=FLEX, params=wait)
    user.time.sleep(300)
    assert user.status("flex") == "PENDING"
    gone = user.call("DELETE", f"zones/{ZONE}/instances/flex")
    user.time.sleep(30 * 60)
    assert user.status("flex") == "PENDING" and user.operation(gone)["status"] == "RUNNING"
    user.time.sleep(10 * 60)
    assert user.status("flex") == 404


def test_row_11_what_is_stopped_keeps_its_name_and_its_disks():
    user = Operator()
    user.running("a")
    assert user.call("POST", f"zones/{ZONE}/instances/a/stop").status == 200
    user.time.sleep(120)
    assert user.status("a") == "TERMINATED" and user.insert("a").status == 409
    assert user.call("GET", f"zones/{ZONE}/disks/a").status == 200
    assert user.instances().keys() == {"a"}  # an audit sees it in any state
    user.running("ssd", disks=[*machine()["disks"], {"type": "SCRATCH", "autoDelete": True}])
    assert user.call("POST", f"zones/{ZONE}/instances/ssd/stop").status == 400
    assert user.call("POST", f"zones/{ZONE}/instances/ssd/stop", discardLocalSsd="true").status == 200


def test_row_12_disks_have_labels_of_their_own_and_may_stay():
    user = Operator()
    data = {"autoDelete": False, "initializeParams": {"diskName": "a-data"}}
    user.running("a", disks=[*machine()["disks"], data])
    user.call("DELETE", f"zones/{ZONE}/instances/a")
    user.time.sleep(120)
    assert user.call("GET", f"zones/{ZONE}/disks/a").status == 404
    left = user.call("GET", f"zones/{ZONE}/disks/a-data")
    assert left.status == 200 and left.body["labels"] == {}
    scopes = user.call("GET", "aggregated/disks", filter="labels.muster-run=r1").body["items"]
    assert not [one for scope in scopes.values() for one in scope.get("disks", [])]
    by_name = user.call("GET", "aggregated/disks", filter="name=a-*").body["items"]
    assert by_name[f"zones/{ZONE}"]["disks"][0]["name"] == "a-data"
    assert by_name["zones/europe-west1-b"]["warning"]["code"] == "NO_RESULTS_ON_PAGE"


def test_row_13_nothing_comes_in_until_a_rule_lets_it():
    user = Operator()
    for name in ("a", "b"):
        user.running(name)
    paths = user.at("a"), user.at("b")
    assert not network.reaches(user.cloud, *paths, 2222)
    rule = {"name": "muster", "network": NETWORK, "sourceRanges": ["10.0.0.0/8"],
            "allowed": [{"IPProtocol": "tcp", "ports": ["2000-3000"]}]}  # fmt: skip
    user.call("POST", "global/firewalls", rule)
    assert network.reaches(user.cloud, *paths, 2222) and not network.reaches(user.cloud, *paths, 29500)
    assert not network.reaches(user.cloud, *paths, 2222, "udp")


def test_row_14_without_an_address_there_is_no_internet():
    user = Operator()
    user.running("a")
    user.running("b", networkInterfaces=[{"network": NETWORK, "subnetwork": SUBNET, "accessConfigs": [{}]}])

    def reached(name):
        return [
            host for host in ("storage.googleapis.com", "pypi.org") if network.outside(user.cloud, user.at(name), host)
        ]

    assert reached("a") == [] and reached("b") == ["storage.googleapis.com", "pypi.org"]
    user.cloud.store[f"compute/v1/{SUBNET}"]["privateIpGoogleAccess"] = True
    assert reached("a") == ["storage.googleapis.com"]
    user.cloud.store[f"{ROOT}/regions/us-central1/routers/nat"] = {"network": NETWORK, "nats": [{"name": "nat"}]}
    assert reached("a") == ["storage.googleapis.com", "pypi.org"]


def test_row_16_of_the_serial_output_the_last_megabyte_is_left():
    user = Operator()
    guest = user.running("a")
    guest.prints("the first line\n")
    url = f"zones/{ZONE}/instances/a/serialPort"
    first = user.call("GET", url).body
    assert "the first line" in first["contents"]
    guest.prints("x" * (3 << 20))
    guest.prints("the error\n")
    later = user.call("GET", url, start=first["next"]).body
    assert later["contents"].endswith("the error\n") and len(later["contents"]) == 1 << 20
    assert int(later["start"]) > int(first["next"])  # and what lies between is gone
    assert "the first line" not in user.call("GET", url).body["contents"]


def test_what_is_refused_at_once():
    user = Operator()
    bad = [
        {"scheduling": {}}, {"scheduling": SPOT | {"automaticRestart": True}}, {"disks": []},
        {"scheduling": SPOT, "reservationAffinity": {"consumeReservationType": "SPECIFIC_RESERVATION"}},
        {"scheduling": FLEX, "reservationAffinity": {"consumeReservationType": "ANY_RESERVATION"}},
        {"scheduling": FLEX | {"maxRunDuration": {"seconds": "60"}}}, {"scheduling": FLEX, "resourcePolicies": ["p"]},
        {"scheduling": {**FLEX, "instanceTerminationAction": "STOP"}},
        {"metadata": {"items": [{"key": "k", "value": "x" * (300 << 10)}]}},
        {"params": {"requestValidForDuration": {"seconds": "60"}}},
    ]  # fmt: skip
    assert [user.insert("a", **one).status for one in bad] == [400] * len(bad)
    assert user.insert("a", networkInterfaces=[{"network": NETWORK + "-other"}]).status == 404
