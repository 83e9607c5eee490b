"""What is the same in all run files of one person: ``config.yaml`` in ``$MUSTER_HOME`` (``~/.muster``).

::

    project: my-project            # resources.project
    region: us-central1            # resources.locations; several: [us-central1, us-east4]
    bucket: gs://my-bucket/runs    # run_dir, with the run's name below it

They stand in for keys that a run file and the command line leave out, where machines are Google Cloud's.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from muster.config.backends import BACKENDS
from muster.config.yaml import KeyPath, parse
from muster.core import environment
from muster.core.errors import Problem, RunFileError, UsageError
from muster.core.typed_json import Json

FILE = "config.yaml"
KEYS: Mapping[str, KeyPath] = {
    "project": ("resources", "project"),
    "region": ("resources", "locations"),
    "bucket": ("run_dir",),
}
MAX_BYTES = 1 << 16
_WORDS = {
    "project": (re.compile(r"[a-z0-9.:-]+"), "a project's id"),
    "region": (re.compile(r"[a-z0-9-]+"), "a region or zone, or a list of them"),
    "bucket": (re.compile(r"gs://[a-z0-9][a-z0-9._-]+(/\S*)?"), "gs://BUCKET or gs://BUCKET/FOLDER"),
}


@dataclass(frozen=True, kw_only=True)
class Default:
    """One value: for which key of a run file, and where it was given."""

    path: KeyPath
    value: Json
    source: str
    line: int


def stand_in(raw: dict[str, Json]) -> list[Default]:
    """Fill in missing keys of a run file from the user's defaults; return those filled in. Raises as ``read``."""
    backend = raw.get("backend")
    if backend not in BACKENDS.names() or not BACKENDS.get(str(backend)).capabilities.in_google_cloud:
        return []
    taken = []
    for default in read(environment.current().home, name=str(raw.get("name"))):
        *above, last = default.path
        section = raw.setdefault(str(above[0]), {}) if above else raw
        if isinstance(section, dict) and last not in section:
            section[str(last)] = default.value
            taken.append(default)
    return taken


def read(home: Path, *, name: str) -> Sequence[Default]:
    """The defaults of the file in ``home``, for a run of this name; none where there is no such file.

    Raises:
        RunFileError: an unknown key, or a value that is none. UsageError: the file cannot be read.
    """
    path = home / FILE
    try:
        data = path.read_bytes()[: MAX_BYTES + 1]
        text = data.decode("utf-8-sig")
    except FileNotFoundError:
        return ()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(
            f"cannot read {path}: {reason}", hint="it holds your defaults: project, region, bucket"
        ) from error
    parsed = parse(text, source=str(path))
    problems = list(parsed.problems)
    given = parsed.value if parsed.value is not None else {}
    if not isinstance(given, dict):
        problems, given = [Problem("", "must be a mapping: `project: my-project`", line=1, source=str(path))], {}
    found = []
    for key, value in given.items():
        line = parsed.lines.get((key,), 1)
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"{', '.join(KEYS)} are known"
            problems.append(Problem(key, "unknown key", line=line, source=str(path), hint=hint))
            continue
        values = value if key == "region" and isinstance(value, list) else [value]
        pattern, words = _WORDS[key]
        if not values or not all(isinstance(each, str) and pattern.fullmatch(each) for each in values):
            problems.append(Problem(key, f"must be {words}", line=line, source=str(path)))
            continue
        taken: Json = (
            list(values) if key == "region" else f"{str(value).rstrip('/')}/{name}" if key == "bucket" else value
        )
        found.append(Default(path=KEYS[key], value=taken, source=str(path), line=line))
    if problems:
        raise RunFileError(problems)
    return found
