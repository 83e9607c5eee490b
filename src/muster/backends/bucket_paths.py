"""A bucket by its URI and below its mount: hosts on Google's clouds see ``gs://BUCKET`` as ``/gcs/BUCKET``."""

from __future__ import annotations

from muster.config.spec import RunSpec


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
