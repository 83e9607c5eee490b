"""``python -m muster.agent.watchdog``: the keeper. Starts the agent, starts it again if it dies, beats for the host.

The keeper does nothing else, so that its heartbeat is never late because of work: a busy agent loop gave
false deaths at a 300 ms limit. It holds no state; killing it ends the host (the agent notices and leaves).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from muster.agent.heartbeat import HeartbeatSender
from muster.config.spec import RunSpec
from muster.transport.secure_session import read_token


def main() -> None:
    """Run until the agent ends by itself (code 0) or cannot be started."""
    parser = argparse.ArgumentParser(description="run one host of a Muster run")
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--bind", default=os.environ.get("MUSTER_BIND", "127.0.0.1"))
    arguments = parser.parse_args()
    run_dir = Path(arguments.run_dir).resolve()
    spec = RunSpec.model_validate_json((run_dir / "resolved.json").read_text())
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    os.environ["MUSTER_NICE"] = str(nice)  # what the user gave the run: the programs below go back to it
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, nice - 10)  # a heartbeat must not wait for the ranks' work
    lifeline = HeartbeatSender(
        run_dir=run_dir,
        host=arguments.host,
        token=read_token(str(run_dir / "token")),
        every_s=spec.recovery.heartbeat_timeout_s / 6,
    )
    argv = [
        sys.executable, "-m", "muster.agent.host_agent",
        "--run-dir", str(run_dir), "--run-id", arguments.run_id,
        "--host", arguments.host, "--bind", arguments.bind,
    ]  # fmt: skip
    sys.exit(keep(argv, lifeline))


def keep(argv: list[str], lifeline: HeartbeatSender) -> int:
    """Start ``argv``; start it again when it dies by a signal or a fault; return its code when it ends well.

    A child that dies young three times in a row will die again: give up with its code.
    """
    young = 0
    while True:
        started = time.monotonic()
        pid = os.posix_spawn(argv[0], argv, {**os.environ, "MUSTER_KEEPER": str(os.getpid())})
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, functools.partial(_forward, pid))
        if os.environ.get("MUSTER_TERM") == "ignored":  # the supervisor hears of it and saves on all hosts (Slurm)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        fd = os.pidfd_open(pid)
        lifeline.until(fd)
        os.close(fd)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code in (0, 75, 130):
            return code
        young = young + 1 if time.monotonic() - started < 10 else 1
        if young >= 3:
            print(f"the agent died {young} times in a row, last with code {code}", file=sys.stderr)
            return 1


def _forward(child: int, number: int, _frame: FrameType | None) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, number)


if __name__ == "__main__":
    main()
