"""A bucket by its URI and below its mount: hosts on Google's clouds see ``gs://BUCKET`` as ``/gcs/BUCKET``."""

from __future__ import annotations

from muster.config.spec import Recovery, RunSpec


def as_uri(path: str) -> str:
    """``/gcs/bucket/x`` as ``gs://bucket/x``: what is committed or shared goes to the bucket itself, never through a
    mount, which has no conditional write; other paths as they are."""
    return "gs://" + path.removeprefix("/gcs/").rstrip("/") if path.startswith("/gcs/") else path.rstrip("/")


def mounted(path: str) -> str:
    """``gs://bucket/x`` as a file below its mount, ``/gcs/bucket/x``; other paths as they are."""
    return "/gcs/" + path.removeprefix("gs://").rstrip("/") if path.startswith("gs://") else path


def is_bucket(path: str) -> bool:
    return path.startswith(("gs://", "s3://"))


def with_mounted_inputs(spec: RunSpec) -> RunSpec:
    """The run file with everything that is only read (weights, tokenizer, data) as a path below the mount."""
    changes: dict[str, object] = {}
    if (model := spec.model) is not None:
        named = {key: getattr(model, key) for key in ("source", "tokenizer")}
        paths = {key: mounted(value) for key, value in named.items() if isinstance(value, str)}
        changes["model"] = model.model_copy(update=paths)
    if (data := spec.data) is not None:
        sources = [
            one.model_copy(update={key: mounted(path) for key, path in one.files.items()}) for one in data.sources
        ]
        cache = mounted(data.cache_dir) if data.cache_dir else None
        changes["data"] = data.model_copy(update={"sources": sources, "cache_dir": cache})
    return spec.model_copy(update=changes)


def home_of(spec: RunSpec, run_id: str, run_dir: str | None) -> str:
    """Where a run lives that needs a bucket of Google's: as given, else next to the checkpoints where those are in one;
    empty where nothing names one."""
    for given in (spec.run_dir, run_dir):
        if given and as_uri(given).startswith("gs://"):
            return as_uri(given)
    directory = as_uri(spec.checkpoint.dir or "")
    return "/".join([*directory.split("/")[:3], "muster-runs", run_id]) if directory.startswith("gs://") else ""


def home_filled_in(spec: RunSpec, *, home: str, gpus: int, start_timeout_s: float) -> RunSpec:
    """The run file with what its home in a bucket and its machines (``gpus`` each) decide: ranks a host, device, where
    checkpoints go, and, where it leaves that open, how long hosts are waited for."""
    checkpoint, recovery, resources = spec.checkpoint, spec.recovery, spec.resources
    late = recovery.start_timeout_s
    start_s = max(late, start_timeout_s) if late == Recovery().start_timeout_s else late
    machine = {
        "ranks_per_host": resources.ranks_per_host or gpus or 1,
        "device": ("cuda" if gpus else "cpu") if resources.device == "auto" else resources.device,
    }
    directory = as_uri(checkpoint.uri(home))
    return spec.model_copy(
        update={
            "run_dir": as_uri(spec.run_dir) if spec.run_dir else None,
            "resources": resources.model_copy(update=machine),
            "recovery": recovery.model_copy(update={"start_timeout_s": start_s}),
            "checkpoint": checkpoint.model_copy(update={"dir": directory}),
        }
    )
