"""Calibrate: fit the plan's constant to a run that was measured, and keep it for later plans."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from muster import backends
from muster.app.planning.model_shape import shape_of
from muster.catalog import offers, rows
from muster.catalog.devices import accelerator_of
from muster.catalog.offers import Option
from muster.catalog.rows import Accelerator
from muster.config.load import first_problem
from muster.config.spec import RunSpec
from muster.core import environment, event_log, resolved_file
from muster.core.errors import MusterError, UsageError
from muster.core.event_details.attempts import AttemptStarted
from muster.core.event_details.training import ModelReady, Step
from muster.core.event_log import Damage
from muster.core.events import Event
from muster.core.flops import ModelShape
from muster.core.layout import Layout, layout_for
from muster.core.typed_json import JsonObject, Record, Unreadable, decode
from muster.plan.calibrate import Calibration, calibrate
from muster.plan.constants import DEFAULT, ON_CPU, Constants
from muster.plan.cost import CALIBRATED_SIGMA, STEP_SIGMA
from muster.plan.memory import CUDA, memory
from muster.plan.workload import Setting, Workload, workload
from muster.storage import run_registry

FILE = "calibration.json"
#: What a calibration on another chip is still worth.
OTHER_CHIP_SIGMA = 0.10
#: Efficiencies of a GPU that its work keeps busy; a run below is held up by its host, one above was read wrongly.
LIKELY = (0.3, 1.2)
#: A run calibrates plans of models up to so many times larger or smaller.
SIMILAR = 10.0
#: A CPU core's share of memory bandwidth; only its order of magnitude matters next to the fitted constant.
CPU_BYTES_PER_S = 10e9


@dataclass(frozen=True, kw_only=True)
class Entry(Record):
    """One run's calibration as ``calibration.json`` keeps it."""

    accelerator: str
    parameters: int
    lora: bool
    run_id: str
    made: str
    efficiency: float
    measured_step_s: float
    predicted_step_s: float
    steps: int
    spread: float
    off: float
    machine: str = ""
    layout: Mapping[str, int] = field(default_factory=dict)
    memory_bytes: int | None = None
    """The most that torch held on the rank that reports; of an older entry unknown."""
    planned_memory_bytes: int | None = None
    stall_share: float = 0.0
    """Of a step, held by snapshots and saves."""

    @property
    def sentence(self) -> str:
        """How far off the plan was for this run."""
        axes = " x ".join(f"{axis} {size}" for axis, size in self.layout.items() if size > 1) or "one rank"
        held = ""
        if self.memory_bytes and self.planned_memory_bytes:
            held = f", memory {self.planned_memory_bytes / self.memory_bytes - 1:+.0%}"
        where = self.machine or self.accelerator
        stalls = f", stalls {self.stall_share:.0%} of a step" if self.stall_share >= 0.005 else ""
        off = f"{self.off:+.0%} of a step{held}{stalls}"
        return f"calibrated by {self.run_id} on {where} ({axes}): its plan was off by {off}"


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    run_id: str
    accelerator: str
    path: Path
    calibration: Calibration
    damaged: tuple[Damage, ...] = ()
    """Places of the run's event log that were left out."""

    def to_json(self) -> JsonObject:
        return {
            "run_id": self.run_id,
            "accelerator": self.accelerator,
            "path": str(self.path),
            **asdict(self.calibration),
            "off": self.calibration.off,
            "damaged": [damage.to_json() for damage in self.damaged],
        }


