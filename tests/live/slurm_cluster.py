"""A real Slurm on one machine: a controller and N node daemons, each in a network, host-name and mount namespace.

Root, and Debian's ``slurm-wlm munge iproute2``. A node has an address, a host name, ``/dev/shm`` and ``/scratch`` of
its own; everything else (the home directory too) is shared, as on a cluster with a shared home.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from cluster import Network, namespaces_work

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "nsenter", "unshare", "setpriv")

CONFIGURATION = """\
ClusterName={tag}
SlurmctldHost={host}({bridge})
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={dir}/munge/sock,cred_expire=5
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/spool-%n
SlurmctldPidFile={dir}/slurmctld.pid
SlurmdPidFile={dir}/slurmd-%n.pid
SlurmctldLogFile={dir}/log/slurmctld.log
SlurmdLogFile={dir}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin={task}
SelectType=select/cons_tres
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=5
SlurmctldTimeout=10
SlurmdTimeout={timeout_s}
UnkillableStepTimeout=10
KillWait=15
MessageTimeout=5
ReturnToService=2
JobRequeue=1
JobCompType=jobcomp/filetxt
JobCompLoc={dir}/jobcomp.txt
MpiDefault=none
GresTypes=gpu
"""


class SlurmCluster(Network):
    """A context manager: started on entry, removed on exit. ``env`` is what a user's shell needs."""

    def __init__(
        self, directory: Path, nodes: int = 4, *, slurmd_timeout_s: int = 300, gpus: int = 8, cpus: int = 8,
        task: str = "task/none", more: str = "", shown: Mapping[str, Path] | None = None,
    ) -> None:  # fmt: skip
        """``task``: the task plugin; ``more``: further lines of slurm.conf; ``shown``: path that is not there on this
        machine -> folder that nodes show there."""
        self.dir, self.gpus, self.slurmd_timeout_s = Path(directory), gpus, slurmd_timeout_s
        self.cpus, self.task, self.more, self.shown = cpus, task, more, dict(shown or {})
        super().__init__([f"node{number}" for number in range(1, nodes + 1)])
        self.port = 20000 + secrets.randbelow(10000)
        self.env = {**os.environ, "SLURM_CONF": str(self.dir / "slurm.conf")}
        self.made: list[Path] = []
        self.env.pop("GLOO_SOCKET_IFNAME", None)  # another test's loopback: nodes meet over their own network

    # ------------------------------------------------------------ up and down

    def __enter__(self) -> SlurmCluster:
        for name in ("state", "log", "munge", "dev", *(f"spool-{name}" for name in self.names)):
            (self.dir / name).mkdir(parents=True, exist_ok=True)
        for folder in (self.dir, *self.dir.parents):  # munge's user walks down to its key
            with contextlib.suppress(PermissionError):
                if not folder.stat().st_mode & 0o001:
                    folder.chmod(folder.stat().st_mode | 0o011)
        for path in map(Path, self.shown):
            while not path.exists():  # a place to mount at; taken away again
                missing = next(part for part in reversed([path, *path.parents]) if not part.exists())
                missing.mkdir()
                self.made.append(missing)
        try:
            self._munge()
            self.up()
            self._configure()
            run("slurmctld", "-c", "-f", self.env["SLURM_CONF"])
            for name in self.names:
                self.start_node(name)
            self.wait_until(lambda: self.states().count("idle") == len(self.names), "idle nodes", 30)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            self.kill_processes(name)
        for file in (self.dir / "slurmctld.pid", self.dir / "munge" / "munged.pid"):
            with contextlib.suppress(OSError, ValueError):
                os.kill(int(file.read_text()), signal.SIGKILL)
        self.down()
        for folder in reversed(self.made):
            with contextlib.suppress(OSError):
                folder.rmdir()
        self.made.clear()

    def _munge(self) -> None:
        folder = self.dir / "munge"
        shutil.chown(folder, "munge", "munge")
        folder.chmod(0o711)
        key = folder / "key"
        key.write_bytes(secrets.token_bytes(128))
        shutil.chown(key, "munge", "munge")
        key.chmod(0o400)
        run(
            "setpriv", "--reuid", "munge", "--regid", "munge", "--clear-groups", "munged", "--force",
            f"--key-file={key}", f"--socket={folder}/sock", f"--pid-file={folder}/munged.pid",
            f"--log-file={folder}/log", f"--seed-file={folder}/seed",
        )  # fmt: skip

    def _configure(self) -> None:
        named = {name: self.address(name) for name in self.names}
        named |= {"localhost": "127.0.0.1", os.uname().nodename: self.bridge}
        (self.dir / "hosts").write_text("".join(f"{address} {name}\n" for name, address in named.items()))
        lines = [
            CONFIGURATION.format(
                tag=self.tag, host=os.uname().nodename, bridge=self.bridge, port=self.port, dir=self.dir,
                timeout_s=self.slurmd_timeout_s, task=self.task,
            ),
            self.more,
        ]  # fmt: skip
        gres = f" Gres=gpu:h100:{self.gpus}" if self.gpus else ""
        for name in self.names:
            lines.append(
                f"NodeName={name} NodeAddr={self.address(name)} CPUs={self.cpus} RealMemory=16000 Feature=a3mega{gres} "
                "State=UNKNOWN\n"
            )
        lines.append(f"PartitionName=main Nodes=node[1-{len(self.names)}] Default=YES MaxTime=7-00:00:00 State=UP\n")
        lines.append("PartitionName=short Nodes=node1 MaxTime=00:30:00 State=UP\n")
        (self.dir / "slurm.conf").write_text("".join(lines))
        devices = self.dir / "dev"
        for number in range(self.gpus):
            os.mknod(devices / f"nvidia{number}", 0o666 | 0o020000, os.makedev(1, 3))
        if self.gpus:
            (self.dir / "gres.conf").write_text(f"Name=gpu Type=h100 File={devices}/nvidia[0-{self.gpus - 1}]\n")

    # ------------------------------------------------------------ nodes and their faults

    def start_node(self, name: str) -> None:
        """(Re)start a node's daemon: the node boots."""
        # Not ip netns exec: it remounts /sys, and without /sys/fs/cgroup slurmd does not start.
        script = (
            'hostname "$0" && mount --bind "$1" /etc/hosts && mount -t tmpfs tmpfs /dev/shm && mkdir -p /scratch'
            " && mount -t tmpfs tmpfs /scratch && conf=$2 && name=$0 && shift 2"
            ' && while [ $# -gt 0 ]; do mount --bind "$1" "$2" && shift 2 || exit 1; done'
            ' && exec slurmd -f "$conf" -N "$name"'
        )
        shown = [word for path, folder in self.shown.items() for word in (str(folder), path)]
        run(
            "nsenter", f"--net=/run/netns/{self.namespace(name)}", "unshare", "--uts", "--mount", "sh", "-c", script,
            name, str(self.dir / "hosts"), self.env["SLURM_CONF"], *shown,
        )  # fmt: skip

    def power_off(self, name: str) -> None:
        """The node loses power: all its processes end at once, silently."""
        self.cut(name)
        self.kill_processes(name)

    # ------------------------------------------------------------ Slurm's own words

    def ask(self, *words: str) -> str:
        """The output of a Slurm command."""
        return run(*words, env=self.env)

    def states(self) -> list[str]:
        return self._printed("sinfo", "-h", "-p", "main", "-N", "-o", "%T").split()

    def job_state(self, job_id: str) -> str:
        return self._printed("squeue", "-h", "-t", "all", "-j", job_id, "-o", "%T").strip()

    def _printed(self, *argv: str) -> str:
        """The output of a command, even if it fails (a controller that is starting)."""
        return subprocess.run(argv, env=self.env, capture_output=True, text=True, check=False).stdout

    def wait_until(self, condition, what: str, timeout_s: float = 60):  # type: ignore[no-untyped-def]
        until = time.monotonic() + timeout_s
        while not (found := condition()):
            assert time.monotonic() < until, f"no {what} within {timeout_s} s\n{self.story()}"
            time.sleep(0.05)
        return found

    def story(self) -> str:
        log = self.dir / "log" / "slurmctld.log"
        return self._printed("squeue") + (log.read_text()[-2000:] if log.exists() else "")


