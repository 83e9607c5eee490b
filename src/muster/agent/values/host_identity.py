"""Which host of which run this is: plain values that all parts of its agent may know."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from muster.config.spec import RunSpec
from muster.core import environment, processes, resolved_file
from muster.core.processes import open_log
from muster.core.types import Topology
from muster.protocol.exit_codes import LIMITED
from muster.storage import run_secrets
from muster.storage.memory_dir import MemoryDir

#: Where the agent listens to the processes of its host, in the host's folder in memory.
SOCKET = "agent.sock"
#: Compute Engine's; only its machines resolve the name.
METADATA_URL = "http://metadata.google.internal"


@dataclass(frozen=True, kw_only=True)
class HostIdentity:
    run_dir: Path
    run_id: str
    host: str
    """Its place in the run: another machine takes the name after this one is lost."""
    bind: str
    memory: MemoryDir
    """The host's folder in memory: snapshots, sockets."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """What the programs started here inherit."""
    hosts_here: int = 1
    """Agents of the run that share this machine's cores."""
    pod: str = ""
    """What names this machine's share of the run alone, where a back end gives such a name."""
    place: Topology = field(default_factory=Topology)
    pid: int = field(default_factory=os.getpid)
    """Of its agent."""
    limits: Mapping[int, tuple[int, int]] = field(default_factory=processes.limits)
    """This process's resource limits when it began."""
    metadata_url: str | None = None
    """The cloud's metadata server, which announces the end of this host; None: no cloud machine."""

    @classmethod
    def of_this_process(cls, arguments: argparse.Namespace) -> HostIdentity:
        """From an agent's arguments (``watchdog.parse_arguments``) and environment; makes the folder in memory."""
        run_dir, run_id, host = arguments.run_dir, arguments.run_id, arguments.host
        return cls(
            run_dir=run_dir,
            run_id=run_id,
            host=host,
            bind=arguments.bind,
            memory=MemoryDir.of_host(run_dir, run_id=run_id, host=host),
            environ=environment.inherited(),
            hosts_here=arguments.hosts_here,
            pod=environment.current().pod,
            place=environment.current().place,
            metadata_url=environment.current().metadata_url or (None if arguments.no_metadata_server else METADATA_URL),
        )

    def read_spec(self) -> RunSpec:
        """The run file as it is now: a restart may have changed it."""
        return RunSpec.model_validate_json(resolved_file.read(self.run_dir, patient=True))

    def variables(self, spec: RunSpec) -> dict[str, str]:
        """What ranks and data preparation find: the environment of this host, the run file's, and its secrets.

        Raises:
            AccessError: the file of secrets cannot be used.
        """
        return {**self.environ, **spec.env, **run_secrets.read(self.run_dir)}

    def log_path(self, program: str) -> Path:
        return self.run_dir / "logs" / f"{program}-{self.host}.log"

    def _open_log(self, program: str) -> BinaryIO:
        path = self.log_path(program)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            return open_log(path)
        except OSError:  # a full disk must not prevent a start
            return open(os.devnull, "ab")

    def start_program(self, log: str, module: str, *arguments: str, **streams: Any) -> subprocess.Popen[Any]:
        """Start ``python -m module arguments``, in a session of its own; it writes to ``logs/{log}-HOST.log``.

        ``streams``: stdin, stdout where they are others, and what else ``Popen`` takes.

        It would inherit limits that were lowered since this agent began: they are restored, or else this agent
        ends here, and its keeper starts one that has its own. Ranks and the fork server outlive that.
        """
        low = processes.restore_limits(self.limits)
        if low:
            print(f"error: {low}: this agent ends, and its keeper starts another one", file=sys.stderr)
            sys.exit(LIMITED)
        # -P: a module in the current folder, an image's for example, never shadows the library's.
        with self._open_log(log) as output:
            given = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output, **streams}
            return subprocess.Popen([sys.executable, "-P", "-m", module, *arguments], start_new_session=True, **given)
