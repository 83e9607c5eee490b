"""Plan: what a run file would need, take and cost, on everything in the catalogue. Reads files; starts nothing but,
where asked, the memory trace.

A plan written to a file represents its run file: ``open_plan`` loads that file with the plan's settings, and refuses
where it has changed since.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import TypeVar

from muster import backends
from muster.app.planning.calibrate import calibration_for
from muster.app.planning.hardware import hardware
from muster.app.planning.model_shape import shape_of, unfit, weights_problems
from muster.catalog import rows
from muster.config import load
from muster.config.load import Loaded
from muster.config.spec import RunSpec
from muster.config.tpu_rules import tpu_rules
from muster.core.errors import NoPlanError, RunFileError, UsageError
from muster.core.errors import Problem as RunFileProblem
from muster.core.typed_json import JsonObject, child, text, texts
from muster.plan import bucket, plan_file
from muster.plan import format as format
from muster.plan.constants import DEFAULT, ON_CPU
from muster.plan.cost import STEP_SIGMA
from muster.plan.explanation import likelihood, why
from muster.plan.layouts import Pins
from muster.plan.nearest_fit import explain
from muster.plan.plan_file import NotTaken as NotTaken
from muster.plan.plan_file import Plan as Plan
from muster.plan.plan_file import PlannedWay as PlannedWay
from muster.plan.search import Candidate, Limits, Outcome, Problem, search
from muster.plan.workload import Workload, workload

#: Settings that name hardware to be got from somewhere.
_ELSEWHERE = frozenset(
    f"resources.{name}" for name in ("machine", "accelerator", "provisioning_model", "locations", "usd_per_host_hour")
)
Setting = TypeVar("Setting")
LIMITS = ("limits.deadline", "limits.max_usd", "limits.max_hours")


@dataclass(frozen=True, kw_only=True)
class Planned:
    plan: Plan
    spec: RunSpec
    """The run file's, before the plan's settings."""
    work: Workload
    outcome: Outcome
    chosen: Candidate
    limits: dict[str, float | None]
    """``max_usd``, and ``max_hours`` with the deadline in it."""
    here: bool = False
    """It trains on this machine: no offer is chosen among."""

    def __repr__(self) -> str:
        chosen, usd = self.plan.chosen, self.plan.chosen.usd.p50
        cost = "price unknown" if usd is None else format.dollars(usd)
        rows = [f"{self.plan.job}: {chosen.title}: {format.duration(chosen.hours.p50)}, {cost}"]
        rows += [f"not taken: {other.machine} {other.mode}: {other.reason}" for other in self.plan.rejected[:5]]
        return "\n".join(rows)

    def _repr_html_(self) -> str:
        """What a notebook's cell shows."""
        return f"<pre>{escape(repr(self))}</pre>"

    def to_json(self) -> JsonObject:
        return self.plan.to_json()


