"""Use case: a run file as what would be sent, offline."""

from __future__ import annotations

from pathlib import Path

from muster import backends
from muster.backends.backend import RenderedFiles
from muster.config.spec import RunSpec
from muster.core.errors import UsageError
from muster.core.typed_json import JsonObject
from muster.storage import run_registry


def render(
    spec: RunSpec,
    *,
    format: str | None = None,
    run_id: str | None = None,
    run_dir: str | None = None,
    options: JsonObject | None = None,
) -> RenderedFiles:
    """Everything that a run needs on a cluster, without project, credentials or network.

    ``run_id`` and ``run_dir`` default to the run file's name and folder, so that the same file gives the same text.
    ``options`` are the back end's own.

    Raises:
        RunFileError: rules across keys are broken, each with its reason.
        UsageError: the back end has no such format, or the run file names no folder.
    """
    formats = backends.get(spec.backend).formats
    if not formats:
        able = backends.names_where(lambda backend: bool(backend.formats))
        raise UsageError(f"nothing is rendered for the back end {spec.backend!r}", hint=f"backend: {able}")
    write_files = formats.get(format or next(iter(formats)))
    if write_files is None:
        raise UsageError(f"backend: {spec.backend} has no format {format!r}", hint=f"--format {' or '.join(formats)}")
    run_id = run_id or run_registry.slug(spec.name, run_registry.MAX_ID)
    return write_files(spec, run_id=run_id, run_dir=run_dir, options=options or {})


def write(rendered: RenderedFiles, folder: Path) -> list[Path]:
    """Write every file below ``folder``; return their paths.

    Raises:
        UsageError: one cannot be written.
    """
    written = []
    for name, text in rendered.files.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}", hint="--output names a folder") from error
        written.append(path)
    return written
