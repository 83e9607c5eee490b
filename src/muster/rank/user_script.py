"""A user's training script as a rank: the environment that torchrun gives, under Muster's agents."""

from __future__ import annotations

import os
import runpy
import sys

import muster.run
from muster.core.errors import UsageError
from muster.protocol.ranks import EXPECTED_EXIT_CODES, AgentClient, RankContext


def run_command(command: list[str], context: RankContext, agent: AgentClient) -> int:
    """Run ``[script.py, argument...]`` or ``[-m, module, argument...]`` in this process; return its exit code, one of
    ``EXPECTED_EXIT_CODES``.

    ``env://`` finds the run's rendezvous store, which is new for each attempt.

    Raises:
        UsageError: no such script.
        SystemExit: it left with another code, or with words.
    """
    muster.run.enter(context, agent)
    agent.emit("phase.changed", phase="start")
    script, arguments = command[0], command[1:]
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
