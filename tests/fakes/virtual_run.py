"""A run in virtual time for tests of the supervisor: run file, state machine, cluster, its log, its invariants."""

from muster.config.spec import RunSpec
from muster.core.events import Event
from muster.policy.builtin import SHIPPED
from muster.simulate.cluster import Cluster
from muster.simulate.stage_arithmetic import Stages
from muster.supervise.recovery.inputs import Settings
from muster.supervise.recovery.state_machine import RecoveryStateMachine


def spec(**resources):
    recovery = resources.pop("recovery", {})
    return RunSpec.model_validate(
        {
            "name": "test",
            "model": {"config": {}},
            "data": {"sources": [{"type": "random"}]},
            "training": {"epochs": 1},  # each cluster says how many steps that is
            "resources": {"ranks_per_host": 1, **resources},
            "recovery": {"start_timeout_s": 60.0, **recovery},
        }
    )


def machine(of, policy=None, state=None):
    return RecoveryStateMachine(
        settings=Settings(spec=of, run_id="r", run_dir="/r", ranks_per_host=of.resources.ranks_per_host),
        policy=policy or SHIPPED["default"],
        state=state,
    )


def without_copies(of):
    """The run file with ``checkpoint.replicate_snapshots: false``."""
    return of.model_copy(update={"checkpoint": of.checkpoint.model_copy(update={"replicate_snapshots": False})})


def cluster(of, *, steps=100, policy=None, stages=None, places=None):
    count = of.resources.hosts + of.resources.spare_hosts
    return Cluster(
        machine=machine(of, policy),
        names=[f"host-{n}" for n in range(count)],
        total_steps=steps,
        stages=stages or Stages(),
        places=places or {},
    )


def kinds(found, kind):
    return [(at, log) for at, log in found.log if log.kind == kind]


def actions(found):
    return [log.detail["action"] for _, log in kinds(found, "incident.decided")]


def number_of_attempt(found, index):
    return sum(1 for _, log in found.log[: index + 1] if log.kind == "attempt.started")


def events_of(found):
    """What a new supervisor would read: the machine's own log, and what the hosts wrote into theirs."""
    own = [
        (at, log.host or "supervisor", number_of_attempt(found, index), vars(log))
        for index, (at, log) in enumerate(found.log)
    ]
    theirs = [(event.mono_ns / 1e9, host, event.attempt, vars(event)) for host, event in found.written]
    return [
        Event(
            run_id="r",
            attempt=attempt,
            seq=index,
            mono_ns=int(at * 1e9),
            wall_ns=int(at * 1e9),
            host=host,
            kind=said["kind"],
            rank=said.get("rank"),
            step=said.get("step"),
            phase=said.get("phase"),
            detail=said["detail"],
        )
        for index, (at, host, attempt, said) in enumerate([*own, *theirs])
    ]


def check_invariants(found):
    """Attempts rise and are used once; every decision answers one incident; the end is said once."""
    attempts = [
        number_of_attempt(found, index) for index, (_, log) in enumerate(found.log) if log.kind == "attempt.started"
    ]
    assert attempts == sorted(set(attempts))
    incidents = [log.detail["incident_id"] for _, log in kinds(found, "incident.detected")]
    assert len(incidents) == len(set(incidents))
    decisions = [log.detail["incident_id"] for _, log in kinds(found, "incident.decided")]
    assert len(decisions) == len(set(decisions)) and set(decisions) <= set(incidents)
    assert len(kinds(found, "run.finished")) <= 1
    for _, log in kinds(found, "attempt.started"):
        ranks = [rank for ranks in log.detail["hosts"].values() for rank in ranks]
        assert sorted(ranks) == list(range(log.detail["world_size"]))
