"""Slurm: what a cluster offers, the job that is sent, the programs that run in the allocation."""

from __future__ import annotations

from collections.abc import Sequence

from muster.backends.backend import Acceptance, Backend, Capabilities, Checks, Market, Provisioning, RenderedFiles, Site
from muster.backends.protocols import Launcher
from muster.backends.slurm.run_file_rules import rules
from muster.config.spec import RunSpec
from muster.core.typed_json import JsonObject
from muster.core.types import JobRequest, Offer


def _launcher() -> Launcher:
    """The launcher, over the Slurm commands of this machine."""
    from muster.backends.slurm.launcher import SlurmLauncher

    return SlurmLauncher()


#: A plan waits no longer for a controller.
LOOK_S = 5.0


def _look(spec: RunSpec) -> Sequence[Offer]:
    """The cluster's nodes as ``sinfo`` has them."""
    from muster.backends.slurm.commands import Slurm
    from muster.backends.slurm.launcher import SlurmLauncher

    return SlurmLauncher(slurm=Slurm(timeout_s=LOOK_S)).offers(spec)


def _script(spec: RunSpec, *, run_id: str, run_dir: str | None, options: JsonObject) -> RenderedFiles:
    from muster.backends.slurm.script import SCRIPT, script
    from muster.storage import run_registry

    run_dir = run_dir or str(run_registry.place(run_id, spec.run_dir))
    return RenderedFiles(files={SCRIPT: script(spec, run_id=run_id, run_dir=run_dir)})


def _blueprint(spec: RunSpec, *, run_id: str, run_dir: str | None, options: JsonObject) -> RenderedFiles:
    """A Cluster Toolkit blueprint of the cluster that the job runs on."""
    from muster.backends.slurm.toolkit.blueprint import blueprint

    return RenderedFiles(files=blueprint(spec))


def _access(spec: RunSpec, request: JobRequest) -> Sequence[str]:
    from muster.backends.slurm.access import look

    return look(spec, request)


def _rehearse(spec: RunSpec, *, machine: str | None = None, mode: str | None = None) -> RunSpec:
    from muster.backends.slurm.access import rehearse

    return rehearse(spec, machine=machine, mode=mode)


def _drain(node: str, reason: str) -> str:
    from muster.backends.slurm.commands import Slurm

    return Slurm().drain(node, reason)


def _site() -> Site:
    from muster.backends.slurm.trial_site import SlurmSite

    return SlurmSite()


BACKEND = Backend(
    name="slurm",
    launcher=_launcher,
    capabilities=Capabilities(ships_code=True),
    checks=Checks(
        rules=rules,
        image=lambda spec: spec.slurm.container.image if spec.slurm.container is not None else None,
        fixed_keys=("slurm",),
    ),
    market=Market(look=_look),
    formats={"yaml": _script, "toolkit": _blueprint},
    provisioning=Provisioning(drain=_drain),
    acceptance=Acceptance(access=_access, rehearse=_rehearse, site=_site),
)
