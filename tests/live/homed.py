"""A run whose processes share nothing but a bucket: every pod is a folder of its own, and what dies takes it along.

The bucket is the played one, unkind as the real one is. A pod's processes are killed by real signals; a lost pod's
folder is deleted, as an emptyDir is.
"""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from chaos import Judged
from cluster import RUN_ID, checkpoint_hash, kill_tree

from muster.core import event_log
from muster.core.event_log import EventReader
from muster.core.events import Event
from muster.protocol.lease import read_lease
from muster.storage.home import HOME_FILE, open_home
from muster.storage.memory_dir import MemoryDir
from muster.transport.client import ask_supervisor
from muster.transport.secure_session import read_token

JOB = "job-1"
SUPERVISE = (
    "import sys; from pathlib import Path; from muster.supervise.process.supervisor import Supervisor; "
    "sys.exit(Supervisor(Path(sys.argv[1]), job=sys.argv[2]).serve())"
)


@dataclass
class Pod:
    """One folder, and what was seen in the event files that it writes itself."""

    name: str
    folder: Path
    seen: list[tuple[str, Event]] = field(default_factory=list)
    """(file, event)."""

    def __post_init__(self) -> None:
        self.reader = EventReader(self.folder / "events")

    def look(self) -> list[tuple[str, Event]]:
        """What is new."""
        own = "supervisor." if self.name.startswith("supervisor") else f"{self.name}."
        new = [item for item in self.reader.read() if item[0].startswith(own)]
        self.seen += new
        return new


GAP = re.compile(r"I1: attempt (\d+): steps around \d+ are missing or doubled")
#: What ranks had sent and a killed agent had not read: the agent is back within these, on a busy machine too.
BACK_WITHIN_NS = 10_000_000_000


class KilledRun(Judged):
    """Agents are killed with -9: the steps that ranks had told them at that moment, and no others, may be missing."""

    def broken(self, reference):
        return [problem for problem in super().broken(reference) if not self.died_with_an_agent(problem)]

    def died_with_an_agent(self, problem):
        match = GAP.fullmatch(problem)
        if match is None:
            return False
        steps = sorted((e for e in self.events("step") if e.attempt == int(match[1])), key=lambda e: e.step)
        back = [event.wall_ns for event in self.events("agent.started")]
        return all(
            after.step > before.step
            and (
                after.step == before.step + 1
                or any(before.wall_ns <= at_ns <= before.wall_ns + BACK_WITHIN_NS for at_ns in back)
            )
            for before, after in itertools.pairwise(steps)
        )


