"""Buckets as folders: every ``/gcs/BUCKET/...`` path of a run file is a GCSFuse volume with options for its use."""

from __future__ import annotations

from muster.backends.gke.manifests.placement import Placement, mounted
from muster.core.typed_json import Json

_BASE = ["implicit-dirs"]
_DATA = [
    "profile=aiml-training",
    "file-cache:enable-parallel-downloads:true",
    "file-cache:parallel-downloads-per-file:100",
    "file-cache:max-parallel-downloads:-1",
    "file-cache:download-chunk-size-mb:10",
    "file-cache:max-size-mb:-1",
]
_CHECKPOINTS = [
    "profile=aiml-checkpointing",
    "write:enable-streaming-writes:true",
    "metadata-cache:negative-ttl-secs:0",
    "file-system:kernel-list-cache-ttl-secs:0",
]
# The run folder is how agents find the supervisor: a cached absence or an old lease would hide it from them.
_RUN = ["metadata-cache:ttl-secs:0"]
_KEPT = ["metadata-cache:ttl-secs:-1"]


def buckets(placement: Placement) -> dict[str, set[str]]:
    """Bucket -> its uses (run, checkpoints, data), for every path below ``/gcs``."""
    result: dict[str, set[str]] = {}

    def note(path: str | None, use: str) -> None:
        if path and path.startswith("/gcs/"):
            result.setdefault(path.split("/")[2], set()).add(use)

    spec = placement.spec
    note(mounted(placement.run_dir), "run")
    note(spec.checkpoint.dir, "checkpoints")
    if spec.model is not None:
        note(spec.model.source, "data")
    if spec.data is not None:
        note(spec.data.cache_dir, "data")
        for source in spec.data.sources:
            for path in source.files.values():
                note(path, "data")
    return result


def bucket_volumes(placement: Placement) -> list[tuple[dict[str, Json], dict[str, Json]]]:
    """(volume, mount) for every bucket."""
    rows: list[tuple[dict[str, Json], dict[str, Json]]] = []
    for number, (bucket, uses) in enumerate(sorted(buckets(placement).items())):
        options = ",".join(_options(uses))
        attributes = {"bucketName": bucket, "mountOptions": options}
        volume: dict[str, Json] = {
            "name": f"bucket-{number}",
            "csi": {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": attributes},
        }
        rows.append((volume, {"name": f"bucket-{number}", "mountPath": f"/gcs/{bucket}"}))
    return rows


def bucket_annotations(placement: Placement) -> dict[str, str]:
    """What the GCSFuse sidecar's injection waits for; limits of 0 mean none (a sidecar out of memory looks like an
    I/O error)."""
    if not buckets(placement):
        return {}
    limits = {f"gke-gcsfuse/{resource}-limit": "0" for resource in ("cpu", "memory", "ephemeral-storage")}
    return {"gke-gcsfuse/volumes": "true", **limits}


def _options(uses: set[str]) -> list[str]:
    options = list(_BASE)
    if "checkpoints" in uses:
        options += _CHECKPOINTS
    elif "data" in uses:
        options += _DATA
    return options + (_RUN if "run" in uses else _KEPT)
