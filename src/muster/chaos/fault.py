"""One fault of the drill's menu: what it needs of a run, how it is injected, and the expected outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from muster.chaos.target import RunTarget
from muster.config.spec import RunSpec

#: Steps between the disk checkpoints of a drill that falls back to one.
CHECKPOINT_EVERY = 5
#: Limit for a step in a drill of a hung rank, where the file gives no limit.
STEP_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One entry of the menu."""

    name: str
    text: str
    """One sentence."""
    numbers: tuple[int, ...] = ()
    """Of the fault list in docs/explanation/recovery.md."""
    noticed: tuple[str, ...] = ()
    """Incident kinds, any of which may come first; empty: none is needed."""
    done: tuple[tuple[str, ...], ...] = ((),)
    """Sequences of actions, any of which is a correct recovery; the empty one: nothing needs to be done."""
    redone: int | None = 0
    """Applied steps that may be redone; None: back to the last checkpoint on disk."""
    inject: Callable[[RunTarget], None]
    hosts: int = 1
    """The least number of hosts."""
    spares: int = 0
    shrinks: bool = False
    """The run must be allowed to continue with fewer hosts."""
    checkpoint: bool = False
    """It needs a committed checkpoint."""
    own_loop: bool = False
    """It happens inside Muster's training loop: a run of ``command:`` has none."""
    hangs: bool = False
    """Only a limit for a step detects it."""
    network: bool = False
    """Each host needs a network namespace of its own: root and iproute2."""
    disk: bool = False
    """The checkpoints need a file system of their own that can be filled: root."""
    settings: tuple[str, ...] = ()
    """Overrides of the file, ``key=value``."""
    exit_code: int | None = None
    """The run ends with it; None: training continues."""
    recover: bool = False
    """No supervisor is left: the drill runs ``muster recover``, as a user would."""

    @property
    def needs_root(self) -> bool:
        """It creates network namespaces, or mounts."""
        return self.network or self.disk

    def overrides(self, spec: RunSpec) -> list[str]:
        """Settings that the run file lacks for this drill."""
        settings = []
        resources = spec.resources
        hosts = max(resources.hosts, self.hosts)
        if hosts != resources.hosts:
            settings.append(f"resources.hosts={hosts}")
        if self.spares != resources.spare_hosts:
            settings.append(f"resources.spare_hosts={self.spares}")
        if self.shrinks:
            settings.append("resources.min_hosts=1")
        elif resources.min_hosts is not None and resources.min_hosts != hosts:
            settings.append(f"resources.min_hosts={hosts}")
        if self.checkpoint and spec.checkpoint.every_steps != CHECKPOINT_EVERY:
            settings.append(f"checkpoint.every_steps={CHECKPOINT_EVERY}")
        if self.hangs and spec.recovery.step_timeout_s is None:
            settings.append(f"recovery.step_timeout_s={STEP_TIMEOUT_S:g}")
        return [*settings, *self.settings]
