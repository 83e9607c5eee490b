"""Scenarios for tests: the one of the formulas, and one with everything in it."""

from muster.config.spec import RunSpec
from muster.simulate.scenario import FaultKind, Saves, Scenario
from muster.simulate.stage_times import constant

MTBF_S = 17_280.0  # five a day
#: Every failure kills one process and is seen at once.
ONLY_PROCESS = {"process": FaultKind(share=1, slow_s=0, fast_s=0)}


def spec_for(**recovery):
    """A run file with nothing but the supervisor's settings."""
    return RunSpec.model_validate(
        {
            "name": "rehearsal",
            "model": {"config": {}},
            "data": {"sources": [{"type": "random"}]},
            "training": {"steps": 1000},
            "recovery": recovery,
        }
    )


def formula(*, every_s, stall_s, recovery_s, mtbf_s=MTBF_S, hours=400.0, step_s=1.0, drain_s=0.0, **changes):
    """Daly's world: one host, saves to disk alone, exponential failures, a constant recovery that they strike too."""
    return Scenario(
        spec=spec_for(max_restarts_without_progress=1000, start_timeout_s=1e6),
        hosts=1,
        min_hosts=1,
        spares=0,
        hours=hours,
        failures_per_day=86_400 / mtbf_s if mtbf_s else 0.0,
        kinds=ONLY_PROCESS,
        memory_tier=False,
        profile=constant(step=step_s, start=recovery_s),
        saves=Saves(every_s=every_s, stall_s=stall_s, drain_s=drain_s, restore_s=0.0),
    ).with_(**changes)


def everything(**changes):
    """Every source of trouble at once, on a few hosts."""
    return Scenario(
        spec=spec_for(),
        hosts=12,
        spares=1,
        min_hosts=8,
        quantum_hosts=2,
        hours=24.0,
        failures_per_day=12.0,
        weibull_shape=0.7,
        correlated_per_day=1.0,
        correlated_hosts=3,
        maintenance_per_day=1.0,
        false_alarms_per_day=2.0,
        slow_per_day=2.0,
        snapshot_every=5,
        micro_batches=100,
        data_ranks_per_host=8,
    ).with_(**changes)
