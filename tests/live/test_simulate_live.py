"""A real faulty run, its stage times fed back as a profile: rehearsals of it must bracket what it really did."""

import random

import pytest
from cluster import LiveRun, spec_of

from muster.app.simulate import measure
from muster.report import api
from muster.simulate.rehearsal import Play
from muster.simulate.scenario import Scenario
from muster.simulate.schedule import Fault

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]
STEPS = 240
CHANGES = {"resources.hosts": 2, "resources.ranks_per_host": 1, "resources.spare_hosts": 1, "training.steps": STEPS}
KILLS = (40, 80, 120)
HOST_AT = 170


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two hosts and a spare: three killed ranks, then a whole host, in one run."""
    directory = tmp_path_factory.mktemp("simulated")
    spec = spec_of(**CHANGES)
    with LiveRun(directory, spec) as run:
        run.start()
        run.wait_for_spare()
        for number, step in enumerate(KILLS):
            run.wait_for_step(step)
            run.kill_rank(number % 2)
            run.wait_until(lambda number=number: len(run.events("recovered")) > number, "recovery of the rank")
        run.wait_for_step(HOST_AT)
        run.signal_host(run.ranks()[1][1])
        assert run.wait() == 0, run.story()
        yield run


def rehearsed(run, document, seed):
    """The same hosts, as long, as many blows of each kind, at other moments."""
    scenario = Scenario(
        spec=run.spec, hosts=2, spares=1, min_hosts=2, hours=document["wall_s"] / 3600, failures_per_day=0.0,
        profile=measure(run.dir), saves=None,
    )  # fmt: skip
    rng, play = random.Random(seed), Play(scenario, seed)
    begin_s = scenario.profile.mean_s("agent_start") + scenario.profile.mean_s("first_start")
    for _ in KILLS:
        blow(play, Fault(at_s=rng.uniform(begin_s, document["wall_s"]), kind="process", where=rng.random(),
                         detect_s=rng.choice(scenario.profile.detect_s["process"])))  # fmt: skip
    blow(play, Fault(at_s=rng.uniform(begin_s, document["wall_s"]), kind="host", where=rng.random(), swap=True,
                     detect_s=rng.choice(scenario.profile.detect_s["host"]), repair_s=1e6))  # fmt: skip
    return play.run()


def blow(play, fault):
    play.cluster.at(fault.at_s, lambda: play.strike(fault))


def test_rehearsals_with_the_runs_own_stage_times_bracket_its_goodput(run):
    document = api.load(run.dir).to_json()
    measured = document["goodput"]["active"]
    outcomes = [rehearsed(run, document, seed) for seed in range(200)]
    found = sorted(one.goodput_active for one in outcomes)
    print(f"measured {measured:.4f}, rehearsed {found[0]:.4f} to {found[-1]:.4f}, middle {found[100]:.4f}")
    assert found[5] <= measured <= found[-6], (found[5], measured, found[-6])
    assert found[-6] - found[5] < 0.25, "a bracket that everything fits into"
    assert all(one.identity_error < 1e-9 for one in outcomes)


def test_the_profile_says_where_its_times_come_from(run):
    found = measure(run.dir)
    assert len(found.detect_s["process"]) == 3 and len(found.detect_s["host"]) == 1
    assert len(found.stages["start"].samples_s) == 4
    assert 0 < found.mean_s("step") < 5 and 0 < found.mean_s("start") < 30
    assert run.dir.name in found.stages["end"].source
