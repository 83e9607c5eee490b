"""What a sweep is, as it was typed: checked whole before anything is begun, and compared with what its folder holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from muster import backends
from muster.app.inspect.compare import differences, flat
from muster.app.sweep import ranges
from muster.app.sweep.optimizer import PRUNERS, SAMPLERS
from muster.app.sweep.ranges import Over
from muster.config.load import Loaded, load
from muster.core import environment
from muster.core.errors import UsageError
from muster.core.typed_json import Json, JsonObject, parse_object
from muster.storage import run_registry, sweep_record
from muster.storage.sweep_record import SweepRecord, TrialRecord

EVALUATIONS = 10
"""Of a trial, where the run file evaluates at its end only: nothing could be ended early."""
CHANGEABLE = ("run_dir", "limits", "output", "metrics", "recovery")
"""Sections that may differ when a sweep goes on."""


@dataclass(frozen=True, kw_only=True)
class Definition:
    """A sweep, as it was typed."""

    folder: Path
    loaded: Loaded
    """The run file without the values of any trial."""
    over: tuple[Over, ...]
    trials: int
    parallel: int
    sampler: str
    pruner: str
    seed: int
    places: str
    """``run_dir`` of a trial, without its number."""
    shares: tuple[str, ...] = ()
    """``CUDA_VISIBLE_DEVICES`` of trials that run at the same time on this machine; empty: not set."""
    notes: tuple[str, ...] = ()
    """What was decided, for people."""

    @property
    def name(self) -> str:
        return self.loaded.spec.name

    def record(self) -> SweepRecord:
        """What the folder holds of this sweep, or a new record, which is written.

        Raises:
            UsageError: the folder holds another sweep.
        """
        new = SweepRecord(
            name=self.name,
            run_file=parse_object(self.loaded.spec.model_dump_json()),
            over=tuple(each.to_json() for each in self.over),
            sampler=self.sampler,
            pruner=self.pruner,
            seed=self.seed,
        )
        held = sweep_record.read(self.folder)
        if held is None:
            sweep_record.write(self.folder, new)
            return new
        if changed := _changed(held, new):
            raise UsageError(
                f"{self.folder} holds another sweep: {changed}",
                hint="type it as it was to go on with it, or begin a new one with run_dir=ANOTHER_FOLDER",
            )
        return replace(held, run_file=new.run_file)

    def of(self, trial: TrialRecord, limits: Sequence[str]) -> Loaded:
        """The run file of this trial. Raises RunFileError: it does not take these values together."""
        named = (f"name={self.name[:50]}-t{trial.number:03d}", f"run_dir={self.places}{trial.number:03d}")
        values = [ranges.override(key, value) for key, value in trial.values.items()]
        return load(self.loaded.source, [*self.loaded.overrides, *values, *named, *limits])

    def in_words(self, values: Mapping[str, Json]) -> str:
        """``learning_rate 0.000312, global_batch_size 16``."""
        return ", ".join(f"{key.rpartition('.')[2]} {short(value)}" for key, value in values.items())


def define(
    run_file: str,
    overrides: Sequence[str],
    over: Sequence[str],
    *,
    trials: int,
    parallel: int = 1,
    sampler: str = "tpe",
    pruner: str = "median",
    seed: int = 0,
) -> Definition:
    """Check all of a sweep. Reads files and looks at this machine; writes nothing.

    Raises:
        UsageError: something in it cannot be. RunFileError: the run file takes no such key or value.
    """
    for given, known, flag in ((sampler, SAMPLERS, "--sampler"), (pruner, PRUNERS, "--pruner")):
        if given not in known:
            raise UsageError(f"{flag} {given!r} is none of {', '.join(known)}")
    parsed = ranges.parse(over, run_file, overrides)
    loaded = load(run_file, overrides)
    backend = backends.get(loaded.spec.backend)
    launcher = backends.load(loaded.spec.backend)
    run_dir, notes = loaded.spec.run_dir, list[str]()
    if launcher.remote is not None and run_dir is None:
        raise UsageError("the trials of a sweep need a run_dir in a bucket", hint="run_dir=gs://BUCKET/FOLDER")
    folder = sweep_record.place(loaded.spec.name)
    if run_dir is not None and launcher.remote is None:
        folder = run_registry.place("", run_dir)
    spec = loaded.spec
    if pruner != "none" and spec.command is None and not spec.evaluation.every_steps and (spec.training.steps or 0) > 1:
        every = max(1, (spec.training.steps or 0) // EVALUATIONS)
        loaded = load(run_file, [*overrides, f"evaluation.every_steps={every}"])
        notes.append(f"evaluation.every_steps is {every} in every trial: a trial is judged by its held-out loss")
    shares = _shares(loaded, parallel) if backend.capabilities.uses_this_machine else ()
    return Definition(
        folder=folder, loaded=loaded, over=parsed, trials=trials, parallel=parallel, sampler=sampler, pruner=pruner,
        seed=seed, places=f"{run_dir.rstrip('/') if run_dir else folder}/trial-", shares=shares, notes=tuple(notes),
    )  # fmt: skip


def short(value: Json) -> str:
    """A value in few characters: numbers with four digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _shares(loaded: Loaded, parallel: int) -> tuple[str, ...]:
    """This machine's GPUs in equal parts. Raises UsageError: there are too few."""
    spec = loaded.spec
    (offer,) = backends.load(spec.backend).offers(spec)
    if parallel == 1 or offer.gpus_per_node == 0 or spec.resources.device == "cpu":
        return ()
    visible = environment.inherited().get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(index) for index in range(offer.gpus_per_node)]
    each = len(gpus) // parallel
    needed = (spec.resources.ranks_per_host or 1) * (spec.resources.hosts + spec.resources.spare_hosts)
    if each < needed:
        raise UsageError(
            f"{parallel} trials at a time need {parallel * needed} GPUs, and this machine has {len(gpus)}",
            hint=f"--parallel {max(1, len(gpus) // needed)}",
        )
    return tuple(",".join(gpus[index * each : (index + 1) * each]) for index in range(parallel))


def _changed(held: SweepRecord, new: SweepRecord) -> str | None:
    """What is not as it was, the first thing; None: the same sweep."""
    for what in ("sampler", "pruner", "seed"):
        before, now = getattr(held, what), getattr(new, what)
        if before != now:
            return f"its {what} is {before}, not {now}"
    if list(held.over) != list(new.over):
        return f"it varies {_over_words(held.over)}, not {_over_words(new.over)}"
    files = [dict(flat(record.run_file)) for record in (held, new)]
    for key, (before, now) in differences(files).items():
        if key.partition(".")[0] not in CHANGEABLE:
            return f"its {key} is {short(before)}, not {short(now)}"
    return None


def _over_words(over: Sequence[JsonObject]) -> str:
    return "; ".join(
        f"{each['key']}={each['choices']}" if "choices" in each else f"{each['key']}={each['low']}..{each['high']}"
        for each in over
    )
