"""Hosts on the unkind Compute Engine: what is asked for, what comes of it, and programs that are killed anywhere."""

import json

import pytest
from fakes.compute_engine import instances
from fakes.compute_engine.run_of_hosts import RunOfHosts
from fakes.google_wire import Fault, Killed, turning_points
from gce_cases import RUN_ID, placement, spec

STEM = RUN_ID
ZONES = ["us-central1-a", "us-central1-b"]
FLEX = {"limits": {"max_hours": 12}, "gce": {"max_wait_hours": 1}}


def on_demand(**changes):
    return placement(spec("g2-standard-48", "on_demand", **({"locations": ZONES} | changes)))


def flex(**changes):
    return placement(spec("a3-highgpu-8g", "flex_start", **({"locations": ZONES} | FLEX | changes)))


def names(turn, count):
    return [f"{STEM}-{turn}-{index}" for index in range(count)]


def turns(run):
    return [(turn.where, turn.state) for turn in run.log.requests]


def test_all_at_once_in_the_first_zone():
    run = RunOfHosts(on_demand())
    run.drive(run.program())
    assert run.living() == names(1, 2) and turns(run) == [(ZONES[0], "made")]
    assert run.program().step()  # and nothing is asked for again
    assert len(run.log.requests) == 1


@pytest.mark.parametrize("code", ["ZONE_RESOURCE_POOL_EXHAUSTED", "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS"])
def test_a_stock_out_moves_on_with_the_reason_of_the_machines_own_operations(code):
    run = RunOfHosts(on_demand(), stock={ZONES[0]: 1}, stockout_code=code)
    run.drive(run.program())
    assert run.living() == names(2, 2) and turns(run) == [(ZONES[0], "nothing"), (ZONES[1], "made")]
    reason = run.log.requests[0].reason
    assert reason.startswith(f"the zone has no such machines now: {code}: ")
    assert ("there may be some in" in reason) == code.endswith("DETAILS")
    # The one machine that was there booted, and was rolled back: it counted at no time.
    assert not [one for one in run.instances() if one.zone == ZONES[0]]


def test_an_unknown_error_is_not_called_a_stock_out():
    run = RunOfHosts(on_demand(hosts=1), odd_errors={ZONES[0]: ("SOMETHING_NEW", "Nobody has seen this.")})
    run.drive(run.program())
    assert run.log.requests[0].reason == "refused: SOMETHING_NEW: Nobody has seen this."
    assert turns(run)[-1] == (ZONES[1], "made")


def test_too_few_are_kept_where_that_is_enough_and_the_rest_is_asked_for():
    run = RunOfHosts(on_demand(hosts=3, min_hosts=2), stock={ZONES[0]: 2})
    run.drive(run.program(), until=lambda: len(run.living()) == 2 and run.log.requests[0].state == "made")
    assert any("2 x g2-standard-48 in us-central1-a, of 3 that were asked for" in line for line in run.said)
    run.user.cloud.stock[ZONES[0]] = 5
    run.drive(run.program())
    assert run.living() == [*names(1, 2), f"{STEM}-{run.log.last.number}-0"], "in the same zone, by another name"


def test_every_zone_is_asked_again_later():
    run = RunOfHosts(on_demand(), stock={ZONES[0]: 0, ZONES[1]: 0})
    hosts = run.program()
    run.drive(hosts, until=lambda: len(run.log.requests) == 2 and run.log.last.state == "nothing")
    at_s = run.user.clock.now_s
    run.user.cloud.stock[ZONES[0]] = 9
    run.drive(hosts)
    assert 300 <= run.user.clock.now_s - at_s < 500 and turns(run)[-1] == (ZONES[0], "made")


def test_quota_is_a_403_and_moves_on():
    run = RunOfHosts(on_demand(), instance_quota=1)
    run.drive(run.program(), until=lambda: len(run.log.requests) == 2)
    assert run.log.requests[0].reason.startswith("the project's quota is used up: quotaExceeded: ")


def test_a_grant_that_does_not_hold_yet_is_waited_for_and_its_text_is_shown():
    account = on_demand().spec.gce.service_account
    run = RunOfHosts(on_demand(), actors={account: 90.0})
    hosts = run.program()
    hosts.step()
    assert "iam.serviceAccountUser" in run.log.last.reason and run.log.last.state == "asked"
    run.drive(hosts)
    assert run.living() == names(1, 2) and run.user.clock.now_s >= 90


def test_a_lost_host_is_replaced_under_another_name_in_the_same_zone():
    run = RunOfHosts(on_demand(), stock={ZONES[0]: 0})
    run.drive(run.program())
    at = run.user.at(f"{STEM}-2-0", ZONES[1])
    run.user.cloud.stock[ZONES[0]] = 9
    instances.halt(run.user.cloud, at, 10)  # its time is over, say: it keeps its name and its disks
    run.user.time.sleep(20)
    run.drive(run.program())
    assert run.living() == [f"{STEM}-2-1", f"{STEM}-3-0"] and turns(run)[-1] == (ZONES[1], "made")
    run.user.time.sleep(200)
    assert len(run.instances()) == 2, "the stopped one is removed"


@pytest.mark.parametrize("make", [on_demand, flex])
def test_killed_after_every_request_and_run_again(make):
    number = 0
    while True:
        number += 1
        run = RunOfHosts(make())
        try:
            run.drive(run.program(kill_at=number))
        except Killed:
            run.user.time.sleep(25.0 * (number % 4))
            run.drive(run.program())
        else:
            break
        assert len(run.living()) == 2 == len(run.instances()), number
        assert turns(run) == [(ZONES[0], "made")], number
    assert number > 3


