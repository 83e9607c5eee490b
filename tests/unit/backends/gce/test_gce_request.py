"""What is sent to Compute Engine: byte by byte (``python tests/golden/gce/gce_cases.py`` rewrites), held against
Google's own description of the API, and accepted by the unkind service."""

import hashlib
import json
import urllib.parse
from pathlib import Path

import pytest
from fakes.discovery import Discovery, folder
from gce_cases import HERE, RUN_ID, cases, placement, spec, text

from muster.backends.gce import requests
from muster.backends.gce.placement import LONGEST_STEM, host_names, place, resolved
from muster.config.load import loads

CASES = cases()


@pytest.mark.parametrize("name", CASES)
def test_as_recorded(name):
    for file, content in text(CASES[name]).items():
        assert content == (HERE / name / file).read_text(), f"{name}/{file}: python {HERE / 'gce_cases.py'} if meant"


def test_no_record_without_a_case():
    found = {(path.parent.name, path.name) for path in HERE.glob("*/*.json")}
    assert found == {(name, file) for name, case in CASES.items() for file in text(case)}


def test_the_documents_example_is_the_first_golden():
    page = (Path(__file__).parents[4] / "docs" / "how-to" / "gce.md").read_text()
    of = placement(loads(page.partition("```yaml\n")[2].partition("```")[0], environment=False).spec)
    assert text(of) == text(CASES["full-8b-flex-two-zones"])


@pytest.fixture(scope="module")
def api():
    documents = folder()
    if documents is None:
        pytest.skip("google-api-python-client is not installed")
    return Discovery(documents, ("compute.v1", "iam.v1"))


def complaints(api, request, body=None):
    url = urllib.parse.urlsplit(request.url)
    match = api.match("POST", url.netloc, url.path)
    assert match is not None, request.url
    return api.complaints(match, url.query, request.body if body is None else body)


def everything(case):
    return [request for rows in requests.files(case).values() for request in rows]


@pytest.mark.parametrize("name", CASES)
def test_google_knows_every_field(name, api):
    for request in everything(CASES[name]):
        assert complaints(api, request) == [], request.what


def test_the_check_refuses_what_google_would(api):
    (bulk,) = requests.hosts(CASES["a3-mega-spot"], "us-central1-a", request_number=1)
    good = json.dumps(bulk.body)
    for old, new in (
        ('"count": "2"', '"count": 2'),
        ('{"seconds": "120"}', '"120s"'),
        ('"SPOT"', '"PREEMPTIBLE"'),
        ('"llama-20260822-101500-1a2b-1-0": {}', '"llama-20260822-101500-1a2b-1-0": {"metadata": {}}'),
        ('"preemptionNoticeDuration"', '"preemptionNotice"'),
    ):
        assert old in good, old
        assert complaints(api, bulk, json.loads(good.replace(old, new))), new


def properties(case):
    """What hosts have in common, for each zone."""
    found = []
    for turn, zone in enumerate(case.zones, start=1):
        for request in requests.hosts(case, zone, request_number=turn):
            if inner := request.body.get("instanceProperties") or request.body.get("properties"):
                found.append(inner)
    assert len(found) == len(case.zones)
    return found


def test_nobodys_reservation_is_used_up_and_nothing_stays_that_was_stopped():
    for name, case in CASES.items():
        reserved = case.mode in ("reservation", "calendar")
        for inner in properties(case):
            kind = inner["reservationAffinity"]["consumeReservationType"]
            assert kind == ("SPECIFIC_RESERVATION" if reserved else "NO_RESERVATION"), name
            scheduling = inner["scheduling"]
            assert scheduling.get("instanceTerminationAction", "DELETE") == "DELETE", name
            assert "instanceTerminationAction" in scheduling or "maxRunDuration" not in scheduling, name
            if case.machine.local_ssd:
                assert scheduling["localSsdRecoveryTimeout"] == {"seconds": "0"}, name
            for disk in inner["disks"]:
                assert disk["autoDelete"] is True, name
                assert (disk.get("type") == "SCRATCH") or disk["initializeParams"]["labels"] == case.labels, name


