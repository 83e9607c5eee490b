"""``muster rm`` and ``muster prune``: what a run takes, and its end."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from muster.app import api
from muster.cli import output
from muster.cli.inspect_commands import JSON

if TYPE_CHECKING:
    from muster.app.run.remove import Removal

RUNS = typer.Argument(..., metavar="RUN...", help="Runs and sweeps that have ended: ids, folders, or `last`.")
YES = typer.Option(False, "--yes", "-y", help="Do not ask.")
DRY = typer.Option(False, "--dry-run", help="List what would be removed; change nothing.")
STATES = typer.Option([], "--state", help="Only runs that ended so: failed, stopped...; may be repeated.")


def rm(runs: list[str] = RUNS, yes: bool = YES, dry_run: bool = DRY, json: bool = JSON) -> None:
    """Remove ended runs: folder, memory, registry entry; of a sweep all trials. Says how much that frees, and asks.

    Nothing outside a run's own folder is deleted.
    """
    from muster.app.run import remove as use_case

    chosen, sweeps = use_case.removals(runs)
    _end(chosen, sweeps, [], yes, dry_run, json)


def prune(
    older_than: float = typer.Option(30.0, "--older-than", min=0.0, metavar="DAYS", help="Days since it was started."),
    keep: int = typer.Option(0, "--keep", min=0, help="Leave so many of the newest."),
    state: list[str] = STATES,
    yes: bool = YES,
    dry_run: bool = DRY,
    json: bool = JSON,
) -> None:
    """Remove ended runs that are old, and entries of the registry whose folder is gone. Lists them, and asks.

    A sweep goes with the last of its trials.
    """
    from muster.app.run import remove as use_case

    known = ("succeeded", "failed", "stopped", "preempted", "absent")
    if wrong := [name for name in state if name not in known]:
        raise api.UsageError(f"no run ends as {wrong[0]!r}", hint=f"one of {', '.join(known)}")
    chosen, left = use_case.prunable(older_than_s=older_than * 86_400, now_ns=time.time_ns(), states=state, keep=keep)
    for sentence in left:
        output.info(sentence)
    _end(chosen, [], use_case.forgotten(), yes, dry_run, json)


def _end(
    chosen: Sequence[Removal], named: Sequence[Path], forgotten: Sequence[str], yes: bool, dry_run: bool, json: bool
) -> None:
    """Show it, ask, and remove it. ``named``: folders of sweeps that were named."""
    from muster.app.run import remove as use_case

    sweeps = use_case.emptied_sweeps(named, chosen)
    if not chosen and not forgotten and not sweeps and not json:
        output.info("nothing to remove")
        return
    if not json:
        for line in listing(chosen, forgotten, time.time_ns()):
            output.result(line)
        for folder in sweeps:
            output.result(f"sweep: {folder}")
    if not dry_run and not yes:
        if json or not sys.stdin.isatty():
            raise api.UsageError("nothing was removed: no terminal to ask on", hint="--yes, or --dry-run to look")
        typer.confirm(f"remove {_what(chosen, forgotten)} for good?", abort=True, err=True)
    removed: list[Removal] = []
    for each in () if dry_run else chosen:
        use_case.remove(each)
        removed.append(each)
    for folder in () if dry_run else sweeps:
        use_case.remove_sweep(folder)
    for run_id in () if dry_run else forgotten:
        use_case.forget(run_id)
    if json:
        rows = [each.to_json() for each in chosen]
        output.as_json(
            {
                "removed": not dry_run,
                "runs": rows,
                "sweeps": [str(folder) for folder in sweeps],
                "registry_entries": list(forgotten),
            }
        )
    elif not dry_run:
        output.info(f"removed: {_what(removed, forgotten)}")
    else:
        output.info("nothing was removed (--dry-run)")


def listing(chosen: Sequence[Removal], forgotten: Sequence[str], now_ns: int) -> Iterator[str]:
    """What would go, and what would stay."""
    from muster.cli.tables import aligned, short_path

    rows = [("run", "state", "age", "disk", "memory", "folder")]
    for each in chosen:
        age = output.age((now_ns - each.began_ns) / 1e9) if each.began_ns is not None else "-"
        memory = size(each.memory_bytes) if each.memory_bytes else "-"
        where = short_path(each.run.path)
        rows.append((each.run.run_id, each.state.value, age, size(each.bytes), memory, where))
    if chosen:
        yield from aligned(rows, left=(0, 1, 5))
    for each in chosen:
        for place in each.kept:
            yield f"stays: {place} (of {each.run.run_id})"
    for run_id in forgotten:
        yield f"{run_id}: its folder is gone; its entry in the registry goes too"


def size(count: int) -> str:
    """``7.3 MiB``, ``12.4 GiB``."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _what(chosen: Sequence[Removal], forgotten: Sequence[str]) -> str:
    freed = sum(each.bytes for each in chosen)
    parts = [f"{len(chosen)} run{'s' * (len(chosen) != 1)}, {size(freed)} on disk"] if chosen else []
    if memory := sum(each.memory_bytes for each in chosen):
        parts.append(f"{size(memory)} of memory")
    if forgotten:
        parts.append(f"{len(forgotten)} entr{'y' if len(forgotten) == 1 else 'ies'} of the registry")
    return ", ".join(parts)
