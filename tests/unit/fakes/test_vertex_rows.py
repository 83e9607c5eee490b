"""The played custom-job service is as unkind as the real one is documented, or was seen, to be: states and requests."""

import pytest

discovery = pytest.importorskip("fakes.discovery")
if discovery.folder() is None:
    pytest.skip("google-api-python-client (Google's discovery documents) is not installed", allow_module_level=True)

from fakes.google_wire import Fault, each_request_each_way  # noqa: E402
from fakes.vertex.jobs import Manners  # noqa: E402
from fakes.vertex.machines import demand  # noqa: E402
from fakes.vertex.submitter import CPU, L4, REGION, Submitter, at, job, pool  # noqa: E402

from muster.backends.google.http import Call, Unreachable  # noqa: E402

L4_QUOTA = "custom_model_training_nvidia_l4_gpus"
NONCE = "labels.muster-nonce=n1"


def without_gpus(**more):
    return Submitter(**more)


def with_gpus(number=8, **more):
    kinds = ("custom_model_training_nvidia_l4_gpus", "custom_model_training_preemptible_nvidia_l4_gpus")
    limits = {(region, kind): number for region in (REGION, "us-east4") for kind in kinds}
    return Submitter(limits=limits, **more)


def test_row_01_a_number_of_googles_and_a_lost_answer_may_be_a_second_job():
    user = Submitter()
    user.fault(Fault.LOST)
    with pytest.raises(Unreachable):
        user.create(job())
    again = user.create(job())  # the same request: nothing in it says so
    assert again.status == 200 and len(user.vertex.jobs) == 2
    names = {of.body["name"] for of in user.vertex.jobs.values()}
    assert len(names) == 2 and all(name.rpartition("/")[2].isdigit() for name in names)
    user.time.sleep(60)
    assert {row["name"] for row in user.list(NONCE)} == names  # the label is how both are found
    with pytest.raises(AssertionError, match="output-only"):
        user.create(job() | {"name": "mine"})
    with pytest.raises(AssertionError, match="unknown"):
        user.wire.send(Call(method="POST", url=at(REGION, requestId="1"), body=job()))


def test_row_02_a_new_job_is_not_in_the_list_at_once():
    user = Submitter()
    made = user.made(job())
    user.time.sleep(29)
    assert user.list(NONCE) == [] and user.get(made)["state"] == "JOB_STATE_PENDING"
    user.time.sleep(1)
    assert [row["name"] for row in user.list(NONCE)] == [made.body["name"]]


def test_the_list_knows_the_documented_fields_alone():
    user = Submitter()
    user.made(job())
    user.made(job(labels={"muster-run": "r2"}))
    user.time.sleep(60)
    assert len(user.list("labels.muster-run:*")) == 2
    assert len(user.list('labels.muster-run="r2" AND state="JOB_STATE_PENDING"')) == 1
    assert len(user.list('display_name:"muster-*" AND NOT labels.muster-run=r2')) == 1
    assert len(user.list("labels.muster-run=r1 OR labels.muster-run=r2")) == 2
    assert user.listed("labels.muster-run:r*").status == 200
    assert user.listed("error.code=3").status == 400
    first = user.listed("", pageSize="1").body
    assert len(first["customJobs"]) == 1 and len(user.list("", pageToken=first["nextPageToken"])) == 1


def test_row_03_a_worker_that_fails_takes_all_of_them_with_it():
    user = Submitter()
    made = user.running(job(3))
    made.exit("workerpool1-1", 1, "Traceback ...")
    user.time.sleep(5)
    assert made.worker("workerpool1-1").running  # started again for a moment, which means nothing
    user.time.sleep(55)
    assert user.get(made)["state"] == "JOB_STATE_FAILED" and not any(one.running for one in made.workers)
    assert {stop.grace_s for stop in made.stops} == {None, 30.0}  # some are told before, some are not
    user.time.sleep(60)
    assert user.get(made)["error"]["code"] == 3
    assert user.get(made)["error"]["message"].startswith(
        "The replica workerpool1-1 exited with a non-zero status of 1. Termination reason: Error."
    )


