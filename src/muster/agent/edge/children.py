"""The programs that an agent starts: their input and output through its selector, their ends as events.

Nothing waits for a program: its output is read as it comes, its end is its pidfd, and what does not fit into its input
waits here. A program of its own that outlived it may hold its pipe, so the end of the output is not waited for.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field

from muster.agent.ranks import rank_environment
from muster.agent.values.actions import Program, StopProgram, WriteProgram
from muster.agent.values.events import Event, ProgramEnded, ProgramLine, ProgramStarted
from muster.agent.values.host_identity import HostIdentity
from muster.core.errors import AccessError
from muster.core.processes import program as path_of
from muster.core.typed_json import Record
from muster.protocol.codec import encode
from muster.protocol.to_supervisor import StartFailed
from muster.transport.connections import ConnectionPool

#: What a pipe did not take is offered again so soon.
FULL_S = 0.05
#: Of a program's output, read in one turn.
READ_BYTES = 1 << 20
#: How long the host's end waits for a program that was sent SIGTERM (it ends its own programs), or SIGKILL.
TERM_S, KILL_S = 10.0, 1.0


@dataclass(eq=False)
class Child:
    """``popen`` None: a process that a dead agent started."""

    program: Program
    pid: int
    popen: subprocess.Popen[bytes] | None
    pidfd: int
    output: bytearray = field(default_factory=bytearray)
    """Its last incomplete line, or all that it wrote."""
    pending: bytearray = field(default_factory=bytearray)
    """What its input did not take yet."""


@dataclass(frozen=True)
class Output:
    child: Child


@dataclass(frozen=True)
class Ended:
    child: Child


class Children:
    """One program of each name; of one that was replaced or left nothing more is heard."""

    def __init__(self, pool: ConnectionPool, identity: HostIdentity) -> None:
        self._pool, self._identity = pool, identity
        self._current: dict[str, Child] = {}
        self._left: dict[Child, float] = {}
        """How long the host's end waits for each."""

    def start(self, program: Program) -> Iterator[Event]:
        """Output that is not read goes to the program's log, a tool's nowhere. Limits that were lowered are restored
        first, or the agent ends (``HostIdentity.start_program``)."""
        streams = {"stdin": subprocess.PIPE if program.writes else subprocess.DEVNULL}
        if program.reads != "nothing":
            streams["stdout"] = subprocess.PIPE
        try:
            popen = self._tool(program, streams) if program.is_tool else self._module(program, streams)
        except AccessError as error:
            failure = StartFailed(reason=str(error), exit_code=error.exit_code, hint=error.hint)
            yield ProgramEnded(program.name, None, failure=failure)
            return
        except OSError as error:
            yield _not_started(program, error)
            return
        try:
            pidfd = os.pidfd_open(popen.pid)
        except OSError as error:  # no descriptors: its end would not be noticed
            popen.kill()
            popen.wait()
            _close(popen)
            yield _not_started(program, error)
            return
        child = self._current[program.name] = Child(program, popen.pid, popen, pidfd)
        self._pool.watch(pidfd, Ended(child))
        if popen.stdin is not None:
            os.set_blocking(popen.stdin.fileno(), False)
        if popen.stdout is not None:
            os.set_blocking(popen.stdout.fileno(), False)
            self._pool.watch(popen.stdout.fileno(), Output(child))
        yield ProgramStarted(program.name, popen.pid)

    def _module(self, program: Program, streams: dict[str, int]) -> subprocess.Popen[bytes]:
        """Raises AccessError: the file of secrets cannot be used."""
        identity, env = self._identity, None
        if program.env != "own" and program.spec is not None:
            env = identity.variables(program.spec)
            if program.env == "ranks":
                cores = len(os.sched_getaffinity(0))
                env = rank_environment.fork_server_environment(
                    program.spec, env, cores=cores, hosts_here=identity.hosts_here
                )
        module, *arguments = program.argv
        return identity.start_program(program.name, module, *arguments, env=env, **streams)

    def _tool(self, program: Program, streams: dict[str, int]) -> subprocess.Popen[bytes]:
        argv = [path_of(program.argv[0]) or program.argv[0], *program.argv[1:]]
        stderr = subprocess.STDOUT if program.with_stderr else subprocess.DEVNULL
        return subprocess.Popen(
            argv, stdin=streams["stdin"], stdout=streams.get("stdout"), stderr=stderr, start_new_session=True
        )

    def adopt(self, program: Program, pid: int) -> None:
        """A process that a dead agent started."""
        child = self._current[program.name] = Child(program, pid, None, os.pidfd_open(pid))
        self._pool.watch(child.pidfd, Ended(child))

    # ------------------------------------------------------------ input

    @property
    def has_pending(self) -> bool:
        return any(child.pending for child in self._current.values())

    def write(self, order: WriteProgram) -> None:
        child = self._current.get(order.program)
        if child is not None and not (order.droppable and child.pending):
            child.pending += encode(order.message) + b"\n"
            self._flush(child)

    def flush(self) -> None:
        for child in self._current.values():
            self._flush(child)

    def _flush(self, child: Child) -> None:
        """What its pipe takes now."""
        if child.popen is None or child.popen.stdin is None or child.popen.stdin.closed:
            child.pending.clear()
            return
        with contextlib.suppress(OSError):
            while child.pending:
                del child.pending[: os.write(child.popen.stdin.fileno(), child.pending[:4096])]

    # ------------------------------------------------------------ output and end

    def on_output(self, token: Output) -> Iterator[Event]:
        child, budget = token.child, READ_BYTES
        if child.popen is None or child.popen.stdout is None or child.popen.stdout.closed:
            return
        fd = child.popen.stdout.fileno()
        with contextlib.suppress(BlockingIOError):
            while budget > 0 and not child.popen.stdout.closed:
                data = os.read(fd, 1 << 16)
                if not data:
                    self._pool.unwatch(fd)
                    if child.program.ends_with_output and self._is_current(child):
                        yield from self.stop(StopProgram(child.program.name, leave=True))
                    return
                budget -= len(data)
                yield from self._received(child, data)

    def _received(self, child: Child, data: bytes) -> Iterator[Event]:
        if child.program.reads == "all":
            child.output += data[: child.program.most_bytes - len(child.output)]
            return
        *lines, rest = bytes(child.output + data).split(b"\n")
        child.output[:] = rest
        for line in lines:
            if self._is_current(child):
                yield ProgramLine(child.program.name, line)

    def on_ended(self, token: Ended) -> Iterator[Event]:
        """Its output first, without waiting for the end of that."""
        child = token.child
        yield from self.on_output(Output(child))
        self._pool.unwatch(child.pidfd)
        os.close(child.pidfd)
        self._left.pop(child, None)
        code = None
        if child.popen is not None:
            if child.program.ends_with_session:
                _kill_session(child.pid)  # before its number is free for another process
            code = child.popen.wait()
            self._unwatch_output(child)
            _close(child.popen)
        if not self._is_current(child):
            return
        if child.program.reads == "lines" and child.output:
            yield ProgramLine(child.program.name, bytes(child.output))
        if child.program.reads == "nothing":
            with contextlib.suppress(OSError, IndexError):
                log = self._identity.log_path(child.program.name).read_bytes()
                child.output[:] = log.strip().splitlines()[-1]
        del self._current[child.program.name]
        yield ProgramEnded(child.program.name, code, bytes(child.output))

    def stop(self, order: StopProgram) -> Iterator[Event]:
        """Signal it. One that is left answers at once, with what it wrote."""
        child = self._current.get(order.program)
        if child is None:
            return
        if child.program.ends_with_session and order.number == signal.SIGKILL:
            _kill_session(child.pid)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(child.pidfd, order.number)
        if order.leave:
            self._unwatch_output(child)
            del self._current[child.program.name]
            self._left[child] = TERM_S if order.number == signal.SIGTERM else KILL_S
            yield ProgramEnded(child.program.name, None, bytes(child.output))

    def finish(self, name: str, message: Record, limit_s: float) -> Iterator[Event]:
        """Tell a program to end, and wait for it."""
        child = self._current.pop(name, None)
        if child is None or child.popen is None:
            return
        self._unwatch_output(child)
        output = b""
        try:
            output = child.popen.communicate(encode(message) + b"\n", limit_s)[0]
        except subprocess.TimeoutExpired as error:
            output = error.output or b""
        except OSError:
            pass
        for line in output.splitlines():
            yield ProgramLine(name, line)
        _kill_session(child.pid)
        child.popen.wait()

    def wait(self) -> None:
        """The host ends: for what was stopped, never long."""
        for child, limit_s in self._left.items():
            if child.popen is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.popen.wait(limit_s)

    def _is_current(self, child: Child) -> bool:
        return self._current.get(child.program.name) is child

    def _unwatch_output(self, child: Child) -> None:
        if child.popen is not None and child.popen.stdout is not None and not child.popen.stdout.closed:
            self._pool.unwatch(child.popen.stdout.fileno())


def _not_started(program: Program, error: OSError) -> ProgramEnded:
    return ProgramEnded(program.name, None, failure=StartFailed(reason=str(error.strerror)))


def _close(popen: subprocess.Popen[bytes]) -> None:
    for stream in (popen.stdin, popen.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


def _kill_session(leader: int) -> None:
    """A program and what it started in its session: helper processes of trackers' clients."""
    with contextlib.suppress(OSError):
        os.killpg(leader, signal.SIGKILL)