def plan(
    run_file: str | Path,
    overrides: Sequence[str] = (),
    *,
    now: datetime | None = None,
    fastest: bool = False,
    reasons: bool = False,
    home: Path | None = None,
    environment: bool = True,
    device: str | None = None,
    calibrated: bool = True,
) -> Planned:
    """The cheapest (or fastest) way to run ``run_file`` within its limits.

    ``environment``: check this machine's files and folders too. ``device``: plan for it instead of the file's.

    Raises:
        NoPlanError: nothing fits; the message says why, the hint names the nearest plan that would.
        RunFileError: the file itself is wrong.
    """
    now = now or datetime.now(UTC)
    loaded, impossible = _load(run_file, overrides, environment)
    loaded = loaded if device is None else on_device(loaded, device)
    spec = loaded.spec
    here = backends.get(spec.backend).capabilities.uses_this_machine
    if wrong := unfit(spec) or _chips(spec) or ([] if here else weights_problems(spec)):
        raise loaded.placed(RunFileError(wrong))
    work = workload(spec, shape_of(spec))
    problem, learned = _problem(loaded, work, now, home, calibrated=calibrated)
    outcome = search(problem)
    if impossible is not None or outcome.cheapest is None or outcome.fastest is None:
        message, hint = explain(problem, outcome)
        raise NoPlanError(impossible or message, hint=hint if outcome.cheapest is None else _works(outcome.cheapest))
    chosen = outcome.fastest if fastest else outcome.cheapest
    frontier, rejected = plan_file.ways(work, outcome)
    here = here and not problem.tpus
    return Planned(
        spec=spec, work=work, outcome=outcome, chosen=chosen, here=here,
        limits={"max_usd": problem.limits.max_usd, "max_hours": problem.limits.max_hours},
        plan=Plan(
            run_file=os.path.abspath(loaded.source),
            run_text=loaded.text,
            overrides=loaded.overrides,
            spec=spec.model_dump(mode="json"),
            made=now.isoformat(timespec="seconds"),
            settings=_settings(spec, work, chosen),
            chosen=plan_file.planned_way(work, chosen),
            chances=_chances(problem.limits, chosen),
            cheapest=plan_file.planned_way(work, outcome.cheapest),
            fastest=plan_file.planned_way(work, outcome.fastest),
            frontier=frontier,
            rejected=rejected,
            assumptions=(*assumptions(problem, here=here), *learned, *_of_place(loaded, work, chosen, environment)),
            bucket=bucket.requests(chosen.num_nodes, chosen.option.offer.gpus_per_node) if _in_bucket(spec) else None,
            storage=tuple(_storage(spec, problem, chosen)),
            why=tuple(why(problem, outcome, chosen)) if reasons else (),
            job=work.title,
            evaluated_settings=outcome.evaluated,
        ),
    )  # fmt: skip


def open_plan(path: str | Path, overrides: Sequence[str] = ()) -> Loaded:
    """The planned run, checked like any run file: for ``train`` and ``submit``.

    Raises:
        UsageError: it is not a plan, its run file has changed since, or ``overrides`` change it.
    """
    source = str(path)
    try:
        content = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {source}: {error}") from error
    result = plan_file.read(content, source=source)
    if overrides:
        raise UsageError(
            f"a plan is used unchanged, and {overrides[0]!r} would change it",
            hint=f"muster plan {text(result, 'run_file')} {' '.join(overrides)} --out {source}",
        )
    given = texts(result, "overrides")
    settings = plan_file.settings_as_overrides(child(result, "settings"))
    run_file = Path(text(result, "run_file"))
    items = child(result, "chosen", "step_s_by_item")
    planned = {name: float(value) for name, value in items.items() if isinstance(value, int | float)}
    if not run_file.exists():
        gone = f"{source} (its run file is gone)"
        return replace(load.loads(text(result, "run_text"), [*given, *settings], source=gone), planned_step_s=planned)
    now = load.load(run_file, given).spec.model_dump(mode="json")
    plan_file.check_fresh(result, now, source=source)
    return replace(load.load(run_file, [*given, *settings]), planned_step_s=planned)


def assumptions(problem: Problem, *, here: bool = False) -> list[str]:
    """What every figure of this plan rests on beyond the catalogue; ``here``: nothing is queued for or rented."""
    efficiency = problem.constants.efficiency
    origin = (
        "two runs on one H100, see docs/explanation/plan.md" if efficiency == DEFAULT.efficiency else "not calibrated"
    )
    if problem.sigma != STEP_SIGMA:
        origin = "calibrated here"
    arithmetic = f"matrices at {efficiency:.0%} of the measured matmul ceiling ({origin})"
    return [
        "modelled, unfitted, and no TPU was measured (docs/how-to/tpu.md)" if problem.tpus else arithmetic,
        "every token has a target and documents fill their sequences"
        if problem.work.document_length is None
        else f"documents of {problem.work.document_length} tokens",
        *([] if here else ["queueing time for machines is not known and not counted", _prices()]),
    ]


def _prices() -> str:
    return f"prices of {rows.table_date('accelerators.yaml')} and before, list prices without negotiated discounts"