@pytest.mark.parametrize("fault", list(Fault))
@pytest.mark.parametrize("make", [on_demand, flex])
def test_each_request_may_go_wrong_in_each_way(make, fault):
    whole = RunOfHosts(make())
    whole.drive(whole.program())
    for number in turning_points(whole.wire.log):
        run = RunOfHosts(make())
        run.drive(run.program(faults={number: fault}))
        run.user.time.sleep(400)
        run.wire.deliver()
        run.drive(run.program())
        run.user.time.sleep(400)
        assert len(run.living()) == 2 == len(run.instances()), (number, whole.wire.log[number - 1], run.said)


def test_the_request_is_repeated_after_its_id_was_forgotten():
    run = RunOfHosts(on_demand())
    with pytest.raises(Killed):
        run.drive(run.program(kill_at=2))  # the answer of the bulk request was not written down
    assert run.log.last.name == ""
    run.user.time.sleep(4000)
    run.drive(run.program())
    assert run.living() == names(1, 2) and turns(run) == [(ZONES[0], "made")]


@pytest.mark.parametrize("make", [on_demand, flex])
def test_down_killed_after_every_request_leaves_nothing(make):
    whole = RunOfHosts(make())
    whole.drive(whole.program())
    assert whole.down() == [] and whole.left() == []
    points = turning_points(whole.wire.log)
    assert len(points) > 4
    for number in points:
        run = RunOfHosts(make())
        run.drive(run.program())
        with pytest.raises(Killed):
            run.down(kill_at=number)
        assert run.down() == [] and run.left() == [], number


@pytest.mark.parametrize("make", [on_demand, flex])
def test_down_in_the_middle_of_everything_leaves_nothing(make):
    whole = RunOfHosts(make())
    whole.drive(whole.program())
    for number in range(1, len(whole.wire.log) + 1):
        run = RunOfHosts(make())
        with pytest.raises(Killed):
            run.drive(run.program(kill_at=number))
        late = run.program()
        assert run.down() == []
        assert late.step() is False and run.left() == [], "a supervisor that wakes up asks for nothing"


def test_flex_start_waits_in_the_queue_and_then_leaves_for_the_next_zone():
    run = RunOfHosts(flex(), stock={ZONES[0]: 0})
    hosts = run.program()
    run.drive(hosts, limit_s=9000)
    assert turns(run) == [(ZONES[0], "nothing"), (ZONES[1], "made")]
    assert "no machines within gce.max_wait_hours (1)" in run.log.requests[0].reason
    assert 3600 <= run.user.clock.now_s < 5000 and len(run.living()) == 2
    assert run.down() == [] and run.left() == []


def test_machines_that_come_after_the_cancellation_count():
    run = RunOfHosts(flex(), stock={ZONES[0]: 0})
    hosts = run.program()

    def cancelled():
        return any("cancel" in url for _, url in run.wire.log)

    run.drive(hosts, until=cancelled, limit_s=9000)
    run.user.cloud.stock[ZONES[0]] = 5  # before the cancellation is through
    run.drive(hosts, limit_s=9000)
    assert len(run.living()) == 2 == len(run.instances())


def test_a_host_of_a_group_is_removed_through_the_group():
    run = RunOfHosts(flex())
    run.drive(run.program())
    lost = run.living()[0]
    instances.halt(run.user.cloud, run.user.at(lost, ZONES[0]), 10)
    run.user.time.sleep(20)
    run.drive(run.program())
    run.user.time.sleep(600)
    assert len(run.instances()) == 2 and lost not in run.living()
    assert not any(method == "DELETE" and "/instances/" in url for method, url in run.wire.log)


def test_what_is_left_says_what_it_costs():
    from muster.backends.gce import teardown

    run = RunOfHosts(on_demand(hosts=1))
    run.drive(run.program())
    rows = {str(row).partition("/")[0]: row for row in teardown.leftovers(run.compute(), STEM)}
    assert rows["instances"].usd_per_day > 50 and "a day)" in str(rows["instances"])
    assert rows["disks"].usd_per_day > 0


def test_groups_of_several_slices_are_the_runs_and_those_of_a_run_with_a_longer_name_are_not():
    from muster.backends.gce import teardown

    run = RunOfHosts(on_demand(hosts=1))
    run.drive(run.program())
    folder = f"compute/v1/projects/example-project/zones/{ZONES[1]}/instanceGroupManagers"
    for name in (f"{STEM}-1s0", f"{STEM}-1s1", f"{STEM}-1-2", f"{STEM}-1s0-2"):
        run.user.cloud.store[f"{folder}/{name}"] = {"name": name, "zone": f"projects/example-project/zones/{ZONES[1]}"}
    found = {one.name for one in teardown.leftovers(run.compute(), STEM) if one.kind == "instanceGroupManagers"}
    assert found == {f"{STEM}-1s0", f"{STEM}-1s1"}


def test_an_orphan_disk_and_another_runs_machines():
    run = RunOfHosts(on_demand(hosts=1))
    run.drive(run.program())
    run.user.insert("somebody-elses", ZONES[0])
    folder = f"compute/v1/projects/example-project/zones/{ZONES[1]}/disks"
    run.user.cloud.store[f"{folder}/{STEM}-9-0"] = {
        "name": f"{STEM}-9-0", "labels": run.placement.labels, "sizeGb": "200",
        "zone": f"https://www.googleapis.com/compute/v1/projects/example-project/zones/{ZONES[1]}",
    }  # fmt: skip
    run.user.time.sleep(60)
    assert run.down() == [] and run.left() == []
    assert "somebody-elses" in json.dumps(sorted(run.user.cloud.store))
