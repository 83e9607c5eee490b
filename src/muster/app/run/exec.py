"""A command on a host of a run: a look around, a shell. Its output is the user's, its exit code comes back."""

from __future__ import annotations

from collections.abc import Sequence

from muster import backends
from muster.app.inspect.status import spec_of
from muster.backends.protocols import Terminal
from muster.core.errors import UsageError
from muster.storage import run_registry


def execute(reference: str, argv: Sequence[str], terminal: Terminal, *, host: int | None = None) -> int:
    """Run ``argv`` on a host of the run (default: its first) and return the command's exit code.

    Raises:
        UsageError: no such run or host, no command, or a back end whose hosts are reached otherwise.
        BackendError: no host runs, or the connection broke.
    """
    run = run_registry.find(reference)
    launcher = backends.load(spec_of(run).backend)
    there = getattr(launcher, "exec", None)
    if there is None:
        raise UsageError(
            f"muster exec cannot reach hosts of the back end {launcher.name!r}",
            hint=f"the run's folder is {run.path}" if launcher.name == "local" else "use the scheduler's own command",
        )
    if not argv:
        raise UsageError("no command", hint=f"muster exec {reference} -- bash")
    code: int = there(run.run_id, list(argv), terminal, host=host)
    return code