def test_row_04_five_restarts_of_a_worker_then_three_of_the_job():
    user = Submitter()
    made = user.running(job(1))
    restarts = []
    for _ in range(4 * 6):
        assert made.worker("workerpool1-0").running
        made.breaks("workerpool1-0")
        user.time.sleep(2000)
        restarts.append(made.job_restarts)
    assert restarts == [0] * 5 + [1] * 6 + [2] * 6 + [3] * 6 + [3]
    assert made.state == "JOB_STATE_FAILED"


@pytest.mark.parametrize("code", [134, 139, 6, 11])
def test_row_04_an_abort_starts_every_container_anew_three_times(code):
    user = Submitter()
    made = user.running(job(2))
    for number in range(1, 4):
        before = {one.name: (one.boot_id, one.address) for one in made.workers}
        made.exit("workerpool1-0", code)
        assert user.get(made)["state"] == "JOB_STATE_PENDING"
        user.time.sleep(2000)
        assert made.job_restarts == number and user.get(made)["state"] == "JOB_STATE_RUNNING"
        assert all(before[one.name] != (one.boot_id, one.address) for one in made.workers)
    made.exit("workerpool1-0", code)
    user.time.sleep(60)
    assert user.get(made)["state"] == "JOB_STATE_FAILED"


def test_row_04_a_restart_of_one_is_one_of_all_where_the_job_says_so():
    user = Submitter()
    made = user.running(job(2, scheduling={"restartJobOnWorkerRestart": True}))
    made.breaks("workerpool1-0")
    user.time.sleep(2000)
    assert [one.starts for one in made.workers] == [2, 2, 2]


def test_googles_own_errors_are_retried_twice():
    user = Submitter()
    made, careful = user.running(job(1)), user.running(job(1, scheduling={"disableRetries": True}))
    for _ in range(2):
        made.internal_error()
        user.time.sleep(2000)
        assert made.state == "JOB_STATE_RUNNING"
    for of in (made, careful):
        of.internal_error()
        user.time.sleep(200)
        assert user.get(of)["error"]["code"] == 13


def test_row_05_the_same_name_on_another_machine_and_nothing_left_on_it():
    user = Submitter()
    made = user.running(job(1))
    worker, began = made.worker("workerpool1-0"), user.get(made)["startTime"]
    worker.disk["/tmp/snapshot"] = b"x"
    host, address, boot = worker.host, worker.address, worker.boot_id
    made.lose_machine("workerpool1-0")
    assert user.get(made)["state"] == "JOB_STATE_RUNNING" and not worker.running  # nobody says so
    user.time.sleep(300)
    assert worker.running and worker.host == host and worker.disk == {}
    assert worker.address != address and worker.boot_id != boot
    assert user.get(made)["startTime"] == began and made.worker("workerpool0-0").starts == 1


def test_row_06_each_begins_when_it_is_there_and_the_chief_may_be_the_last():
    user = Submitter()
    made = user.made(job(2))
    user.time.sleep(90)
    assert [one.name for one in made.workers if one.running] == ["workerpool1-0"]
    user.time.sleep(580)
    assert [one.running for one in made.workers] == [False, True, True]
    assert user.get(made)["state"] == "JOB_STATE_PENDING" and "startTime" not in user.get(made)
    user.time.sleep(20)
    assert user.get(made)["state"] == "JOB_STATE_RUNNING"


def test_row_09_the_reason_comes_a_minute_after_the_end():
    user = Submitter()
    made = user.running(job(1))
    made.exit("workerpool0-0", 1)
    user.time.sleep(46)
    assert user.get(made)["state"] == "JOB_STATE_FAILED" and "error" not in user.get(made)
    user.time.sleep(58)
    assert "error" not in user.get(made)
    user.time.sleep(2)
    assert user.get(made)["error"]["code"] == 3


