"""A network that can be broken (each host of a drill in a namespace of its own, joined by a bridge), and a disk that
can be full.

Both need root, and fail without it. The machine's own network and disks are not touched; everything created here has
a unique name or path and is removed at the end.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from muster.core.clock import SystemShell
from muster.core.errors import UsageError
from muster.core.protocols import Shell
from muster.core.types import JobRequest, TaskSpec

#: ip, tc and mount return at once.
COMMAND_TIMEOUT_S = 20.0


@dataclass
class Network:
    """Hosts ``names`` in a /24 of their own: .1 is the bridge and the supervisor, hosts from .11 on."""

    names: Sequence[str]
    shell: Shell = field(default_factory=SystemShell)
    tag: str = field(default_factory=lambda: f"mud{secrets.token_hex(3)}")
    """A deleted namespace's links disappear later: a name is never reused."""
    subnet: str = field(default_factory=lambda: f"10.78.{secrets.randbelow(250)}")

    @property
    def bridge(self) -> str:
        return f"{self.subnet}.1"

    def namespace(self, name: str) -> str:
        return f"{self.tag}{self.names.index(name)}"

    def address(self, name: str) -> str:
        return f"{self.subnet}.{11 + self.names.index(name)}"

    def _link(self, name: str) -> str:
        return f"{self.tag}v{self.names.index(name)}"

    # ------------------------------------------------------------ up and down

    def up(self) -> None:
        """Create it.

        Raises:
            UsageError: not root, or this machine has no namespaces, or no iproute2.
        """
        _need_root("creates network namespaces")
        bridge = f"{self.tag}br"
        self._ip("link", "add", bridge, "type", "bridge")
        self._ip("addr", "add", f"{self.bridge}/24", "dev", bridge)
        self._ip("link", "set", bridge, "up")
        for name in self.names:
            space = self.namespace(name)
            self._ip("netns", "add", space)
            self._ip("link", "add", self._link(name), "type", "veth", "peer", "name", "eth0", "netns", space)
            self._ip("link", "set", self._link(name), "master", bridge, "up")
            self._ip("-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            self._ip("-n", space, "link", "set", "eth0", "up")
            self._ip("-n", space, "link", "set", "lo", "up")

    def down(self) -> None:
        """Remove all of it; absent is success."""
        for name in self.names:
            _problem(self.shell, ["ip", "netns", "del", self.namespace(name)])
        for bridge in ("br", "b2"):
            _problem(self.shell, ["ip", "link", "del", f"{self.tag}{bridge}"])

    def place(self, request: JobRequest) -> JobRequest:
        """The same job with each host's agent in its namespace, and the supervisor on the bridge."""
        tasks: list[TaskSpec] = []
        for task in request.tasks:
            if task.name != "agent":
                tasks.append(dataclasses.replace(task, env={**task.env, "MUSTER_BIND": self.bridge}))
                continue
            for index, name in enumerate(self.names[: task.count]):
                argv = [name if word == "host-{index}" else word for word in task.argv]
                inside = ("nsenter", f"--net=/run/netns/{self.namespace(name)}", *argv, "--bind", self.address(name))
                tasks.append(dataclasses.replace(task, name=f"agent-{index}", argv=inside, count=1))
        return dataclasses.replace(request, tasks=tuple(tasks))

    # ------------------------------------------------------------ breaking it

    def cut(self, name: str) -> None:
        self._ip("link", "set", self._link(name), "down")

    def heal(self, name: str) -> None:
        self._ip("link", "set", self._link(name), "up")

    def limit(self, name: str, *, rate: str, burst: str, limit: str) -> None:
        """A token bucket on the way out of a host; a heavier one replaces a lighter one."""
        bucket = ["tbf", "rate", rate, "burst", burst, "limit", limit]
        self._must(["tc", "-n", self.namespace(name), "qdisc", "replace", "dev", "eth0", "root", *bucket])

    def split(self, names: Sequence[str]) -> None:
        """These reach only each other: their links move to a bridge of their own."""
        self._ip("link", "add", f"{self.tag}b2", "type", "bridge")
        self._ip("link", "set", f"{self.tag}b2", "up")
        for name in names:
            self._ip("link", "set", self._link(name), "master", f"{self.tag}b2")

    def join(self, names: Sequence[str]) -> None:
        for name in names:
            self._ip("link", "set", self._link(name), "master", f"{self.tag}br")
        self._ip("link", "del", f"{self.tag}b2")

    def _ip(self, *words: str) -> None:
        self._must(["ip", *words])

    def _must(self, argv: Sequence[str]) -> None:
        problem = _problem(self.shell, argv)
        if problem is not None:
            raise UsageError(
                f"this machine cannot do `{' '.join(argv)}`: {problem}", hint="root and iproute2 are needed"
            )


@dataclass
class Disk:
    """A file system in memory on ``folder``, which can be shrunk to its contents: a full disk."""

    folder: Path
    shell: Shell = field(default_factory=SystemShell)

    def up(self) -> None:
        """Mount it.

        Raises:
            UsageError: not root, or this machine mounts nothing.
        """
        _need_root("mounts a file system")
        self.folder.mkdir(parents=True, exist_ok=True)
        problem = self._mount("-t", "tmpfs", "-o", "mode=0700", "muster-drill")
        if problem is not None:
            raise UsageError(f"this machine cannot mount a file system on {self.folder}: {problem}")

    def down(self) -> None:
        """Unmount it, even while it is in use; absent is success."""
        _problem(self.shell, ["umount", "--lazy", str(self.folder)])

    def fill(self) -> bool:
        """Leave no free space; False where a file grew meanwhile: try again."""
        stat = os.statvfs(self.folder)
        used = max(1, stat.f_blocks - stat.f_bfree) * stat.f_frsize
        return self._mount("-o", f"remount,size={used}") is None

    def free(self) -> None:
        """As much space as the machine has memory."""
        problem = self._mount("-o", "remount,size=100%")
        if problem is not None:
            raise UsageError(f"the file system on {self.folder} cannot be made larger: {problem}")

    def _mount(self, *words: str) -> str | None:
        return _problem(self.shell, ["mount", *words, str(self.folder)])


def _need_root(act: str) -> None:
    if os.geteuid() != 0:
        raise UsageError(f"this fault needs root: it {act}", hint="muster drill --list marks such faults")


def _problem(shell: Shell, argv: Sequence[str]) -> str | None:
    """Run it; why it failed, None: it did not."""
    done = shell.run(argv, timeout_s=COMMAND_TIMEOUT_S)
    return None if done.returncode == 0 else (done.stderr.strip() or f"exit code {done.returncode}")
