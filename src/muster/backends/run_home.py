"""A run's home in a bucket, as the machine that submits sees it: begun before the run, read after its pods are gone."""

from __future__ import annotations

import codecs
import contextlib
import io
import sys
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from muster.config.sections.resources import Resources
from muster.config.spec import RunSpec
from muster.core import processes, resolved_file
from muster.core.errors import BackendError, ConflictError, MusterError
from muster.core.protocols import Store
from muster.core.typed_json import Unreadable, child, decode, parse_object, text
from muster.core.types import LogChunk
from muster.protocol.lease import EndRecord, LeaseRecord, read_lease
from muster.storage import job_record, run_registry
from muster.storage.home import HOME_FILE, Home, open_home
from muster.storage.home.bucket import CLIENT, BucketHome

LEASE, END, RUN_ID = "lease.json", "end.json", "run_id"
AGAIN = 75
WHERE = ("project", "locations", "cluster", "machine", "accelerator", "device", "queue")
"""Keys of ``resources`` by which a run's machines are found, in every version."""
TRIES = 10
"""Of at most 2 s each, which the first one (a name, a token, a connection) may not keep."""


def open_of(local: Path, store: Store | None = None) -> Home | None:
    """The home that a local run folder names; None where it names none. ``store``: instead of the bucket's."""
    if not (local / HOME_FILE).is_file():
        return None
    home = open_home(local)
    return BucketHome(local, home.uri, store=store, bulk=store) if store is not None else home


def begin(local: Path, run_id: str, uri: str, store: Store | None = None) -> None:
    """Name the home in the local run folder, make sure that it is this run's, and bring the client's events there.

    What was decided here (``run.submitted``) is in the home before anything runs that could act on it.

    Raises:
        ConflictError: another run lives there.
        MusterError: the bucket cannot be written.
    """
    run_registry.replace_text(local / HOME_FILE, f"{uri}\n")
    home = open_of(local, store)
    assert home is not None
    try:
        home.store.put_if_absent(home.uri_of(RUN_ID), f"{run_id}\n".encode())
    except ConflictError:
        held = home.store.get(home.uri_of(RUN_ID)).data.decode(errors="replace").strip()
        if held != run_id:
            raise ConflictError(f"the run {held} lives in {uri}", hint="another run_dir, or none") from None
    log = home.open_log(run_id, CLIENT, 0)
    try:
        for _ in range(TRIES):
            if log.sync():
                return
    finally:
        log.close()
    raise BackendError(f"the run's beginning cannot be written to {uri}: {log.unsealed}", hint="the same command again")


def end_of(home: Home, *, again: bool = False) -> EndRecord | None:
    """How the newest submission from this folder ended; None where nothing says so, or the bucket does not answer.

    An allocation that ended while the run wants to go on (75) is no end of the run, but with ``again``.
    """
    found = _read(home, END)
    try:
        end = decode(EndRecord, found) if found is not None else None
    except Unreadable:
        return None
    mine = end is not None and end.submission == submission_of(home.local) and (again or end.exit_code != AGAIN)
    return end if mine else None


def holder_of(home: Home) -> str | None:
    """A pod's IP: of the supervisor that holds the run. None where none does, or the bucket does not answer."""
    found = _read(home, LEASE)
    try:
        lease: LeaseRecord | None = read_lease(found, me="this command") if found is not None else None
    except (Unreadable, MusterError):
        return None
    return lease.address[0] if lease is not None and lease.address is not None else None


def publish(home: Home, resolved: str, code: bytes | None) -> None:
    """Put a corrected run file, and the code with it, where pods that start or restart read it."""
    named = {resolved_file.NAME: resolved_file.sealed(resolved).encode()}
    if code is not None:
        with tarfile.open(fileobj=io.BytesIO(code)) as archive:
            for entry in archive:
                if (file := archive.extractfile(entry)) is not None:
                    named[f"code/{entry.name}"] = file.read()
    home.publish_run_file(submission_of(home.local), named)


def submission_of(local: Path) -> str:
    """The number of the newest submission from this folder."""
    return str(job_record.submission(local) or 1)


def logs(home: Home, after: Mapping[str, int]) -> Iterator[LogChunk]:
    """What the run's programs printed beyond ``after``, as far as it is in the home; at most half a minute old.

    What is damaged there is left out, with a line on standard error at the first look; where more of the same file
    follows, a line in its place says how much is lost.

    Raises:
        MusterError: the bucket cannot be read.
    """

    def tell(text: str) -> None:
        if not after:
            print(f"warning: {text}", file=sys.stderr)

    home.mirror(home.local, what="logs", on_damage=tell)
    for path in sorted((home.local / "logs").glob("*.log")):
        start = after.get(path.stem, 0) if after.get(path.stem, 0) <= path.stat().st_size else 0
        with processes.open_plain(path) as file:
            file.seek(start)
            data = file.read()
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        text = decoder.decode(data)
        if text:  # what may be half a character stays for the next look
            yield LogChunk(task=path.stem, text=text, next_offset=start + len(data) - len(decoder.getstate()[0]))


def spec_to_end(local: Path) -> RunSpec:
    """The run file of a run of any version, as far as its end needs it: where its machines are.

    Raises:
        BackendError: neither the file nor its copy is there.
        Unreadable: it is no JSON object.
    """
    with contextlib.suppress(ValueError, MusterError, OSError):  # of another version, damaged, or gone
        return RunSpec.model_validate_json(resolved_file.read(local))
    copy = resolved_file.copied(local)
    try:
        written = parse_object(copy or processes.read_plain(local / resolved_file.NAME))
    except OSError as error:
        where = f"{local / resolved_file.NAME} cannot be read: the project of the run's machines is not known"
        raise BackendError(where, hint="they have the label muster-run in the project") from error
    resources = {}
    for key in WHERE:
        value = child(written, "resources").get(key)
        with contextlib.suppress(ValueError):
            Resources.model_validate({key: value}, strict=False)
            resources[key] = value
    values = {"name": "ended", "backend": text(written, "backend"), "command": ["true"], "resources": resources}
    return RunSpec.model_validate(values, strict=False)


def _read(home: Home, name: str) -> bytes | None:
    try:
        return home.store.get(home.uri_of(name)).data
    except (FileNotFoundError, MusterError, OSError):
        return None
