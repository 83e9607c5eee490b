"""Simulate: a run file rehearsed with the supervisor and policy that will run, on virtual hosts and a virtual clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from muster.app.planning.plan import Planned, plan
from muster.config import load
from muster.config.load import Loaded
from muster.config.spec import RunSpec
from muster.core import event_log
from muster.core.errors import MusterError, UsageError
from muster.core.event_details.attempts import AttemptStarted
from muster.core.event_details.hosts import HostAllocated
from muster.core.event_details.training import Step
from muster.core.incidents import KINDS, traits_of
from muster.core.typed_json import Json
from muster.report import api
from muster.simulate import ensembles
from muster.simulate import stage_times as profiles
from muster.simulate.ensembles import Choice, Progress, Study
from muster.simulate.host_time import CATEGORIES
from muster.simulate.scenario import Saves, Scenario, read_trace
from muster.simulate.stage_times import Profile, Recovery

MODELLED = (
    "Faults, hosts and clock are virtual: stage times come from the profile, only the supervisor and the policy are "
    "the real ones. No contention, no network, no GPU."
)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The command line's part of a scenario; None: the run file's, or the default."""

    hosts: int | None = None
    spares: int | None = None
    min_hosts: int | None = None
    hours: float | None = None
    failures_per_day: float = 5.0
    detection: str = "fast"
    repair_h: float = 4.0
    weibull_shape: float = 1.0
    correlated_per_day: float = 0.0
    correlated_hosts: int = 8
    maintenance_per_day: float = 0.0
    false_alarms_per_day: float = 0.0
    slow_per_day: float = 0.0
    policy: str | None = None
    profile: str | None = None
    trace: str | None = None
    step_s: float | None = None
    usd_per_host_hour: float | None = None


#: Of what was asked, as it is.
TAKEN = (
    "repair_h", "weibull_shape", "correlated_per_day", "correlated_hosts", "maintenance_per_day",
    "false_alarms_per_day", "slow_per_day",
)  # fmt: skip


#: What one rehearsal may hold. Its time grows with the square of the hosts: 4,096 take about a minute a seed.
MOST_HOSTS, MOST_SPARES, MOST_FAULTS, MOST_SEEDS = 4096, 1024, 20_000, 10_000
#: Numbers of the command line, and between which values they mean something.
BOUNDS = {
    "hours": (0.01, 100_000.0), "step_s": (0.001, 86_400.0), "weibull_shape": (0.1, 10.0),
    "repair_h": (0.001, 10_000.0), "usd_per_host_hour": (0.0, 1e6), "correlated_hosts": (1, MOST_HOSTS),
    **{name: (0.0, 100_000.0) for name in Asked.__dataclass_fields__ if name.endswith("_per_day")},
}  # fmt: skip


