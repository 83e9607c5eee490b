"""What an agent tells the supervisor that it finds."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from muster.agent.supervisor_link import SupervisorLink
from muster.core.errors import AccessError
from muster.protocol.to_supervisor import HostReady
from muster.protocol.values import RankEvent


class Hub:
    """Connections to one supervisor, which is there from the first attempt on."""

    token = b"a" * 64

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.answer: Any = None

    def connect(self, *address: Any, timeout_s: float) -> Any:
        return SimpleNamespace(expect=self._expect)

    def _expect(self, reader: object, answer: Any) -> None:
        self.answer = answer

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


def test_an_agent_that_began_with_a_damaged_token_starts_again_once_it_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would ever speak to it. One to which a supervisor has spoken knows the right one, whatever the file
    says."""
    hub, token = Hub(), tmp_path / "token"
    link = SupervisorLink(
        hub=hub, identity=SimpleNamespace(run_dir=tmp_path, host="host-1"), hello=HostReady,  # type: ignore[arg-type]
        on_message=lambda message: None, on_refused=lambda line: None,
    )  # fmt: skip
    monkeypatch.setattr(link, "find_address", lambda: ("127.0.0.1", 1))
    assert link.connect(), "no file: nothing better is known"
    for text in ("a" * 64, "a"):
        token.write_text(text)
        token.chmod(0o600)
        assert link.connect(), "the same one, or none"
    token.write_text("b" * 64)
    with pytest.raises(AccessError, match="starts again"):
        link.connect()
    token.write_text("a" * 64)
    assert link.connect()
    hub.answer(None, HostReady())
    token.write_text("b" * 64)
    assert link.connect()
