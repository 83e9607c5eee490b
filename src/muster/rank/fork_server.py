"""The fork server: imports torch once, then forks a rank in milliseconds.

A separate program (``python -m muster.rank.fork_server``), started by the agent. Before a fork it runs
no tensor operation, starts no thread and touches no CUDA: a fork of a process that did any of these can
deadlock or inherit a dead context, so it asserts that it has one thread. A forked child waits as a *standby*
until the agent assigns it a rank. Another child serves the rendezvous store, a new one for each attempt.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from muster.catalog import libraries
from muster.config.spec import RunSpec
from muster.core import environment, redact, resolved_file, typed_json
from muster.core.errors import AccessError, MusterError
from muster.core.processes import forgive_outputs, open_log
from muster.core.snapshots import SnapshotNotIntact
from muster.core.typed_json import Record
from muster.protocol.codec import reader_of
from muster.protocol.fork_server import (
    TO_FORK_SERVER,
    ChildExited,
    ForkServerHello,
    NewStore,
    SpawnStandbys,
    ToForkServer,
)
from muster.protocol.rank_agent import (
    FROM_RANK,
    TO_RANK,
    RankHello,
    RunRank,
    StandbyHello,
    StandbyUnfit,
    StandbyWarm,
    ToRank,
    WarmUp,
)
from muster.protocol.ranks import EXPECTED_EXIT_CODES, RankContext
from muster.protocol.values import LastWords, StoreAddress
from muster.rank import fork_check, interface
from muster.rank.agent_connection import AgentAddress, AgentConnection, SocketAgentClient
from muster.transport.listening import listen_on
from muster.transport.secure_session import run_token

#: A standby without a rank after this time warms up; earlier it would delay the ranks of the first attempt.
WARM_AFTER_S = 0.5
#: How often a standby looks whether its CUDA context still works: a GPU's error may end it while nobody uses it.
CONTEXT_LOOK_S = 30.0


def main() -> None:
    """Serve until the agent ends this program, or is absent for ``--orphan-s``."""
    forgive_outputs()
    parser = argparse.ArgumentParser(description="fork ranks for a Muster agent")
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--agent-socket", required=True)
    parser.add_argument("--bind", default="127.0.0.1")
    parser.add_argument("--orphan-s", type=float, default=30.0)
    parser.add_argument("--beat-every-s", type=float, default=0.25)
    arguments = parser.parse_args()
    settings = environment.current()
    os.setpriority(os.PRIO_PROCESS, 0, settings.nice)  # the agent's own is raised for heartbeats
    try:
        token = run_token(arguments.run_dir)
        os.environ.update(interface.variables(arguments.bind, named=os.environ.keys()))
        spec = RunSpec.model_validate_json(resolved_file.read(Path(arguments.run_dir), patient=True))
        if spec.model is not None:  # before anything is imported, which a wrong version fails at
            libraries.refuse(libraries.installed(), attention=spec.model.attention)
    except MusterError as error:  # the agent tells the user the last line of this program's log
        print(f"error: {error}" + (f" ({error.hint})" if error.hint else ""), file=sys.stderr)
        sys.exit(error.exit_code)
    _import_everything(spec)
    gc.collect()
    gc.freeze()  # the parent's objects stay out of every child's collections, and their pages stay shared
    _assert_single_threaded()
    try:
        fork_check.check()
    except MusterError as error:
        print(f"error: {error} ({error.hint})", file=sys.stderr)
        sys.exit(error.exit_code)
    ForkServer(
        AgentAddress(arguments.agent_socket, token, arguments.orphan_s, arguments.beat_every_s),
        bind=arguments.bind,
        spec=spec,
        term_ignored=settings.term_ignored,
        inject_faults=settings.drill,
    ).serve()


def _import_everything(spec: RunSpec) -> None:
    """Everything that a rank imports, the lazy imports of the first model build included, and what reads messages."""
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.profiler  # noqa: F401

    from muster.rank import worker

    if spec.model is not None:
        worker.preload(spec.model)
    if spec.resources.device == "tpu":  # no device is touched: a fork after that would hang
        import muster.train_jax.components  # noqa: F401
    typed_json.prepare(*TO_RANK.messages, *FROM_RANK.messages, StandbyHello, RankHello)


def _assert_single_threaded() -> None:
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads before the fork: a forked rank could deadlock"


def _serve_store(bind: str, inherited: list[int]) -> tuple[int, tuple[str, int]]:
    """Fork a rendezvous store's process, which ends with this one; (pid, address)."""
    listener = listen_on(bind)
    address = listener.getsockname()[:2]
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _die_with_parent(parent)
        for fd in inherited:
            os.close(fd)
        from torch._C._distributed_c10d import TCPStore

        _store = TCPStore(
            address[0], address[1], None, True, wait_for_workers=False, master_listen_fd=listener.fileno()
        )
        while True:
            time.sleep(3600)
    listener.close()
    return pid, (address[0], address[1])


