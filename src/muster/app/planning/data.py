"""Data: prepare what a run file names and look at it, without a run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from muster.config.load import Loaded
from muster.core.errors import UsageError, install_command

if TYPE_CHECKING:
    from muster.data.preview import Preview


def prepare_and_preview(
    loaded: Loaded, *, examples: int = 3, progress: Callable[[str, int, int], None] | None = None
) -> Preview:
    """Fill the cache (or find it filled) and return a few documents as the model will read them.

    Raises:
        UsageError: there is no data, or it cannot be trained on.
    """
    try:
        from muster.data.prepare import prepare
        from muster.data.preview import preview
    except ImportError as error:
        raise UsageError(f"preparing data needs {error.name}", hint=install_command("train")) from error
    if loaded.spec.data is None:
        raise UsageError(f"{loaded.source} names no data", hint="a `command` brings its own")
    with tempfile.TemporaryDirectory(prefix="muster-data-") as scratch:
        return preview(prepare(loaded.spec, run_dir=Path(scratch), progress=progress), examples=examples)


def render(result: Preview) -> object:
    """The preview for a terminal (a rich renderable)."""
    from muster.data.preview import RenderedPreview

    return RenderedPreview(result)
