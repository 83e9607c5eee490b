"""The training state that hosts hold in memory, as far as they have reported it."""

from __future__ import annotations

from collections.abc import Collection

from muster.supervise.recovery.context import SupervisorContext
from muster.supervise.recovery.layout import Choice, Snapshot, newest_complete


def newest_held(
    ctx: SupervisorContext, *, hosts: Collection[str] | None = None, without: Collection[tuple[int, int]] = ()
) -> Choice | None:
    """The newest complete version in the memory of connected hosts; None: none is newer than what is committed.

    ``hosts``: only these. ``without``: (step, attempt) of versions that must not be used.
    """
    snapshots = [
        Snapshot(
            step=int(item["step"]),
            attempt=int(item["attempt"]),
            rank=int(item["rank"]),
            layout=str(item["layout"]),
            host=name,
            tier=str(item["tier"]),
        )
        for name, host in ctx.state.hosts.items()
        if host.connected and (hosts is None or name in hosts)
        for item in host.snapshots
        if (int(item["step"]), int(item["attempt"])) not in without
    ]
    choice = newest_complete(snapshots)
    return choice if choice is not None and choice.step >= ctx.state.committed_step else None
