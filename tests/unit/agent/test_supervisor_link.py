"""What an agent tells the supervisor that it finds."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from muster.agent.supervisor_link import SupervisorLink
from muster.protocol.to_supervisor import HostReady
from muster.protocol.values import RankEvent


class Hub:
    """Connections to one supervisor, which is there from the first attempt on."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def connect(self, *address: Any, timeout_s: float) -> Any:
        return SimpleNamespace(expect=lambda *given: None)

    def send(self, peer: object, message: object) -> None:
        self.told.append(message)


def event(kind: str, step: int) -> RankEvent:
    detail = {"tier": "disk", "uri": f"there/step-{step}", "bytes": 1}
    return RankEvent(kind=kind, attempt=1, mono_ns=step, wall_ns=step, rank=0, step=step, detail=detail)


def test_a_checkpoint_that_ranks_reported_meanwhile_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a killed agent's successor waits for its ranks. Otherwise a supervisor would start the next attempt from an
    older version that memory holds."""
    hub = Hub()
    link = SupervisorLink(
        hub=hub, identity=SimpleNamespace(run_dir=tmp_path, host="host-1"), hello=HostReady,  # type: ignore[arg-type]
        on_message=lambda message: None, on_refused=lambda line: None,
    )  # fmt: skip
    monkeypatch.setattr(link, "find_address", lambda: ("127.0.0.1", 1))
    for step in (24, 32, 40):
        link.send(event("checkpoint.committed", step))
    link.send(event("eval", 41))
    assert link.connect() and hub.told == [HostReady(), event("checkpoint.committed", 40)]
    link.send(event("checkpoint.committed", 48))
    link.on_lost()
    assert link.connect() and hub.told[2:] == [event("checkpoint.committed", 48), HostReady()]


def test_a_lease_that_changes_hands_is_a_lost_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A spare that was not told so counted its wait from hours ago, and exited where the new holder was slow."""
    lost: list[object] = []

    class Closing(Hub):
        def close(self, peer: object) -> None:
            """Says nothing to ``on_gone``, as the pool's."""

        def on_gone(self, peer: object, reason: str) -> None:
            assert link.is_peer(peer) and "another supervisor" in reason  # type: ignore[arg-type]
            link.on_lost()
            lost.append(peer)

    link = SupervisorLink(
        hub=Closing(), identity=SimpleNamespace(run_dir=tmp_path, host="host-1"), hello=HostReady,  # type: ignore[arg-type]
        on_message=lambda message: None, on_refused=lambda line: None,
    )  # fmt: skip
    address = ["127.0.0.1", 1]
    monkeypatch.setattr(link, "find_address", lambda: tuple(address))
    assert link.connect()
    link.watch()
    assert link.connected and lost == []
    address[1] = 2
    link._lease_check_s = 0.0
    (tmp_path / "lease.json").write_text("{}")  # what it holds is ``find_address``'s here
    link.watch()
    assert not link.connected and len(lost) == 1
