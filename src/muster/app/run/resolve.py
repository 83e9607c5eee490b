"""What only the machines know of a run: its devices, its layout where the plan is to choose it, its price."""

from __future__ import annotations

from collections.abc import Callable

from muster import backends
from muster.app.planning.model_shape import unfit
from muster.app.planning.source_run import located, weights_of
from muster.backends.protocols import Launcher
from muster.config.spec import RunSpec
from muster.core.errors import RunFileError
from muster.policy.load import load_policy


def resolved(spec: RunSpec, launcher: Launcher) -> tuple[RunSpec, str | None]:
    """The spec with what the machines decide filled in, and its price where hosts are rented; why the layout that
    ``parallelism: auto`` became, if it was that.

    Raises:
        RunFileError: the spec does not fit the machines, or is of TPUs where none are made.
        UsageError: ``recovery.policy`` is not a policy, or no layout can be chosen.
        NoPlanError: no layout fits.
    """
    refuse(spec)
    here = backends.get(spec.backend).capabilities.uses_this_machine
    if here:
        load_policy(spec.recovery.policy)  # an unusable file is reported now, not by a supervisor in the background
    spec, why = launcher.resolve(spec), None
    if spec.parallelism.auto:  # the plan and the prices are imported by runs that need them, the example starts without
        from muster.app.planning.auto_layout import laid_out

        spec, why = laid_out(spec)
    if not here:
        from muster.app.planning.model_shape import weights_problems
        from muster.app.planning.prices import priced

        if problems := weights_problems(spec):
            raise RunFileError(problems)

        spec = priced(spec)
    return spec, why


def with_weights(spec: RunSpec, tell: Callable[[str], None]) -> RunSpec:
    """As ``export.with_weights``, which is imported where ``model.source`` names a run: it brings reports and cards."""
    if weights_of(spec) is None:
        return spec
    from muster.app.run import export

    return export.with_weights(spec, tell)


def refuse(spec: RunSpec) -> None:
    """Raises RunFileError: ``unfit``."""
    if problems := unfit(spec):
        raise RunFileError(problems)


def again(spec: RunSpec) -> RunSpec:
    """``resolved``, of a run that was submitted before."""
    return resolved(located(spec), backends.load(spec.backend))[0]
