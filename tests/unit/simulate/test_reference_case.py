"""The case study and the spares table: rehearsed within the error that docs/explanation/simulator.md states."""

import importlib.util
import math
from pathlib import Path
from statistics import fmean, stdev

import pytest

from muster.simulate.rehearsal import rehearse

PLACE = Path(__file__).parents[3] / "benchmarks" / "simulate_reference.py"


def load():
    spec = importlib.util.spec_from_file_location("simulate_reference", PLACE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


REFERENCE = load()


def mean_and_error(scenario, seeds):
    found = [100 * rehearse(scenario, seed).goodput_active for seed in range(seeds)]
    return fmean(found), stdev(found) / math.sqrt(seeds)


def test_the_case_study_step_by_step_within_a_point():
    settings, before = {}, 0.0
    for name, (expected, change) in REFERENCE.CASE.items():
        settings = {**settings, **change}
        mean, error = mean_and_error(REFERENCE.case(per_day=5, **settings), 8)
        assert mean == pytest.approx(expected, abs=3 * error + 0.5), name
        assert mean > before - 0.2, f"{name} makes nothing worse on the same blows"
        before = mean


@pytest.mark.parametrize(("spares", "repair_h"), [(0, 4), (1, 4), (2, 8)])
def test_the_spares_table_in_groups_of_one(spares, repair_h):
    scenario = REFERENCE.advanced(stall_s=2 + 30 / 16, quantum=1, spares=spares, repair_h=repair_h)
    mean, error = mean_and_error(scenario, 6)
    expected, _ = REFERENCE.SPARES[spares][(repair_h, 1)]
    assert mean == pytest.approx(expected, abs=3 * error + 0.1)