def calibrate_run(
    run_dir: str | Path, *, home: Path | None = None, accelerator: str | None = None, automatic: bool = False
) -> Calibrated:
    """Fit to the steps of a run in ``run_dir`` and write the constant to ``<home>/calibration.json``. ``accelerator``:
    what the driver calls the run's GPUs, where its file does not say. ``automatic``: only by steps that say much.

    Raises:
        UsageError: the folder holds no run with steps, or they cannot be explained.
    """
    home = home or run_registry.home()
    path = Path(run_dir)
    try:
        spec = RunSpec.model_validate_json(resolved_file.read(path))
    except OSError as error:
        raise UsageError(f"{path} is not a run: {error.strerror}", hint="give a run's id or its folder") from error
    except ValueError as error:
        raise UsageError(f"{path / 'resolved.json'} cannot be taken: {first_problem(error)}") from error
    damaged: list[Damage] = []
    events = event_log.merged(path / "events", on_damage=damaged.append)
    steps = [event for event in events if event.kind == Step.kind]
    layout = layout_of(events, spec)
    work = replace(workload(spec, shape_of_run(path, spec, events)), checkpoint_every=0)
    setting = Setting(
        layout=layout,
        micro_batch_size=spec.training.micro_batch_size,
        activation_checkpointing=spec.training.activation_checkpointing,
    )
    option = option_of(events, spec, layout, accelerator)
    result = calibrate(work, setting, option, spec.resources.hosts, _seconds(steps), _shipped(spec))
    if automatic and not (LIKELY[0] < result.efficiency < LIKELY[1] and steps[0].attempt == steps[-1].attempt):
        raise UsageError(f"the steps of {path} say too little: more than one attempt, or an unlikely efficiency")
    run_id = steps[0].run_id
    file = home / FILE
    entry = Entry(
        accelerator=option.accelerator.name,
        parameters=work.shape.parameters,
        lora=work.lora_rank > 0,
        run_id=run_id,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        **asdict(result),
        off=result.off,
        machine=spec.resources.machine or "",
        layout={axis: size for axis, size in layout.sizes.items() if size > 1},
        **_memory(steps, work, setting, option),
        stall_share=_stalls(steps),
    )
    kept = [row for row in _read(file) if row.run_id != run_id]
    run_registry.make_folder(home)
    run_registry.replace_text(file, json.dumps([asdict(row) for row in (*kept, entry)], indent=1) + "\n")
    name = option.accelerator.name
    return Calibrated(run_id=run_id, accelerator=name, path=file, calibration=result, damaged=tuple(damaged))


def keep(run_dir: Path, spec: RunSpec) -> None:
    """Calibrate by a run on GPUs that has ended well, where it can be; never in CI (the environment's ``CI``).

    Not by runs whose steps say little: those that changed size, that learn from preferences (the plan does not count
    their other passes), or that the host held up (a tiny model). Runs on a CPU are asked for (``muster calibrate``):
    what else its cores do is in their steps.
    """
    if spec.model is None or spec.training.objective is not None or environment.inherited().get("CI"):
        return
    with contextlib.suppress(MusterError, OSError):
        [offer] = backends.get(spec.backend).launcher().offers(spec)
        calibrate_run(run_dir, accelerator=offer.accelerator, automatic=True)


def calibration_for(home: Path | None, spec: RunSpec, work: Workload) -> tuple[Constants, float, str | None]:
    """Constants, the step time's uncertainty, and what they rest on for a plan: calibrated on this chip, on another, or
    not at all (None).

    CPU runs do not speak for GPUs, nor those for a run on CPU.
    """
    on_cpu = spec.resources.device == "cpu"
    kept = _read((home or run_registry.home()) / FILE)
    entries = [row for row in kept if (row.accelerator not in rows.accelerators()) == on_cpu]
    if not on_cpu:  # a small model is held up by its host, which says nothing of a large one
        near = SIMILAR * work.shape.parameters
        entries = [row for row in entries if work.shape.parameters / SIMILAR <= row.parameters <= near]
    if not entries:
        return _shipped(spec), STEP_SIGMA, None
    accelerator = "cpu" if on_cpu else (spec.resources.accelerator or "").lower()

    def distance(entry: Entry) -> tuple[bool, bool, float]:
        ratio = entry.parameters / work.shape.parameters
        return (entry.accelerator.lower() != accelerator, entry.lora != (work.lora_rank > 0), max(ratio, 1 / ratio))

    best = min(entries, key=distance)
    sigma = CALIBRATED_SIGMA if best.accelerator.lower() == accelerator else OTHER_CHIP_SIGMA
    return replace(_shipped(spec), efficiency=best.efficiency), sigma, best.sentence


def _shipped(spec: RunSpec) -> Constants:
    return ON_CPU if spec.resources.device == "cpu" else DEFAULT


