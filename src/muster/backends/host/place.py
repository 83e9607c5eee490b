"""What one host of a back end knows, behind one seam; ``decide`` has what all of them share."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from muster.backends.host.run_state import RunState
from muster.backends.host.state import AGENT, SUPERVISOR, Exit, Looked, Requeued, SaveReason, Scope, State
from muster.core.errors import MusterError
from muster.core.typed_json import Unreadable
from muster.protocol.client import AskStatus, StopRun
from muster.protocol.lease import LeaseRecord
from muster.transport.client import ask_supervisor


@dataclass(frozen=True, kw_only=True)
class Program:
    argv: Sequence[str]
    env: Mapping[str, str]
    log: Path | None = None
    """The file for its output; None: this process's output."""
    home: RunState | None = None
    """Whose ``writer`` the program is; its last events are uploaded from there when it was killed."""
    writer: str = ""


def program_argv(module: str, run_dir: Path, run_id: str) -> list[str]:
    """Of one of Muster's own programs, under this process's Python."""
    return [sys.executable, "-P", "-m", module, "--run-dir", str(run_dir), "--run-id", run_id]


def two_programs(
    folder: Path, *, name: str, run_id: str, env: Mapping[str, str], home: RunState, more: Mapping[str, str]
) -> dict[str, Program]:
    """The agent and the supervisor in the folders of ``run_folder.place_both``. ``home``: the supervisor's; ``more``:
    of its environment."""
    agent, supervisor, env = folder / "host", home.run_dir, {**env, "MUSTER_POD": name, "MUSTER_JOBSET": home.job}
    return {
        AGENT: Program(
            argv=[*program_argv("muster.agent.watchdog", agent, run_id), "--host", name, "--no-metadata-server"],
            env={**env, "MUSTER_RUN_DIR": str(agent)},
            home=RunState(run_dir=agent),
            writer=name,
        ),
        SUPERVISOR: Program(
            argv=program_argv("muster.app.supervisor", supervisor, run_id),
            env={**env, **more, "MUSTER_RUN_DIR": str(supervisor)},
            log=supervisor / "logs" / f"supervisor-{name}.log",
            home=home,
            writer=SUPERVISOR,
        ),
    }


class Service(Protocol):
    """What runs next to the programs until the end."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


@dataclass(kw_only=True)
class Place:
    """One host of a run; a back end overrides what is different there. All but ``leave`` may be called in threads, and
    return within seconds."""

    home: RunState
    """As the supervisor's own folder has it."""
    token: bytes = b""
    reasons: Mapping[SaveReason, str] = field(default_factory=dict)
    """Why the supervisor is asked to save."""

    def look(self, ended_pid: int | None) -> Looked:
        """Read lease and end. ``ended_pid``: of a supervisor that was started here and has ended."""
        return self.home.look(ended_pid)

    def save(self, reason: SaveReason) -> bool:
        """Ask the run's supervisor to save and to ask to be continued; False: it did not answer."""
        return ask_to_save(self.home.lease(), self.token, self.reasons[reason])

    def notice_scope(self) -> Scope | None:
        """What a notice means, where ``Rules.notice_scope`` does not say; None: no answer."""
        return "host"

    def requeue(self) -> Requeued:
        """Queue the rest of the run."""
        raise NotImplementedError

    def time_left_s(self) -> float:
        """Until the run is to be saved because the allocation ends; asked where ``look`` says ``vacated``."""
        raise NotImplementedError

    def end_here(self) -> None:
        """Kill every process of the run on this host, in any session."""
        raise NotImplementedError

    def leave(self, ended: Exit, state: State) -> int:
        """The last words; returns the exit code of the host program. Bounded."""
        raise NotImplementedError


def ask_to_save(lease: LeaseRecord | None, token: bytes, source: str) -> bool:
    """Ask the lease holder to save and exit with 75; False: it did not answer. One that is stopping already is left
    alone: a second stop would make it exit without saving."""
    if lease is None or lease.address is None:
        return False
    try:
        if ask_supervisor(lease.address, token, AskStatus()).phase not in ("stopping", "ended"):
            ask_supervisor(lease.address, token, StopRun(again=True, source=source))
    except (OSError, Unreadable, MusterError) as error:
        say(f"the run's supervisor does not answer: {error}")
        return False
    return True


def say(text: str) -> None:
    """One line on stderr; named, since threads use it (``Replicator.send`` has the reason)."""
    print(f"muster: {text}", file=sys.stderr, flush=True)
