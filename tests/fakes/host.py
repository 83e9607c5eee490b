"""A host for tests of an agent's parts, which records messages to the supervisor and notes in the run's log."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from muster.agent.fork_server_process import ForkServer
from muster.agent.host_identity import HostIdentity
from muster.agent.programs import Programs
from muster.agent.rank_pool import RankPool
from muster.agent.ranks.pool_calls import Forks, Snapshots
from muster.agent.ranks.rank_process import Worker
from muster.agent.replicator_process import ReplicatorProcess
from muster.agent.unsupervised_host import UnsupervisedHost
from muster.protocol.to_supervisor import FromAgent, ReplicatorAddress
from muster.storage.memory_dir import MemoryDir


class RecordingHost:
    """Makes parts, one of each kind at most. What they report is kept in order: ``sent``, ``notes``, ``failures``,
    ``answers`` of flushes. Its hub and its log do nothing, unless a test gives a hub."""

    def __init__(
        self, memory: Path | None = None, *, run_dir: Path | None = None, spec: Any = None, hub: Any = None
    ) -> None:
        """``run_dir``: another folder than ``memory``; without either nothing of them is used."""
        self.memory, self.spec = memory or Path("memory"), spec
        found = MemoryDir.open(memory) if memory else MemoryDir(self.memory, os.open("/", os.O_RDONLY))
        self.identity = HostIdentity(
            run_dir=run_dir or self.memory, run_id="run", host="host-0", bind="127.0.0.1", memory=found
        )
        self.hub = hub or SimpleNamespace(watch=lambda fd, call: None, unwatch=lambda fd: None, drain=lambda peer: ())
        self.log: Any = SimpleNamespace(
            writer="host-0",
            write=lambda *_, **__: None,
            write_rank=lambda _: True,
            open=lambda attempt: None,
            note=self._note,
        )  # fmt: skip
        self.sent: list[FromAgent] = []
        self.notes: list[str] = []
        self.failures: list[Any] = []
        self.answers: list[Any] = []
        self.stopped: list[int] = []
        self.supervised = False
        self.living: list[Worker] = []
        self.exit_reason: str | None = None

    def _note(self, text: str) -> None:
        self.notes.append(text)

    def _exit(self, reason: str) -> None:
        self.exit_reason = reason

    def _on_failure(self, failure: Any) -> None:
        if failure is not None:
            self.failures.append(failure)

    def _is_ending(self) -> bool:
        return self.exit_reason is not None

    def fork_server(self) -> ForkServer:
        return ForkServer(
            identity=self.identity, hub=self.hub, spec=lambda: self.spec, is_ending=self._is_ending,
            on_failure=self._on_failure, on_exited=lambda pid, code: None,
            on_stopped=self.stopped.append, on_store=self.sent.append, on_note=self.sent.append,
        )  # fmt: skip

    def rank_pool(self, *, reaps: bool = False, **changes: Any) -> RankPool:
        """``reaps``: its fork server tells every exit code. ``changes``: other ``Forks``, ``Snapshots``."""
        forks = Forks(
            spawn=lambda _: None,
            reaps=lambda _: reaps,
            opens_contexts=lambda: False,
            give_up_contexts=lambda: None,
            order_store=lambda: None,
        )
        snapshots = Snapshots(
            begin=lambda order: order.contexts,
            held=tuple,
            drop=lambda _: None,
            on_ready=lambda: None,
            on_step=lambda _: None,
        )
        given: dict[str, Any] = {"forks": forks, "snapshots": snapshots, **changes}
        return RankPool(
            identity=self.identity, hub=self.hub, log=self.log, spec=lambda: self.spec, send=self.sent.append,
            is_supervised=lambda: self.supervised, is_prepared=lambda: True, on_warm=lambda: None, **given,
        )  # fmt: skip

    def programs(self) -> Programs:
        return Programs(
            identity=self.identity, hub=self.hub, log=self.log, spec=lambda: self.spec, tell=self.sent.append,
            exit_reason=lambda: self.exit_reason, on_prepared=lambda: None, on_failure=self._on_failure,
            living=lambda: self.living,
            on_notice=lambda _: None, on_set_up=lambda: None, on_progress=self.sent.append,
        )  # fmt: skip

    def replicator(self) -> ReplicatorProcess:
        return ReplicatorProcess(
            identity=self.identity, hub=self.hub, limit_s=lambda: self.spec.recovery.timing.replicator_stopped_after_s,
            is_ending=self._is_ending, on_flush=lambda answer, order: self.answers.append(answer),
            on_moved=lambda address: self.sent.append(ReplicatorAddress(memory=address)),
            on_rejected=self.sent.append, on_note=self._note,
        )  # fmt: skip

    def unsupervised(self, *, is_working: Any, held: Any, flush: Any) -> UnsupervisedHost:
        return UnsupervisedHost(
            identity=self.identity, spec=lambda: self.spec, is_working=is_working, held=held, flush=flush,
            on_note=self._note, on_exit=self._exit,
        )  # fmt: skip
