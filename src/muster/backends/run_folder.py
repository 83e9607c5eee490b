"""What hosts get of a run: its files, as they travel through the run's home, and as they are placed in its folder.

Where hosts have no config map, the submitter puts one object into the home, named after its SHA-256; the digest reaches
the hosts by another way (a job's arguments), so write access to the bucket alone is not enough to give them other code.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from muster.backends import code_bundle
from muster.core import processes, resolved_file
from muster.core.errors import AccessError, BackendError, ConflictError
from muster.core.protocols import Store
from muster.core.resolved_file import DamagedRunFile
from muster.core.typed_json import Record, Unreadable, decode, encode
from muster.storage import run_registry, run_secrets, uris
from muster.storage.home import HOME_FILE, SUBMISSION_FILE, open_home

FOLDER = "run-files"
"""Of the home: objects by digest."""
PATIENCE_S = 180.0
"""A fresh host's account may be refused for a while: its metadata server has to learn of it."""
RETRY_S = 3.0


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """What one submission of a run gives its hosts."""

    resolved: str
    """The run file with every default, as JSON."""
    run_yaml: str
    """The run file for people."""
    code: bytes | None = None
    """``code_bundle.pack``'s."""

    def encoded(self) -> bytes:
        """As one object; the same files give the same bytes."""
        code = "" if self.code is None else base64.b64encode(self.code).decode()
        return encode(_Stored(resolved=self.resolved, run_yaml=self.run_yaml, code=code))


@dataclass(frozen=True, kw_only=True)
class _Stored(Record):
    resolved: str
    run_yaml: str
    code: str = ""


def digest(data: bytes) -> str:
    """By which hosts know that what they fetch is what was submitted."""
    return hashlib.sha256(data).hexdigest()


def put(store: Store, home: str, data: bytes) -> str:
    """Put ``RunFiles.encoded`` into the home; returns its digest. The same again is one object. Raises as the store."""
    found = digest(data)
    try:
        store.put_if_absent(uris.join(home, FOLDER, found), data)
    except ConflictError:  # an object of that name has that digest, or hosts will refuse it
        pass
    return found


def get(store: Store, home: str, sha256: str, *, patience_s: float = PATIENCE_S) -> RunFiles:
    """What ``put`` put there; a home that refuses or does not answer is asked again for ``patience_s``.

    Raises:
        BackendError: it holds something else, or nothing.
        AccessError: the account may not read it.
    """
    uri, until = uris.join(home, FOLDER, sha256), time.monotonic() + patience_s
    while True:
        try:
            data = store.get(uri).data
            break
        except FileNotFoundError as error:
            raise BackendError(f"{uri} is not there", hint="muster submit puts it there") from error
        except (AccessError, BackendError) as error:
            if time.monotonic() > until:
                raise
            print(f"waiting for the bucket: {error}", file=sys.stderr, flush=True)
            time.sleep(RETRY_S)
    try:
        stored = decode(_Stored, data) if digest(data) == sha256 else None
    except Unreadable as error:
        raise BackendError(f"{uri}: {error}", hint="it is of another version of Muster") from error
    if stored is None:
        raise BackendError(f"{uri} does not have its digest: it was changed", hint="muster submit again")
    code = base64.b64decode(stored.code) if stored.code else None
    return RunFiles(resolved=stored.resolved, run_yaml=stored.run_yaml, code=code)


def place(run_dir: Path, *, run_id: str, backend: str, files: RunFiles, submission: str, home: str | None) -> list[str]:
    """Create what is missing in ``run_dir`` and bring the run file up to date; return the names written.

    Existing files stay (a replaced supervisor's successor finds the folder unchanged), unless ``submission`` is
    another. Where the run lives in a bucket (``home``) the folder is the host's own: its file ``home`` names the
    bucket's, and what a restart put there since the submission is fetched.

    Raises:
        UsageError: a run is there, in a format that this version does not read.
        AccessError, BackendError: the home cannot be read.
    """
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    if run_registry.existing_id(run_dir) is not None:
        run_registry.check_format(run_dir)
    named = {"format": f"{run_registry.FORMAT}\n".encode()}
    named["run.yaml"] = files.run_yaml.encode()
    submitted = resolved_file.sealed(files.resolved)
    named[resolved_file.NAME] = submitted.encode()
    if home is not None:
        named[HOME_FILE] = f"{home}\n".encode()
    named["run_id"] = f"{run_id}\n".encode()
    named["job.json"] = (json.dumps({"version": 1, "run_id": run_id, "backend": backend}) + "\n").encode()
    # Files of an older submission are replaced; what a restart on held hosts wrote after this one stays.
    number = submission.encode()
    named[SUBMISSION_FILE] = number
    newer = _read(run_dir / SUBMISSION_FILE) != number
    if newer and files.code is not None:
        code_bundle.unpack(files.code, run_dir)
    # Of a claim's file that a restart wrote the supervisor alone knows the contents; it rewrites a damaged one.
    damaged = {resolved_file.NAME} if _is_damaged(run_dir, None if home is not None else submitted) else set()
    written = [name for name, data in named.items() if _written(run_dir / name, data, replace=newer or name in damaged)]
    return [*written, "what a restart changed"] if _fetched(run_dir) else written


def place_both(
    folder: Path, link: Path, *, token: str, secrets: Mapping[str, str], run_id: str, backend: str, files: RunFiles,
    submission: str, home: str,
) -> None:  # fmt: skip
    """``place`` the agent's folder, ``host``, and the supervisor's: each brings home what its own programs write.
    ``link``: where the run file looks for the user's code. Raises as ``place``."""
    for part in (folder / "host", folder / "supervisor"):
        place(part, run_id=run_id, backend=backend, files=files, submission=submission, home=home)
        (part / "logs").mkdir(mode=0o700, exist_ok=True)
        processes.replace_text(part / "token", token)
    run_secrets.write(folder / "host", secrets)
    link.unlink(missing_ok=True)  # of an earlier start on this disk
    link.symlink_to(folder / "host" / code_bundle.FOLDER)


def _fetched(run_dir: Path) -> bool:
    """Whether the home had a newer run file of the same submission; it is in ``run_dir`` then."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return open_home(run_dir).fetch()
        except (AccessError, BackendError) as error:
            if time.monotonic() > until:
                raise
            print(f"waiting for the bucket: {error}", file=sys.stderr, flush=True)
            time.sleep(RETRY_S)


def _is_damaged(run_dir: Path, only: str | None) -> bool:
    """``only``: where it had this text's checksum, if given."""
    try:
        resolved_file.read(run_dir)
    except DamagedRunFile as error:
        data = _read(run_dir / resolved_file.NAME) or b""
        if only is not None and not resolved_file.names(data, resolved_file.unsealed(only.encode())):
            return False
        print(f"{error}: the submitted one takes its place", file=sys.stderr)
        resolved_file.set_aside(run_dir)
        return True
    except OSError:
        pass
    return False


def _written(target: Path, data: bytes, *, replace: bool) -> bool:
    """Several pods may do this at once, with the same contents: a reader never sees half a file."""
    if target.exists() and (not replace or _read(target) == data):
        return False
    half = target.with_name(f".{target.name}.{socket.gethostname()}.{os.getpid()}")
    descriptor = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    os.replace(half, target)
    return True


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None
