"""``muster up`` and ``muster down`` of a run file whose hosts are reached by SSH: an environment is made there.

All hosts at once, with plain words that every login shell reads alike, and no more rights than the user has there.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import muster
from muster.backends.cluster import Began, Changed, Down, Image, Planned, Progress, Request, Step, silent
from muster.backends.protocols import Lease
from muster.backends.ssh.openssh import OpenSsh, everywhere, refuse
from muster.config.spec import RunSpec
from muster.core.errors import DISTRIBUTION, BackendError, MusterError, UsageError
from muster.protocol.pipes import FarFacts, FarLook
from muster.storage.store.ssh import ENV

INSTALL_S = 1900.0
CLOCK_S = 10.0
"""By which clocks may seem to differ: ssh takes a while."""
WHEELS = ".muster/ssh/wheels"
NOT_HERE = "has no meaning where hosts are reached by SSH"


@dataclass(kw_only=True)
class SshCluster:
    """The hosts of one run file."""

    spec: RunSpec
    ssh: OpenSsh = field(default_factory=OpenSsh)
    project: str = "ssh.hosts"

    def dry_run(self, manifests: Path | None) -> tuple[Sequence[Request], Sequence[str]]:
        raise UsageError(f"--dry-run {NOT_HERE}")

    def pin(self, manifests: Path | None) -> tuple[Mapping[str, str], Path]:
        raise UsageError(f"--pin {NOT_HERE}")

    def image(self, *, base: str | None = None, torch: str | None = None, torch_index: str | None = None) -> Image:
        raise UsageError(f"an image {NOT_HERE}")

    def look(self) -> Sequence[str]:
        return self._everywhere(self._python, silent, "there")

    def up(self, manifests: Path | None, *, token: str | None = None, progress: Progress = silent) -> Lease:
        """Check every host, then install. ``manifests``: a folder of wheels; None: from the hosts' package index.

        Raises:
            BackendError: hosts lack something; all of it, with what repairs it.
            AccessError: a key is unknown or not accepted.
        """
        if manifests is not None and not any(manifests.glob("*.whl")):
            raise UsageError(f"{manifests} has no wheels", hint=f"in a clone: pip wheel -w {manifests} '.[data,train]'")
        self._everywhere(self._python, progress, "there")

        facts: dict[str, tuple[FarFacts, int]] = {}

        def prepared(host: str) -> str:
            self._install(host, manifests)
            one = self.ssh.order(host, FarLook())
            facts[host] = one, one.wall_ns - time.time_ns()
            gpus = f"{len(one.gpus)} x {one.gpus[0]}" if one.gpus else "no GPU"
            return f"{host}: {one.hostname} at {one.address}, {gpus}, {one.disk_bytes / 1e9:.0f} GB of disk free"

        found = self._everywhere(prepared, progress, "there")
        agree(facts)
        found += [f"warning: {host}: {text}" for host, (one, _) in facts.items() for text in one.doubts]
        return Lease(run_id="", resources=tuple(found), labels={"zone": self.project})

    def down(self, *, keep_data: bool = False, progress: Progress = silent) -> Down:
        """Remove the environments; homes of runs, which are data, stay."""

        def removed(host: str) -> str:
            if holder := self.ssh.order(host, FarLook()).held_by:
                raise UsageError(f"{host} works for {holder}", hint=f"muster down {holder}")
            return self.ssh.run(host, ["rm", "-rf", ENV, WHEELS, ".muster/ssh/runs", ".muster/ssh/lease"])

        try:
            self._everywhere(removed, progress, "gone")
        except MusterError as error:
            return Down(troubles=(str(error),), leftovers=())
        return Down(troubles=(), leftovers=())

    def _everywhere(self, act: Callable[[str], str], progress: Progress, step: Step) -> list[str]:
        """What ``act`` returned for each host. Raises one error with all that is wrong."""
        hosts = self.spec.ssh.hosts
        progress(Began(title="hosts", making=step == "there", nodes=tuple(Planned(key=host) for host in hosts)))

        def watched(host: str) -> str:
            progress(Changed(key=host, step="making"))
            done = act(host)
            progress(Changed(key=host, step=step, text=done))
            return done

        return list(refuse(everywhere(hosts, watched)).values())

    def _python(self, host: str) -> str:
        """Its version. Raises BackendError: too old."""
        python = f"{self.spec.ssh.venv}/bin/python" if self.spec.ssh.venv else "python3"
        found = re.findall(r"^Python (\d+)\.(\d+)", self.ssh.run(host, [python, "--version"]), re.MULTILINE)
        if not found or tuple(map(int, found[-1])) < (3, 11):
            version = ".".join(found[-1]) if found else "not Python"
            raise BackendError(f"{host}: {python} is {version}, and 3.11 is needed", hint="ssh.venv names another")
        return "Python " + ".".join(found[-1])

    def _install(self, host: str, wheels: Path | None) -> None:
        self.ssh.run(host, ["mkdir", "-p", "-m", "700", ".muster/ssh"])
        if self.spec.ssh.venv is not None:
            self.ssh.run(host, ["rm", "-rf", ENV])  # a link into a folder of that name would be made within it
            self.ssh.run(host, ["ln", "-s", self.spec.ssh.venv, ENV])
            return
        self.ssh.run(host, ["find", ".muster/ssh", "-maxdepth", "1", "-type", "l", "-delete"])  # to a venv not ours
        self.ssh.run(host, ["python3", "-m", "venv", ENV])
        pip = [f"{ENV}/bin/python", "-m", "pip", "install", "-q", "--disable-pip-version-check", "-r", "/dev/stdin"]
        wanted = f"{DISTRIBUTION}[data,train]=={muster.__version__}\n"
        if wheels is not None:
            self.ssh.send(host, wheels, WHEELS)
            pip += ["--no-deps", "--no-index", "--find-links", WHEELS]
            wanted = "".join(_requirement(path) for path in sorted(wheels.glob("*.whl")))
        self.ssh.run(host, pip, wanted, INSTALL_S)


def agree(facts: Mapping[str, tuple[FarFacts, int]]) -> None:
    """What hosts need of each other; ``facts`` with what each clock is ahead of this machine's, in ns.

    Raises:
        BackendError: clocks differ, or two hosts have one address, which is none that others reach.
    """
    wrong, hosts = [], dict[str, str]()
    slow, fast = min(facts, key=lambda host: facts[host][1]), max(facts, key=lambda host: facts[host][1])
    if (apart_s := (facts[fast][1] - facts[slow][1]) / 1e9) > CLOCK_S:
        wrong.append(f"{fast}'s clock is {apart_s:.0f} s ahead of {slow}'s (there: sudo timedatectl set-ntp true)")
    for host, (one, _) in facts.items():
        if (other := hosts.setdefault(one.address, host)) != host:
            reason = "one machine" if facts[other][0].boot == one.boot else "NAT: let HostName name what others reach"
            wrong.append(f"{other} and {host} are both {one.address}: {reason}")
    if wrong:
        raise BackendError("; ".join(wrong), hint="repair that, then the same command")


def _requirement(wheel: Path) -> str:
    """With the hash that pip checks."""
    name, version, *_ = wheel.name.split("-")
    return f"{name}=={version} --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"