def _of_place(loaded: Loaded, work: Workload, chosen: Candidate, environment: bool) -> Iterator[str]:
    """What the back end says of the run as it is planned: on the machine that was chosen."""
    notes = backends.get(loaded.spec.backend).market.notes
    if notes is None and not loaded.unnamed:
        return
    settings = plan_file.settings_as_overrides(_settings(loaded.spec, work, chosen))
    given = [*loaded.overrides, *settings]
    planned = load.loads(loaded.text, given, source=loaded.source, environment=environment, to_plan=True)
    if notes is not None:
        yield from notes(planned.spec, chosen.time.seconds, chosen.cost.usd_per_hour)
    if planned.unnamed:
        yield f"{', '.join(problem.key for problem in planned.unnamed)} will be named: a submit needs them"


def _in_bucket(spec: RunSpec) -> bool:
    """Runs on machines that Muster makes share a bucket and no folder."""
    return backends.get(spec.backend).provisioning.cluster is not None


def _storage(spec: RunSpec, problem: Problem, chosen: Candidate) -> Iterator[str]:
    if not _in_bucket(spec) or spec.model is None:
        return
    source = spec.model.source or ""
    size = rows.weights_bytes(source)
    weights = size and bucket.Weights(bytes_=size, from_hub=spec.model.weights == "hub")
    yield from bucket.advice(problem.work, chosen, weights or None, problem.constants)


def _load(run_file: str | Path, overrides: Sequence[str], environment: bool) -> tuple[Loaded, str | None]:
    """The checked file; and what is impossible about its limits (then it is loaded without them)."""
    try:
        return load.load(run_file, overrides, environment=environment, to_plan=True), None
    except RunFileError as error:
        wrong = [problem for problem in error.problems if problem.key in LIMITS]
        if not wrong or len(wrong) != len(error.problems):
            raise
        without = [override for override in overrides if override.partition("=")[0] not in LIMITS]
        loosened = [*without, *(f"{problem.key}=null" for problem in wrong)]
        loaded = load.load(run_file, loosened, environment=environment, to_plan=True)
        return loaded, "no plan fits: " + "; ".join(f"{problem.key} {problem.message}" for problem in wrong)


def on_device(loaded: Loaded, device: str) -> Loaded:
    """The run file for ``device``: where that is not its own, machines, layout and micro-batches are left to the plan.

    Raises:
        UsageError: the trainer on TPUs does not do what the run file asks for.
    """
    spec = loaded.spec
    if spec.resources.device == device or (spec.resources.device == "auto" and device != "tpu"):
        return loaded
    free = {"machine": None, "accelerator": None, "hosts": 1, "ranks_per_host": None, "usd_per_host_hour": None}
    changes: dict[str, object] = {
        "resources": spec.resources.model_copy(update={**free, "device": device, "reservation": None}),
        "parallelism": type(spec.parallelism)(),
    }
    if device == "tpu":
        changes["backend"] = "local"  # the only one that trains on them
    spec = spec.model_copy(update=changes)
    wrong = next(tpu_rules(spec), None)
    if wrong is not None:
        raise UsageError(f"{wrong.key}: {wrong.message}", hint=wrong.hint)
    left = ("parallelism", "training.micro_batch_size", "training.activation_checkpointing", "resources.hosts")
    keys = {path: ".".join(map(str, path)) for path in loaded.origins}
    kept = {path: origin for path, origin in loaded.origins.items() if not keys[path].startswith(left)}
    return replace(loaded, spec=spec, origins=kept)


def _chips(spec: RunSpec) -> list[RunFileProblem]:
    """Hosts whose chips ``parallelism.tp`` does not divide: all that are TPUs, or that the file names."""
    tp, asked = spec.parallelism.tp, spec.resources
    if asked.device != "tpu":
        return []
    named = (machine for name, machine in rows.machines().items() if not asked.machine or asked.machine == name)
    chips = sorted({each.count for each in named if each.topologies})
    if not chips or any(count % tp == 0 for count in chips):
        return []
    message = f"does not divide the chips of a host, of which there are {' or '.join(map(str, chips))}"
    return [RunFileProblem("parallelism.tp", message, value=tp, hint="tp is within a host")]


def _works(candidate: Candidate) -> str:
    cost = candidate.cost
    usd = f" for {format.dollars(cost.usd_p50)}" if cost.usd_p50 is not None else ""
    return f"the nearest plan that works: without that limit: {candidate.title}, {format.duration(cost.hours_p50)}{usd}"


