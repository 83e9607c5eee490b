"""A standby: a process that has imported everything and waits for a rank; then that rank, to its end."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from muster.config.spec import RunSpec
from muster.core import environment, redact, resolved_file
from muster.core.errors import MusterError
from muster.core.processes import open_log
from muster.core.snapshots import SnapshotNotIntact
from muster.protocol.codec import reader_of
from muster.protocol.rank_agent import TO_RANK, RunRank, StandbyHello, StandbyUnfit, StandbyWarm, ToRank, WarmUp
from muster.protocol.ranks import EXPECTED_EXIT_CODES, RankContext
from muster.protocol.values import LastWords
from muster.rank.agent_connection import AgentAddress, AgentConnection, SocketAgentClient
from muster.transport import robust_lock

#: A standby without a rank after this time warms up; earlier it would delay the ranks of the first attempt.
WARM_AFTER_S = 0.5
#: How often a standby checks that its CUDA context still works: a GPU's error may end an unused context.
CONTEXT_LOOK_S = 30.0


def run(agent: AgentAddress, spec: RunSpec, *, local_rank: int, context: bool, inject_faults: bool) -> int:
    """Wait for a rank, run it, return its exit code.

    ``local_rank``: the expected one. ``context``: it may wait with a CUDA context on that GPU.
    """
    hello = StandbyHello(pid=os.getpid(), local_rank=local_rank, bound=context)
    connection = agent.wait_for_connection(lambda: hello, reader_of(TO_RANK))
    if connection is None:
        return 0
    try:
        assignment = _first_assignment(connection, spec, local_rank=local_rank, context=context)
    except ConnectionError:
        # The agent died while this process was a standby: no work is lost, its successor forks new ones.
        return 0
    if not isinstance(assignment, RunRank):
        return 0
    rank_context = assignment.context
    _redirect(assignment.log)
    _set_environment(rank_context)
    redact.hide_values(environment.inherited().get(name, "") for name in spec.secrets)
    if rank_context.host_memory is not None:
        robust_lock.hold(Path(rank_context.host_memory) / robust_lock.name_of(os.getpid()))
    client = SocketAgentClient(connection, agent, attempt=rank_context.attempt, rank=rank_context.rank)
    return _run(rank_context, client, inject_faults=inject_faults)


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
    """What is reported to the agent and the supervisor about the exception that ends a rank."""
    from muster.rank.user_script import traceback_of

    # Its raiser has imported the module. An import here takes memory, which may be exhausted.
    nonfinite = sys.modules.get("muster.train.optim.nonfinite")
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
        not_finite=nonfinite is not None and isinstance(error, nonfinite.NotFinite),
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
