"""Requests and regions in turn against the played custom-job service: lost answers, no machines, no quota, two jobs."""

import uuid
from dataclasses import replace

import pytest

discovery = pytest.importorskip("fakes.discovery")
if discovery.folder() is None:
    pytest.skip("google-api-python-client (Google's discovery documents) is not installed", allow_module_level=True)

from fakes.google_wire import Fault  # noqa: E402
from fakes.timeline import EPOCH  # noqa: E402
from fakes.vertex.jobs import Manners  # noqa: E402
from fakes.vertex.machines import demand  # noqa: E402
from fakes.vertex.submitter import Submitter, at  # noqa: E402
from vertex_cases import RUN_ID, cases, placement, spec  # noqa: E402

from muster.backends.google.http import Call, Unreachable  # noqa: E402
from muster.backends.vertex import claim as claims  # noqa: E402
from muster.backends.vertex.claim import Claim  # noqa: E402
from muster.backends.vertex.custom_job import requests  # noqa: E402
from muster.backends.vertex.job_state import Cause, custom_job  # noqa: E402
from muster.backends.vertex.placement import nonce  # noqa: E402
from muster.backends.vertex.turns import Asked, Cancel, Create, Look, NoRoom, Over, Placed, next_step  # noqa: E402
from muster.storage.store import open_store  # noqa: E402

REGIONS = ["us-central1", "us-east4"]
OF = placement(spec("a3-highgpu-8g", "on_demand", locations=REGIONS))
METRIC = OF.machine.accelerator.metric("on_demand").partition("/")[2]


def submitter(quota=1000, manners=None, **service):
    limits = {}
    for case in (OF, *cases().values()):
        for request in requests(case):
            limits |= {(request.region, metric): quota for metric in demand(request.body["jobSpec"])}
    return Submitter(limits=limits, manners=manners, **service)


class Turns:
    """Does what ``next_step`` says, as a launcher has to: the claim before the request, the record before both."""

    def __init__(self, user, of=OF, max_wait_s=7200.0):
        self.user, self.of, self.max_wait_s = user, of, max_wait_s
        self.asked: list[Asked] = []
        self.store, self.uri = open_store(), f"memory://{uuid.uuid4().hex}/{claims.FILE}"

    def jobs(self):
        return [custom_job(row) for row in self.user.list(f"labels.muster-nonce={self.asked[-1].nonce}", self.region)]

    @property
    def region(self):
        return self.asked[-1].region

    @property
    def now_s(self):
        return EPOCH.timestamp() + self.user.clock.now_s

    def step(self):
        self.user.time.settle()
        jobs = self.jobs() if self.asked else []
        counts = claims.counting(self.store, self.uri, self.asked[-1].nonce) if self.asked else None
        found = next_step(
            self.of.regions, self.asked, jobs, max_wait_s=self.max_wait_s, now_s=self.now_s, counts=counts
        )
        if isinstance(found, Create):
            self.create(found)
        elif isinstance(found, Cancel):
            path = found.name.partition("customJobs")[2]
            self.user.wire.send(Call(method="POST", url=at(self.region, f"{path}:cancel"), body={}))
            if found.leave:
                self.asked[-1] = replace(self.asked[-1], left=True)
        elif isinstance(found, Look):
            self.user.time.sleep(found.after_s)
        return found

    def create(self, found):
        if found.nothing:
            self.asked[-1] = replace(self.asked[-1], nothing=found.nothing)
        self.asked = self.asked[: len(self.asked) - found.again]
        turn = len(self.asked) + 1
        mark = nonce(RUN_ID, 1, turn)
        claims.ask(self.store, self.uri, Claim(nonce=mark, region=found.region, submission=1))
        self.asked.append(Asked(region=found.region, nonce=mark, at_s=self.now_s))
        (request,) = [one for one in requests(self.of, turn=turn) if one.region == found.region]
        try:
            reply = self.user.create(request.body, found.region)
        except Unreachable:
            return
        gone = {"nothing": Cause.QUOTA.value} if reply.status == 429 else {"name": reply.body.get("name", "")}
        self.asked[-1] = replace(self.asked[-1], **gone)

    def until(self, *kinds):
        for _ in range(2000):
            found = self.step()
            if isinstance(found, kinds):
                return found
        raise AssertionError(f"none of {kinds} in {self.user.clock.now_s} s: {found}")


@pytest.mark.parametrize("name", cases())
def test_the_service_takes_every_example(name):
    user = submitter()
    for request in requests(cases()[name]):
        reply = user.create(request.body, request.region)
        assert reply.status == 200, reply.message


def test_a_job_gets_its_machines_in_the_first_region():
    turns = Turns(submitter())
    assert turns.until(Placed, Over, NoRoom).job.region == "us-central1"


def test_an_answer_that_was_lost_makes_no_second_job():
    user = submitter()
    turns = Turns(user)
    user.fault(Fault.LOST)
    assert isinstance(turns.until(Placed, Over, NoRoom), Placed)
    assert len(user.vertex.jobs) == 1


def test_a_list_that_lags_longer_makes_two_and_one_of_them_trains():
    """Longer than is waited for: what cannot be prevented is found, and the claim decides."""
    user = submitter(manners=Manners(list_lag_s=90.0))
    turns = Turns(user)
    user.fault(Fault.LOST)
    while len(user.vertex.jobs) < 2:
        turns.step()
    user.time.sleep(90)
    numbers = list(user.vertex.jobs)
    mark = turns.asked[-1].nonce
    said = [bool(claims.counts(turns.store, turns.uri, nonce=mark, job=number)) for number in reversed(numbers)]
    assert said == [True, False], "the host that wakes first, of whichever job"
    assert turns.until(Placed).job.name.endswith(numbers[1])
    user.time.sleep(600)
    states = {number: job.state for number, job in user.vertex.jobs.items()}
    assert states == {numbers[0]: "JOB_STATE_CANCELLED", numbers[1]: "JOB_STATE_RUNNING"}


def test_no_machines_in_the_first_region():
    user = submitter(empty={"us-central1"})
    placed = Turns(user).until(Placed, Over, NoRoom)
    assert placed.job.region == "us-east4" and len(user.vertex.jobs) == 2


def test_no_machines_anywhere_says_each_regions_reason():
    turns = Turns(submitter(empty=set(REGIONS)))
    end = turns.until(Placed, Over, NoRoom)
    assert end == NoRoom(reasons=tuple(f"{region}: {Cause.STOCK_OUT.value}" for region in REGIONS))


def test_quota_below_the_request_is_refused_at_once_and_the_next_region_asked():
    user = submitter()
    user.vertex.limits["us-central1", METRIC] = 8
    assert Turns(user).until(Placed, Over, NoRoom).job.region == "us-east4"
    assert len(user.vertex.jobs) == 1


def test_quota_that_others_hold_keeps_the_job_waiting_until_our_own_deadline():
    user = submitter(quota=16)
    user.vertex.used["us-central1", METRIC] = 8
    turns = Turns(user, max_wait_s=1800.0)
    assert isinstance(turns.until(Cancel), Cancel)
    assert 1800 <= user.clock.now_s < 1900
    assert turns.until(Placed, Over, NoRoom).job.region == "us-east4"
    first = next(iter(user.vertex.jobs.values()))
    assert first.state == "JOB_STATE_CANCELLED", "one active request at a time"
    stale = claims.counts(turns.store, turns.uri, nonce=nonce(RUN_ID, 1, 1), job=first.number)
    assert not stale, "a host of it that wakes late does nothing"
