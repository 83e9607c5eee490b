"""A host's state for tests of an agent's parts, which records messages to the supervisor and notes in the run's log."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from muster.agent.child_processes import ChildEvents
from muster.agent.host_state import HostState


class RecordingHost(HostState):
    """``sent`` and ``notes`` in order; its hub and its log do nothing."""

    def __init__(self, memory: Path = Path("memory"), *, spec: Any = None) -> None:
        hub: Any = SimpleNamespace(watch=lambda fd, call: None, unwatch=lambda fd: None, drain=lambda peer: None)
        log: Any = SimpleNamespace(write=lambda *_, **__: None, open=lambda attempt: None)
        super().__init__(
            run_dir=memory, run_id="run", host="host-0", bind="127.0.0.1", memory=memory, spec=spec, hub=hub, log=log
        )
        self.sent: list[Mapping[str, Any]] = []
        self.notes: list[str] = []

    def send(self, message: Mapping[str, Any]) -> None:
        self.sent.append(message)

    def note(self, text: str) -> None:
        self.notes.append(text)


def events(**given: Any) -> ChildEvents:
    """Reactions to a host's children: ``given``, else none."""
    none: dict[str, Any] = dict.fromkeys(("on_prepared", "on_failure", "on_notice", "on_flush"), lambda *_: None)
    return ChildEvents(**{**none, **given})
