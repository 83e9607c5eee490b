"""The host program of a machine that was reached by SSH: ``python -m muster.backends.ssh.host FOLDER``.

``far`` starts it, detached; it holds the host's lease, keeps the agent and, where it is due, the supervisor
(``backends/host``), and leaves when the run is over.
"""

from __future__ import annotations

import secrets
import sys
from dataclasses import dataclass
from pathlib import Path

from muster.backends import code_bundle, run_folder
from muster.backends.host.loop import HostProgram
from muster.backends.host.place import Place, say, two_programs
from muster.backends.host.run_state import RunState
from muster.backends.host.state import Exit, Outcome, Rules, State
from muster.backends.ssh.far import root, secrets_of
from muster.backends.ssh.home_copy import HomeCopy
from muster.core import environment, processes
from muster.core.errors import MusterError
from muster.core.typed_json import decode
from muster.protocol.pipes import FarStart
from muster.storage.store import open_store
from muster.transport.listening import raise_soft_limit


@dataclass(kw_only=True)
class SshPlace(Place):
    """One host, whose exit code is not read."""

    base: Path

    def leave(self, ended: Exit, state: State) -> int:
        """Without secrets."""
        for path in secrets_of(self.base):
            path.unlink(missing_ok=True)
        return 0 if ended.outcome is Outcome.RUN_ENDED else 1


def rules(rank: int | None) -> Rules:
    """None: the home is on another host's disk, and gone with that host, so this one cannot supervise the run."""
    return Rules(rank=rank, leaves_on_notice=True, released_host_ends=True)


def serve(base: Path) -> int:
    """Until the run is over. Raises MusterError: the home cannot be read, or holds something else."""
    order = decode(FarStart, (base / "start.json").read_bytes())
    run_folder.place_both(
        base, base / code_bundle.FOLDER, token=order.token, secrets=order.secrets, run_id=order.run_id, backend="ssh",
        files=run_folder.get(open_store(), order.home, order.files_sha256), submission=order.submission,
        home=order.home,
    )  # fmt: skip
    state = RunState(run_dir=base / "supervisor", job=f"{order.run_id}.{order.submission}")
    name = f"host-{order.index}-{secrets.token_hex(3)}"  # what an earlier start left is its own
    place = SshPlace(home=state, token=order.token.encode(), reasons={"notice": "SIGTERM"}, base=base)
    env = environment.inherited()
    programs = two_programs(base, name=name, run_id=order.run_id, env=env, home=state, more={})
    rank = order.rank if order.server in ("", order.address) else None
    copies = [HomeCopy(home=order.home, folder=root() / "homes" / order.run_id)] if order.copies else []
    return HostProgram(place=place, rules=rules(rank), programs=programs, services=copies).run()


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
