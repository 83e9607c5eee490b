"""Machines that run and never join, say that their start failed, or fall silent are replaced; not for ever."""

import pytest
from test_gce_launcher import Stage, stage  # noqa: F401 (a fixture)

from muster.backends.gce.launcher import submission_of
from muster.backends.gce.reason import SILENT_S, Useless
from muster.core.typed_json import encode
from muster.protocol.client import HostStatus, SupervisorStatus
from muster.protocol.lease import HomeStatus


class Run:
    """Two machines that run, and the supervisor's machine beside them."""

    def __init__(self, at: Stage):
        self.at, self.request = at, at.request()
        self.stem, self.up_s = self.request.run_id, 10_000.0
        self.home = submission_of(self.request).placement.home
        at.launcher.submit(self.request)
        self.hosts = at.hosts(self.request)
        at.until_hosts(self.request, self.hosts)
        self.said = []
        self.hosts.report = self.said.append
        self.hosts.useless = Useless(
            placement=self.hosts.placement, store=at.bucket, wall_s=self.hosts.wall_s, up_s=lambda: self.up_s
        )

    def status(self, *names):
        """What the supervisor writes: these are connected."""
        known = {name: HostStatus(connected=True, ready=True, active=True, ranks=(0,)) for name in names}
        status = SupervisorStatus(phase="train", reason="", attempt=1, step=3, hosts=known)
        words = encode(HomeStatus(wall_ns=self.at.clock.wall_ns(), term=1, status=status))
        self.at.bucket.put(f"{self.home}/status.json", words)

    def live(self, *names, for_s=0.0):
        """Time goes by in steps of the provisioner's, with those hosts connected."""
        until = self.hosts.wall_s() + for_s
        while True:
            self.status(*names)
            self.hosts.step()
            if self.hosts.wall_s() >= until:
                return
            self.at.clock.sleep(30)

    def started(self, name, *stages):
        for stage_name in stages:
            self.at.tell(self.request, name, stage_name, "fine")

    @property
    def machines(self):
        return [name for name in self.at.names() if not name.endswith("-supervisor")]

    @property
    def given_up(self):
        return {one.name: one.reason for one in self.at.launcher._file(self.hosts.placement).read()[0].given_up}


@pytest.fixture
def run(stage):  # noqa: F811
    return Run(stage())


def test_one_that_never_tells_anything_is_replaced_once_its_limit_has_passed(run):
    good, bad = (f"{run.stem}-1-{number}" for number in (0, 1))
    run.live(good, for_s=200)
    assert run.given_up == {}, "its limit has not passed"
    while not run.given_up:
        run.live(good, for_s=30)
    assert list(run.given_up) == [bad] and "no way to Cloud Storage" in run.given_up[bad]
    run.live(good, for_s=240)
    assert good in run.machines and bad not in run.machines and f"{run.stem}-2-0" in run.machines


def test_one_whose_start_failed_is_replaced_and_the_reason_is_told(run):
    good, bad = (f"{run.stem}-1-{number}" for number in (0, 1))
    run.started(bad, "booted", "driver")
    run.at.tell(run.request, bad, "failed", "gs://b/x is not what its name says")
    run.live(good, for_s=120)
    assert run.given_up == {}, "what fails may pass: systemd tries again"
    run.live(good, for_s=300)
    assert run.given_up == {bad: "agent failed: gs://b/x is not what its name says"}
    words = run.at.launcher.poll(run.at.launcher.handle(run.stem, run.home, run.hosts.placement.supervisor)).reason
    assert f"1 machines were given up, the last one {bad}: agent failed" in words


def test_one_that_falls_silent_is_replaced_and_one_that_boots_again_is_not(run):
    first, second = (f"{run.stem}-1-{number}" for number in (0, 1))
    run.live(first, second, for_s=60)
    run.live(first, for_s=SILENT_S - 60)
    assert run.given_up == {}
    run.live(first, for_s=120)
    assert list(run.given_up) == [second] and "fell silent" in run.given_up[second]


def test_a_reboot_starts_its_limits_anew(run):
    first, second = (f"{run.stem}-1-{number}" for number in (0, 1))
    run.live(first, second, for_s=60)
    run.live(first, for_s=400)
    run.at.tell(run.request, second, "booted", "as host", boot="b2")
    run.live(first, for_s=SILENT_S - 300)
    assert run.given_up == {}, "its driver's limit has not passed since its boot"


def test_nobody_is_given_up_while_there_is_no_supervisor_to_join(run):
    run.up_s = 30.0  # it has just been started
    run.live(for_s=4000)
    assert run.given_up == {}
    run.up_s = 10_000.0
    run.at.clock.sleep(200)
    for _ in range(100):  # it hangs: its status is old, and grows older
        run.hosts.step()
        run.at.clock.sleep(60)
    assert run.given_up == {} and len(run.machines) == 2


def test_what_fails_every_time_is_not_paid_for_for_ever(run):
    run.live(for_s=20_000)
    assert len(run.given_up) == 6, "three for each of two hosts"
    before = list(run.machines)
    run.live(for_s=20_000)
    assert len(run.given_up) == 6 and run.machines == before
    assert any("no more machines are given up today" in line for line in run.said)
    run.live(for_s=90_000)
    assert len(run.given_up) > 6, "the next day others may find what was mended"