def _die_with_parent(parent: int) -> None:
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


@dataclass
class ForkServer:
    """Forks on request, reaps and reports."""

    agent: AgentAddress
    bind: str
    spec: RunSpec
    term_ignored: bool
    inject_faults: bool
    children: dict[int, int] = field(default_factory=dict)
    """pidfd -> pid"""
    connection: AgentConnection[ToForkServer] | None = None
    stores: list[int] = field(default_factory=list)
    """pids, oldest first"""

    def __post_init__(self) -> None:
        self.store = self._new_store()

    def _new_store(self) -> tuple[str, int]:
        """A store without keys of an earlier attempt: users' scripts do not put the attempt in them (pytorch#135712).

        The previous store serves the running attempt and stays; older ones end.
        """
        inherited = [*self.children, *([self.connection.sock.fileno()] if self.connection else [])]
        pid, address = _serve_store(self.bind, inherited)
        self.stores.append(pid)
        while len(self.stores) > 2:
            old = self.stores.pop(0)
            os.kill(old, signal.SIGKILL)
            os.waitpid(old, 0)
        return address

    def serve(self) -> None:
        import select

        while True:
            connection = self.connection or self._connect()
            watched: list[socket.socket | int] = [connection.sock, *self.children]
            ready, _, _ = select.select(watched, [], [])
            for fd in [fd for fd in ready if isinstance(fd, int)]:
                self._reap(fd)
            if self.connection is not None and self.connection.sock in ready:
                self._handle_messages(self.connection)

    def _connect(self) -> AgentConnection[ToForkServer]:
        children = tuple(self.children.values())  # a restarted agent cannot know those that do not register
        hello = ForkServerHello(pid=os.getpid(), store=self.store, children=children)
        self.connection = self.agent.wait_for_connection(lambda: hello, reader_of(TO_FORK_SERVER))
        if self.connection is None:
            self._end_all()
            sys.exit(1)
        return self.connection

    def _send(self, message: Record) -> None:
        try:
            if self.connection is not None:
                self.connection.send(message)
        except OSError:
            self.connection = None

    def _handle_messages(self, connection: AgentConnection[ToForkServer]) -> None:
        try:
            messages = connection.wait(1.0)
        except (OSError, AccessError, ValueError):
            self.connection = None
            return
        for message in messages:
            match message:
                case SpawnStandbys():
                    for local_rank in message.local_ranks:
                        self._fork(local_rank, context=message.contexts)
                case NewStore():
                    self.store = self._new_store()
                    self._send(StoreAddress(store=self.store))

    def _fork(self, local_rank: int, *, context: bool) -> None:
        _assert_single_threaded()
        pid = os.fork()
        if pid == 0:
            self._become_standby(local_rank, context=context)
        fd = os.pidfd_open(pid)
        self.children[fd] = pid

    def _become_standby(self, local_rank: int, *, context: bool) -> None:
        """In the child; never returns."""
        code = 1
        try:
            os.setsid()  # a Ctrl-C in the terminal then reaches only the supervisor
            for fd in self.children:
                os.close(fd)
            if self.connection is not None:
                self.connection.sock.close()
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN if self.term_ignored else signal.SIG_DFL)
            code = self._standby(local_rank, context=context)
        except BaseException:  # noqa: BLE001 (process boundary: nothing may unwind into the fork server)
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _reap(self, fd: int) -> None:
        pid = self.children.pop(fd)
        _, status = os.waitpid(pid, 0)
        os.close(fd)
        self._send(ChildExited(pid=pid, code=os.waitstatus_to_exitcode(status)))

    def _end_all(self) -> None:
        for pid in self.children.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _standby(self, local_rank: int, *, context: bool) -> int:
        """In the child: wait for a rank, run it, return its exit code.

        ``local_rank``: the expected one. ``context``: the standby may wait with a CUDA context on that GPU.
        """
        hello = StandbyHello(pid=os.getpid(), local_rank=local_rank, bound=context)
        connection = self.agent.wait_for_connection(lambda: hello, reader_of(TO_RANK))
        if connection is None:
            return 0
        try:
            assignment = _first_assignment(connection, self.spec, local_rank=local_rank, context=context)
        except ConnectionError:
            # The agent died while this process was a standby: no work is lost, its successor forks new ones.
            return 0
        if not isinstance(assignment, RunRank):
            return 0
        rank_context = assignment.context
        _redirect(assignment.log)
        _set_environment(rank_context)
        redact.hide_values(os.environ.get(name, "") for name in self.spec.secrets)
        agent = SocketAgentClient(connection, self.agent, attempt=rank_context.attempt, rank=rank_context.rank)
        return _run(rank_context, agent, inject_faults=self.inject_faults)


