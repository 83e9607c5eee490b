"""The host program of a machine that was reached by SSH: ``python -m muster.backends.ssh.host FOLDER``.

``far`` starts it, detached; it holds the host's lease, keeps the agent and, where it is due, the supervisor
(``backends/host``), and leaves when the run is over.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path

from muster.backends import code_bundle, run_folder
from muster.backends.host.children import RealChildren
from muster.backends.host.loop import HostProgram
from muster.backends.host.place import Place, Program, program_argv, say
from muster.backends.host.run_state import RunState
from muster.backends.host.state import AGENT, SUPERVISOR, Exit, Outcome, Rules, State
from muster.backends.letters import Letters
from muster.backends.ssh.far import secrets_of
from muster.core import environment, processes
from muster.core.errors import MusterError
from muster.core.typed_json import decode
from muster.protocol.pipes import FarStart
from muster.storage import run_secrets
from muster.storage.store import open_store
from muster.transport.listening import raise_soft_limit
from muster.transport.secure_session import run_token


@dataclass(kw_only=True)
class SshPlace(Place):
    """One host, of which nobody reads an exit code."""

    order: FarStart
    base: Path
    name: str

    def prepare(self) -> None:
        """The two folders, the agent's and the supervisor's, with what was submitted.

        Raises:
            MusterError: the home cannot be read, or holds something else.
        """
        order, store = self.order, open_store()
        files = run_folder.get(store, order.home, order.files_sha256)
        for folder in (self.base / "host", self.base / "supervisor"):
            run_folder.place(
                folder, run_id=order.run_id, backend="ssh", files=files, submission=order.submission, home=order.home
            )
            (folder / "logs").mkdir(mode=0o700, exist_ok=True)
            processes.replace_text(folder / "token", order.token)
        run_secrets.write(self.base / "host", order.secrets)
        with contextlib.suppress(FileExistsError):
            (self.base / code_bundle.FOLDER).symlink_to(Path("host", code_bundle.FOLDER))

    def programs(self) -> dict[str, Program]:
        agent, supervisor, run_id = self.base / "host", self.home.run_dir, self.order.run_id
        env = {**environment.inherited(), "MUSTER_POD": self.name, "MUSTER_JOBSET": self.home.job}
        return {
            AGENT: Program(
                argv=[
                    *program_argv("muster.agent.watchdog", agent, run_id),
                    "--host",
                    self.name,
                    "--no-metadata-server",
                ],
                env={**env, "MUSTER_RUN_DIR": str(agent)},
                home=RunState(run_dir=agent),
                writer=self.name,
            ),
            SUPERVISOR: Program(
                argv=program_argv("muster.app.supervisor", supervisor, run_id),
                env={**env, "MUSTER_RUN_DIR": str(supervisor)},
                log=supervisor / "logs" / f"supervisor-{self.name}.log",
                home=self.home,
                writer=SUPERVISOR,
            ),
        }

    def leave(self, ended: Exit, state: State) -> int:
        """Without secrets."""
        for path in secrets_of(self.base):
            path.unlink(missing_ok=True)
        return 0 if ended.outcome is Outcome.RUN_ENDED else 1


def rules(order: FarStart) -> Rules:
    """A home on the first host's disk is gone with that host, so no other one can supervise the run."""
    rank = order.index if not order.home.startswith("ssh://") else None if order.index else 0
    return Rules(rank=rank, leaves_on_notice=True, released_host_ends=True)


def serve(base: Path) -> int:
    """Until the run is over."""
    order, token = decode(FarStart, (base / "start.json").read_bytes()), run_token("")
    state = RunState(run_dir=base / "supervisor", job=f"{order.run_id}.{order.submission}")
    name = f"host-{order.index}-{secrets.token_hex(3)}"  # what an earlier start left is its own
    place = SshPlace(home=state, token=token, reasons={"notice": "SIGTERM"}, order=order, base=base, name=name)
    place.prepare()
    children, programs = RealChildren(), place.programs()

    def holds() -> bool:
        return state.is_held_by(children.pid(SUPERVISOR))

    letters = Letters(
        store=open_store(), home=order.home, run_id=order.run_id, token=token, index=order.index, children=children,
        env=programs[SUPERVISOR].env, run_dir=state.run_dir, holds=holds,
    )  # fmt: skip
    return HostProgram(
        place=place, rules=rules(order), programs=programs, services=[letters], children=children
    ).run()  # fmt: skip


def main() -> int:
    processes.forgive_outputs()
    raise_soft_limit()
    try:
        return serve(Path(sys.argv[1]))
    except (MusterError, OSError, ValueError) as error:
        say(f"error: {error}" + (f" (hint: {hint})" if (hint := getattr(error, "hint", None)) else ""))
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
