"""The run file as the supervisor's process finds it in the run's folder."""

from __future__ import annotations

import json
from pathlib import Path

from muster.config.spec import RunSpec
from muster.core.errors import MusterError, UsageError
from muster.policy.load import load_policy
from muster.supervise.recovery.inputs import RestartRequest, Settings

#: What hosts need to capture their ranks (``agent.evidence``: 0.2 s at most) and to answer.
GATHER_EVIDENCE_S = 0.3


def read_run_id(run_dir: Path) -> str:
    """Of the run in ``run_dir``."""
    return str(json.loads((run_dir / "job.json").read_text())["run_id"])


def read_spec(run_dir: Path) -> RunSpec:
    """As it is now: a restart may have changed it. Raises OSError, ValueError."""
    return RunSpec.model_validate_json((run_dir / "resolved.json").read_text())


def corrected(run_dir: Path, run_id: str) -> tuple[RunSpec, RestartRequest]:
    """The run file as it is now, and the request to start again with it.

    Raises:
        UsageError: there is a mistake in it or in its policy, in one line.
    """
    try:
        spec = read_spec(run_dir)
        policy = load_policy(spec.recovery.policy)
    except (MusterError, ValueError, OSError) as error:
        raise UsageError(str(error)[:500]) from error
    return spec, RestartRequest(settings=settings_of(spec, run_id=run_id, run_dir=run_dir), policy=policy)


def settings_of(spec: RunSpec, *, run_id: str, run_dir: Path) -> Settings:
    """What the state machine needs of it."""
    return Settings(
        spec=spec,
        run_id=run_id,
        run_dir=str(run_dir),
        ranks_per_host=spec.resources.ranks_per_host or 1,
        usd_per_host_hour=spec.resources.usd_per_host_hour,
        gather_evidence_s=GATHER_EVIDENCE_S,
    )
