"""What is sent to Vertex AI, exactly: one pure function from a run file to a request for each region.

A job's pools: 0 the chief, 1 the other hosts, 2 Google's Reduction Server; of TPUs one alone, a slice. Every host runs
the same program, which finds its place in ``CLUSTER_SPEC``. A job's arguments can be read by all who may read the job:
they name secrets and hold none.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from muster.backends.backend import RenderedFiles
from muster.backends.google.request_log import mark_of
from muster.backends.google.rules import slices_of
from muster.backends.run_folder import RunFiles, digest
from muster.backends.vertex import reducers
from muster.backends.vertex.placement import Placement, place, resolved
from muster.backends.vertex.run_file_rules import rules, warnings
from muster.catalog.vertex import FLEX_START, RESERVATION, SPOT
from muster.config.spec import RunSpec
from muster.core.errors import RunFileError
from muster.core.typed_json import Json, JsonObject

Body = dict[str, Json]

HOST_PROGRAM = "muster.backends.vertex.host"
RUN_LABEL, NONCE_LABEL = "muster-run", "muster-nonce"
REDUCER_IMAGE = "{where}-docker.pkg.dev/vertex-ai-restricted/training/reductionserver:latest"
"""Google documents no other tag."""
NEAREST = {"europe": "europe", "me": "europe", "africa": "europe", "asia": "asia", "australia": "asia"}
NCCL_SCRIPT = "/usr/local/gib/scripts/set_nccl_env.sh"
"""To be sourced before the program on machines with RDMA (Google's page on compute resources)."""
# A constant program: what varies arrives as "$0" and "$@", so nothing is ever quoted into it. Without the script it
# goes on over plain TCP, and says so: an end with an error would end all hosts.
SOURCE_AND_RUN = """\
if [[ -r $0 ]]; then words=("$@"); source "$0"; set -- "${words[@]}"
else echo "warning: no $0: NCCL will use plain TCP" >&2; fi
exec "$@"
"""
HOST_DIR = "/tmp/muster"
"""Where a host keeps what is its own: the user's code lies at a path that is known before."""


@dataclass(frozen=True, kw_only=True)
class Request:
    region: str
    url: str
    body: JsonObject

    def text(self) -> str:
        shown: JsonObject = {"method": "POST", "url": self.url, "body": self.body}
        return json.dumps(shown, indent=2) + "\n"


def rendered(spec: RunSpec, *, run_id: str, run_dir: str | None) -> RenderedFiles:
    """A file for each region, in the order in which they are tried.

    Raises:
        RunFileError: rules across keys are broken, each with its reason.
    """
    if problems := list(rules(spec)):
        raise RunFileError(problems)
    placement = place(spec, run_id=run_id, run_dir=run_dir)
    files = {f"custom-job.{request.region}.json": request.text() for request in requests(placement)}
    return RenderedFiles(files=files, warnings=tuple(warnings(placement)))


def requests(placement: Placement, *, submission: int = 1, turn: int = 1, sha256: str | None = None) -> list[Request]:
    """What creates the job, by region; one at a time is sent. ``sha256``: of the run's files, where the user's own code
    is among them."""
    project, run = placement.spec.resources.project, placement.run_id
    mark = mark_of(run, submission, turn)
    return [
        Request(
            region=region,
            url=f"https://{region}-aiplatform.googleapis.com/v1/projects/{project}/locations/{region}/customJobs",
            body={
                "displayName": run,
                "labels": {RUN_LABEL: run, NONCE_LABEL: mark},
                "jobSpec": _job(placement, region, mark, submission, sha256 or digest(run_files(placement).encoded())),
            },
        )
        for region in placement.regions
    ]


def run_files(placement: Placement) -> RunFiles:
    """What hosts fetch from the home, without code of the user's own; its digest is in their arguments."""
    spec = resolved(placement)
    return RunFiles(
        resolved=spec.model_dump_json(indent=1) + "\n",
        run_yaml=placement.spec.model_dump_json(indent=1, exclude_defaults=True) + "\n",
    )


def code_dir(run_id: str) -> str:
    """The folder on a host that has the user's code below it."""
    return f"{HOST_DIR}/{run_id}"


def _job(placement: Placement, region: str, mark: str, submission: int, sha256: str) -> JsonObject:
    asked = placement.spec.vertex
    job: Body = {
        "workerPoolSpecs": _pools(placement, region, _container(placement, mark, submission, sha256)),
        "scheduling": _scheduling(placement),
    }
    if asked.service_account:
        job["serviceAccount"] = asked.service_account
    if asked.network:
        job["network"] = asked.network
    if asked.network_attachment:
        job["pscInterfaceConfig"] = {"networkAttachment": asked.network_attachment}
    if asked.web_access:
        job["enableWebAccess"] = True
    if asked.tensorboard:  # what is shown is read from the folder that the second one makes
        job["tensorboard"] = asked.tensorboard
        job["baseOutputDirectory"] = {"outputUriPrefix": f"{placement.home}/vertex"}
    return job


def _scheduling(placement: Placement) -> JsonObject:
    """Vertex restarts no worker and no job for one that does: what is lost inside a job is Muster's to replace."""
    strategy = {FLEX_START: "FLEX_START", SPOT: "SPOT"}.get(placement.mode, "STANDARD")
    scheduling: Body = {
        "strategy": strategy,
        "timeout": f"{placement.timeout_s}s",
        "restartJobOnWorkerRestart": False,
        "disableRetries": False,
    }
    if placement.mode == FLEX_START:  # the only mode that knows it
        scheduling["maxWaitDuration"] = f"{placement.max_wait_s}s"
    return scheduling


def _pools(placement: Placement, region: str, container: JsonObject) -> list[JsonObject]:
    host: Body = {
        "machineSpec": _machine(placement),
        "diskSpec": {
            "bootDiskType": placement.spec.vertex.boot_disk_type or placement.machine.boot_disk,
            "bootDiskSizeGb": placement.boot_disk_gb,
        },
        "containerSpec": container,
    }
    pools: list[JsonObject] = [{**host, "replicaCount": "1"}]
    if placement.machine.chips:  # a replica is a slice: its topology says how many hosts there are
        return pools
    if placement.hosts > 1:
        pools.append({**host, "replicaCount": str(placement.hosts - 1)})
    if servers := reducers.count(placement):
        where = NEAREST.get(region.partition("-")[0], "us")
        pools.append(
            {
                "machineSpec": {"machineType": reducers.MACHINE},
                "containerSpec": {"imageUri": REDUCER_IMAGE.format(where=where)},
                "replicaCount": str(servers),
            }
        )
    return pools


def _machine(placement: Placement) -> JsonObject:
    machine, named = placement.machine, placement.spec.resources.reservation
    spec: Body = {"machineType": machine.name}
    if machine.chips:
        spec["tpuTopology"] = slices_of(placement.spec, machine.name).topology
    if machine.accelerator is not None:
        spec |= {"acceleratorType": machine.accelerator.name, "acceleratorCount": machine.gpus}
    if placement.mode == RESERVATION and named:
        key = "compute.googleapis.com/reservation-name"
        spec["reservationAffinity"] = {
            "reservationAffinityType": "SPECIFIC_RESERVATION", "key": key, "values": [named],
        }  # fmt: skip
    return spec


def _container(placement: Placement, mark: str, submission: int, sha256: str) -> JsonObject:
    chip, secret = placement.machine.accelerator, placement.spec.vertex.hugging_face_secret
    program = ["python", "-m", HOST_PROGRAM]
    words = [
        "--run-id", placement.run_id, "--home", placement.home, "--submission", str(submission), "--nonce", mark,
        "--run-file-sha256", sha256,
        "--token-secret", placement.token_secret,
        *(["--hugging-face-secret", secret] if secret else []),
    ]  # fmt: skip
    if chip is not None and chip.network == "script":
        command, arguments = ["/bin/bash", "-c", SOURCE_AND_RUN, NCCL_SCRIPT], [*program, *words]
    else:
        command, arguments = program, words
    return {"imageUri": placement.spec.resources.image or "", "command": [*command], "args": [*arguments]}
