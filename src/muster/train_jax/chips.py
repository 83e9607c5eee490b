"""What the chips of this host do, as seen by the rank that drives them: the event ``chips.usage``.

Memory is what JAX counts (``Device.memory_stats``). Shares of time come from libtpu, which tells them to the process
that holds the chips (``libtpu.sdk.tpumonitoring``; Google's "TPU Monitoring Library"). Asking it may take long: away
from TPU machines it waits for a metadata server. So a thread asks, and the end of a later step tells what it has found.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax

from muster.core.event_details.training import ChipsUsage
from muster.core.typed_json import Json
from muster.protocol.ranks import AgentClient

EVERY_S = 10.0
#: The event's names and libtpu's: percentages, one of each chip or TensorCore.
SHARES = {"busy": "duty_cycle_pct", "tensorcore": "tensorcore_util"}
#: The event's names and JAX's: bytes.
MEMORY = {"memory_bytes": "bytes_in_use", "memory_peak_bytes": "peak_bytes_in_use", "memory_limit_bytes": "bytes_limit"}


class Chip(Protocol):
    """What is asked of ``jax.Device``."""

    def memory_stats(self) -> Mapping[str, int] | None: ...


@dataclass(kw_only=True)
class ChipsWatch:
    """Tells at the end of a step, every ``EVERY_S`` at most; silent where there are no TPUs."""

    agent: AgentClient
    chips: Sequence[Chip]
    percentages: Callable[[str], Sequence[str]] | None
    """libtpu's answer to one of its names; None: it is not installed, or has none of them."""
    clock_s: Callable[[], float] = time.monotonic
    _next_s: float = 0.0
    _asking: threading.Thread | None = None
    _shares: dict[str, Json] = field(default_factory=dict)

    def at_step(self, step: int) -> None:
        """A step has ended. Never waits."""
        if not self.chips:
            return
        answered = self._asking is not None and not self._asking.is_alive()
        due = self.clock_s() >= self._next_s
        if due:
            self._next_s = self.clock_s() + EVERY_S
        if answered:
            self._asking = None
            self._tell(step, self._shares)
        elif due and (self._asking is not None or self.percentages is None):  # libtpu hangs, or is not there
            self._tell(step, {})
        elif due:
            self._asking = threading.Thread(target=self._ask, name="libtpu", daemon=True)
            self._asking.start()

    def _ask(self) -> None:
        assert self.percentages is not None
        found: dict[str, Json] = {}
        for name, of_libtpu in SHARES.items():
            try:
                found[name] = [round(float(percent) / 100, 4) for percent in self.percentages(of_libtpu)]
            except Exception:  # noqa: BLE001 (another library's edge; a figure that is not there is left out)
                continue
        self._shares = found

    def _tell(self, step: int, shares: Mapping[str, Json]) -> None:
        stats = [chip.memory_stats() or {} for chip in self.chips]
        memory: dict[str, Json] = {
            name: [one[of_jax] for one in stats]
            for name, of_jax in MEMORY.items()
            if all(of_jax in one for one in stats)
        }
        if memory or shares:
            self.agent.emit(ChipsUsage.kind, step=step, **memory, **shares)  # type: ignore[arg-type]


def watch_chips(agent: AgentClient) -> ChipsWatch:
    """Of the chips that this process drives."""
    chips = [device for device in jax.local_devices() if device.platform == "tpu"]
    return ChipsWatch(agent=agent, chips=chips, percentages=libtpu_percentages() if chips else None)


def libtpu_percentages() -> Callable[[str], Sequence[str]] | None:
    """How libtpu is asked for one of its percentages; None: it is not installed, or knows none of ``SHARES``."""
    try:
        monitoring: Any = importlib.import_module("libtpu.sdk").tpumonitoring
        known = set(monitoring.list_supported_metrics())
    except (ImportError, AttributeError, RuntimeError):
        return None
    if not known & set(SHARES.values()):
        return None

    def ask(name: str) -> Sequence[str]:
        return list(monitoring.get_metric(name).data())

    return ask