def test_each_mode_asks_as_it_has_to():
    spot = properties(CASES["a3-mega-spot"])[0]["scheduling"]
    assert spot["automaticRestart"] is False and spot["preemptionNoticeDuration"] == {"seconds": "120"}
    flex = requests.hosts(CASES["a4-flex"], "us-central1-a", request_number=1)
    policy, template, group, resize = (one.body for one in flex)
    assert policy["workloadPolicy"] == {"type": "HIGH_THROUGHPUT"} and "resourcePolicies" not in template["properties"]
    assert group["targetSize"] == 0 and group["instanceLifecyclePolicy"]["defaultActionOnFailure"] == "DO_NOTHING"
    assert resize["resizeBy"] == 2 and resize["requestedRunDuration"] == {"seconds": "604800"}
    compact, bulk = requests.hosts(CASES["a2-compact"], "us-central1-a", request_number=1)
    assert compact.body["groupPlacementPolicy"] == {"collocation": "COLLOCATED"}
    assert bulk.body["instanceProperties"]["resourcePolicies"] == [compact.body["name"]]
    assert (bulk.body["count"], bulk.body["minCount"]) == ("5", "3")
    dense = properties(CASES["a3-ultra-reservation"])[0]
    assert dense["scheduling"]["provisioningModel"] == "RESERVATION_BOUND"
    assert len([disk for disk in dense["disks"] if disk.get("type") == "SCRATCH"]) == 32
    assert "provisioningModel" in properties(CASES["cpu"])[0]["scheduling"]


def test_slices_of_tpus_are_groups_that_come_whole_and_are_wired():
    template, *rest = requests.hosts(CASES["tpu-v5p-flex-two-slices"], "us-central1-a", request_number=1)
    assert template.body["properties"]["scheduling"]["maxRunDuration"] == {"seconds": "45000"}, "12 hours and the lead"
    for number, (policy, group) in enumerate(zip(rest[::2], rest[1::2], strict=True)):
        assert policy.body["workloadPolicy"] == {"type": "HIGH_THROUGHPUT", "acceleratorTopology": "2x2x2"}
        assert group.body["name"] == policy.body["name"] == f"{RUN_ID}-1s{number}"
        assert group.body["resourcePolicies"]["workloadPolicy"].endswith(f"/resourcePolicies/{policy.body['name']}")
        assert (group.body["targetSize"], group.body["targetSizePolicy"]) == (2, {"mode": "BULK"})
        assert group.body["instanceLifecyclePolicy"]["defaultActionOnFailure"] == "DO_NOTHING"
    assert len(rest) == 4
    _, policy, group = requests.hosts(CASES["tpu-v6e-spot"], "us-central1-a", request_number=1)
    assert policy.body["workloadPolicy"]["acceleratorTopology"] == "4x4"
    assert group.body["targetSize"] == 4 and "targetSizePolicy" not in group.body, "bulk is not for Spot"
    _, single = requests.hosts(CASES["tpu-v6e-one-host"], "us-central1-a", request_number=1)
    assert single.body["targetSize"] == 1 and "resourcePolicies" not in single.body
    reserved, _, group = requests.hosts(CASES["tpu-v6e-reservation"], "us-central1-a", request_number=1)
    assert reserved.body["properties"]["scheduling"]["provisioningModel"] == "RESERVATION_BOUND"
    assert group.body["targetSizePolicy"] == {"mode": "BULK"}


def test_a_machine_has_the_networks_of_gkes_table():
    nics = properties(CASES["a3-ultra-reservation"])[0]["networkInterfaces"]
    assert [nic["nicType"] for nic in nics] == ["GVNIC"] * 2 + ["MRDMA"] * 8
    assert nics[0]["subnetwork"].endswith("/training") and nics[2]["subnetwork"].endswith("/muster-rdma-sub-0")
    assert len({nic["subnetwork"] for nic in nics}) == 10
    assert "accessConfigs" not in properties(CASES["a4-flex"])[0]["networkInterfaces"][0], "private"
    assert all("accessConfigs" not in nic for nic in nics[1:])