class HomedRun(KilledRun):
    """``uri``: the run's home. ``dir`` is the folder of somebody who follows the run; no process of it knows that."""

    def __init__(self, directory, spec, uri):
        spec = spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update={"dir": f"{uri}/checkpoints"})})
        super().__init__(directory, spec)
        self.uri, self.pods, self._numbers = uri, {}, itertools.count()
        self.lost: list[tuple[Pod, int]] = []
        """(pod, wall clock of its end) of pods whose folder is gone."""

    def __enter__(self):
        super().__enter__()
        (self.dir / "run_id").write_text(RUN_ID)
        (self.dir / HOME_FILE).write_text(self.uri + "\n")
        return self

    def __exit__(self, *exception):
        if exception[0] is None:
            self.home.mirror(self.dir)
        super().__exit__(*exception)
        for pod in self.pods.values():
            for folder in MemoryDir.of_run(pod.folder).values():
                shutil.rmtree(folder.folder, ignore_errors=True)

    @property
    def home(self):
        return open_home(self.dir)

    # ------------------------------------------------------------ pods

    def pod(self, task) -> Pod:
        """Of a host or the supervisor; a new one where there is none."""
        if task not in self.pods:
            name = f"{task}-{next(self._numbers)}"
            folder = self.dir / "pods" / name
            (folder / "logs").mkdir(parents=True)
            for each in ("resolved.json", "job.json", "run_id", HOME_FILE):
                shutil.copy(self.dir / each, folder / each)
            (folder / "submission").write_text("1")
            self.pods[task] = Pod(name, folder)
        return self.pods[task]

    def environ(self, pod):
        return {**os.environ, "MUSTER_TOKEN_FILE": str(self.dir / "token"), "MUSTER_POD": pod.name}

    def start_supervisor(self):
        pod = self.pod("supervisor")
        with open(pod.folder / "logs" / "supervisor.log", "a") as log:
            self.supervisor = subprocess.Popen(
                [sys.executable, "-c", SUPERVISE, str(pod.folder), JOB],
                stdout=log, stderr=log, start_new_session=True, env=self.environ(pod),
            )  # fmt: skip

    def start_agent(self, name):
        pod = self.pod(name)
        with open(pod.folder / "logs" / f"agent-{name}.log", "a") as log:
            self.agents[name] = subprocess.Popen(
                [
                    sys.executable, "-m", "muster.agent.watchdog", "--run-dir", str(pod.folder), "--run-id", RUN_ID,
                    "--host", name, "--hosts-here", str(self.spec.resources.hosts), "--no-metadata-server",
                ],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True, env=self.environ(pod),
            )  # fmt: skip

    # ------------------------------------------------------------ looking

    def events(self, kind=None):
        """Of the pods' own files: what happened, wherever it has got to."""
        new = [item for pod in self.pods.values() for item in pod.look()]
        self._events += [(event.wall_ns, name, event.seq, event) for name, event in new]
        if new:
            self._events.sort(key=lambda item: item[:3])
        return [event for *_, event in self._events if kind is None or event.kind == kind]

    def in_the_home(self, into: Path):
        """(file, line number) -> event of what the home holds now."""
        into.mkdir(parents=True, exist_ok=True)
        self.home.mirror(into)
        return {(name, event.seq): event for name, event in event_log.read(into / "events")}

    def host_pids(self, name):
        self_dir, self.dir = self.dir, self.pods[name].folder
        try:
            return super().host_pids(name)
        finally:
            self.dir = self_dir

    def story(self):
        logs = [
            f"--- {path.parent.parent.name}/{path.name}\n{path.read_text()[-1500:]}"
            for path in sorted(self.dir.glob("pods/*/logs/*.log"))
        ]
        return "\n".join([super().story(), *logs])

    def tell(self, message):
        """As ``muster`` does in the supervisor's pod."""
        address = read_lease((self.pods["supervisor"].folder / "lease.json").read_bytes(), me="the test").address
        return ask_supervisor(address, read_token(str(self.dir / "token")), message, timeout_s=20)

    def broken(self, reference):
        """Steps whose events a lost pod took along are missing in the home alone: what the pods said shows them."""
        seen = {event.step for event in self.events("step")}
        gap = re.compile(r"I1: attempt \d+ begins at step (\d+), (\d+) was the last before")
        return [
            problem
            for problem in super().broken(reference)
            if not (self.lost and (match := gap.fullmatch(problem)))
            or not seen.issuperset(range(int(match[2]) + 1, int(match[1])))
        ]

    def final_hash(self):
        return checkpoint_hash(f"{self.uri}/checkpoints")

    # ------------------------------------------------------------ faults

    def kill_supervisor(self):
        os.kill(self.supervisor.pid, signal.SIGKILL)
        self.supervisor.wait()

    def lose(self, task):
        """The pod and its folder are gone."""
        pod = self.pods[task]
        if task == "supervisor":
            self.kill_supervisor()
        else:
            self.signal_host(task)
            kill_tree(self.agents[task].pid)
        at_ns = time.time_ns()
        self.events()
        del self.pods[task]
        self.lost.append((pod, at_ns))
        for memory in MemoryDir.of_run(pod.folder).values():
            shutil.rmtree(memory.folder, ignore_errors=True)
        shutil.rmtree(pod.folder)

    def replace_ended_pods(self):
        """As a Job does: an agent that dies three times in a row ends its pod."""
        for name in [name for name, agent in self.agents.items() if agent.poll() not in (None, 0)]:
            self.lose(name)
            self.start_agent(name)

    # ------------------------------------------------------------ what must hold

    def unlogged_attempts(self, number):
        """Attempts that hosts were told to start although the home does not hold the decision."""
        acted = {event.attempt for event in self.events("rank.started")}
        held = self.in_the_home(self.dir / "looks" / str(number))
        started = {event.attempt for event in held.values() if event.kind == "attempt.started"}
        return sorted(acted - started)

    def missing(self, allowed_s):
        """Events that were seen and that the home lacks: of a killed process none may be, of a lost pod those of its
        last ``allowed_s``. Returns (what is missing and may not be, the oldest age of what is missing and may be)."""
        held = self.in_the_home(self.dir)
        wrong, oldest_s = [], 0.0
        ends = {id(pod): at_ns for pod, at_ns in self.lost}
        for pod in [*self.pods.values(), *(pod for pod, _ in self.lost)]:
            for name, event in pod.seen:
                if (name, event.seq) in held:
                    if held[name, event.seq] != event:
                        wrong.append(f"{name}:{event.seq} differs")
                    continue
                age_s = (ends.get(id(pod), 0) - event.wall_ns) / 1e9
                if id(pod) in ends and age_s <= allowed_s:
                    oldest_s = max(oldest_s, age_s)
                else:
                    wrong.append(
                        f"{name}:{event.seq} {event.kind} of {json.dumps(dict(event.detail))[:80]} ({age_s:.1f} s)"
                    )
        return wrong, oldest_s