def test_row_10_above_the_limit_429_above_the_rest_the_queue_without_end():
    assert without_gpus().create(job(1, machine=L4)).status == 429  # nobody has any before they asked
    user = with_gpus(4)
    refused = user.create(job(4, machine=L4))
    assert refused.status == 429 and refused.reasons >= {"RESOURCE_EXHAUSTED"}
    assert f"exceed quota limits: aiplatform.googleapis.com/{L4_QUOTA}" in refused.message
    first, second = user.made(job(1, machine=L4)), user.made(job(2, machine=L4))
    user.time.sleep(30 * 86400 - 1)
    assert first.state == "JOB_STATE_CANCELLED"  # its seven days were over
    user = with_gpus(4)
    user.vertex.used[REGION, L4_QUOTA] = 3
    first = user.made(job(1, machine=L4))
    user.time.sleep(30 * 86400)
    assert user.get(first)["state"] == "JOB_STATE_QUEUED" and "error" not in user.get(first)
    user.vertex.free(REGION, L4_QUOTA, 3)
    assert user.get(first)["state"] == "JOB_STATE_PENDING"
    assert second.released


def test_row_11_a_stock_out_is_tried_again_for_long_and_is_a_text():
    user = with_gpus(empty={REGION})
    made = user.made(job(1, machine=L4))
    user.time.sleep(4 * 600)
    assert user.get(made)["state"] == "JOB_STATE_PENDING"
    user.time.sleep(200)
    found = user.get(made)
    assert found["state"] == "JOB_STATE_FAILED"
    assert found["error"]["message"].startswith(f"Resources are insufficient in region: {REGION}. Try a different")
    elsewhere = user.made(job(1, machine=L4), "us-east4")
    user.time.sleep(2000)
    assert elsewhere.state == "JOB_STATE_RUNNING"


def test_row_12_no_wait_at_all_is_to_wait_for_ever():
    user = with_gpus(empty={REGION})
    wish = {"strategy": "FLEX_START", "maxWaitDuration": "0s"}
    ever, day = (
        user.made(job(1, machine=L4, scheduling=wish)),
        user.made(job(1, machine=L4, scheduling={"strategy": "FLEX_START"})),
    )
    user.time.sleep(60 * 86400)
    assert user.get(ever)["state"] == "JOB_STATE_PENDING" and user.get(day)["state"] == "JOB_STATE_FAILED"
    user.vertex.empty.clear()
    user.time.sleep(700)
    assert user.get(ever)["state"] == "JOB_STATE_RUNNING"
    assert len({one.starts for one in ever.workers}) == 1


def test_row_13_spot_is_all_or_nothing_and_seven_is_one_too_many():
    user = with_gpus()
    made = user.running(job(1, machine=L4, scheduling={"strategy": "SPOT"}))
    for number in range(6):
        made.lose_machine("workerpool1-0")  # one host
        assert user.get(made)["state"] == "JOB_STATE_PENDING"
        user.time.sleep(2000)
        assert [one.starts for one in made.workers] == [number + 2] * 2
    made.preempt()
    user.time.sleep(200)
    assert user.get(made)["state"] == "JOB_STATE_FAILED" and "STOCKOUT" in user.get(made)["error"]["message"]


def test_row_14_flex_start_has_one_kind_of_machine_and_no_reservation():
    user = with_gpus()
    flex = {"strategy": "FLEX_START", "timeout": "86400s"}
    reducers = job(1, machine=L4, scheduling=flex)
    reducers["jobSpec"]["workerPoolSpecs"].append(pool({"machineType": "n1-highcpu-16"}, 2))
    assert user.create(reducers).status == 400
    affinity = {
        "reservationAffinityType": "SPECIFIC_RESERVATION",
        "key": "compute.googleapis.com/reservation-name",
        "values": ["projects/p/zones/us-central1-a/reservations/r"],
    }
    reserved = L4 | {"reservationAffinity": affinity}
    assert user.create(job(1, machine=reserved)).status == 200
    assert user.create(job(1, machine=reserved, scheduling=flex)).status == 400
    no_zone = L4 | {"reservationAffinity": affinity | {"values": ["projects/p/reservations/r"]}}
    assert user.create(job(1, machine=no_zone)).status == 400
    assert user.create(job(1, machine=L4, scheduling=flex | {"timeout": "604801s"})).status == 400
    assert user.create(job(1, scheduling=flex)).status == 400  # no accelerator
    assert user.create(job(1, machine=L4, scheduling=flex)).status == 200


