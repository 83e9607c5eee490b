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
    backend = backends.get(spec_of(run).backend)
    launcher = backends.load(backend.name)
    if launcher.exec is None:
        here = backend.capabilities.uses_this_machine
        raise UsageError(
            f"muster exec cannot reach hosts of the back end {backend.name!r}",
            hint=f"the run's folder is {run.path}" if here else "use the scheduler's own command",
        )
    if not argv:
        raise UsageError("no command", hint=f"muster exec {reference} -- bash")
    return launcher.exec(run.run_id, list(argv), terminal, host=host)
