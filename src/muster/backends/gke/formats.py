"""The formats of ``muster render`` for GKE: the manifests as they are sent, or a Helm chart of them."""

from __future__ import annotations

from collections.abc import Mapping

from muster.backends.backend import RenderedFiles
from muster.backends.gke.manifests import yaml_text
from muster.backends.gke.manifests.helm_chart import chart
from muster.backends.gke.manifests.kueue_configuration import GATES, WAIT
from muster.backends.gke.manifests.placement import Options, Placement, place
from muster.backends.gke.manifests.render import cluster_objects, render
from muster.backends.gke.manifests.spec_rules import findings, refuse
from muster.backends.gke.provision.access import services
from muster.backends.gke.provision.inventory.resource_names import Site, site
from muster.backends.gke.provision.software import wanted_software
from muster.backends.gke.provision.up import resources
from muster.backends.google.project import terraform
from muster.catalog import gke as catalogue
from muster.config.spec import RunSpec
from muster.core.errors import UsageError
from muster.core.typed_json import Json, JsonObject, child, convert, text

CHART = "muster-queue"


def rendered(form: str, spec: RunSpec, *, run_id: str, run_dir: str | None, options: JsonObject) -> RenderedFiles:
    """``form`` is ``yaml``, ``helm`` or ``terraform``; ``options`` are fields of ``Options``.

    Raises:
        RunFileError: rules across keys are broken, each with its reason.
        UsageError: what the form cannot say, or the place is not named.
    """
    chosen = convert(Options, options)
    run_dir = run_dir or spec.run_dir or f"/muster-runs/{run_id}"
    placement = place(spec, run_id=run_id, run_dir=run_dir, options=chosen)
    if placement.slices and form != "yaml":
        raise UsageError(f"slices of TPUs are not rendered as {form} yet", hint="--format yaml, or muster up")
    if form == "terraform":
        refuse(placement)
        files: Mapping[str, str] = terraform_files(placement)
    elif form == "helm":
        files = chart(spec, run_id=run_id, run_dir=run_dir, options=chosen)
    else:
        files = render(spec, run_id=run_id, run_dir=run_dir, options=chosen).files
    return RenderedFiles(files=files, warnings=tuple(finding.problem for finding in findings(placement)))


def terraform_files(placement: Placement) -> dict[str, str]:
    """File name -> text, for the run file's first place.

    Raises:
        UsageError: no project or zone; data networks by resource claims, which this provider cannot ask for.
    """
    where = site(placement)
    if placement.claims and placement.machine.gpus:
        raise UsageError(
            f"{placement.machine.name} has its data networks by resource claims here, and hashicorp/google 6.50 has no "
            "argument for a pool's acceleratorNetworkProfile",
            hint="--network annotations, or muster up",
        )
    releases = child(catalogue.versions(), "releases")
    versions: dict[str, Json] = {
        f"{name}_version": text(releases, name, "version").removeprefix("v")
        for name in ("jobset", *(["kueue"] if placement.kueue else []))
    }
    result = terraform.rendered(
        resources(where, None),
        where="gke",
        project=where.project,
        zone=where.zone,
        values={"services": [*services(where).names], "namespace": placement.options.namespace, **versions},
        about=_about(where),
    )
    if placement.kueue:
        result["kueue-values.yaml"] = yaml_text.dump([_kueue_values()])
    return result | {f"{CHART}/{name}": content for name, content in _chart(where).items()}


def _about(where: Site) -> str:
    lines = [
        f"Written by `muster render --format terraform` for {where.placement.machine.name} in {where.zone}.",
        "`muster submit` uses what this makes. It was never applied: read `terraform plan`.",
    ]
    installers = [url for name, url in wanted_software(where).items() if name not in ("kueue.yaml", "jobset.yaml")]
    if installers:
        lines += ["Not here, and needed on the cluster once:", *(f"  kubectl apply -f {url}" for url in installers)]
    return "\n".join(lines)


def _kueue_values() -> JsonObject:
    """The chart takes the whole Configuration: what its manager cannot do without, and our settings."""
    configuration: JsonObject = {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "health": {"healthProbeBindAddress": ":8081"},
        "metrics": {"bindAddress": ":8443"},
        "webhook": {"port": 9443},
        "leaderElection": {"leaderElect": True, "resourceName": "c1f6bfd2.kueue.x-k8s.io"},
        "integrations": {"frameworks": ["batch/job", "jobset.x-k8s.io/jobset"]},
        "waitForPodsReady": WAIT,
        "featureGates": GATES,
    }
    return {"managerConfig": {"controllerManagerConfigYaml": yaml_text.dump([configuration])}}


def _chart(where: Site) -> dict[str, str]:
    """A chart that only carries manifests: Helm asks for no definition of their kinds before Kueue is there."""
    objects = yaml_text.dump(cluster_objects(where.placement))
    if "{{" in objects:
        raise UsageError("a name in the run file has {{ in it, which Helm would take for an expression")
    meta: JsonObject = {"apiVersion": "v2", "name": CHART, "version": "0.1.0", "description": "Queue and accounts"}
    files = {"Chart.yaml": yaml_text.dump([meta]), "templates/objects.yaml": objects}
    return files
