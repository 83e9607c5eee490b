"""An exported folder onto the Hugging Face hub: all of it in one commit, or nothing. The token is huggingface_hub's own
matter: ``HF_TOKEN``, or ``hf auth login``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from muster.core.errors import AccessError, BackendError, ConflictError, UsageError, install_command
from muster.data.hub import translate

CARD = "README.md"


def open_repository(repo: str, *, public: bool) -> Any:
    """The hub's client, with a repository that takes our files: made, private unless ``public``, or there already.

    Raises:
        UsageError: huggingface_hub is not installed, or ``repo`` is no name.
        AccessError: no token, or none that may write there.
        BackendError: the hub cannot be reached.
    """
    try:
        from huggingface_hub import HfApi, get_token
    except ImportError as error:
        raise UsageError("--push needs huggingface_hub", hint=install_command("data")) from error
    if repo.count("/") != 1 or not all(repo.split("/")):
        raise UsageError(f"--push {repo!r} names no repository", hint="--push OWNER/NAME")
    if get_token() is None:
        raise AccessError("--push needs a token of the Hugging Face hub", hint="`hf auth login`, or HF_TOKEN")
    api = HfApi()
    try:
        api.create_repo(repo, private=not public, exist_ok=True)
    except Exception as error:
        raise _told(error, repo) from error
    return api


def push(api: Any, folder: Path, repo: str, *, message: str, replaced: Mapping[str, bytes] | None = None) -> str:
    """Every file of the folder, in one commit, those of ``replaced`` with these bytes; its address.

    Raises:
        AccessError, BackendError: as ``open_repository``.
        ConflictError: somebody else wrote there at this moment.
    """
    from huggingface_hub import CommitOperationAdd

    files = sorted(path for path in folder.rglob("*") if path.is_file())
    contents: dict[str, Path | bytes] = {path.relative_to(folder).as_posix(): path for path in files}
    add = [CommitOperationAdd(name, content) for name, content in {**contents, **(replaced or {})}.items()]
    try:
        commit = api.create_commit(repo, add, commit_message=message)
    except Exception as error:
        raise _told(error, repo) from error
    return str(commit.commit_url)


def _told(error: Exception, repo: str) -> Exception:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (409, 412):
        return ConflictError(f"{repo} was changed on the hub at this moment", hint="the same command again")
    if status == 403:
        return AccessError(f"the token may not write to {repo}", hint="a token with write access to that owner")
    if isinstance(error, RuntimeError) and error.__cause__ is not None:  # of one file's upload; it says which
        return BackendError(f"{repo}: {error} {error.__cause__}".splitlines()[0][:300], hint="the same command again")
    return translate(error, f"the repository {repo}")