def run(*argv: str, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{' '.join(argv)}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def slurm_is_missing() -> str:
    """Why no Slurm can be started here; empty when it can."""
    if os.geteuid() != 0:
        return "needs root for a Slurm in network namespaces"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)} (apt-get install slurm-wlm munge iproute2)"
    if not Path("/sys/fs/cgroup").exists():
        return "needs /sys/fs/cgroup, without which slurmd does not start"
    return namespaces_are_missing()


def namespaces_are_missing() -> str:
    """Why no host of its own can be made here; empty when it can."""
    mount = ["unshare", "--uts", "--mount", "--pid", "--fork", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
    if namespaces_work() and subprocess.run(mount, capture_output=True, check=False).returncode == 0:
        return ""
    return "cannot make network and mount namespaces here"


def main(arguments: Sequence[str]) -> None:
    """``python tests/live/slurm_cluster.py FOLDER [NODES]``: a cluster to try things on, until Ctrl-C."""
    with SlurmCluster(Path(arguments[0]).absolute(), int(arguments[1]) if len(arguments) > 1 else 4) as cluster:
        print(cluster.ask("sinfo"))
        print(f"export SLURM_CONF={cluster.env['SLURM_CONF']}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()


if __name__ == "__main__":
    main(sys.argv[1:])