def _first_assignment(connection: AgentConnection[ToRank], spec: RunSpec, *, local_rank: int, context: bool) -> ToRank:
    """The agent's first message other than ``WarmUp``; warms up if it asks for that, or is silent for a while."""
    with contextlib.suppress(TimeoutError):
        for message in connection.wait(WARM_AFTER_S):
            if not isinstance(message, WarmUp):
                return message
    from muster.rank import warmup

    fit = True
    if warmup.applies(spec, context=context):
        fit = warmup.warm_up(spec, gpu=local_rank if context else None) or not context
    # An unfit one is ended by the agent, which starts no other like it, unless a rank was assigned meanwhile.
    connection.send(StandbyWarm() if fit else StandbyUnfit())
    while True:
        messages: Sequence[ToRank] = [WarmUp()]
        with contextlib.suppress(TimeoutError):
            messages = connection.wait(CONTEXT_LOOK_S if context and fit else None)
        for message in messages:
            if not isinstance(message, WarmUp):
                return message
            if context and fit:  # asked, because a rank here has exited; or nothing came for a while
                fit = warmup.context_lives(local_rank)
                if not fit:
                    connection.send(StandbyUnfit())


def _run(context: RankContext, agent: SocketAgentClient, *, inject_faults: bool) -> int:
    try:
        resolved = json.loads(resolved_file.read(Path(context.run_dir), patient=True))
        if command := resolved.get("command"):
            from muster.rank.user_script import run_command

            code = run_command(command, context, agent, workdir=resolved.get("workdir"))
        else:
            from muster.rank import worker

            code = worker.run_rank(context, agent, store_hosted=True, inject_faults=inject_faults)
        if code in EXPECTED_EXIT_CODES:
            agent.report_exit(LastWords(left=code))
        return code
    except BaseException as error:  # noqa: BLE001 (process boundary: the agent must learn of any failure)
        from muster.rank.user_script import words_of

        if not (isinstance(error, SystemExit) and isinstance(error.code, int)):
            print(redact.redact(words_of(error)), end="", file=sys.stderr, flush=True)  # before what is said of it
        agent.report_exit(last_words(error))
        return error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
    finally:
        agent.close()


def last_words(error: BaseException) -> LastWords:
    """What the agent and the supervisor are told about the exception that ends a rank."""
    from muster.rank.user_script import traceback_of
    from muster.train.optim.nonfinite import NotFinite

    name, message = type(error).__name__, _sendable(str(error))
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        message = f"the script left with exit code {error.code}"
    if not isinstance(error, MusterError):
        return LastWords(exception=name, message=message, traceback=_sendable(traceback_of(error)[-4000:]))
    return LastWords(
        exception=name,
        message=message,
        hint=error.hint and _sendable(error.hint),
        exit_code=error.exit_code,
        not_finite=isinstance(error, NotFinite),
        rejected=error.copies if isinstance(error, SnapshotNotIntact) else (),
    )


def _sendable(text: str) -> str:
    """``text`` without the run's secrets, as a frame holds it: lone surrogates of file names escaped, not too long."""
    return redact.redact(text.encode(errors="backslashreplace").decode()[:100_000])


def _redirect(path: str) -> None:
    """Both outputs of this process to ``path``; where a full disk has no room for it, they stay in the host's log."""
    try:
        with open_log(Path(path)) as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
    except OSError as error:
        print(f"note: {path} cannot be opened ({error.strerror}): a rank's output follows here", file=sys.stderr)


def _set_environment(context: RankContext) -> None:
    """The variables that torchrun sets, for users' scripts."""
    os.environ.update(
        RANK=str(context.rank),
        LOCAL_RANK=str(context.local_rank),
        WORLD_SIZE=str(context.world_size),
        LOCAL_WORLD_SIZE=str(context.local_world_size),
        GROUP_RANK=str(context.rank // context.local_world_size),  # every host has the same number of ranks
        GROUP_WORLD_SIZE=str(context.world_size // context.local_world_size),
        ROLE_NAME="default",
        ROLE_RANK=str(context.rank),
        ROLE_WORLD_SIZE=str(context.world_size),
        TORCHELASTIC_MAX_RESTARTS="0",  # the policy decides on restarts, no count of a launcher
        MASTER_ADDR=context.master_addr,
        MASTER_PORT=str(context.master_port),
        TORCHELASTIC_RUN_ID=context.run_id,
        TORCHELASTIC_RESTART_COUNT=str(context.attempt - 1),
        TORCHELASTIC_USE_AGENT_STORE="True",
        MUSTER_ATTEMPT=str(context.attempt),
    )


if __name__ == "__main__":
    main()