def test_no_secret_in_metadata_which_everybody_reads(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_" + "x" * 30)
    for case in CASES.values():
        assert "hf_x" not in "".join(requests.text(rows) for rows in requests.files(case).values())


def test_metadata_is_small_enough_and_names_the_run_file():
    for name, case in CASES.items():
        for inner in properties(case):
            values = {row["key"]: row["value"] for row in inner["metadata"]["items"]}
            assert sum(len(key) + len(value) for key, value in values.items()) < 64 << 10, "of 512 KiB"
            assert (
                values["muster-files"] == hashlib.sha256(requests.run_files(case.spec, case).encoded()).hexdigest()
            ), name
            assert values["muster-gpus"] == str(case.machine.gpus), name
    whole = resolved(CASES["full-8b-flex-two-zones"])
    assert (whole.resources.ranks_per_host, whole.resources.device) == (8, "cuda")
    assert whole.checkpoint.dir == "gs://example-bucket/runs/llama/checkpoints"


def test_the_supervisor_may_not_be_a_host_and_ends_by_itself():
    for case in CASES.values():
        role, machine = (one.body for one in requests.files(case)["supervisor.json"])
        assert machine["serviceAccounts"][0]["email"].startswith("muster-supervisor@")
        assert machine["scheduling"]["instanceTerminationAction"] == "DELETE"
        life_s = int(machine["scheduling"]["maxRunDuration"]["seconds"])
        assert (case.run_s or 0) < life_s <= 120 * 86400
        assert not [one for one in role["role"]["includedPermissions"] if "iam" in one or "firewall" in one]


def test_the_same_request_has_the_same_names_and_id_and_another_turn_has_others():
    case = CASES["a3-mega-spot"]

    def asked(turn):
        (bulk,) = requests.hosts(case, "us-central1-a", request_number=turn)
        return bulk.url, tuple(bulk.body["perInstanceProperties"])

    assert asked(1) == asked(1)
    assert not set(asked(1)[1]) & set(asked(2)[1]) and asked(1)[0] != asked(2)[0]
    (replacement,) = requests.hosts(case, "us-central1-a", request_number=3, count=1)
    assert list(replacement.body["perInstanceProperties"]) == [f"{RUN_ID}-3-0"]
    assert (replacement.body["count"], replacement.body["minCount"]) == ("1", "1")


@pytest.mark.parametrize("run_id", ["a" * 70, "Run_With.Odd-names", "9lives", "x"])
def test_names_can_be_machines_names(run_id):
    of = place(spec(), run_id=run_id, run_dir=None)
    assert len(of.stem) <= LONGEST_STEM
    for name in [*host_names(of, 9999, 1), of.supervisor]:
        assert requests.names.re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name), name


SENT = {  # modes whose requests differ in kind
    "l4-on-demand", "a2-compact", "a3-mega-spot", "full-8b-flex-two-zones", "a4-flex", "a3-high-calendar",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(SENT))
def test_the_unkind_service_takes_them(name, api):
    """It refuses what Google's pages say that it refuses: modes, times, affinities, networks that are not there."""
    from fakes.compute_engine.operator import Operator

    case, user = CASES[name], Operator()
    zone = case.zones[0]
    subnets = {
        nic["subnetwork"] for inner in properties(case) for nic in inner["networkInterfaces"]
    }  # not made here: they are there
    for key in ("service_account", "supervisor_service_account"):
        user.cloud.store[f"iam/{key}/serviceAccounts/{getattr(case.spec.gce, key)}"] = {}
    for subnet in subnets:
        user.cloud.store[f"compute/v1/{subnet}"] = {"name": subnet.rpartition("/")[2]}
    for request in [requests.supervisor(case, zone), *requests.hosts(case, zone, request_number=1)]:
        path = request.url.partition("/projects/example-project/")[2]
        reply = user.call("POST", path, request.body)
        assert reply.status == 200, f"{request.what}: {reply.message}"
        user.time.sleep(60)
    user.time.sleep(300)
    there = user.instances(f"labels.muster-run={case.stem}")
    assert len(there) == 1 + case.hosts and all(one["status"] == "RUNNING" for one in there.values())
