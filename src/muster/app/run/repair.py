"""Restores a damaged ``resolved.json`` where no supervisor of the run is there to do it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from muster.config.load import loads
from muster.config.spec import RunSpec
from muster.core import event_log, resolved_file
from muster.core.errors import MusterError, UsageError
from muster.core.event_details.run import RunSubmitted
from muster.core.processes import read_plain
from muster.core.resolved_file import DamagedRunFile
from muster.core.typed_json import text, texts
from muster.storage.run_registry import RunDir

Resolve = Callable[[RunSpec], RunSpec]


def repair_run_file(run: RunDir, resolve: Resolve) -> str | None:
    """Write it as it was if it is damaged, and return a sentence about that; None: nothing is wrong with it.

    Raises:
        UsageError: it is damaged, and nothing tells what it was.
    """
    try:
        resolved_file.read(run.path)
        return None
    except OSError:
        return None  # its next reader reports it
    except DamagedRunFile as error:
        problem = error
    found = as_submitted(run, resolve)
    if found is None:
        raise UsageError(
            f"{problem}, and {run.run_file} gives another one today",
            hint=f"muster submit with its run file and run_dir={run.path} rewrites both",
        )
    resolved_file.set_aside(run.path)
    resolved_file.write(run.path, found)
    return f"{problem} (kept as {resolved_file.DAMAGED}): it was restored as it was submitted"


def as_submitted(run: RunDir, resolve: Resolve) -> str | None:
    """The text of a damaged one as it was: of which the file's own checksum speaks, or the last ``run.submitted``.

    That is its copy, the file without its first line, or ``run.yaml`` resolved again, with what the command lines
    changed in it. ``resolve``: what the machines decide is filled in. None: none of them fits.
    """
    events = sorted((event for _, event in event_log.read(run.events)), key=lambda event: event.wall_ns)
    submitted = [event.detail for event in events if event.kind == RunSubmitted.kind]
    try:
        data = read_plain(run.resolved)
    except OSError:
        return None
    last = [text(detail, "spec_digest") for detail in submitted[-1:]]
    argv = [word for detail in submitted for word in texts(detail, "argv")]
    for found in _candidates(run, data, argv, resolve):
        if resolved_file.names(data, found) or resolved_file.digest(found) in last:
            return found
    return None


def _candidates(run: RunDir, data: bytes, argv: Sequence[str], resolve: Resolve) -> Iterator[str]:
    if (copy := resolved_file.copied(run.path)) is not None:
        yield copy
    yield "{\n" + data.decode(errors="replace").partition('",\n')[2]
    for overrides in ([], [word for word in argv if "=" in word and not word.startswith("-")]):
        try:
            spec = resolve(loads(read_plain(run.run_file).decode(), overrides, environment=False).spec)
        except (MusterError, OSError, ValueError):
            continue
        yield spec.model_dump_json(indent=1) + "\n"
