"""Find a policy by name, or in the user's Python file."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import cast

from muster.core.errors import UsageError
from muster.policy.builtin import SHIPPED
from muster.policy.cluster_state import Policy


def load_policy(name: str) -> Policy:
    """A shipped policy, or the ``policy`` object (or ``decide`` function's module) of a ``.py`` file.

    Raises:
        UsageError: no such policy; a file without ``decide``; a file that fails to import.
    """
    if name in SHIPPED:
        return SHIPPED[name]
    if not name.endswith(".py"):
        raise UsageError(
            f"recovery.policy: {name!r} is no policy", hint=f"one of {', '.join(SHIPPED)}, or a Python file of yours"
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
    found = getattr(module, "policy", module)
    if not callable(getattr(found, "decide", None)):
        raise UsageError(f"recovery.policy: {name} has no decide(situation, incident)", hint="see docs/recovery.md")
    return cast(Policy, found)
