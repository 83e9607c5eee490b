"""Optuna, asked for the next trial's values and for whether a trial is worth going on with. Imported by a sweep alone.

The study is in memory and is rebuilt, from the sweep's record and the runs' events, whenever a sweep goes on:
there is no second file that could disagree with them.
"""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from muster.app.sweep.ranges import Over
from muster.core.errors import UsageError, install_command
from muster.core.typed_json import Json

SAMPLERS = ("tpe", "random", "grid")
PRUNERS = ("median", "halving", "hyperband", "none")
SPREAD_TRIALS = 10
"""The model of Optuna's TPE begins with so many trials (its own ``n_startup_trials``)."""
STARTUP_TRIALS = 4
"""With so many complete ones the median begins to end others."""


def random_place(seed: int, number: int, index: int, *, of: int) -> float:
    """Coordinate ``index`` of trial ``number`` in [0, 1), independent of all others."""
    return Random(f"muster-sweep-{seed}-{index}-{number}").random()


def spread_place(seed: int, number: int, index: int, *, of: int) -> float:
    """Coordinate ``index`` of trial ``number``, of a sequence that fills the cube of ``of`` coordinates evenly.

    Roberts' additive recurrence (R_d, 2018): steps of the powers of 1/phi, phi the positive root of x^(d+1) = x + 1;
    of one coordinate the golden ratio. The seed moves the whole sequence.
    """
    phi = 2.0
    for _ in range(40):  # a contraction: the error at least halves each time
        phi = (1 + phi) ** (1 / (of + 1))
    return (random_place(seed, 0, index, of=of) + number * phi ** -(index + 1)) % 1.0


class Optimizer:
    """A study. Trials are numbered from 0, in the order of ``known`` and ``next``.

    Raises:
        UsageError: optuna is not installed, or the sampler does not fit the ranges.
    """

    def __init__(self, over: Sequence[Over], *, sampler: str, pruner: str, seed: int, parallel: int) -> None:
        try:
            import optuna
        except ImportError as error:
            raise UsageError("muster sweep needs optuna", hint=install_command("sweep")) from error
        self._optuna: Any = optuna
        self._sampler, self._seed, self._parallel = sampler, seed, parallel
        self._over = {each.key: each for each in over}
        self._grid = list(itertools.product(*(each.every() for each in over))) if sampler == "grid" else None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
        self._distributions = {each.key: self._distribution(each) for each in over}
        self._study = optuna.create_study(study_name="sweep", direction="minimize", pruner=self._pruner(pruner))
        self._trials: list[Any] = []

    def known(self, values: Mapping[str, Json]) -> None:
        """A trial that was begun before."""
        chosen = {key: json.dumps(value) if self._over[key].choices else value for key, value in values.items()}
        self._study.enqueue_trial(chosen)
        self._ask()

    def next(self) -> dict[str, Json] | None:
        """The values of a new trial, from the seed, its number and what is known of the others; None: a grid's end.

        Optuna's TPE alone chooses by what is known, and only after SPREAD_TRIALS: its own first trials are random ones,
        here from generators of neighbouring seeds, whose first four numbers lie in an eighth of the range.
        """
        if self._grid is not None:
            if len(self._trials) >= len(self._grid):
                return None
            values = dict(zip(self._over, self._grid[len(self._trials)], strict=True))
            self.known(values)
            return values
        number = len(self._trials)
        if self._sampler == "random" or number < SPREAD_TRIALS:
            place = random_place if self._sampler == "random" else spread_place
            values = {
                key: over.at(place(self._seed, number, index, of=len(self._over)))
                for index, (key, over) in enumerate(self._over.items())
            }
            self.known(values)
            return values
        params = self._ask().params
        return {key: json.loads(params[key]) if over.choices else params[key] for key, over in self._over.items()}

    def report(self, number: int, step: int, loss: float) -> bool:
        """A trial's held-out loss after a step, once a step; whether the trial should be ended now."""
        trial = self._trials[number]
        trial.report(loss, step)
        return bool(trial.should_prune())

    def end(self, number: int, loss: float | None, *, pruned: bool = False) -> None:
        """The trial is over; without a loss it has failed."""
        state = self._optuna.trial.TrialState
        if pruned:
            self._study.tell(self._trials[number], state=state.PRUNED)
        elif loss is None:
            self._study.tell(self._trials[number], state=state.FAIL)
        else:
            self._study.tell(self._trials[number], loss)

    def _ask(self) -> Any:
        # A sampler of its own for each trial: asked again after a restart, it says the same.
        # Trials that still run count as bad ones: parallel trials stay apart.
        self._study.sampler = self._optuna.samplers.TPESampler(
            seed=self._seed + len(self._trials), multivariate=True, constant_liar=self._parallel > 1
        )
        self._trials.append(self._study.ask(self._distributions))
        return self._trials[-1]

    def _pruner(self, name: str) -> Any:
        pruners = self._optuna.pruners
        return {
            "median": lambda: pruners.MedianPruner(n_startup_trials=STARTUP_TRIALS),
            "halving": pruners.SuccessiveHalvingPruner,
            "hyperband": pruners.HyperbandPruner,
            "none": pruners.NopPruner,
        }[name]()

    def _distribution(self, over: Over) -> Any:
        kinds = self._optuna.distributions
        if over.choices:  # as JSON: to Optuna, true and 1 are the same value, and a list is none
            return kinds.CategoricalDistribution([json.dumps(choice) for choice in over.choices])
        if over.whole:
            return kinds.IntDistribution(int(over.low), int(over.high), log=over.log, step=int(over.step or 1))
        return kinds.FloatDistribution(over.low, over.high, log=over.log, step=over.step)