def layout_of(events: Iterable[Event], spec: RunSpec) -> Layout:
    """The layout that ran: an event says it, or the run file's axes fill the ranks."""
    for event in events:
        if event.kind == AttemptStarted.kind:
            return Layout.of(event.read(AttemptStarted).layout)
    ranks = (spec.resources.ranks_per_host or 1) * spec.resources.hosts
    return layout_for(spec.rank_axes, ranks, resize=True) or Layout()


def shape_of_run(path: Path, spec: RunSpec, events: Iterable[Event]) -> ModelShape:
    """The shape of the model that ran; a trained tokenizer's real size where it is known."""
    shape = shape_of(spec)
    for event in events:
        total = event.read(ModelReady).parameters if event.kind == ModelReady.kind else shape.parameters
        if total != shape.parameters:
            columns = 1 if shape.tied else 2
            vocab = shape.vocab + round((total - shape.parameters) / (columns * shape.hidden))
            return shape.with_vocab(vocab) if vocab > 0 else shape
    return shape


def option_of(events: Iterable[Event], spec: RunSpec, layout: Layout, accelerator: str | None = None) -> Option:
    """The hardware that ran, as something to plan with: a catalogue chip, or this CPU at its measured matmul rate."""
    name = spec.resources.accelerator or accelerator or ""
    chip = next((chip_row for chip_row in rows.accelerators().values() if chip_row.name.lower() == name.lower()), None)
    chip = chip or accelerator_of(name)
    machine = rows.machines().get(spec.resources.machine or "")
    if chip is not None and machine is not None:
        return offers.option(machine, rows.modes()["owned"], "here", None)
    ready = (event.read(ModelReady) for event in events if event.kind == ModelReady.kind)
    peak = next((detail.peak_flops for detail in ready if detail.peak_flops is not None), None)
    if chip is None and (peak is None or spec.resources.device == "cuda"):
        raise UsageError(
            "the run does not say what it ran on, nor a measured matmul rate",
            hint="set resources.accelerator (for example H200) in its run file",
        )
    chip = chip or cpu(peak or 0.0, origin="measured by the run")
    hosts = spec.resources.hosts
    return offers.this_machine(
        chip, gpus=layout.world_size // hosts or 1, memory_bytes=chip.memory_bytes, usd_per_hour=0.0, hosts=hosts
    )


def cpu(matmul_flops: float, *, origin: str, memory_bytes: int = 0) -> Accelerator:
    """A rank's share of this machine's cores as something to plan with."""
    return Accelerator(
        name="CPU", kind="cpu", memory_bytes=memory_bytes, memory_bytes_per_s=CPU_BYTES_PER_S,
        peak_flops={"bf16": matmul_flops}, matmul_flops={"bf16": matmul_flops}, origin=origin, reliability="measured",
    )  # fmt: skip


def _seconds(steps: Iterable[Event]) -> list[float]:
    """Each step's time once, in the order they were made."""
    by_step: dict[int, float] = {}
    for event in steps:
        if event.step is not None:
            by_step[event.step] = event.read(Step).step_ns / 1e9
    if not by_step:
        raise UsageError("the run has no steps", hint="calibrate with a run of at least 6 steps")
    return [by_step[step] for step in sorted(by_step)]


def _memory(steps: Iterable[Event], work: Workload, setting: Setting, option: Option) -> dict[str, int]:
    """What torch held at most, and what the plan has for it."""
    seen = [held for event in steps if (held := event.read(Step).memory_bytes) is not None]
    if not seen or option.accelerator.kind != "gpu":
        return {}
    device = replace(CUDA, capacity_bytes=option.offer.gpu_memory_bytes, context_bytes=0, fragmentation=0.0)
    items = memory(work, setting, device).items
    planned = sum(size for name, size in items.items() if name not in ("communicators", "standby"))
    return {"memory_bytes": max(seen), "planned_memory_bytes": planned}


def _stalls(steps: Iterable[Event]) -> float:
    seen = [event.read(Step) for event in steps]
    return sum(step.stall_ns or 0 for step in seen) / max(1, sum(step.step_ns for step in seen))


def _read(path: Path) -> tuple[Entry, ...]:
    if not path.exists():
        return ()
    try:
        return decode(tuple[Entry, ...], path.read_bytes())
    except Unreadable as error:
        raise UsageError(f"{path} is unreadable: {error}", hint="remove it and calibrate again") from error
