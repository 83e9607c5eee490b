"""An exported folder where it is asked: requests for Vertex AI, or manifests for GKE, that serve it with vLLM.

Nothing is sent: files are written next to the folder, and the commands that use them are printed. Never run on Google
Cloud. Sources: aiplatform.v1 (revision 20261106) for the requests, Kubernetes 1.34 for the manifests, Google's pages on
vLLM in a custom container (its server speaks OpenAI's protocol, so it is asked by ``rawPredict``) and on GKE.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from muster.app.planning.prices import all_prices
from muster.catalog import gke, rows, vertex
from muster.config import user_defaults
from muster.config.spec import RunSpec
from muster.core import environment
from muster.core.errors import NoPlanError, UsageError
from muster.core.typed_json import JsonObject, parse_object, whole
from muster.storage.run_registry import slug

GKE_IMAGE = "vllm/vllm-openai:v0.28.0"
#: Of a GPU's memory, what is left to weights where keys and values, activations and the context have theirs.
FOR_WEIGHTS = 0.75
PORT = 8080
MODEL_PATH = "/model"


@dataclass(frozen=True, kw_only=True)
class Server:
    """A machine that holds the model."""

    machine: str
    gpus: int
    chip: str
    label: str
    """Of GKE's nodes: ``cloud.google.com/gke-accelerator``."""
    usd_per_hour: float | None
    """On demand, the machine alone; None: no price is known."""
    price_of: str
    """Where and when."""


@dataclass(frozen=True, kw_only=True)
class Serving:
    """What was written, and what a person does with it."""

    server: Server
    files: Mapping[str, str]
    steps: Sequence[str]
    """Commands, in order."""
    notes: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where a model is to be served: checked before it is exported."""

    place: Place
    bucket: str
    image: str | None
    project: str
    region: str
    machine: str | None


def target(
    place: str, spec: RunSpec, *, bucket: str | None = None, image: str | None = None, machine: str | None = None
) -> Target:
    """What is needed there, from the command line, the run file and the user's defaults.

    Raises:
        UsageError: something is missing, or there is no such place.
    """
    if place not in PLACES:
        raise UsageError(f"--for {place!r} is none of {', '.join(PLACES)}")
    defaults = {each.path[-1]: each.value for each in user_defaults.read(environment.current().home, name="exports")}
    regions = spec.resources.locations or defaults.get("locations") or []
    found = Target(
        place=PLACES[place],
        bucket=bucket or str(defaults.get("run_dir") or ""),
        image=image,
        machine=machine,
        project=spec.resources.project or str(defaults.get("project") or ""),
        region=re.sub(r"-[a-z]$", "", str(regions[0])) if isinstance(regions, list) and regions else "",
    )
    where = f"in {environment.current().home / user_defaults.FILE}"
    _uri(found.bucket, "x")
    if machine is not None:
        gke.find(machine, None)
    rented = PLACES[place].rented
    if rented and image is None:
        raise UsageError(
            "Vertex AI serves from an image in Artifact Registry whose entry point is vLLM's server",
            hint="--image REGION-docker.pkg.dev/PROJECT/REPOSITORY/IMAGE:TAG",
        )
    if rented and not (found.project and found.region):
        raise UsageError("Vertex AI needs a project and a region", hint=f"project: and region: {where}")
    return found


def serve(found: Target, name: str, folder: Path) -> Serving:
    """Write the files into the folder of the exported model. Raises as ``choose``, ``for_gke``, ``for_vertex``."""
    result = found.place.make(found, slug(name, 50), choose(folder, found.machine), folder)
    for file, text in result.files.items():
        (folder / file).write_text(text)
    return result


def choose(folder: Path, machine: str | None = None) -> Server:
    """The cheapest machine that holds the folder's weights, or this one.

    Raises:
        NoPlanError: none holds them. UsageError: no such machine, or the folder is no model.
    """
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if not size or (folder / "adapter_config.json").exists():
        raise UsageError(f"{folder} holds no whole model", hint="export it without --adapter: merged")
    heads = whole(parse_object((folder / "config.json").read_bytes()), "num_attention_heads", default=1)
    found = [server for server, why in _servers(size, heads) if why is None and machine in (None, server.machine)]
    if machine is not None and not found:
        gke.find(machine, None)  # unknown: says so
        why = next((why for server, why in _servers(size, heads) if server.machine == machine), "it has no GPUs")
        raise NoPlanError(f"{machine} does not serve {size / 1e9:.1f} GB of weights: {why}")
    priced = [server for server in found if server.usd_per_hour is not None] or found
    if not priced:
        raise NoPlanError(f"no machine of the catalogue holds {size / 1e9:.1f} GB of weights")
    return min(priced, key=lambda server: (server.usd_per_hour or math.inf, server.gpus, server.machine))


def _servers(size: int, heads: int) -> Iterator[tuple[Server, str | None]]:
    """Every machine, and why it does not serve a model of so many bytes; None: it does."""
    here = [price for price in all_prices() if (price.mode, price.region) == ("on_demand", "us-central1")]
    prices = {price.machine: price for price in here}
    for family in gke.families().values():
        chip = rows.accelerators().get(family.accelerator)
        for machine in family.machines.values():
            if chip is None or chip.kind != "gpu" or not machine.gpus or not family.label:
                continue
            price = prices.get(machine.name)
            server = Server(
                machine=machine.name,
                gpus=machine.gpus,
                chip=chip.name,
                label=family.label,
                usd_per_hour=None if price is None else price.usd_per_gpu_hour * machine.gpus,
                price_of="" if price is None else f"{price.region}, {price.date}, {price.reliability}",
            )
            if heads % machine.gpus:
                yield server, f"{heads} attention heads are not divided by {machine.gpus} GPUs"
            elif chip.memory_bytes * machine.gpus * FOR_WEIGHTS < size:
                yield server, f"{machine.gpus} x {chip.memory_bytes / 1e9:.0f} GB are too little"
            elif machine.memory_gb * 1e9 < size:
                yield server, f"its {machine.memory_gb} GB of memory are too little to load them"
            else:
                yield server, None


def for_gke(found: Target, name: str, server: Server, folder: Path) -> Serving:
    """A Deployment of one pod, and a Service that the cluster alone reaches. The pod mounts the bucket's copy."""
    uri = _uri(found.bucket, name)
    bucket_name = uri.removeprefix("gs://").partition("/")[0]
    labels = {"app": name}
    manifests: list[JsonObject] = [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}},
        {
            "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name, "labels": labels},
            "spec": {"replicas": 1, "selector": {"matchLabels": labels}, "template": _pod(found, name, server, uri)},
        },
        {
            "apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "labels": labels},
            "spec": {"type": "ClusterIP", "selector": labels, "ports": [{"port": 80, "targetPort": "http"}]},
        },
    ]  # fmt: skip
    pool = "principal://iam.googleapis.com/projects/NUMBER/locations/global/workloadIdentityPools/PROJECT.svc.id.goog"
    reader = f"--role=roles/storage.objectViewer --member={pool}/subject/ns/default/sa/{name}"
    return Serving(
        server=server,
        # JSON is YAML; kubectl reads a List.
        files={"serve.yaml": json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests}, indent=1) + "\n"},
        steps=(
            f"gcloud storage cp -r {folder}/* {uri}/",
            f"gcloud storage buckets add-iam-policy-binding gs://{bucket_name} {reader}",
            f"kubectl apply -f {folder}/serve.yaml",
            f"kubectl port-forward service/{name} 8000:80",
        ),
        notes=(*_costs(server), "the Service is reached from within the cluster alone, and asks for no password"),
    )


