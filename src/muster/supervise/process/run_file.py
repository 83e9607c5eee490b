"""The run file as the supervisor's process finds it in the run's folder."""

from __future__ import annotations

from pathlib import Path

from muster.config.spec import RunSpec
from muster.core import resolved_file
from muster.core.errors import MusterError, UsageError
from muster.core.processes import read_plain
from muster.core.resolved_file import DamagedRunFile
from muster.core.typed_json import parse_object
from muster.policy.load import load_policy
from muster.supervise.recovery.inputs import RestartRequest, Settings

#: What hosts need to capture their ranks (``agent.evidence``: 0.2 s at most) and to answer.
GATHER_EVIDENCE_S = 0.3


def read_run_id(run_dir: Path) -> str:
    """Of the run in ``run_dir``."""
    return str(parse_object(read_plain(run_dir / "job.json"))["run_id"])


def read_spec(run_dir: Path) -> RunSpec:
    """As it is now: a restart may have changed it. Raises OSError, ValueError."""
    return RunSpec.model_validate_json(resolved_file.read(run_dir))


def repair(run_dir: Path, spec: RunSpec) -> str | None:
    """Write ``resolved.json`` again from ``spec`` where it is damaged or gone; returns what was wrong.

    A disk that does not answer, or takes nothing, is no damage: the next call finds out.
    """
    try:
        resolved_file.read(run_dir)
        return None
    except DamagedRunFile as error:
        found = f"{error} (kept as {resolved_file.DAMAGED})"
    except FileNotFoundError:
        found = f"{run_dir / resolved_file.NAME} is gone"
    except OSError:
        return None
    if not (run_dir / "job.json").exists():  # not the file but the folder, or its disk, is away
        return None
    try:
        resolved_file.set_aside(run_dir)
        resolved_file.write(run_dir, spec.model_dump_json(indent=1) + "\n")
    except OSError:
        return None
    return f"{found}: it was written again from what this supervisor holds"


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