def test_row_15_a_cancelled_job_may_succeed():
    user = Submitter()
    made, other = user.running(job(1)), user.running(job(1))
    for of in (made, other):
        assert user.cancel(of).status == 200 and user.get(of)["state"] == "JOB_STATE_CANCELLING"
    made.exit("workerpool0-0", 0)
    user.time.sleep(200)
    assert user.get(made)["state"] == "JOB_STATE_SUCCEEDED" and "error" not in user.get(made)
    assert user.get(other)["state"] == "JOB_STATE_CANCELLED" and user.get(other)["error"]["code"] == 1
    assert user.cancel(made).status == 400


def test_row_16_what_runs_is_not_deleted_and_deleting_takes_time():
    user = Submitter()
    made = user.running(job(1))
    refused = user.delete(made)
    assert refused.status == 400 and refused.reasons >= {"FAILED_PRECONDITION"}
    user.cancel(made)
    assert user.delete(made).status == 400
    user.time.sleep(60)
    user.vertex.delete_s = 900
    operation = user.delete(made).body
    assert operation["done"] is False
    user.time.sleep(600)
    url = f"https://{REGION}-aiplatform.googleapis.com/v1/{operation['name']}"
    assert user.wire.send(Call(method="GET", url=url)).body["done"] is False and user.get(made)["state"]
    user.time.sleep(300)
    assert user.wire.send(Call(method="GET", url=url)).body["done"] is True
    assert user.get(made).status == 404


def test_row_26_whole_numbers_and_durations_are_texts():
    user = Submitter()
    made = user.made(job(2, scheduling={"timeout": "7200s"}))
    found = user.get(made)["jobSpec"]
    assert [one["replicaCount"] for one in found["workerPoolSpecs"]] == ["1", "2"]
    assert found["scheduling"]["timeout"] == "7200s"
    del (one := job(0))["jobSpec"]["workerPoolSpecs"][0]["replicaCount"]
    assert user.get(user.made(one))["jobSpec"]["workerPoolSpecs"][0]["replicaCount"] == "1"
    with pytest.raises(AssertionError, match="timeout"):
        user.create(job(1, scheduling={"timeout": 7200}))


def test_row_27_there_are_twelve_states_and_may_be_a_thirteenth():
    user = Submitter()
    made = user.running(job(1))
    for word in ("PAUSED", "UPDATING", "UNSPECIFIED", "DREAMING", "PARTIALLY_SUCCEEDED", "EXPIRED"):
        made.to(word)
        assert user.get(made)["state"] == f"JOB_STATE_{word}"
    assert user.cancel(made).status == 400 and user.delete(made).status == 200  # final


def test_row_28_the_chiefs_end_is_everybodys():
    user = Submitter()
    made = user.running(job(2))
    made.exit("workerpool1-0", 0)  # done, and not started again
    user.time.sleep(900)
    assert user.get(made)["state"] == "JOB_STATE_RUNNING" and made.worker("workerpool1-0").starts == 1
    made.exit("workerpool0-0", 0)
    assert made.stop_of("workerpool1-1").grace_s == 30.0 and not made.worker("workerpool1-1").running
    assert user.get(made)["state"] == "JOB_STATE_SUCCEEDED"


def everything(user):
    """What a careless client does: no answer is looked at but the first."""
    user.create(job())
    user.time.sleep(60)
    for of in list(user.vertex.jobs.values()):
        user.get(of)
        user.cancel(of)
        user.time.sleep(60)
        user.delete(of)
    user.list()


