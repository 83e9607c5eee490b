"""Machines with a real ``sshd`` on one machine: each in network, mount, PID and UTS namespaces of its own.

Root, and Debian's ``openssh-server iproute2``. A host has an address, a name, a home directory, ``/tmp``, ``/dev/shm``,
a boot id and a machine id of its own; the root file system (Python and Muster) is this machine's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import uuid
from pathlib import Path

from cluster import Network
from slurm_cluster import namespaces_are_missing, run
from waiting import eventually, listens

SECRET = "hunter2-of-the-ssh-test"
PROGRAMS = ("sshd", "ssh", "ssh-keygen", "ip", "nsenter", "unshare")
NOISE = 'echo "*** Welcome, muster-far 1 ***"; echo more noise\n'  # of a .bashrc that prints at every command

#: The first process of a host: a shell's words, then one that collects what lost its parent.
INIT = """\
import os, signal, subprocess, sys
name, folder, home, top, login = sys.argv[1:]
def sh(*argv): subprocess.run(argv, check=True)
sh("hostname", name)
sh("mount", "--bind", folder + "/boot_id", "/proc/sys/kernel/random/boot_id")
sh("mount", "--bind", folder + "/machine-id", "/etc/machine-id")
for place in ("/tmp", "/dev/shm"):
    if place == "/tmp": sh("mount", "--bind", top, "/mnt")
    sh("mount", "-t", "tmpfs", "-o", "size=300m", "tmpfs", place)
os.makedirs(top, exist_ok=True)
sh("mount", "--move", "/mnt", top)
sh("mount", "--bind", home, login)
subprocess.Popen(["/usr/sbin/sshd", "-D", "-e", "-f", folder + "/sshd_config"])
while True:
    try: os.wait()
    except ChildProcessError: signal.pause()
"""


class SshHosts(Network):
    """Started on entry, removed on exit. ``env`` is the user's, with keys, ``~/.ssh/config`` and ``known_hosts``."""

    def __init__(self, directory: Path, hosts: int) -> None:
        self.dir = Path(directory)
        super().__init__([f"gpu{number}" for number in range(1, hosts + 1)])
        self.variables: dict[str, str] = {}  # of every login
        self.home, self.login = self.dir / "user", self.dir / "login"  # and where each host shows its own
        self.env = {**os.environ, "HOME": str(self.home), "MINE": SECRET}
        for name in ("GLOO_SOCKET_IFNAME", "MUSTER_RUN_ID", "MUSTER_RUN_DIR", "MUSTER_MEMORY_DIR", "SSH_AUTH_SOCK"):
            self.env.pop(name, None)

    def __enter__(self) -> SshHosts:
        for folder in (self.home / ".ssh", self.login):
            folder.mkdir(parents=True)
        (self.home / ".ssh").chmod(0o700)
        Path("/run/sshd").mkdir(exist_ok=True)
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.home / ".ssh" / "id_ed25519"))
        with contextlib.ExitStack() as undo:
            undo.push(self)
            self.up()
            for name in self.names:
                self._prepare(name)
                self.boot(name)
            self._configure()
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            self.kill_processes(name)
        self.down()

    def _prepare(self, name: str) -> None:
        folder, home = self.dir / name, self.dir / name / "home"
        (home / ".ssh").mkdir(parents=True)
        (home / ".bashrc").write_text(NOISE)
        shutil.copy(self.home / ".ssh" / "id_ed25519.pub", home / ".ssh" / "authorized_keys")
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "hostkey"))
        (folder / "machine-id").write_text(uuid.uuid4().hex + "\n")
        # Root's home directory is /root on every host: the login shell is told another one.
        (folder / "sshd_config").write_text(
            f"ListenAddress {self.address(name)}\nHostKey {folder}/hostkey\nUsePAM no\nStrictModes no\n"
            f"AuthorizedKeysFile {home}/.ssh/authorized_keys\nPidFile none\nPermitRootLogin yes\n"
            f"SetEnv HOME={self.login} MUSTER_HOME={self.login}/.muster "
            f"{' '.join(f'{key}={value}' for key, value in self.variables.items())}\nPrintMotd yes\n"
            f"LogLevel ERROR\nForceCommand {folder}/shell\nMaxSessions 1\n"
        )
        program(folder / "shell", f'bash\ncd {self.login} && . ./.bashrc; exec /bin/bash -c "$SSH_ORIGINAL_COMMAND"')

    def _configure(self) -> None:
        """OpenSSH takes the home directory of the password file, not HOME."""
        folder, script = self.home / ".ssh", self.dir / "bin" / "ssh"
        config = [
            f"Host *\n  IdentityFile {folder}/id_ed25519\n  UserKnownHostsFile {folder}/known_hosts\n  User root\n"
        ]
        with open(folder / "known_hosts", "w") as known:
            for name in self.names:
                known.write(f"{self.address(name)} {(self.dir / name / 'hostkey.pub').read_text()}")
                config.append(f"Host {name}\n  HostName {self.address(name)}\n")
        (folder / "hosts.conf").write_text("".join(config))
        (folder / "config").write_text(f"Include {folder}/hosts.conf\n")
        script.parent.mkdir()
        program(script, f'sh\nexec /usr/bin/ssh -F {folder}/config "$@"')
        self.env["PATH"] = f"{script.parent}:{self.env['PATH']}"

    # ------------------------------------------------------------ hosts and their faults

    def boot(self, name: str) -> None:
        """Start the host; memory and /tmp are empty, and the boot id is another."""
        folder = self.dir / name
        (folder / "boot_id").write_text(f"{uuid.uuid4()}\n")
        with open(folder / "console", "ab") as console:
            subprocess.Popen(
                [
                    "nsenter", f"--net=/run/netns/{self.namespace(name)}", "unshare", "--uts", "--mount", "--pid",
                    "--fork", "--mount-proc", "--kill-child", "/usr/bin/python3", "-c", INIT, name, str(folder),
                    str(folder / "home"), str(self.dir), str(self.login),
                ],
                stdin=subprocess.DEVNULL, stdout=console, stderr=console, start_new_session=True,
            )  # fmt: skip
        eventually(lambda: listens(self.address(name), 22))

    def start_sshd(self, name: str) -> None:
        """Where it was killed."""
        init = str(max(self.processes(name, "import os, signal")))  # the other one is unshare, outside
        run("nsenter", "-t", init, "-a", "/usr/sbin/sshd", "-f", str(self.dir / name / "sshd_config"))

    def kill(self, name: str, word: str) -> int:
        """kill -9 of the processes whose command line holds ``word``; how many."""
        found = self.processes(name, word)
        for pid in found:
            os.kill(pid, signal.SIGKILL)
        return len(found)

    def story(self) -> str:
        logs = sorted([*self.dir.glob("gpu*/console"), *self.dir.glob("gpu*/home/.muster/ssh/runs/*/*.log")])
        return "\n".join(f"--- {path}\n{path.read_text(errors='replace')[-1500:]}" for path in logs)


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/{text}\n")
    path.chmod(0o755)


def ssh_is_missing() -> str:
    """Why no such host can be started here; empty when it can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if missing:
        return f"needs {', '.join(missing)} (apt-get install openssh-server iproute2 util-linux)"
    return namespaces_are_missing()
