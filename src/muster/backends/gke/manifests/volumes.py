"""What pods mount: the run's folder, the token, scratch space, and buckets with data and weights (GCSFuse).

Nothing that a run's processes share goes through a mount (see ``muster.storage.home``). Options are flags (``a=b``, or
the bare name of a switch): what goes into GCSFuse's configuration file instead (``a:b:c``) is ignored by 3.4.0 to 3.5.6
on the large GPU machines, and a switch with a value (``a=true``) ends the mount with CSI drivers before v1.23, which
hand it over as two words.
"""

from __future__ import annotations

import math

from muster.backends.bucket_paths import as_uri, mounted
from muster.backends.gke.manifests.placement import CLAIM_FOLDER, LOCAL_FOLDER, Placement
from muster.catalog import rows
from muster.core.typed_json import Json, JsonObject

Manifest = dict[str, Json]

TOKEN_FOLDER = "/etc/muster/token"
TOKEN_FILE = f"{TOKEN_FOLDER}/token"
SCRATCH = "/var/tmp/muster"
"""On the node's own disk, or its local SSDs: what is downloaded and compiled. It goes with the pod."""
BESIDE_WEIGHTS_GIB = 20
SHARE_OF_WEIGHTS = 1.1
"""A download lies under its final name and, in part, under a temporary one."""

# What Google's profile of this name sets is for data that are read and do not change while a run lasts.
_READ = ["implicit-dirs", "profile=aiml-training"]
_CACHED = ["file-cache-enable-parallel-downloads"]
# Prepared data: every host may write them, and the hosts agree by links on the mount which one does
# (``muster.data.cache``): no name may be remembered. Muster renames no folder there; an export or a script may, on flat
# buckets up to this many files (the default off the large machines is 0).
_WRITTEN = ["implicit-dirs", "metadata-cache-ttl-secs=0", "rename-dir-limit=200000"]


def buckets(placement: Placement) -> dict[str, set[str]]:
    """Bucket -> its uses: ``home`` and ``checkpoints`` by URI, ``read`` and ``written`` below a mount."""
    result: dict[str, set[str]] = {}

    def note(path: str | None, use: str) -> None:
        if path and as_uri(path).startswith("gs://"):
            result.setdefault(as_uri(path).split("/")[2], set()).add(use)

    spec = placement.spec
    note(placement.home, "home")
    note(spec.checkpoint.dir, "checkpoints")
    note(placement.model_copies, "read")
    if spec.model is not None:
        note(spec.model.source, "read")
        note(spec.model.tokenizer if isinstance(spec.model.tokenizer, str) else None, "read")
    if spec.data is not None:
        note(spec.data.cache_dir, "written")
        for source in spec.data.sources:
            for path in source.files.values():
                note(path, "read")
    return result


def bucket_volumes(placement: Placement) -> list[tuple[dict[str, Json], dict[str, Json]]]:
    """(volume, mount) for every bucket with data or weights."""
    rows: list[tuple[dict[str, Json], dict[str, Json]]] = []
    mounts = {bucket: uses for bucket, uses in sorted(buckets(placement).items()) if uses & {"read", "written"}}
    for number, (bucket, uses) in enumerate(mounts.items()):
        source: JsonObject = {
            "driver": "gcsfuse.csi.storage.gke.io",
            "volumeAttributes": _attributes(placement, bucket, uses),
        }
        if "written" not in uses:
            source = {**source, "readOnly": True}
        rows.append(
            ({"name": f"bucket-{number}", "csi": source}, {"name": f"bucket-{number}", "mountPath": f"/gcs/{bucket}"})
        )
    return rows


def bucket_annotations(placement: Placement) -> dict[str, str]:
    """What the GCSFuse sidecar's injection waits for; limits of 0 mean none (a sidecar out of memory looks like an
    I/O error)."""
    if not bucket_volumes(placement):
        return {}
    limits = {f"gke-gcsfuse/{resource}-limit": "0" for resource in ("cpu", "memory", "ephemeral-storage")}
    return {"gke-gcsfuse/volumes": "true", **limits}


def _attributes(placement: Placement, bucket: str, uses: set[str]) -> JsonObject:
    """What is only read is kept on the node's local SSDs, where it has some: a boot disk would fill up."""
    if "written" in uses:
        return {"bucketName": bucket, "mountOptions": ",".join(_WRITTEN)}
    if not placement.local_ssds:
        return {"bucketName": bucket, "mountOptions": ",".join(_READ)}
    # An attribute, because the option of the same meaning as a flag does not switch the cache on: the driver does.
    return {"bucketName": bucket, "mountOptions": ",".join([*_READ, *_CACHED]), "fileCacheCapacity": "-1"}


def run_volumes(placement: Placement) -> list[Manifest]:
    """The run's own folder (on the claim, or one of this pod alone), its files, and its token."""
    claim = placement.options.run_claim
    folder: JsonObject = {"persistentVolumeClaim": {"claimName": claim}} if claim else {"emptyDir": {}}
    return [
        {"name": "run-file", "configMap": {"name": f"{placement.name}-run"}},
        {"name": "token", "secret": {"secretName": f"{placement.name}-token", "defaultMode": 0o400}},
        {"name": "runs", **folder},
    ]


def run_mount(placement: Placement) -> Manifest:
    return {"name": "runs", "mountPath": CLAIM_FOLDER if placement.options.run_claim else LOCAL_FOLDER}


def token_mount() -> Manifest:
    """For programs alone: the token is in no folder of the run."""
    return {"name": "token", "mountPath": TOKEN_FOLDER, "readOnly": True}


def scratch_environment(placement: Placement) -> dict[str, str]:
    """Where libraries put what they download and compile. Where ``/tmp`` is a folder of the node (TCPX has its socket
    there), it is small, and what lies in it stays when the pod goes."""
    env = {"HF_HOME": f"{SCRATCH}/huggingface"}
    if placement.model_copies:
        env["MUSTER_MODEL_COPIES"] = mounted(placement.model_copies)
    if placement.machine.gpus and any(mount.path == "/tmp" for mount in placement.machine.fabric.mounts):
        env |= {
            "TMPDIR": SCRATCH,
            "TORCHINDUCTOR_CACHE_DIR": f"{SCRATCH}/inductor",
            "TRITON_CACHE_DIR": f"{SCRATCH}/triton",
        }
    return env


def ephemeral_storage(placement: Placement) -> JsonObject:
    """What a host asks of the node's disk for the weights that it downloads, where their size is known."""
    model = placement.spec.model
    size = rows.weights_bytes(model.source or "") if model is not None and model.weights == "hub" else None
    if not size:
        return {}
    return {"ephemeral-storage": f"{math.ceil(SHARE_OF_WEIGHTS * size / 2**30) + BESIDE_WEIGHTS_GIB}Gi"}
