"""The ``Launcher`` for machines that are reached by SSH: each has a program of its own, found by its lease.

This machine holds the run's intent and speaks with hosts by the user's own ``ssh``; it may go away while the run is on.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from muster.backends import code_bundle, run_folder, run_home
from muster.backends.bucket_launcher import ASK_S, BucketLauncher, ended_with
from muster.backends.letters import ASK
from muster.backends.run_folder import RunFiles
from muster.backends.ssh.openssh import OpenSsh, everywhere, refuse
from muster.backends.ssh.placement import Placement, place
from muster.config.spec import RunSpec
from muster.core.errors import BackendError, CapacityError, ConflictError, MusterError, UsageError
from muster.core.types import JobHandle, JobRequest, JobState, JobStatus, LogChunk, Offer, TaskSpec
from muster.protocol.client import FromClient, SupervisorStatus
from muster.protocol.pipes import FarAsk, FarEnd, FarFacts, FarLook, FarStart
from muster.storage import run_registry, run_secrets
from muster.storage.home import HOME_FILE
from muster.storage.job_record import SUBMISSION
from muster.transport.secure_session import read_token

RESOLVED = "resolved.json"
_Result = TypeVar("_Result")
DOWN = "down"
"""File in the run's folder on this machine: ended from here since it was submitted. What still lives then was out of
reach, and is no part of the run."""


@dataclass(kw_only=True)
class SshLauncher(BucketLauncher[Placement]):
    """Runs jobs on the machines of ``ssh.hosts``."""

    name: str = "ssh"
    ssh: OpenSsh = field(default_factory=OpenSsh)
    follow = None

    def placed(self, spec: RunSpec, run_id: str, run_dir: str | None) -> Placement:
        return place(spec, run_id, run_dir)

    def offers(self, spec: RunSpec) -> list[Offer]:
        """The least of the hosts that answer."""
        found = list(self._there(place(spec, "")).values())
        gpus = min(len(one.gpus) for one in found)
        return [
            Offer(
                backend=self.name,
                machine="ssh",
                location="here",
                accelerator=found[0].gpus[0] if gpus else "cpu",
                gpus_per_node=gpus,
                gpu_memory_bytes=min(one.gpu_memory_bytes for one in found),
                usd_per_node_hour=spec.resources.usd_per_host_hour,
                peak_flops_per_gpu=None,
                max_nodes=len(found),
                mode="owned",
            )
        ]

    def resolve(self, spec: RunSpec) -> RunSpec:
        """Device and ranks a host as the hosts have them, where the run file leaves that open; spares."""
        asked, device = spec.resources, spec.resources.device
        gpus = 0
        if device == "auto" or (device == "cuda" and asked.ranks_per_host is None):
            gpus = self.offers(spec)[0].gpus_per_node
        update = {
            "spare_hosts": len(spec.ssh.hosts) - asked.hosts,
            "device": ("cuda" if gpus else "cpu") if device == "auto" else device,
            "ranks_per_host": asked.ranks_per_host or gpus or 1,
        }
        return spec.model_copy(update={"resources": asked.model_copy(update=update)})

    def render(self, spec: RunSpec, *, run_id: str, run_dir: str) -> JobRequest:
        """The run file as hosts get it. Pure: no name is resolved."""
        programs = ("muster.app.supervisor", "muster.agent.watchdog")
        supervisor, agent = (("python", "-m", program, "--run-id", run_id) for program in programs)
        hosts = spec.resources.hosts + spec.resources.spare_hosts
        return JobRequest(
            run_id=run_id,
            backend=self.name,
            run_dir=run_dir,
            tasks=(TaskSpec(name="supervisor", argv=supervisor), TaskSpec(name="agent", argv=agent, count=hosts)),
            labels={"muster-run": run_id, SUBMISSION: "1"},
            files={RESOLVED: spec.model_dump_json(indent=1) + "\n"},
        )

    def submit(self, request: JobRequest) -> JobHandle:
        """Put the run's files into its home and start the host programs, the first host's first; the same request
        twice starts each once.

        Raises:
            CapacityError: fewer hosts answer than the run needs.
            ConflictError: a host works for another run.
            AccessError, BackendError: a host's refusal. What this submission started is ended.
        """
        local, run_id = Path(request.run_dir), request.run_id
        spec = RunSpec.model_validate_json(request.files[RESOLVED])
        number, known = request.labels.get(SUBMISSION, "1"), self.known(run_id)
        placement, begun = known[1] if known is not None else place(spec, run_id), known is not None
        placement = replace(placement, spec=spec)
        facts = _enough(placement, self._look(placement))
        if placement.keeper is not None and placement.keeper not in facts:
            hint = f"muster recover {run_id} --from HOST continues from another host's copy" if begun else None
            raise CapacityError(f"{placement.keeper} does not answer, and has the run's home", hint=hint)
        if placement.is_shared:
            self._share(placement, list(facts), run_id)
        self.begin(local, run_id, placement.home)
        home = self.home(run_id)
        held = [host for host, one in facts.items() if one.held_by == run_id and not (local / DOWN).exists()]
        if home and held and not run_home.end_of(home, again=True):
            number = run_home.submission_of(local)  # that one goes on: what it lacks is started
        try:
            first, *others = orders = self._orders(placement, facts, local, run_id, number)
            self.ssh.order(first, orders[first])
            answers = everywhere(others, lambda host: self.ssh.order(host, orders[host]))
            _enough(placement, answers, more=1)
        except MusterError:
            undo = FarEnd(run_id=run_id, grace_s=0.0, forget=not begun)
            idle = [host for host in facts if host not in held]
            everywhere(idle, lambda host: self.ssh.order(host, undo))
            raise
        (local / DOWN).unlink(missing_ok=True)
        self.record(local, run_id, int(number))
        return self.handle(run_id, local, placement.hosts[0], _doubts(placement, facts, answers, run_id))

    def move(self, run_id: str, host: str, spec: RunSpec) -> str:
        """Let the copy of the run's home on ``host`` be its home, and end what works for the run; how old the copy is.
        ``spec``: with which it is to go on.

        Raises:
            ConflictError: the home is still there.
            UsageError: ``host`` has no copy.
            MusterError: it does not answer, or fewer hosts than the run needs do (nothing is ended then), or what runs
                cannot be ended.
        """
        known = self.known(run_id)
        if known is None or host not in known[1].hosts:
            raise UsageError(f"{host!r} is no host of {run_id}", hint="as in ssh.hosts")
        local, placement = known
        found = self._look(placement, run_id)
        facts = {name: one for name, one in found.items() if isinstance(one, FarFacts)}
        if not isinstance(here := found[host], FarFacts):
            raise here
        if placement.keeper in facts and facts[placement.keeper].keeps_home:
            raise ConflictError(f"{placement.keeper} answers and has the home", hint=f"muster recover {run_id} uses it")
        if not (here.keeps_home if placement.is_shared else here.copied_wall_ns):
            having = ", ".join(name for name, one in facts.items() if one.copied_wall_ns)
            raise UsageError(f"{host} has no copy of the home of {run_id}", hint=having and f"--from {having}")
        if placement.is_shared:  # the run itself needs nothing
            run_registry.replace_text(local / HOME_FILE, f"ssh://{host}/{run_id}\n")
            return f"the home of {run_id} is read through {host}"
        _enough(replace(placement, spec=spec), found)
        refuse(everywhere(list(facts), lambda name: self.ssh.order(name, FarEnd(run_id=run_id, grace_s=0.0))))
        with contextlib.suppress(FileNotFoundError):  # the copy may end earlier than what was read of the lost home
            (local / "events").rename(local / f"events-{placement.keeper}-{here.wall_ns}")
        run_registry.replace_text(local / HOME_FILE, f"ssh://{host}/{run_id}\n")
        (local / DOWN).touch()
        return f"the copy on {host} is {(here.wall_ns - here.copied_wall_ns) / 1e9:.0f} s old"

    def _share(self, placement: Placement, hosts: Sequence[str], run_id: str) -> None:
        """Have the home in the folder that hosts share, under the name by which each looks for it."""
        link, folder = f".muster/ssh/homes/{run_id}", str(placement.spec.run_dir)

        def linked(host: str) -> str:
            self.ssh.run(host, ["mkdir", "-p", "-m", "700", ".muster/ssh/homes", folder])
            return self.ssh.run(host, ["ln", "-sfn", folder, link])

        _enough(placement, everywhere(hosts, linked))

    def _orders(
        self, placement: Placement, facts: Mapping[str, FarFacts], local: Path, run_id: str, number: str
    ) -> dict[str, FarStart]:
        """Each host's start order; the run's files are in its home then."""
        spec = placement.spec
        if len({one.boot for one in facts.values()}) < len(facts):
            names = ", ".join(f"{host} ({one.hostname})" for host, one in facts.items())
            raise BackendError(f"two of ssh.hosts are one machine: {names}", hint="one name of each")
        if len(homes := {one.home for one in facts.values()}) > 1:
            raise BackendError(f"home directories differ: {', '.join(sorted(homes))}", hint="one user name")
        spares = max(0, len(facts) - spec.resources.hosts)
        spec = spec.model_copy(update={"resources": spec.resources.model_copy(update={"spare_hosts": spares})})
        shipped, code = code_bundle.pack(spec, _code_dir(homes.pop(), run_id))
        text = json.dumps(shipped.model_dump(mode="json", exclude_defaults=True), indent=1) + "\n"  # JSON is YAML
        resolved = placement.filled_in(shipped).model_dump_json(indent=1) + "\n"
        files = RunFiles(resolved=resolved, run_yaml=text, code=code).encoded()
        sha256 = run_folder.put(self.opened(), placement.home, files)
        token, secrets = read_token(str(local / "token")).decode(), run_secrets.read(local)
        server = facts[placement.keeper].address if placement.keeper is not None else ""
        return {
            host: FarStart(
                run_id=run_id, index=spec.ssh.hosts.index(host), rank=rank, submission=number, home=placement.home,
                files_sha256=sha256, address=one.address, server=one.address if placement.is_shared else server,
                port=spec.ssh.port, copies=rank == 1 and bool(server) and not placement.is_shared, token=token,
                secrets=secrets,
            )
            for rank, (host, one) in enumerate(facts.items())
        }  # fmt: skip

    def ask(
        self, run_id: str, message: FromClient, *, timeout_s: float = 5.0, resolved: str | None = None
    ) -> SupervisorStatus:
        """As ``BucketLauncher``; a corrected run file is completed as a submitted one."""
        if resolved is not None and (known := self.known(run_id)) is not None:
            resolved = known[1].filled_in(RunSpec.model_validate_json(resolved)).model_dump_json(indent=1) + "\n"
        return super().ask(run_id, message, timeout_s=timeout_s, resolved=resolved)

    def code_dir(self, run_id: str) -> str:
        known = self.known(run_id)
        assert known is not None  # it was submitted
        return _code_dir(next(iter(self._there(known[1]).values())).home, run_id)

    def box_of_host(self, run_id: str, placement: Placement, host: int) -> str:
        """The host itself: commands go there by ssh."""
        hosts = placement.spec.ssh.hosts
        if host >= len(hosts):
            raise UsageError(f"{run_id} has no host {host}: it has {len(hosts)}, counted from 0")
        return hosts[host]

    def carry(self, run_id: str, to: str, kind: str, text: str, *, timeout_s: float) -> str:
        """By ssh to the host of the supervisor, or of the command. No other program of ours has to run there."""
        known = self.known(run_id)
        assert known is not None  # it was submitted
        if kind == ASK:
            found = self._look(known[1], run_id)
            able = [host for host, one in found.items() if isinstance(one, FarFacts) and one.supervises]
            if not able:
                silent = "; ".join(str(one) for one in found.values() if isinstance(one, MusterError))
                raise BackendError(silent or f"no host has a supervisor of {run_id}", hint=f"muster recover {run_id}")
            to = able[0]
        return self.ssh.order(to, FarAsk(run_id=run_id, kind=kind, text=text), timeout_s + ASK_S).reply

    def find(self, run_id: str) -> JobHandle | None:
        """By the run's folder on this machine, until it was ended from here."""
        known = self.known(run_id)
        if known is None or (known[0] / DOWN).exists():
            return None
        return self.handle(run_id, known[0], known[1].hosts[0])

    def poll(self, handle: JobHandle) -> JobStatus:
        """Look once, at all hosts: one that does not answer is unreachable, which is no end."""
        known, home = self.known(handle.run_id), self.home(handle.run_id)
        if known is None or home is None:
            return JobStatus(state=JobState.ABSENT, reason="no such run, or it was never submitted")
        tasks = {
            host: f"unreachable: {one}" if isinstance(one, MusterError) else _task(one)
            for host, one in self._look(known[1], handle.run_id).items()
        }
        if (end := run_home.end_of(home, again=True)) is not None:
            return ended_with(end, tasks)
        count = list(tasks.values()).count("running")
        silent = [host for host, task in tasks.items() if task.startswith("unreachable")]
        down = (known[0] / DOWN).exists()
        if count or (silent and not down):
            reason = f"{count} of {len(tasks)} hosts work" + (f"; no answer from {', '.join(silent)}" if silent else "")
            return JobStatus(state=JobState.RUNNING, reason=reason, tasks=tasks)
        if down:
            return JobStatus(state=JobState.STOPPED, reason="it was ended from this machine", tasks=tasks)
        return JobStatus(
            state=JobState.FAILED,
            reason=f"no host works for it; a host's own words: ~/.muster/ssh/runs/{handle.run_id}/host.log",
            tasks=tasks,
        )

    def logs(self, handle: JobHandle, *, after: Mapping[str, int] | None = None) -> Iterator[LogChunk]:
        """What the run's programs wrote, from its home."""
        if (home := self.home(handle.run_id)) is not None:
            yield from run_home.logs(home, after or {})

    def cancel(self, handle: JobHandle) -> None:
        """End everything of the run on every host and spare; absent is success.

        Raises:
            BackendError: a host does not answer, or a process does not end.
        """
        if (known := self.known(handle.run_id)) is None:
            return
        order = FarEnd(run_id=handle.run_id)
        refuse(everywhere(known[1].hosts, lambda host: self.ssh.order(host, order)))
        (known[0] / DOWN).touch()

    def remaining(self, handle: JobHandle) -> list[str]:
        """Processes, memory and secrets on every host: the proof of a tear-down. A silent host is named."""
        if (known := self.known(handle.run_id)) is None:
            return []
        found: list[str] = []
        for host, one in self._look(known[1], handle.run_id).items():
            found += [f"{host}: {what}" for what in one.left] if isinstance(one, FarFacts) else [str(one)]
        return found

    def _look(self, placement: Placement, run_id: str = "") -> dict[str, FarFacts | MusterError]:
        order = FarLook(run_id=run_id)
        return everywhere(placement.hosts, lambda host: self.ssh.order(host, order))

    def _there(self, placement: Placement) -> dict[str, FarFacts]:
        """Hosts that answer. Raises what they said where none does."""
        return refuse(self._look(placement), most=len(placement.hosts) - 1)


