"""Find a policy by name, or in the user's Python file."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path

from muster.core.errors import UsageError
from muster.core.types import Decision, Incident
from muster.policy.builtin import MAX_WAIT_S, SHIPPED
from muster.policy.cluster_state import Adjust, ClusterState, Policy


@dataclass(frozen=True)
class UserPolicy:
    """A user's module or object with the defaults for what it lacks."""

    given: object
    max_wait_s: float
    adjust: Adjust | None

    def decide(self, situation: ClusterState, incident: Incident) -> Decision:
        decision: Decision = self.given.decide(situation, incident)  # type: ignore[attr-defined]
        return decision


def complete(given: object) -> Policy:
    """A policy from anything that has ``decide(situation, incident)``."""
    wait_s = getattr(given, "max_wait_s", MAX_WAIT_S)
    usable = isinstance(wait_s, (int, float)) and wait_s > 0
    return UserPolicy(given, wait_s if usable else MAX_WAIT_S, getattr(given, "adjust", None))


def load_policy(name: str, *, max_wait_s: float | None = None) -> Policy:
    """A shipped policy, or the ``policy`` object (or ``decide`` function's module) of a ``.py`` file.

    ``max_wait_s``: another time for a shipped policy to wait for capacity.

    Raises:
        UsageError: no such policy; a file without ``decide``; a file that fails to import.
    """
    if name in SHIPPED:
        return SHIPPED[name] if max_wait_s is None else replace(SHIPPED[name], max_wait_s=max_wait_s)
    if not name.endswith(".py"):
        raise UsageError(
            f"recovery.policy: there is no policy {name!r}",
            hint=f"one of {', '.join(SHIPPED)}, or a Python file of your own",
        )
    path = Path(name)
    if not path.is_file():
        raise UsageError(f"recovery.policy: no file {name!r}")
    spec = importlib.util.spec_from_file_location("muster_user_policy", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"recovery.policy: {name} failed to import: {type(error).__name__}: {error}") from error
    given = getattr(module, "policy", module)
    if not callable(getattr(given, "decide", None)):
        raise UsageError(
            f"recovery.policy: {name} has no decide(situation, incident)", hint="see docs/explanation/recovery.md"
        )
    return complete(given)
