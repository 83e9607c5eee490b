"""A pretrained model's files on this machine: a folder, a copy that lies here, or the hub's cache.

Only safetensors and JSON are fetched. Data preparation fetches them once on a host, before its ranks start, and writes
to the run's folder which commit it was: ranks read that one, with no word to the hub, and so does a restart after the
branch has moved (frozen weights are in no checkpoint).
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeAlias

from muster.config.spec import Model
from muster.config.validation import is_remote, looks_local
from muster.core import environment
from muster.core.errors import BackendError, MusterError, UsageError
from muster.core.typed_json import Json
from muster.storage.model_copies import find_copy

#: The terms of a model, which those who pass on what was made of it have to hand over.
LICENCES = ("LICEN[CS]E*", "NOTICE*", "USE_POLICY*")
PATTERNS = ("*.safetensors", "*.json", "README.md", *LICENCES)
POINTER = "weights.json"
#: How often the size of what has arrived is looked at.
LOOK_S = 2.0
#: (activity, bytes that are here, bytes in all).
Progress: TypeAlias = Callable[[str, int, int], None]
_COMMIT = re.compile(r"[0-9a-f]{40}")


def fetch(source: str, revision: str | None) -> Path:
    """The local folder of a model: itself, a copy of it here, or the hub's in the cache (weights and configuration).

    What is in the cache is not fetched again: of a download that was cut, every file that was whole. Where the hub
    cannot be reached the cache's folder counts, if it is whole.

    Raises:
        UsageError: no such model.
        BackendError: the hub cannot be reached.
        MusterError: no room for it.
    """
    here = _without_hub(source, revision)
    if here is not None:
        return here
    if source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise UsageError(f"model.source: no folder {source}", hint="give a local folder or a hub id like org/name")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=list(PATTERNS)))
    except Exception as error:
        raise hub_error(source, error) from error


def fetch_for_ranks(model: Model, run_dir: Path, progress: Progress) -> Mapping[str, Json]:
    """Have the files on this machine before ranks start; bytes and seconds, empty where nothing is from the hub.

    ``progress`` hears at once that it begins, then whenever more bytes have arrived. Raises as ``fetch``.
    """
    if model.source is None or _without_hub(model.source, model.revision) is not None:
        return {}
    began, revision = time.monotonic(), pinned(model, run_dir).revision
    sizes = _sizes(model.source, revision)
    total = sum(sizes.values())
    size = f" ({total / 1e9:.1f} GB)" if total else ""
    with _watched(model.source, sizes, lambda done: progress(f"fetch {model.source}{size}", done, total)):
        folder = fetch(model.source, revision)
    _pin(model, run_dir, folder)
    return {"weights_bytes": total, "weights_s": round(time.monotonic() - began, 1)}


def pinned(model: Model, run_dir: Path) -> Model:
    """``model`` at the commit that data preparation fetched for this run; as it is where there is none."""
    try:
        held = json.loads((run_dir / POINTER).read_text())
        commit, of = held["commit"], (held["source"], held["revision"])
    except (OSError, ValueError, KeyError, TypeError):
        return model
    if of != (model.source, model.revision) or not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        return model
    return model.model_copy(update={"revision": commit})


def hub_id(source: str) -> str | None:
    """The hub's id of ``source``: itself, or that of a snapshot in the hub's cache; None: another folder."""
    if not looks_local(source):
        return None if is_remote(source) else source
    parts = Path(source).parts  # .../models--ORG--NAME/snapshots/COMMIT
    cached = parts[-3] if parts[-2:-1] == ("snapshots",) and len(parts) > 2 else ""
    return cached.removeprefix("models--").replace("--", "/", 1) if cached.startswith("models--") else None


def licence_of(folder: Path) -> dict[str, str]:
    """The keys of the licence in the metadata of the folder's README.md
    (https://huggingface.co/docs/hub/model-cards#model-card-metadata)."""
    try:
        header = (folder / "README.md").read_text(encoding="utf-8", errors="replace").split("---\n", 2)[1]
    except (OSError, IndexError):
        return {}
    found = re.findall(r"^(license|license_name|license_link): *(\S.{0,200})$", header, re.MULTILINE)
    return {key: value.strip(" \"'") for key, value in found}


def hub_error(source: str, error: Exception) -> MusterError:
    """The error for a failed download, in one line without what a signed address holds."""
    kind = type(error).__name__
    if kind in ("RepositoryNotFoundError", "RevisionNotFoundError", "GatedRepoError", "HFValidationError"):
        return UsageError(
            f"model.source: {source} is not available on the hub ({kind})",
            hint="check the name, accept the model's terms on the hub, or run `hf auth login`",
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
        return MusterError(
            f"model.source: {source} cannot be stored here: {error.strerror}", hint="set HF_HOME to another place"
        )
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else kind
    return BackendError(
        f"model.source: {source} is not a local folder and the hub cannot be reached: "
        + re.sub(r"(https?://[^\s?]+)\?\S*", r"\1", first_line),
        hint="check the network, or download the model and give its folder",
    )


def _without_hub(source: str, revision: str | None) -> Path | None:
    """The model's folder where no hub is asked for it."""
    if Path(source).is_dir():
        return Path(source)
    copies = environment.current().model_copies
    return None if copies is None else find_copy(copies, source, revision)


def _sizes(source: str, revision: str | None) -> dict[str, int]:
    """Name in the cache -> bytes of each file that will be fetched; empty where the hub does not say: the download
    itself finds out why."""
    from huggingface_hub import HfApi

    try:
        info = HfApi().model_info(source, revision=revision, files_metadata=True)
    except Exception:  # noqa: BLE001 (needed only for the reported share)
        return {}
    wanted = [file for file in info.siblings or () if any(fnmatch(file.rfilename, each) for each in PATTERNS)]
    return {name: int(file.size or 0) for file in wanted if (name := _cached_name(file))}


def _cached_name(file: Any) -> str | None:
    """Large files lie in the cache by their SHA-256, small ones by git's hash (huggingface_hub's "blobs")."""
    large = getattr(file, "lfs", None)
    name = large.sha256 if large is not None else file.blob_id
    return name if isinstance(name, str) and name else None


@contextmanager
def _watched(source: str, sizes: Mapping[str, int], tell: Callable[[int], None]) -> Iterator[None]:
    """Meanwhile, call ``tell`` with the bytes that are here: from the cache's folder, for any downloading library."""
    from huggingface_hub import constants
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    disable_progress_bars()  # they fill the log with lines that overwrite each other
    blobs = Path(constants.HF_HUB_CACHE) / f"models--{source.replace('/', '--')}" / "blobs"
    over = threading.Event()
    tell(_arrived(blobs, sizes))

    def look() -> None:
        before = _arrived(blobs, sizes)
        while not over.wait(LOOK_S):
            now = _arrived(blobs, sizes)
            if now != before:  # a stalled download is not reported, so that it can be given up
                tell(now)
            before = now

    thread = threading.Thread(target=look, name="weights", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _arrived(blobs: Path, sizes: Mapping[str, int]) -> int:
    """Bytes of these files that are here, whole or in part (``NAME.incomplete``, ``NAME.RANDOM.incomplete``)."""
    found: dict[str, int] = {}
    with suppress(OSError), os.scandir(blobs) as entries:
        for entry in entries:
            name, cut, _ = entry.name.partition(".")
            if name in sizes:
                with suppress(OSError):
                    status = entry.stat()
                    # One that is written in several places at once is as large as it will be from its beginning on.
                    size = min(status.st_blocks * 512, status.st_size) if cut else status.st_size
                    found[name] = max(found.get(name, 0), size)
    return sum(min(size, sizes[name]) for name, size in found.items())


def _pin(model: Model, run_dir: Path, folder: Path) -> None:
    """Write down the commit; hosts that share the run's folder do so at once. Of a copy there is none to write down."""
    if folder.parent.name != "snapshots" or not _COMMIT.fullmatch(folder.name):
        return
    held = json.dumps({"source": model.source, "revision": model.revision, "commit": folder.name})
    temporary = run_dir / f".{POINTER}.{secrets.token_hex(8)}"
    temporary.write_text(held)
    os.replace(temporary, run_dir / POINTER)