def scenario_of(run_file: str | Path, overrides: Sequence[str], asked: Asked) -> Scenario:
    """The run file's world with what was asked on top.

    Raises:
        RunFileError: the run file's problems. UsageError: no such profile, policy or trace; a number out of range.
    """
    loaded = load.load(run_file, overrides, environment=False, to_plan=True)
    spec = loaded.spec
    _check(asked)
    profile = profile_of(asked.profile, cpu=spec.resources.device == "cpu")
    basis = _basis(run_file, overrides, loaded, asked, profile)
    profile = replace(profile, stages={**profile.stages, "step": basis.step})
    held = read_trace(asked.trace) if asked.trace else None
    hosts = asked.hosts or basis.hosts
    spares = spec.resources.spare_hosts if asked.spares is None else asked.spares
    quantum, replicas, per_host = _groups(spec, hosts)
    batch = -(-spec.training.global_batch_size // spec.training.micro_batch_size)
    result = Scenario(
        spec=spec,
        hosts=hosts,
        spares=spares,
        min_hosts=asked.min_hosts or (spec.resources.min_hosts if asked.hosts is None else None) or hosts,
        gpus_per_host=spec.resources.ranks_per_host or 8,
        hours=asked.hours or (held.hours if held else 40.0),
        failures_per_day=0.0 if held else asked.failures_per_day,
        fast_detection=asked.detection == "fast",
        **{name: getattr(asked, name) for name in TAKEN},
        trace=held,
        profile=profile,
        policy=asked.policy or spec.recovery.policy,
        quantum_hosts=quantum,
        replicas=replicas,
        memory_tier=spec.checkpoint.snapshot_every_steps != 0,
        snapshot_every=basis.snapshot_every,
        replicate_snapshots=spec.checkpoint.replicate_snapshots is not False and hosts > 1,
        saves=_saves(spec, profile),
        usd_per_host_hour=basis.usd_per_host_hour,
        price_source=basis.price_source,
        micro_batches=math.ceil(batch * hosts / basis.hosts),
        data_ranks_per_host=per_host,
    )
    from muster.policy.load import load_policy

    load_policy(result.policy)
    _check_size(result)
    if result.min_hosts is not None and result.min_hosts > hosts:
        raise UsageError(f"--min-hosts {result.min_hosts} is more than {hosts} hosts")
    return result


@dataclass(frozen=True, kw_only=True)
class _Basis:
    """Step time and price of a rehearsal: the plan's, unless the command line says otherwise."""

    step: profiles.Stage
    usd_per_host_hour: float | None
    price_source: str
    snapshot_every: int
    """Steps; at least 1."""
    hosts: int
    """Of the run file, or where it leaves them open of the plan."""


def _basis(run_file: str | Path, overrides: Sequence[str], loaded: Loaded, asked: Asked, profile: Profile) -> _Basis:
    """Ask the plan for what is not given. Where there is no plan, the step is the profile's, and says why."""
    spec = loaded.spec
    found: Planned | None = None
    wanted = (asked.step_s is None and asked.profile is None) or asked.usd_per_host_hour is None
    why = ""
    if wanted:
        try:
            found = plan(run_file, [*overrides, *_scaled(spec, asked.hosts)], environment=False)
        except MusterError as error:
            why = str(error).splitlines()[0]
    way = found.plan.chosen if found is not None else None
    title = f"plan: {way.title}" if way is not None else ""
    if asked.step_s is not None:
        step = profiles.Stage(mean_s=asked.step_s, cv=0.0, source="--step-s")
    elif way is not None and asked.profile is None:
        step = profiles.Stage(mean_s=way.step_s, cv=0.0, source=title)
    else:
        step = profile.stages["step"]
        if why:
            step = replace(step, source=f"{step.source} (no plan: {why})")
    usd, source = asked.usd_per_host_hour, "--usd-per-host-hour"
    if usd is None and way is not None and way.usd_per_hour is not None:
        usd, source = way.usd_per_hour / way.num_nodes, title
    elif usd is None:
        usd, source = spec.resources.usd_per_host_hour, "resources.usd_per_host_hour"
    fixed = ("resources", "hosts") in loaded.origins or way is None or asked.hosts is not None
    every = spec.checkpoint.snapshot_every_steps
    if every == "auto":
        every = 1 if way is None else way.snapshot_every_steps
    return _Basis(
        snapshot_every=max(1, every),
        step=step,
        usd_per_host_hour=usd,
        price_source=source if usd is not None else "",
        hosts=spec.resources.hosts if fixed or way is None else way.num_nodes,
    )


def _scaled(spec: RunSpec, hosts: int | None) -> list[str]:
    """Overrides for ``hosts`` instead of the run file's: as many sequences a host, and more replicas of its groups. The
    run file's limits are of its own number."""
    own, axes = spec.resources.hosts, spec.parallelism
    if hosts is None or hosts == own:
        return []
    batch = math.ceil(spec.training.global_batch_size * hosts / own)
    result = [f"resources.hosts={hosts}", f"training.global_batch_size={batch}", "resources.min_hosts=null"]
    result += [f"limits.{name}=null" for name in ("max_usd", "max_hours", "deadline")]
    ranks, replica = hosts * (spec.resources.ranks_per_host or 0), axes.dp_shard * axes.tp * axes.pp * axes.cp
    if axes.dp_shard > 0 and ranks and ranks % replica == 0:
        result.append(f"parallelism.dp_replicate={ranks // replica}")
    return result


def _check(asked: Asked) -> None:
    if asked.detection not in ("fast", "slow"):
        raise UsageError(f"--detection {asked.detection!r} is none", hint="fast or slow")
    for name, (least, most) in BOUNDS.items():
        value = getattr(asked, name)
        if value is not None and not least <= value <= most:  # a NaN is in no range
            flag = f"--{name.replace('_', '-').replace('repair-h', 'repair-hours')}"
            raise UsageError(f"{flag} must be from {least:,g} to {most:,g}, got {value:g}")


def _check_size(scenario: Scenario) -> None:
    """Refuse what would rehearse for hours, or without end."""
    if scenario.hosts > MOST_HOSTS or scenario.spares > MOST_SPARES:
        raise UsageError(
            f"{scenario.hosts:,} hosts and {scenario.spares:,} spares: a rehearsal takes at most {MOST_HOSTS:,} hosts "
            f"and {MOST_SPARES:,} spares",
            hint="--hosts and --spares override resources.hosts and resources.spare_hosts",
        )
    per_day = sum(getattr(scenario, name) for name in Scenario.__dataclass_fields__ if name.endswith("_per_day"))
    faults = per_day * scenario.hours / 24
    if faults > MOST_FAULTS:
        raise UsageError(
            f"{per_day:,g} faults a day for {scenario.hours:,g} h are {faults:,.0f} faults in each rehearsal, at most "
            f"{MOST_FAULTS:,} are rehearsed",
            hint="fewer --hours, or fewer faults a day",
        )


def _groups(spec: RunSpec, hosts: int) -> tuple[int | None, int, int]:
    """(hosts of a sharded group, replicas, data ranks of a host): one rank represents a host in rehearsals."""
    per_host = spec.resources.ranks_per_host or (1 if spec.resources.device == "cpu" else 8)
    axes = spec.parallelism
    sharing = axes.tp * axes.pp * axes.cp  # ranks that work on the same micro-batch
    data_ranks = max(1, per_host // sharing)
    if axes.dp_shard == -1:
        return None, axes.dp_replicate, data_ranks
    group = axes.dp_shard * sharing
    if group <= per_host:
        return 1, 1, data_ranks
    quantum = -(-group // per_host)
    return (quantum, 1, data_ranks) if hosts % quantum == 0 else (None, 1, data_ranks)


def _saves(spec: RunSpec, profile: Profile) -> Saves | None:
    every = spec.checkpoint.every_steps
    if every == 0:
        return None
    stall_s, drain_s = profile.mean_s("save_stall"), profile.mean_s("save_drain")
    if not spec.checkpoint.asynchronous:
        stall_s, drain_s = stall_s + drain_s, 0.0
    every_s = None if every == "auto" else int(every) * profile.mean_s("step")
    return Saves(every_s=every_s, stall_s=stall_s, drain_s=drain_s, restore_s=profile.mean_s("restore"))


def profile_of(name: str | None, *, cpu: bool = False) -> Profile:
    """A shipped profile by name, or one measured from a run's folder or id.

    Raises:
        UsageError: neither; or the run's log shows no healed incident.
    """
    if name is None or name in profiles.names():
        return profiles.shipped(name or ("cpu-measured" if cpu else profiles.DEFAULT))
    from muster.app.inspect.report import _place

    try:
        place = _place(name)
    except UsageError as error:
        hint = f"one of {', '.join(profiles.names())}, or a run's id or folder"
        raise UsageError(f"no profile and no run {name!r}", hint=hint) from error
    return measure(place)


def measure(run_dir: Path) -> Profile:
    """Stage times of a run's own log: steps, start, and each healed incident."""
    report = api.load(run_dir)
    document = report.document
    simulated_as = {kind: traits_of(kind).simulated_as for kind in KINDS.names()}
    recoveries = [
        Recovery(
            kind=fault,
            detect_s=incident.detect_s,
            started_s=incident.stages_s["started"],
            first_step_s=incident.stages_s["first_step"],
        )
        for incident in document.incidents
        if (fault := simulated_as.get(incident.kind))
        and {"collected", "started", "first_step"} <= incident.stages_s.keys()
    ]
    events = event_log.merged(run_dir / "events" if (run_dir / "events").is_dir() else run_dir)
    taken = [event for event in events if event.kind == Step.kind]
    firsts = {event.attempt: event.seq for event in reversed(taken)}
    steps = [event.read(Step).step_ns / 1e9 for event in taken if firsts[event.attempt] != event.seq]
    started = next((event for event in events if event.kind == AttemptStarted.kind), None)
    first = next(iter(taken), None)
    reference, reference_s = document.goodput.reference, None
    if reference is not None and document.steps:
        reference_s = document.tokens / document.steps / reference.tokens_per_s
    bought = next((event for event in events if event.kind == HostAllocated.kind), None)
    agent_start_s = first_start_s = None
    if started is not None and bought is not None:
        agent_start_s = max(0.0, (started.wall_ns - bought.wall_ns) / 1e9)
    if started is not None and first is not None:
        first_start_s = max(0.0, (first.wall_ns - started.wall_ns - first.read(Step).step_ns) / 1e9)
    measured = profiles.measured(
        run_dir.name,
        step_s=steps,
        recoveries=recoveries,
        reference_s=reference_s,
        agent_start_s=agent_start_s,
        first_start_s=first_start_s,
    )
    return replace(measured, damaged=report.damaged)


def simulate(
    scenario: Scenario,
    *,
    seeds: int = 100,
    paired: int = 20,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Study:
    """Rehearse. Raises UsageError on a number of seeds that is none."""
    if not 1 <= seeds <= MOST_SEEDS or paired < 0:
        raise UsageError(f"--seeds {seeds} and --paired {paired}: from 1 to {MOST_SEEDS:,}, and at least 0")
    return ensembles.study(scenario, seeds=seeds, paired=paired, workers=workers, progress=progress)


def to_json(study: Study) -> dict[str, Json]:
    """The answer for programs. Shares are of purchased host-time; ``change`` is against the scenario as given."""
    scenario = study.scenario
    host_s, purchased = study.host_s, sum(outcome.purchased_host_s for outcome in study.outcomes) / len(study.outcomes)
    return {
        "scenario": {
            "hosts": scenario.hosts, "gpus": scenario.hosts * scenario.gpus_per_host, "spares": scenario.spares,
            "min_hosts": scenario.min_hosts, "hours": scenario.hours, "failures_per_day": scenario.failures_per_day,
            "detection": "fast" if scenario.fast_detection else "slow", "mean_detect_s": scenario.mean_detect_s,
            "repair_h": scenario.repair_h, "policy": scenario.policy, "quantum_hosts": scenario.quantum_hosts,
            "copies": scenario.copies, "checkpoint_every_s": _finite(scenario.every_s),
            "step_s": scenario.profile.mean_s("step"), "step_source": scenario.profile.stages["step"].source,
            "usd_per_host_hour": scenario.usd_per_host_hour, "price_source": scenario.price_source,
            "swaps_per_day": scenario.swaps_per_day, "trace": scenario.trace.name if scenario.trace else None,
        },
        "profile": {
            "name": scenario.profile.name, "about": scenario.profile.about,
            "stages": {name: {"mean_s": stage.mean_s, "source": stage.source}
                       for name, stage in scenario.profile.stages.items()},
        },
        "damaged": [damage.to_json() for damage in scenario.profile.damaged],
        "seeds": len(study.outcomes),
        "goodput_active": asdict(study.active),
        "goodput_purchased": asdict(study.purchased),
        "categories": {
            name: {"host_s": value, "share": value / purchased, "meaning": CATEGORIES[name]}
            for name, value in host_s.items()
        },
        "purchased_host_s": purchased,
        "identity_error": max(outcome.identity_error for outcome in study.outcomes),
        "lost_s": {
            kind: {"count": len(values), **{f"p{n}": ensembles.percentile(values, n / 100) for n in (50, 95)}}
            for kind, values in study.lost_s.items()
        },
        "redone_steps": sum(outcome.redone_steps for outcome in study.outcomes) / len(study.outcomes),
        "gave_up": sum(outcome.gave_up for outcome in study.outcomes) / len(study.outcomes),
        "mean_hosts_out": sum(outcome.mean_out for outcome in study.outcomes) / len(study.outcomes),
        "usd": None if scenario.usd_per_host_hour is None else purchased / 3600 * scenario.usd_per_host_hour,
        "contributions": [_choice(choice, scenario) for choice in study.contributions],
        "spares": [_choice(choice, scenario) for choice in study.spares],
        "intervals": [_choice(choice, scenario) for choice in study.intervals],
        "policies": [_choice(choice, scenario) for choice in study.policies],
        "best": {
            name: result.name if (result := ensembles.best(group)) else None
            for name, group in (("spares", study.spares), ("interval", study.intervals), ("policy", study.policies))
        },
        "note": MODELLED,
    }  # fmt: skip


def _choice(choice: Choice, scenario: Scenario) -> dict[str, Json]:
    result = {key: _finite(value) if isinstance(value, float) else value for key, value in asdict(choice).items()}
    price, ratio = scenario.usd_per_host_hour, _finite(choice.cost_ratio)
    return {**result, "usd_per_useful_host_hour": None if price is None or ratio is None else price * ratio}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
