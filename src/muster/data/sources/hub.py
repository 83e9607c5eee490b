"""A data set on the Hugging Face hub, pinned to a commit."""

from __future__ import annotations

from muster.config.sections.sources import HubSource
from muster.data import hub
from muster.data.files.row_files import locate, read_files
from muster.data.source_type import OpenedSource, SourceType


def _open(section: HubSource) -> OpenedSource:
    files = hub.resolve(section)
    return OpenedSource(
        type=SOURCE,
        section=section,
        label=repr(section.name),
        identity={**section.model_dump(), "commit": files.commit, "files": list(files.train_names)},
        rows=lambda: read_files(files.fetch(files.train_names), section.limit),
        heldout_rows=(lambda: read_files(files.fetch(files.heldout_names))) if files.heldout_names else None,
        locate=lambda index, heldout: locate(files.fetch(files.heldout_names if heldout else files.train_names), index),
    )


SOURCE = SourceType(section=HubSource, open=_open, task="text2sql")