def _problem(
    loaded: Loaded, work: Workload, now: datetime, home: Path | None, *, calibrated: bool
) -> tuple[Problem, tuple[str, ...]]:
    """What is searched, and what was learned of this user's machines and runs."""
    spec, found = loaded.spec, hardware(loaded.spec, home)
    tpus = spec.resources.device == "tpu"
    constants, sigma, run = ON_CPU if spec.resources.device == "cpu" else DEFAULT, STEP_SIGMA, None
    if calibrated and not tpus:
        constants, sigma, run = calibration_for(home, spec, work)
    constants = replace(constants, precision=spec.training.precision)
    problem = Problem(
        work=work,
        options=found.options,
        overhead=found.overhead,
        pins=pins_of(loaded),
        limits=limits_of(spec, now),
        reservation=spec.resources.reservation is not None,
        constants=constants,
        sigma=sigma,
        tpus=tpus,
    )
    return problem, (*([run] if run else ()), *found.notes)


def pins_of(loaded: Loaded) -> Pins:
    """What the file (or the command line) fixes; everything it leaves at its default is the plan's to choose."""
    spec = loaded.spec
    given = {".".join(str(part) for part in path) for path in loaded.origins}

    def fixed(key: str, value: Setting) -> Setting | None:
        return value if key in given else None

    return Pins(
        axes={axis: size for axis, size in spec.parallelism.axes.items() if f"parallelism.{axis}" in given},
        micro_batch_size=fixed("training.micro_batch_size", spec.training.micro_batch_size),
        activation_checkpointing=fixed("training.activation_checkpointing", spec.training.activation_checkpointing),
        num_nodes=fixed("resources.hosts", spec.resources.hosts),
        gpus_per_node=spec.resources.ranks_per_host if spec.resources.device not in ("cpu", "tpu") else None,
        machine=spec.resources.machine,
        accelerator=spec.resources.accelerator,
        mode=spec.resources.provisioning_model,
        locations=tuple(spec.resources.locations),
    )


def limits_of(spec: RunSpec, now: datetime) -> Limits:
    """The run file's limits, the deadline as hours from ``now``."""
    limits = Limits(max_usd=spec.limits.max_usd, max_hours=spec.limits.max_hours)
    if spec.limits.deadline is not None:
        left = (datetime.fromisoformat(spec.limits.deadline) - now).total_seconds() / 3600
        if limits.max_hours is None or left < limits.max_hours:
            return replace(limits, max_hours=left, hours_name="limits.deadline")
    return limits


def _settings(spec: RunSpec, work: Workload, chosen: Candidate) -> JsonObject:
    """What the plan sets; a run on this machine takes its layout alone, since a machine cannot be chosen there."""
    every = chosen.goodput.checkpoint_every_steps if work.checkpoint_every is None else None
    result = plan_file.settings_of(chosen, every_steps=every)
    able = backends.get(spec.backend).capabilities
    left_out = _ELSEWHERE if able.uses_this_machine else frozenset()
    if able.in_zones:  # the file's own are asked in its order; the price is theirs if they are of one region
        regions = {zone.rpartition("-")[0] for zone in spec.resources.locations}
        left_out = frozenset({"resources.locations", *(["resources.usd_per_host_hour"] if len(regions) > 1 else [])})
    return {key: value for key, value in result.items() if key not in left_out}


def settings_of(planned: Planned, candidate: Candidate) -> JsonObject:
    """Key of the run file -> value: what makes it the run of ``candidate``, which need not be the chosen one."""
    return _settings(planned.spec, planned.work, candidate)


def _chances(limits: Limits, chosen: Candidate) -> dict[str, float]:
    result = {}
    if limits.max_hours is not None:
        result["chance_in_time"] = likelihood(chosen.cost.hours_p50, chosen.cost.hours_p90, limits.max_hours)
    if limits.max_usd is not None and chosen.cost.usd_p50 and chosen.cost.usd_p90:
        result["chance_within_max_usd"] = likelihood(chosen.cost.usd_p50, chosen.cost.usd_p90, limits.max_usd)
    return result
