"""``parallelism: auto`` becomes a layout when a run starts: the plan's fastest that fits on the ranks it has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from muster import backends
from muster.app.planning.calibrate import calibration_for
from muster.app.planning.hardware import hardware
from muster.app.planning.model_shape import shape_of
from muster.catalog.offers import THIS_MACHINE, Option
from muster.config.spec import RunSpec
from muster.core.errors import UsageError
from muster.plan.auto_layout import LayoutChoice, compare_layouts, reason
from muster.plan.layouts import Pins
from muster.plan.search import Problem, excluded
from muster.plan.workload import workload


def laid_out(spec: RunSpec, home: Path | None = None) -> tuple[RunSpec, str | None]:
    """(``spec`` with the layout in place of ``auto``, why that one); unchanged, None where the file gives one.

    Raises:
        NoPlanError: no layout of its ranks fits.
        UsageError: it is not known what they run on.
    """
    if not spec.parallelism.auto:
        return spec, None
    tpu = spec.resources.device == "tpu"
    if tpu and spec.resources.machine is None:
        only = spec.model_copy(update={"parallelism": type(spec.parallelism)()})
        return only, "device tpu shards over all chips; tensor parallel is chosen where resources.machine is given"
    choices, option = compared(spec, home)
    why = reason(choices, option)
    best = choices[0]
    if tpu:  # ranks are hosts, and shard over all of them
        chosen = type(spec.parallelism)(tp=best.layout.tp)
        return spec.model_copy(update={"parallelism": chosen}), why
    update = {**best.layout.sizes, "reshard_after_forward": best.reshard_after_forward, "auto": False}
    return spec.model_copy(update={"parallelism": spec.parallelism.model_copy(update=update)}), why


def compared(spec: RunSpec, home: Path | None = None) -> tuple[list[LayoutChoice], Option]:
    """Every layout of the run's ranks, the one that ``auto`` takes first; and what they run on. Raises UsageError."""
    if spec.model is None:
        raise UsageError("parallelism: auto is of Muster's trainer, and the run file has a `command`")
    work = workload(spec, shape_of(spec), steps=spec.training.steps or 1)
    found = hardware(spec, home)
    constants, _, _ = calibration_for(home, spec, work)
    resources = spec.resources
    pins = Pins(
        gpus_per_node=resources.ranks_per_host if resources.device not in ("cpu", "tpu") else None,
        machine=resources.machine,
        accelerator=resources.accelerator,
        mode=resources.provisioning_model,
        locations=tuple(resources.locations),
    )
    reserved = resources.reservation is not None
    problem = Problem(work=work, options=found.options, pins=pins, reservation=reserved, tpus=resources.device == "tpu")
    option = _option(spec, problem)
    choices = compare_layouts(
        work, option, resources.hosts, micro_batch_size=spec.training.micro_batch_size,
        activation_checkpointing=spec.training.activation_checkpointing, overhead=found.overhead,
        constants=replace(constants, precision=spec.training.precision),
    )  # fmt: skip
    return choices, option


def _option(spec: RunSpec, problem: Problem) -> Option:
    """What the ranks run on: this machine, or the one that the run file names."""
    here = backends.get(spec.backend).capabilities.uses_this_machine and not problem.tpus
    if not here and spec.resources.machine is None:
        raise UsageError(
            "parallelism: auto needs to know the machine",
            hint="resources.machine, or `muster plan RUN.yaml --out PLAN.json`, which chooses one",
        )
    possible = (option for option in problem.options if here or excluded(problem, option) is None)
    option = next(possible, None)
    if option is None or (here and option.offer.machine != THIS_MACHINE):
        raise UsageError(
            "parallelism: auto does not know what these ranks run on", hint="give parallelism.dp_replicate or dp_shard"
        )
    return option