def _enough(placement: Placement, found: Mapping[str, _Result | MusterError], *, more: int = 0) -> dict[str, _Result]:
    """The results, of which there are ``more`` besides. Raises what the others said where the run needs those."""
    able = more + sum(not isinstance(one, MusterError) for one in found.values())
    hint = f"resources.min_hosts={able} lets the run go on with {able} of its {placement.spec.resources.hosts} hosts"
    return refuse(found, most=len(found) + more - placement.least, hint=hint if able else None)


def _task(one: FarFacts) -> str:
    """A host's relation to the requested run."""
    return "running" if one.processes else "idle"


def _code_dir(home: str, run_id: str) -> str:
    return f"{home}/.muster/ssh/runs/{run_id}"


def _doubts(
    placement: Placement, facts: Mapping[str, FarFacts], answers: Mapping[str, object], run_id: str
) -> Sequence[str]:
    """What a person who submits should know."""
    found = [f"{host} does not answer and is left out" for host in placement.hosts if host not in facts]
    found += [f"{host}: {one}" for host, each in facts.items() for one in each.doubts]
    found += [f"left out: {answer}" for answer in answers.values() if isinstance(answer, MusterError)]
    copier = next((host for host in answers), None)  # the first of the others, if it was started
    return [*found, *placement.risks(copier if isinstance(answers.get(copier or ""), FarFacts) else None, run_id)]
