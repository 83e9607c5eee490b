"""A user's training script as a rank: the environment that torchrun gives, under Muster's agents."""

from __future__ import annotations

import io
import os
import runpy
import sys
import traceback

import muster.run
from muster.core.errors import MusterError, UsageError
from muster.protocol.ranks import EXPECTED_EXIT_CODES, AgentClient, RankContext

#: Code between a rank's process and the script.
_OURS = (__file__, *(os.path.join(os.path.dirname(__file__), name) for name in ("standby.py", "fork_server.py")))


def run_command(command: list[str], context: RankContext, agent: AgentClient, *, workdir: str | None = None) -> int:
    """Run ``[script.py, argument...]`` or ``[-m, module, argument...]`` in this process, in ``workdir`` where one is
    given; return its exit code, one of ``EXPECTED_EXIT_CODES``.

    ``env://`` finds the run's rendezvous store, which is new for each attempt.

    Raises:
        UsageError: no such script.
        SystemExit: it left with another code, or with words.
    """
    muster.run.enter(context, agent)
    agent.emit("phase.changed", phase="start")
    script, arguments = command[0], command[1:]
    if workdir is not None:
        os.chdir(workdir)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # lines appear at once, as on a terminal
    try:
        if script == "-m":
            sys.argv = command[1:]
            sys.path.insert(0, os.getcwd())  # as ``python -m`` does: this process was started with -P
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            if not os.path.isfile(script):
                raise UsageError(
                    f"command: no script {script!r} in {os.getcwd()}", hint="give a path that exists on every host"
                )
            sys.argv = [script, *arguments]
            sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
            runpy.run_path(script, run_name="__main__")
    except SystemExit as exiting:
        if exiting.code is None:
            return 0
        if exiting.code not in EXPECTED_EXIT_CODES:
            raise
        return int(exiting.code)
    return 0


def words_of(error: BaseException) -> str:
    """What a rank's log says of the exception that ends it: what Python says, and of Muster's own one line."""
    if isinstance(error, MusterError):
        return f"error: {error}\n"
    return f"{error}\n" if isinstance(error, SystemExit) else traceback_of(error)


def traceback_of(error: BaseException) -> str:
    """``error`` with its traceback as ``python SCRIPT`` prints it: without what called the script."""
    trace = error.__traceback__
    while trace is not None and _calls_scripts(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    if trace is not None or isinstance(error, SyntaxError):  # else it is our own error: keep its traceback
        error = error.with_traceback(trace)
    return "".join(traceback.format_exception(error))


def _calls_scripts(file: str) -> bool:
    return file in _OURS or file.startswith("<frozen runpy")
