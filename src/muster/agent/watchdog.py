"""``python -m muster.agent.watchdog``: starts the agent, restarts it if it dies, sends the host's heartbeat.

The watchdog does nothing else, so that its heartbeat is never late because of work: a busy agent loop gave
false deaths at a 300 ms limit. It holds no state; killing it ends the host (the agent notices and exits).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from muster.core import environment, processes, resolved_file
from muster.core.errors import MusterError, UsageError
from muster.protocol.exit_codes import UNSUPERVISED
from muster.transport.listening import raise_soft_limit

# Imports that an agent's start does not need wait until it is started: they take as long as half of the agent's own.
if TYPE_CHECKING:
    from muster.agent.heartbeat import HeartbeatSender

#: Exit codes of an agent that has come to its own end; a ``UsageError`` is ``protocol.version.OtherVersion``.
GRACEFUL = (0, UsageError.exit_code, 75, UNSUPERVISED, 130)


def main() -> None:
    """Run until the agent ends by itself (code 0) or cannot be started."""
    processes.forgive_outputs()
    arguments = parse_arguments("run one host of a Muster run")
    raise_soft_limit()  # of everything on this host: all of it is started from here
    run_dir = arguments.run_dir
    try:
        held = resolved_file.read(run_dir, patient=True)
    except (MusterError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, nice - 10)  # a heartbeat must not wait for the ranks' work
    argv = [sys.executable, "-P", "-m", "muster.agent.host_agent", *sys.argv[1:]]
    # MUSTER_NICE: the user's own niceness, to which the programs below return.
    environ = {**environment.inherited(), "MUSTER_NICE": str(nice), "MUSTER_WATCHDOG": str(os.getpid())}
    heartbeat = functools.cache(lambda: _heartbeat(arguments, held))
    code = keep_running(argv, environ, lambda fd: heartbeat().send_until(fd))
    if code not in GRACEFUL:
        _ship_rest(arguments)
    sys.exit(code)


def _heartbeat(arguments: argparse.Namespace, resolved: str) -> HeartbeatSender:
    from muster.agent.heartbeat import HeartbeatSender
    from muster.config.spec import RunSpec
    from muster.transport.secure_session import run_token

    return HeartbeatSender(
        run_dir=arguments.run_dir,
        host=arguments.host,
        token=run_token(arguments.run_dir),
        timing=RunSpec.model_validate_json(resolved).recovery.timing,
    )


def _ship_rest(arguments: argparse.Namespace) -> None:
    from muster.agent.edge.home import ship_rest
    from muster.agent.edge.host_event_log import writer_of
    from muster.storage.home import open_home

    home = open_home(arguments.run_dir)
    ship_rest(home, writer_of(home, host=arguments.host, pod=environment.current().pod))


def parse_arguments(description: str) -> argparse.Namespace:
    """The watchdog's arguments, and the agent's: they are the same."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--run-dir", required=True, type=lambda text: Path(text).resolve())
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--bind", default=environment.current().bind)
    parser.add_argument("--hosts-here", type=int, default=1, help="hosts of the run that share this machine's cores")
    parser.add_argument(
        "--no-metadata-server", action="store_true", help="no cloud machine, unless MUSTER_METADATA names a server"
    )
    return parser.parse_args()


def keep_running(argv: list[str], environ: Mapping[str, str], beat_until: Callable[[int], None]) -> int:
    """Start ``argv``; restart it when it dies by a signal or a fault; return its code when it ends normally.

    So it does where the supervisor is of another version.
    A child that dies young three times in a row will die again: give up with its code.
    ``beat_until`` sends heartbeats until a descriptor, the child's pidfd, is readable.
    """
    young_deaths, limits = 0, processes.limits()
    while True:
        started = time.monotonic()
        low = processes.restore_limits(limits)  # the agent, and all that it starts, would inherit them
        if low:
            print(f"warning: {low}, and this process may not raise it: root may (prlimit --pid)", file=sys.stderr)
        pid = os.posix_spawn(argv[0], argv, dict(environ))
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, functools.partial(_forward, pid))
        if environment.read(environ).term_ignored:  # the supervisor gets it and saves on all hosts (Slurm)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        fd = os.pidfd_open(pid)
        beat_until(fd)
        os.close(fd)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code in GRACEFUL:
            return code
        young_deaths = young_deaths + 1 if time.monotonic() - started < 10 else 1
        if young_deaths >= 3:
            print(f"the agent died {young_deaths} times in a row, last with code {code}", file=sys.stderr)
            return 1


def _forward(child: int, number: int, _frame: FrameType | None) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, number)


if __name__ == "__main__":
    main()
