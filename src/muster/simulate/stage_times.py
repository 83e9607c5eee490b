"""Stage times: a shipped table with sources, or what a run's own log says. A stage is drawn, not fixed."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from statistics import fmean, median

from muster.config.yaml import parse
from muster.core.errors import UsageError
from muster.core.event_log import Damage
from muster.core.typed_json import JsonObject

#: Spread / mean of a stage whose spread no source gives.
ASSUMED_CV = 0.3
DEFAULT = "gpu-modelled"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage's time and where the figure comes from."""

    mean_s: float
    cv: float = ASSUMED_CV
    samples_s: tuple[float, ...] = ()
    """Measured times: drawn as they are, instead of a log-normal."""
    source: str = ""

    def draw(self, rng: random.Random) -> float:
        """One time, in seconds."""
        if self.samples_s:
            return rng.choice(self.samples_s)
        return log_normal(rng, self.mean_s, self.cv)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Stage name -> its time. ``detect_s``: measured detection by kind, where there is any."""

    name: str
    about: str = ""
    stages: Mapping[str, Stage] = field(default_factory=dict)
    detect_s: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    damaged: tuple[Damage, ...] = ()
    """Places of the measured run's event log that were left out."""

    def mean_s(self, stage: str) -> float:
        return self.stages[stage].mean_s if stage in self.stages else 0.0

    def draw(self, stage: str, rng: random.Random) -> float:
        return self.stages[stage].draw(rng) if stage in self.stages else 0.0


def log_normal(rng: random.Random, mean: float, cv: float) -> float:
    """A log-normal with this mean and spread / mean; the mean itself where either is 0."""
    if mean <= 0 or cv <= 0:
        return max(0.0, mean)
    sigma2 = math.log1p(cv * cv)
    return rng.lognormvariate(math.log(mean) - sigma2 / 2, math.sqrt(sigma2))


def shipped(name: str = DEFAULT) -> Profile:
    """A profile of the shipped table. Raises UsageError on a name that is none."""
    table = _table()
    if name not in table:
        raise UsageError(f"no profile {name!r}", hint=f"one of {', '.join(table)}, or a run with --profile RUN_DIR")
    rows = {stage: _stage(row) for stage, row in table[name].items() if isinstance(row, Mapping)}
    return Profile(name=name, about=str(table[name]["about"]), stages=rows)


@functools.cache
def _table() -> Mapping[str, JsonObject]:
    text = resources.files("muster.simulate").joinpath("tables", "profiles.yaml").read_text(encoding="utf-8")
    table = parse(text, source="profiles.yaml").value
    assert isinstance(table, Mapping)
    return {name: rows for name, rows in table.items() if isinstance(rows, Mapping)}


def _stage(row: JsonObject) -> Stage:
    mean_s, cv = row["mean_s"], row.get("cv", ASSUMED_CV)
    assert isinstance(mean_s, int | float) and isinstance(cv, int | float)
    return Stage(mean_s=mean_s, cv=cv, source=str(row["source"]))


def names() -> list[str]:
    return list(_table())


def constant(**mean_s: float) -> Profile:
    """Every stage takes the same time every time: for checks against formulas. Stages not given take none."""
    return Profile(
        name="constant", stages={name: Stage(mean_s=value, cv=0.0, source="given") for name, value in mean_s.items()}
    )


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """One healed incident as a run's log tells it, in seconds from its detection."""

    kind: str
    detect_s: float
    """From the fault to its detection."""
    started_s: float
    first_step_s: float


def measured(
    name: str,
    *,
    step_s: Sequence[float],
    recoveries: Sequence[Recovery],
    reference_s: float | None = None,
    agent_start_s: float | None = None,
    first_start_s: float | None = None,
) -> Profile:
    """The profile of a run's own log; stages that it never saw are taken from the shipped CPU or GPU table.
    ``step_s``: without each attempt's first. A step is what it takes at the reference rate (``reference_s``; else their
    median), and what they take beyond it on average is the overhead: stalls, waits for data, noise.
    ``agent_start_s``: from the first purchase until the first attempt could begin.

    Raises:
        UsageError: the log shows no step, or no recovery.
    """
    if not step_s or not recoveries:
        missing = "steps" if not step_s else "healed incidents"
        raise UsageError(f"{name}: the log shows no {missing} to measure a profile by", hint="muster drill makes some")
    step = reference_s or median(step_s)
    rest = shipped("cpu-measured" if step < 2 else DEFAULT)
    stages = dict(rest.stages)
    stages["step"] = Stage(
        mean_s=step,
        cv=0.0,
        source=f"{'at the reference rate' if reference_s else f'median of {len(step_s)} steps'} of {name}",
    )
    excess = max(0.0, fmean(step_s) / step - 1)
    stages["overhead"] = Stage(mean_s=excess, cv=0.0, source=f"mean of {len(step_s)} steps over that, {name}")
    seen = {
        "end": [recovery.started_s for recovery in recoveries],
        "start": [max(0.0, recovery.first_step_s - recovery.started_s - step) for recovery in recoveries],
    }
    for stage, values in seen.items():
        source = f"{len(values)} recoveries of {name}"
        stages[stage] = Stage(mean_s=fmean(values), samples_s=tuple(values), source=source)
    within = Stage(mean_s=0.0, cv=0.0, source=f"within start, {name}")
    stages |= {"warmup": within, "relayout": within}
    for stage, once_s in (("agent_start", agent_start_s), ("first_start", first_start_s)):
        if once_s is not None:
            stages[stage] = Stage(mean_s=once_s, cv=0.0, source=name)
    detect: dict[str, tuple[float, ...]] = {}
    for recovery in recoveries:
        detect[recovery.kind] = (*detect.get(recovery.kind, ()), recovery.detect_s)
    return Profile(name=name, about=f"measured in {name}", stages=stages, detect_s=detect)