def _pod(found: Target, name: str, server: Server, uri: str) -> JsonObject:
    bucket_name, _, inside = uri.removeprefix("gs://").partition("/")
    container: JsonObject = {
        "name": "vllm",
        "image": found.image or GKE_IMAGE,
        "args": _arguments(name, server, MODEL_PATH),
        "ports": [{"containerPort": PORT, "name": "http"}],
        "resources": {
            "limits": {"nvidia.com/gpu": str(server.gpus)},
            "requests": {"nvidia.com/gpu": str(server.gpus)},
        },
        # Weights are read from the bucket first: half an hour at most.
        "startupProbe": {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 10, "failureThreshold": 180},
        "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 5},
        "volumeMounts": [
            {"name": "model", "mountPath": MODEL_PATH, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
        "securityContext": {"allowPrivilegeEscalation": False},
    }
    driver: JsonObject = {
        "driver": "gcsfuse.csi.storage.gke.io",
        "readOnly": True,
        "volumeAttributes": {"bucketName": bucket_name, "mountOptions": f"implicit-dirs,only-dir={inside}"},
    }
    return {
        "metadata": {"labels": {"app": name}, "annotations": {"gke-gcsfuse/volumes": "true"}},
        "spec": {
            "serviceAccountName": name,
            "nodeSelector": {
                "cloud.google.com/gke-accelerator": server.label,
                "node.kubernetes.io/instance-type": server.machine,
            },
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
            "containers": [container],
            "volumes": [
                {"name": "model", "csi": driver},
                {"name": "shm", "emptyDir": {"medium": "Memory"}},
            ],
        },
    }


def for_vertex(found: Target, name: str, server: Server, folder: Path) -> Serving:
    """Bodies of ``models.upload``, ``endpoints.create`` and ``endpoints.deployModel``.

    Raises:
        NoPlanError: Vertex AI does not rent the machine.
    """
    rented = vertex.machines().get(server.machine)
    if rented is None or rented.accelerator is None:
        raise NoPlanError(f"Vertex AI does not rent {server.machine}", hint="--machine names another one")
    parent, uri = f"projects/{found.project}/locations/{found.region}", _uri(found.bucket, name)
    endpoint: JsonObject = {"displayName": name, "dedicatedEndpointEnabled": True}
    bodies = {
        "upload": _upload(str(found.image), name, server, uri),
        "endpoint": endpoint,
        "deploy": _deploy(f"{parent}/models/{name}", name, server, rented.accelerator.name),
    }
    host = f"https://{found.region}-aiplatform.googleapis.com/v1/{parent}"
    curl = (
        'curl -X POST -H "Authorization: Bearer $(gcloud auth print-access-token)" -H "Content-Type: application/json"'
    )
    return Serving(
        server=server,
        files={f"vertex-{part}.json": json.dumps(body, indent=1) + "\n" for part, body in bodies.items()},
        steps=(
            f"gcloud storage cp -r {folder}/* {uri}/",
            f"{curl} -d @{folder}/vertex-upload.json {host}/models:upload",
            f"{curl} -d @{folder}/vertex-endpoint.json '{host}/endpoints?endpointId={name}'",
            f"{curl} -d @{folder}/vertex-deploy.json {host}/endpoints/{name}:deployModel",
        ),
        notes=(
            *_costs(server),
            "Vertex AI bills a price of its own for prediction above the machine's, which the catalogue does not have",
            "asked by rawPredict: the server speaks OpenAI's protocol",
        ),
    )


def _upload(image: str, name: str, server: Server, uri: str) -> JsonObject:
    return {
        "modelId": name,
        "model": {
            "displayName": name,
            "artifactUri": uri,
            "containerSpec": {
                "imageUri": image,
                # The files of artifactUri are not put into the container: the server reads them from the bucket itself.
                "args": _arguments(name, server, uri),
                "ports": [{"containerPort": PORT}],
                "predictRoute": "/v1/chat/completions",
                "healthRoute": "/health",
                "sharedMemorySizeMb": str(16 << 10),
                "deploymentTimeout": "3600s",
            },
            "labels": {"muster": "export"},
        },
    }


def _deploy(model: str, name: str, server: Server, accelerator: str) -> JsonObject:
    spec: JsonObject = {
        "machineType": server.machine,
        "acceleratorType": accelerator,
        "acceleratorCount": server.gpus,
    }
    return {
        "deployedModel": {
            "displayName": name,
            "model": model,
            "dedicatedResources": {"machineSpec": spec, "minReplicaCount": 1, "maxReplicaCount": 1},
        },
        "trafficSplit": {"0": 100},
    }


def _arguments(name: str, server: Server, model: str) -> list[str]:
    return [
        f"--model={model}", f"--served-model-name={name}", f"--tensor-parallel-size={server.gpus}", "--host=0.0.0.0",
        f"--port={PORT}", *(["--load-format=runai_streamer"] if model.startswith("gs://") else []),
    ]  # fmt: skip


def _uri(bucket: str, name: str) -> str:
    if not re.fullmatch(r"gs://[a-z0-9][a-z0-9._-]*(/[^\s,]*)?", bucket):
        raise UsageError(f"--bucket {bucket!r} is no bucket", hint="--bucket gs://BUCKET or gs://BUCKET/FOLDER")
    return f"{bucket.rstrip('/')}/{name}"


def _costs(server: Server) -> Iterator[str]:
    machine = f"{server.machine} ({server.gpus} x {server.chip})"
    if server.usd_per_hour is None:
        yield f"{machine}: no price is known; it costs by the hour, asked or not"
        return
    hour = server.usd_per_hour
    yield f"{machine}: ${hour:,.2f} an hour on demand ({server.price_of}), ${hour * 24:,.0f} a day, asked or not"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where models are served."""

    name: str
    make: Callable[[Target, str, Server, Path], Serving]
    rented: bool
    """By the request, in a project's region, from an image of one's own; else on nodes of a cluster that is there."""


_ALL = (Place(name="vertex", make=for_vertex, rented=True), Place(name="gke", make=for_gke, rented=False))
PLACES = {place.name: place for place in _ALL}
