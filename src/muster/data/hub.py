"""Data sets on the Hugging Face hub: which files make up a split, at which commit, and fetching them.

Only plain data files are read (Parquet, JSON lines, text); a data set's own loading script is never run.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.config.sections.sources import HubSource
from muster.core.errors import AccessError, BackendError, MusterError, UsageError, install_command

_READABLE = re.compile(r"\.(arrow|(parquet|jsonl|json|csv|txt)(\.gz|\.zst)?)$")


@dataclass(frozen=True)
class HubFiles:
    """The files of a data set's splits at one commit."""

    commit: str
    train_names: tuple[str, ...]
    heldout_names: tuple[str, ...]
    download: Callable[[str], Path]

    def fetch(self, names: Sequence[str]) -> list[Path]:
        """Local copies of ``names``, downloaded where the hub's cache lacks them."""
        return [self.download(name) for name in names]


def resolve(source: HubSource, *, api: Any = None) -> HubFiles:
    """Pin the data set to a commit and choose the files of its splits. ``api`` replaces HfApi in tests.

    Raises:
        AccessError: missing, private or gated.
        BackendError: the hub cannot be reached.
        UsageError: no readable file for the split.
    """
    api = api or _api()
    try:
        info = api.dataset_info(source.name, revision=source.revision)
    except Exception as error:
        raise translate(error, f"data set {source.name!r}") from error
    names = sorted(sibling.rfilename for sibling in info.siblings)

    def download(name: str) -> Path:
        try:
            return Path(api.hf_hub_download(source.name, name, repo_type="dataset", revision=info.sha))
        except Exception as error:
            raise translate(error, f"{source.name}/{name}") from error

    train, heldout = (
        split_files(names, split, source.subset, source.name) if split else ()
        for split in (source.split, source.heldout_split)
    )
    return HubFiles(commit=info.sha, train_names=train, heldout_names=heldout, download=download)


def split_files(names: Sequence[str], split: str, subset: str | None, data_set: str) -> tuple[str, ...]:
    """Which of a repository's files hold ``split``: by the split's name in the path, as the hub's own viewer does.

    A repository without any split in its names has one split, ``train``. Where a split is there in several
    formats, Parquet wins, then JSON lines.
    """
    readable = [name for name in names if _READABLE.search(name)]
    if subset:
        readable = [name for name in readable if subset in re.split(r"[/]", name)[:-1] or name.startswith(f"{subset}-")]
    elif any(name.startswith("data/") for name in readable):
        readable = [name for name in readable if name.startswith("data/")]
    pattern = re.compile(rf"(^|[/_.-]){re.escape(split)}([/_.-]|$)")
    chosen = [name for name in readable if pattern.search(name)]
    if not chosen and split == "train":
        named = re.compile(r"(^|[/_.-])(train|test|valid|validation|dev)([/_.-]|$)")
        chosen = [
            name for name in readable if not named.search(name) and not name.endswith(("_infos.json", "config.json"))
        ]
    for suffix in ("parquet", "jsonl", "json", "csv", "arrow", "txt"):
        result = tuple(name for name in chosen if re.search(rf"\.{suffix}(\.gz|\.zst)?$", name))
        if result:
            return result
    raise UsageError(
        f"data set {data_set!r} has no readable file for split {split!r}" + (f" of {subset!r}" if subset else ""),
        hint=f"its data files: {', '.join(readable[:8]) or 'none'}",
    )


def fetch_model_files(name: str, revision: str | None, requested: Sequence[str], *, api: Any = None) -> dict[str, Path]:
    """The small files of a model repository that exist among ``requested``: file name -> local path.

    Raises:
        AccessError: missing, private or gated.
        BackendError: the hub cannot be reached.
    """
    api = api or _api()
    try:
        info = api.model_info(name, revision=revision)
        there = {sibling.rfilename for sibling in info.siblings}
        return {file: Path(api.hf_hub_download(name, file, revision=info.sha)) for file in requested if file in there}
    except Exception as error:
        translated = translate(error, f"model {name!r}")
        cached = _cached_model_files(name, revision, requested) if isinstance(translated, BackendError) else {}
        if cached:
            return cached
        raise translated from error


def tensor_names(name: str, revision: str | None, file: str, *, api: Any = None) -> list[str]:
    """The names in the header of a safetensors file, of which nothing else is read. Raises as ``fetch_model_files``."""
    try:
        return list((api or _api()).parse_safetensors_file_metadata(name, file, revision=revision).tensors)
    except Exception as error:
        raise translate(error, f"model {name!r}") from error


def _cached_model_files(name: str, revision: str | None, requested: Sequence[str]) -> dict[str, Path]:
    """Files that an earlier run with a connection left in the hub's own cache."""
    from huggingface_hub import try_to_load_from_cache

    result = {file: try_to_load_from_cache(name, file, revision=revision) for file in requested}
    return {file: Path(path) for file, path in result.items() if isinstance(path, str)}


def _api() -> Any:
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise UsageError("hub sources need huggingface_hub", hint=install_command("data")) from error
    return HfApi()


def translate(error: Exception, subject: str) -> MusterError:
    """The hub's exception as one of ours. Other exceptions are raised again."""
    if isinstance(error, MusterError):
        return error
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return AccessError(f"{subject} is gated", hint="accept its terms on the hub, then `hf auth login`")
    if isinstance(error, errors.RepositoryNotFoundError | errors.RevisionNotFoundError | errors.HFValidationError):
        return AccessError(
            f"{subject} does not exist on the hub, or is private", hint="check the name; `hf auth login`"
        )
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.HfHubHTTPError) and status in (401, 403):
        return AccessError(f"{subject}: the hub refused ({status})", hint="`hf auth login`")
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
        return MusterError(f"{subject} cannot be stored here: {error.strerror}", hint="set HF_HOME to another place")
    known = errors.HfHubHTTPError | errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled | OSError
    # The hub's client has changed its HTTP library over the years, and lets that library's errors through.
    if isinstance(error, known) or type(error).__module__.startswith(("httpx", "httpcore", "requests", "urllib3")):
        return BackendError(
            f"{subject}: the Hugging Face hub cannot be reached: {first[:160]}",
            hint="check the network or proxy, or use a local file",
        )
    raise error