def test_row_31_every_request_goes_wrong_in_every_way():
    user = Submitter()
    everything(user)
    requests, heard = len(user.wire.log), {}
    assert requests == 5
    for faults in each_request_each_way(requests):
        ((number, fault),) = faults.items()
        user = Submitter()
        user.wire.faults = faults
        try:
            everything(user)
        except Unreachable:
            heard.setdefault(fault, set()).add("nothing")
        else:
            status = user.wire.replies[number].status if number in user.wire.replies else "not sent"
            heard.setdefault(fault, set()).add(status)
        if fault is Fault.DELAYED and number == 1:
            assert not user.vertex.jobs
            user.time.sleep(70)
            user.wire.deliver()
            assert len(user.vertex.jobs) == 1  # two minutes after nobody expected it any more
        if fault is Fault.DOUBLED and number == 1:
            assert user.vertex._created == 2
        if fault is Fault.TRUNCATED and number == 1:
            assert user.wire.replies[1].status == 200 and user.wire.replies[1].body == {} and user.wire.replies[1].text
    assert heard[Fault.LOST] == heard[Fault.DROPPED] == heard[Fault.DELAYED] == {"nothing"}
    for fault, status in {
        Fault.EXPIRED: 401, Fault.DENIED: 403, Fault.TOO_MANY: 429, Fault.INTERNAL: 500, Fault.INTERNAL_AFTER: 500,
        Fault.UNAVAILABLE: 503,
    }.items():  # fmt: skip
        assert status in heard[fault] and heard[fault] <= {status, "not sent"}


def test_row_32_labels_are_for_ever():
    user = Submitter()
    made = user.made(job())
    for method in ("PATCH", "PUT"):
        with pytest.raises(AssertionError, match="no documented method"):
            user.wire.send(Call(method=method, url=at(REGION, f"/{made.number}"), body={"labels": {}}))


def test_row_34_a_job_is_known_in_its_region_alone():
    user = Submitter()
    made = user.made(job())
    other = at("us-east4", f"/{made.number}")
    assert user.wire.send(Call(method="GET", url=other)).status == 404
    crossed = at(REGION, f"/{made.number}").replace(f"//{REGION}", "//us-east4")
    assert user.wire.send(Call(method="GET", url=crossed)).status == 404
    everywhere = at(REGION).replace(f"//{REGION}-", "//")
    assert user.wire.send(Call(method="POST", url=everywhere, body=job())).status == 404
    assert user.list("", "us-east4") == []


def test_what_else_is_refused():
    user = with_gpus()
    many = [{"name": f"V{number}", "value": ""} for number in range(101)]
    crowd = job()
    crowd["jobSpec"]["workerPoolSpecs"][0]["containerSpec"]["env"] = many
    two_chiefs = job()
    two_chiefs["jobSpec"]["workerPoolSpecs"][0]["replicaCount"] = "2"
    bad = [
        job(labels={"Muster": "r1"}), job(labels={"a": "x" * 65}), job() | {"displayName": "x" * 129}, crowd,
        two_chiefs,
        job(machine=L4 | {"acceleratorCount": 2}), job(machine=CPU | {"machineType": "a5-mega"}),
        job(tensorboard="projects/1/locations/us-central1/tensorboards/2"),
        job(network="projects/example-project/global/networks/muster"),
    ]  # fmt: skip
    assert [user.create(one).status for one in bad] == [400] * len(bad)
    user = with_gpus(acts_as=set())
    assert user.create(job(serviceAccount="a@example-project.iam.gserviceaccount.com")).status == 403
    hundred = {"machineType": "a3-highgpu-8g", "acceleratorType": "NVIDIA_H100_80GB", "acceleratorCount": 8}
    assert user.create(job(machine=hundred), "me-central2").message == "Machine type a3-highgpu-8g is not supported."


def test_time_is_up_at_the_timeout_without_notice():
    for state in ("JOB_STATE_CANCELLED", "JOB_STATE_FAILED"):
        user = Submitter(Manners(after_timeout=state))
        made = user.running(job(1, scheduling={"timeout": "3600s"}))
        user.time.sleep(3600)
        assert user.get(made)["state"] == state and not any(one.running for one in made.workers)


def test_what_is_counted_against_which_quota():
    spec = job(1, machine=L4)["jobSpec"]
    spec["workerPoolSpecs"].append(pool({"machineType": "n1-highcpu-16"}, 3))
    assert demand(spec) == {L4_QUOTA: 2, "custom_model_training_cpus": 48}
    mega = {"machineType": "a3-megagpu-8g", "acceleratorType": "NVIDIA_H100_MEGA_80GB", "acceleratorCount": 8}
    spec = job(1, machine=mega, scheduling={"strategy": "SPOT"})["jobSpec"]
    assert demand(spec) == {"custom_model_training_preemptible_nvidia_h100_mega_gpus": 16}
