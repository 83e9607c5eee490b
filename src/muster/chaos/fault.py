"""One entry of the drill's menu: what it needs of a run, what is done to it, and what must come of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from muster.chaos.target import RunTarget
from muster.config.spec import RunSpec

#: Steps between the disk checkpoints of a drill that falls back to one.
CHECKPOINT_EVERY = 5
#: Limit for a step in a drill of a rank that makes none, where the file gives no limit.
STEP_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One entry of the menu."""

    name: str
    what: str
    """What is done, one sentence."""
    numbers: tuple[int, ...] = ()
    """Of the fault list in docs/recovery.md."""
    noticed: tuple[str, ...]
    """Incident kinds, any of which may come first; empty: nobody needs to notice."""
    done: tuple[tuple[str, ...], ...]
    """Sequences of actions, any of which heals it as it should."""
    redone: int | None = 0
    """Applied steps that may be taken again; None: back to the last checkpoint on disk."""
    inject: Callable[[RunTarget], None]
    hosts: int = 1
    """At least so many hosts are needed."""
    spares: int = 0
    shrinks: bool = False
    """It needs leave to go on with fewer hosts."""
    checkpoint: bool = False
    """It needs a committed checkpoint."""
    own_loop: bool = False
    """It happens inside Muster's training loop: a run of ``command:`` has none."""
    watchdog: bool = False
    """Only a limit for a step finds it."""
    network: bool = False
    """Each host needs a network namespace of its own: root and iproute2."""
    disk: bool = False
    """The checkpoints need a file system of their own, which can be filled: root."""
    settings: tuple[str, ...] = ()
    """Overrides, ``key=value``, whatever the file says."""
    exit_code: int | None = None
    """The run ends with it; None: it trains on."""
    recover: bool = False
    """Nobody is left to heal it: the drill says ``muster recover``, as a user would."""

    @property
    def needs_root(self) -> bool:
        """It makes network namespaces, or mounts."""
        return self.network or self.disk

    def overrides(self, spec: RunSpec) -> list[str]:
        """What the run file lacks for this drill."""
        found = []
        resources = spec.resources
        hosts = max(resources.hosts, self.hosts)
        if hosts != resources.hosts:
            found.append(f"resources.hosts={hosts}")
        if self.spares != resources.spare_hosts:
            found.append(f"resources.spare_hosts={self.spares}")
        if self.shrinks:
            found.append("resources.min_hosts=1")
        elif resources.min_hosts is not None and resources.min_hosts != hosts:
            found.append(f"resources.min_hosts={hosts}")
        if self.checkpoint and spec.checkpoint.every_steps != CHECKPOINT_EVERY:
            found.append(f"checkpoint.every_steps={CHECKPOINT_EVERY}")
        if self.watchdog and spec.recovery.step_timeout_s is None:
            found.append(f"recovery.step_timeout_s={STEP_TIMEOUT_S:g}")
        return [*found, *self.settings]
