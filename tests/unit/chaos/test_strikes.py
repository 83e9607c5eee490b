"""The random driver's trials: replayable, and nothing that it can do is never done."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "live"))

import strikes

TRIALS = [strikes.draw(seed) for seed in range(500)]
STRUCK = [strike for trial in TRIALS for strike in trial.strikes]


def test_a_seed_is_one_trial():
    assert [strikes.draw(seed) for seed in range(500)] == TRIALS
    assert len({trial.strikes for trial in TRIALS}) == 500


def test_every_kind_meets_every_target():
    assert {strike.kind for strike in STRUCK} == set(strikes.KINDS)
    for kinds, targets in (
        (strikes.OF_A_PROCESS, strikes.PROCESSES),
        (strikes.OF_A_FILE, strikes.FILES),
        (["verbs"], strikes.VERBS),
    ):
        assert {strike.target for strike in STRUCK if strike.kind in kinds} == set(targets)
    assert {strike.target for strike in STRUCK if strike.kind == "kill"} == set(strikes.PROCESSES)


def test_a_trial_is_a_run_that_can_be():
    for trial in TRIALS:
        assert 1 <= trial.hosts <= 3 and trial.ranks() % trial.replicas == 0
        assert 1 <= len(trial.strikes) <= 5
        assert all(0 < strike.step < strikes.LAST < strikes.STEPS for strike in trial.strikes)
        assert all(strike.host < trial.hosts + trial.spares for strike in trial.strikes)
    assert {trial.hosts for trial in TRIALS} == {1, 2, 3}


@pytest.mark.parametrize("kind", strikes.OF_A_FILE)
def test_damage_is_done(kind):
    data = bytes(range(256))
    for share in range(100):
        broken = strikes.damaged(data, kind, share / 100)
        assert broken != data and len(broken) <= len(data)
    assert strikes.damaged(b"", kind, 0.5) == b""


def test_what_may_end_a_run_is_something_that_is_done():
    for kind, target in strikes.MAY_END:
        assert kind in strikes.KINDS and target in {*strikes.PROCESSES, *strikes.VERBS}
