"""The record of a climb: what was run where and when, signed; and what a bug report needs, without secrets.

Signatures are OpenSSH's (``ssh-keygen -Y``). A rehearsal is signed for another purpose than an acceptance: no edit of
its text makes one of the other.
"""

from __future__ import annotations

import io
import json
import platform
import tarfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from muster import __version__
from muster.accept.ladder import DOLLARS, PASSED, SKIPPED, Climbed, Unit
from muster.app.inspect.status import job
from muster.config.spec import RunSpec
from muster.core.errors import MusterError, UsageError
from muster.core.protocols import Shell
from muster.core.redact import redact, redact_value
from muster.core.typed_json import JsonObject
from muster.storage.run_registry import RunDir

ACCEPTANCE, REHEARSAL = "muster-acceptance", "muster-rehearsal"
"""What a signature is for (``ssh-keygen -Y sign -n``)."""
RECORD = "acceptance.json"
TAIL = 200_000
"""Characters of each task's output."""


def record(
    spec: RunSpec,
    climbed: Sequence[Climbed],
    *,
    budget: float,
    began: datetime,
    rehearsal: str | None,
    unit: Unit = DOLLARS,
) -> JsonObject:
    """The project's name is left out: a record is for others' eyes."""
    priced = {} if unit is DOLLARS else {"price": "not known: the budget counted host-hours"}
    return {
        "format": 1,
        "muster": __version__,
        "backend": spec.backend,
        "machine": spec.resources.machine,
        "provisioning_model": spec.resources.provisioning_model,
        "locations": [*spec.resources.locations],
        "python": platform.python_version(),
        "began": began.isoformat(timespec="seconds"),
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        **priced,
        f"budget_{unit.key}": budget,
        f"{unit.key}_at_most": round(climbed[-1].spent, 4),
        "accepted": all(one.outcome in (PASSED, SKIPPED) for one in climbed),
        "rehearsal": rehearsal,
        "rungs": [_level(one, unit) for one in climbed],
    }


def _level(one: Climbed, unit: Unit) -> JsonObject:
    return {
        "name": one.name, "title": one.title, "outcome": one.outcome, "said": redact(one.said),
        "seconds": round(one.seconds, 1), unit.key: one.spent,
    }  # fmt: skip


def write(folder: Path, found: JsonObject) -> Path:
    """Raises UsageError: the folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / RECORD
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {folder}: {error.strerror}", hint="--output FOLDER") from error
    return path


def sign(path: Path, key: Path, found: JsonObject, shell: Shell) -> Path:
    """``path`` with ``.sig``. Raises UsageError: the key cannot sign."""
    purpose = REHEARSAL if found["rehearsal"] else ACCEPTANCE
    signature = path.with_name(path.name + ".sig")
    signature.unlink(missing_ok=True)  # ssh-keygen would ask
    done = shell.run(["ssh-keygen", "-q", "-Y", "sign", "-f", str(key), "-n", purpose, str(path)], timeout_s=60)
    if done.returncode != 0 or not signature.exists():
        raise UsageError(f"{key} does not sign: {done.stderr.strip()}", hint="--sign ~/.ssh/id_ed25519")
    return signature


def pack(folder: Path, run: RunDir | None) -> Path:
    """Record, events and the last of the run's output as one file, with what looks like a secret hidden."""
    path = folder / "evidence.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in _evidence(folder, run):
            data = text.encode()
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return path


def _evidence(folder: Path, run: RunDir | None) -> list[tuple[str, str]]:
    found = [(RECORD, (folder / RECORD).read_text(encoding="utf-8"))]
    if run is None:
        return found
    for events in sorted(run.events.glob("*.jsonl")):
        found.append((f"events/{events.name}", redact(events.read_text(encoding="utf-8", errors="replace"))))
    try:
        resolved = json.loads((run.path / "resolved.json").read_text(encoding="utf-8"))
        found.append(("resolved.json", json.dumps(redact_value("", resolved), indent=1)))
    except (OSError, ValueError) as error:
        found.append(("resolved.txt", str(error)))
    try:
        launcher, handle = job(run)
        output: dict[str, str] = {}
        for chunk in launcher.logs(handle):
            output[chunk.task] = (output.get(chunk.task, "") + chunk.text)[-TAIL:]
        found += [(f"logs/{task}.txt", redact(written)) for task, written in output.items()]
    except MusterError as error:
        found.append(("logs.txt", str(error)))
    return found
