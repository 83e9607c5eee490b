"""The fork server: imports torch once, then forks a rank in milliseconds.

A separate program (``python -m muster.rank.fork_server``), started by the agent. Before a fork it runs
no tensor operation, starts no thread and touches no CUDA: a fork of a process that did any of these can
deadlock or inherit a dead context. Where an imported package did (``fork_check``), each standby and each store is a new
process instead, this program again, which has everything still to import: seconds, and said in the run's log.
A standby waits until the agent assigns it a rank. Another child serves the rendezvous store; the agent orders a new one
once its own may have been given to an attempt.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from muster.catalog import libraries
from muster.config.spec import RunSpec
from muster.core import environment, processes, resolved_file, typed_json
from muster.core.errors import AccessError, MusterError
from muster.core.processes import forgive_outputs
from muster.core.typed_json import Record
from muster.protocol.codec import reader_of
from muster.protocol.fork_server import (
    TO_FORK_SERVER,
    ChildExited,
    ChildStopped,
    ForkServerHello,
    NewStore,
    SpawnStandbys,
    ToForkServer,
)
from muster.protocol.rank_agent import FROM_RANK, TO_RANK, RankHello, StandbyHello
from muster.protocol.values import StoreAddress
from muster.rank import fork_check, interface, standby
from muster.rank.agent_connection import AgentAddress, AgentConnection
from muster.transport.listening import listen_on
from muster.transport.secure_session import run_token

#: Before a store that has ended is replaced: the next one may end at once as well.
STORE_RETRY_S = 0.2


def main() -> None:
    """Serve until the agent ends this program, or is absent for ``--orphan-s``."""
    forgive_outputs()
    parser = argparse.ArgumentParser(description="fork ranks for a Muster agent")
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--agent-socket", required=True)
    parser.add_argument("--bind", default="127.0.0.1")
    parser.add_argument("--orphan-s", type=float, default=30.0)
    parser.add_argument("--beat-every-s", type=float, default=0.25)
    parser.add_argument("--standby", type=int, help="be one of this local rank, instead of a fork")
    parser.add_argument("--context", action="store_true", help="the standby may wait with a CUDA context")
    parser.add_argument("--store", type=int, nargs=2, help="be a store: inherited listener, pid of the fork server")
    arguments = parser.parse_args()
    if arguments.store is not None:
        _be_store(*arguments.store)
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
    server = ForkServer(
        AgentAddress(arguments.agent_socket, token, arguments.orphan_s, arguments.beat_every_s),
        run_dir=arguments.run_dir,
        bind=arguments.bind,
        spec=spec,
        term_ignored=settings.term_ignored,
        inject_faults=settings.drill,
    )
    if arguments.standby is not None:
        server.be_standby(arguments.standby, context=arguments.context, prepare=lambda: _import_everything(spec))
    _import_everything(spec)
    server.serve()


def _import_everything(spec: RunSpec) -> None:
    """Everything that a rank imports, the lazy imports of the first model build included, and what reads messages.

    Without collections: in 3,000 modules they take a fifth of the time (0.8 s) and would free 8 MB. What is there
    afterwards stays out of every later collection, and its pages stay shared with children (``gc.freeze``).
    """
    gc.disable()
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.profiler  # noqa: F401

    from muster.rank import worker

    if spec.model is not None:
        worker.preload(spec.model)
    if spec.resources.device == "tpu":  # no device is touched: a fork after that would hang
        import muster.train_jax.components  # noqa: F401
    typed_json.prepare(*TO_RANK.messages, *FROM_RANK.messages, StandbyHello, RankHello)
    gc.freeze()
    gc.enable()


def _be_store(listener: int, parent: int) -> NoReturn:
    """In a child: a rendezvous store on ``listener``, until process ``parent`` ends."""
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
    from torch._C._distributed_c10d import TCPStore

    address = socket.socket(fileno=os.dup(listener)).getsockname()[:2]
    _store = TCPStore(address[0], address[1], None, True, wait_for_workers=False, master_listen_fd=listener)
    while True:
        time.sleep(3600)


@dataclass
class ForkServer:
    """Forks on request, reaps and reports."""

    agent: AgentAddress
    run_dir: str
    bind: str
    spec: RunSpec
    term_ignored: bool
    inject_faults: bool
    children: dict[int, int] = field(default_factory=dict)
    """pidfd -> pid"""
    connection: AgentConnection[ToForkServer] | None = None
    stores: dict[int, int] = field(default_factory=dict)
    """pidfd -> pid, oldest first"""
    store: tuple[str, int] = ("", 0)
    """Address of the newest one."""
    _woken: socket.socket = field(init=False)
    """Readable once the kernel has signalled a child's exit or stop (SIGCHLD)."""
    unforkable: str = ""
    """Why children are new processes; empty: they are forks."""

    def _new_store(self) -> tuple[str, int]:
        """A store without keys of an earlier attempt: users' scripts do not put the attempt in them (pytorch#135712).

        The previous store may serve the running attempt, and stays; older ones end.
        """
        listener = listen_on(self.bind)
        address = listener.getsockname()[:2]
        parent, number = os.getpid(), listener.fileno()
        if self.unforkable:
            pid = self._start("--store", str(number), str(parent), keep=[number])
        else:
            pid = self._fork(lambda: _be_store(number, parent))
        listener.close()
        self.stores[os.pidfd_open(pid)] = pid
        while len(self.stores) > 2:
            oldest = next(iter(self.stores))
            os.kill(self.stores[oldest], signal.SIGKILL)
            self._reap_store(oldest)
        return address[0], address[1]

    def _reap_store(self, fd: int) -> None:
        os.waitpid(self.stores.pop(fd), 0)
        os.close(fd)

    def _replace_store(self, fd: int) -> None:
        """A store has ended by itself: the next attempt's is replaced. The ranks that were given the one before it
        notice (``train.distributed.process_setup``)."""
        is_newest = fd == [*self.stores][-1]
        self._reap_store(fd)
        if is_newest:
            time.sleep(STORE_RETRY_S)
            self.store = self._new_store()
            self._send(StoreAddress(store=self.store))

    def serve(self) -> NoReturn:
        """Once everything is imported: connect to the agent and do what it asks for."""
        self._look()
        self.watch_children()
        self.store = self._new_store()
        while True:
            self.turn()

    def turn(self) -> None:
        """Wait until something happens, and deal with it."""
        connection = self.connection
        if connection is None:
            connection = self._connect()
            self._report_stopped()
        watched: list[socket.socket | int] = [connection.sock, self._woken, *self.children, *self.stores]
        ready, _, _ = select.select(watched, [], [])
        if self._woken in ready:
            self._woken.recv(4096)
            self._report_stopped()
        for fd in [fd for fd in ready if isinstance(fd, int)]:
            if fd in self.stores:
                self._replace_store(fd)
            else:
                self._reap(fd)
        if self.connection is not None and self.connection.sock in ready:
            self._handle_messages(self.connection)

    def watch_children(self) -> None:
        """From now on a child that a signal stops wakes this process."""
        self._woken, wakes = socket.socketpair()
        for each in (self._woken, wakes):
            each.setblocking(False)
        signal.set_wakeup_fd(wakes.detach(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def _report_stopped(self) -> None:
        """Report to the agent the children that were stopped since the last call, each stop once; what cannot be sent
        is reported to its successor. Exits are left to ``_reap``."""
        for pid in self.children.values():
            with contextlib.suppress(ChildProcessError):  # it has exited
                if os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is None:
                    continue
                self._send(ChildStopped(pid=pid))
                if self.connection is None:
                    return
                os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG)

    def _connect(self) -> AgentConnection[ToForkServer]:
        children = tuple(self.children.values())  # a restarted agent cannot know those that do not register
        hello = ForkServerHello(pid=os.getpid(), store=self.store, children=children, unforkable=self.unforkable)
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
                        self._new_standby(local_rank, context=message.contexts)
                case NewStore():
                    self.store = self._new_store()
                    self._send(StoreAddress(store=self.store))

    def _look(self) -> None:
        """Whether this process can still be forked; once it cannot, it never can."""
        if not self.unforkable:
            self.unforkable = fork_check.why_not(on_gpus=self.spec.resources.on_gpus) or ""
            if self.unforkable:
                print(f"note: ranks are new processes, not forks: {self.unforkable}", file=sys.stderr, flush=True)

    def _new_standby(self, local_rank: int, *, context: bool) -> None:
        if not self.unforkable and fork_check.threads():
            self._look()
        if self.unforkable:
            pid = self._start("--standby", str(local_rank), *(["--context"] if context else []))
        else:
            pid = self._fork(lambda: self.be_standby(local_rank, context=context))
        self.children[os.pidfd_open(pid)] = pid

    def _fork(self, life: Callable[[], NoReturn]) -> int:
        """A child that shares no connection with this process, and ends with ``life``; its pid."""
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if (wakes := signal.set_wakeup_fd(-1)) >= 0:
                os.close(wakes)
                self._woken.close()
            for fd in (*self.children, *self.stores):
                os.close(fd)
            if self.connection is not None:
                self.connection.sock.close()
            life()
        return pid

    def _start(self, *arguments: str, keep: Sequence[int] = ()) -> int:
        """This program once more, as what ``arguments`` say; its pid."""
        agent = self.agent
        return processes.spawn(
            [
                sys.executable, "-P", "-m", "muster.rank.fork_server", "--run-dir", self.run_dir, "--bind", self.bind,
                "--agent-socket", agent.path, "--orphan-s", str(agent.orphan_s),
                "--beat-every-s", str(agent.beat_every_s), *arguments,
            ],
            env=os.environ, keep=keep,
        )  # fmt: skip

    def be_standby(self, local_rank: int, *, context: bool, prepare: Callable[[], None] = lambda: None) -> NoReturn:
        """In a child: its life as a standby, and as a rank. ``prepare``: what is left to import."""
        code = 1
        try:
            if os.getsid(0) != os.getpid():
                os.setsid()  # a Ctrl-C in the terminal then reaches only the supervisor
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN if self.term_ignored else signal.SIG_DFL)
            prepare()
            code = standby.run(
                self.agent, self.spec, local_rank=local_rank, context=context, inject_faults=self.inject_faults
            )
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


if __name__ == "__main__":
    main()
