"""Trials of the random driver: a seed makes a run and what is done to it. Pure: the same seed is the same trial.

A trial is one run on this machine and one to five strikes, each at a step that is drawn: signals and limits to any of
its processes, sockets shut, a disk that is full or away, damage to what is read again, verbs typed at one moment.
``blows`` applies them, ``striking`` drives the run and ``verdict`` judges its end.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass

STEPS = 56
#: The last step of a strike: what it breaks is still needed after it.
LAST = 40
SAVE_EVERY = 8

#: Every program of a run. ``rank`` and ``standby`` are forks of the fork server.
PROCESSES = ("supervisor", "keeper", "agent", "fork_server", "replicator", "standby", "rank")

#: Name -> where a run keeps it: relative to the run's folder; to the host's folder in memory where it begins with @; to
#: the folder of prepared data where it begins with &.
FILES = {
    "host log": "events/{host}.*.jsonl",
    "supervisor log": "events/supervisor.*.jsonl",
    "client log": "events/client.*.jsonl",
    "lease": "lease.json",
    "fence": "checkpoints/fence.json",
    "older fence": "checkpoints/fence.previous.json",
    "marker": "checkpoints/commits/*.json",
    "index": "checkpoints/step-*/index.json",
    "shard": "checkpoints/step-*/*.shard",
    "own ring": "@own.*.ring",
    "peer ring": "@peer.*.ring",
    "memory record": "memory/{host}.json",
    "replicator record": "@replicator.json",
    "fork server's pid": "@forkserver.pid",
    "job": "job.json",
    "resolved run file": "resolved.json",
    "run file": "run.yaml",
    "run's name": "run_id",
    "layout's version": "format",
    "token": "token",
    "data": "data.json",
    "attention proof": "attention_proof.json",
    "prepared data": "&*/train/*.npy",
    "prepared data's record": "&*/meta.json",
}
LOGS = ("host log", "supervisor log", "client log")

#: Files that say what the run is and of which there is one copy: no program can tell their right contents. A person
#: puts them back a while later, as a trial does after some seconds.
PUT_BACK = {
    "token": "a secret has no second copy: who reads it wrong cannot speak to the others until it is put back",
    "run's name": "every process and folder of the run is found by it",
    "layout's version": "it says how everything else is to be read",
}

#: Verbs that are typed at one moment.
VERBS = {
    "looks": ("status", "events", "checkpoints", "report"),
    "recover twice": ("recover", "recover"),
    "stop and recover": ("stop", "recover"),
    "stop twice": ("stop", "stop"),
    "two submits": ("submit", "submit"),
    "stop and submit": ("stop", "submit"),
}

#: Kind -> how often it is drawn.
KINDS = {
    "kill": 5, "pause": 3, "term": 2, "memory limit": 1, "file limit": 1, "socket shut": 2, "disk full": 1,
    "disk away": 1, "flip": 3, "cut": 2, "swap": 2, "verbs": 2,
}  # fmt: skip
OF_A_PROCESS = ("kill", "pause", "term", "memory limit", "file limit", "socket shut")
OF_A_FILE = ("flip", "cut", "swap")
OF_THE_DISK = ("disk full", "disk away")
#: What a disk holds: the checkpoints alone, or everything that the run keeps on disk.
DISKS = ("checkpoints", "run's folder")


@dataclass(frozen=True)
class Strike:
    """One fault."""

    step: int
    """Applied once this step has been taken."""
    kind: str
    target: str
    """A process, a file, a disk or a set of verbs."""
    host: int
    amount: float
    """0 to 1: which file of several, which byte; of a pause or a disk the seconds, of a limit what is left."""

    @property
    def name(self) -> str:
        return f"{self.kind}: {self.target}"


@dataclass(frozen=True)
class Trial:
    """A run and what is done to it."""

    seed: int
    hosts: int
    spares: int
    replicas: int
    exact: bool
    strikes: tuple[Strike, ...]
    stages: int = 1
    """Of a pipeline, on each host or replica."""

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    def changes(self) -> dict[str, object]:
        """Keys of the run file."""
        shrinks = self.exact  # at another number of ranks only exact sums give the same bits
        return {
            "training.steps": STEPS,
            "training.sequence_length": 32,
            "training.global_batch_size": 6,
            "model.config.hidden_size": 32,
            "training.exact": self.exact,
            "training.state_hash_every_steps": 1,
            "checkpoint.every_steps": SAVE_EVERY,
            "resources.hosts": self.hosts,
            "resources.spare_hosts": self.spares,
            "resources.min_hosts": 1 if shrinks else self.hosts,
            "resources.ranks_per_host": (1 if self.hosts > 1 else 2) * self.stages,
            "parallelism.dp_replicate": self.replicas,
            "parallelism.pp": self.stages,
        }

    def ranks(self) -> int:
        return max(self.hosts, 2) * self.stages

    def course(self) -> str:
        """What the final weights depend on."""
        staged = f"-stages{self.stages}" if self.stages > 1 else ""
        return f"ranks{self.ranks()}-replicas{self.replicas}-exact{int(self.exact)}{staged}"


#: Seeds from here on are runs with pipeline stages; those below stay what they were.
STAGED_FROM = 1000
#: From here on a rendezvous store is a target as well, and no run has stages.
STORES_FROM = 2000
#: From here on the machine loses its power instead, once or twice.
POWER_FROM = 3000


def draw(seed: int) -> Trial:
    """The trial of ``seed``."""
    dice = random.Random(f"strikes {seed}")
    processes = (*PROCESSES, "store") if seed >= STORES_FROM else PROCESSES
    hosts = dice.choice((1, 1, 1, 1, 2, 2, 3))
    spares = dice.choice((0, 0, 1)) if hosts == 2 else 0
    replicas = dice.choice((1, 1, 2)) if hosts == 2 else 1
    exact = replicas > 1 or dice.random() < 0.5
    steps = sorted(dice.randrange(2, LAST) for _ in range(dice.choice((1, 1, 2, 2, 3, 4, 5))))
    strikes = tuple(_strike(dice, step, hosts + spares, processes) for step in steps)
    if seed >= POWER_FROM:  # the target says which files cannot be complete: ``verdict.judge``
        strikes = tuple(Strike(step, "power", "host log", 0, dice.random()) for step in steps[:2])
    return Trial(seed, hosts, spares, replicas, exact, strikes, stages=2 if STAGED_FROM <= seed < STORES_FROM else 1)


def _strike(dice: random.Random, step: int, hosts: int, processes: Sequence[str]) -> Strike:
    kind = dice.choices(list(KINDS), list(KINDS.values()))[0]
    target, amount = "", dice.random()
    if kind in OF_A_PROCESS:
        target = dice.choice(processes)
    elif kind in OF_A_FILE:
        target = dice.choice(list(FILES))
    elif kind == "verbs":
        target = dice.choice(list(VERBS))
    if kind == "pause" or kind in OF_THE_DISK:
        amount = round(dice.uniform(0.3, 4.0), 2)
    if kind in OF_THE_DISK:
        target = DISKS[round(amount * 100) % 2]
    return Strike(step, kind, target, dice.randrange(hosts), amount)


def damaged(data: bytes, kind: str, amount: float) -> bytes:
    """``data`` with one bit flipped, its end cut off, or two neighbouring parts exchanged, where ``amount`` says.

    The parts are lines where it is text of several lines, else bytes. What is empty stays empty; what is not always
    changes, but for a swap of equal parts.
    """
    if not data:
        return data
    at = min(int(amount * len(data)), len(data) - 1)
    if kind == "flip":
        return data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]
    if kind == "cut":
        return data[:at]
    assert kind == "swap", kind
    lines = data.splitlines(keepends=True)
    if len(lines) > 1 and data.isascii():
        first = min(int(amount * len(lines)), len(lines) - 2)
        lines[first : first + 2] = lines[first + 1], lines[first]
        return b"".join(lines)
    width = max(1, min(16, len(data) // 4))
    at = min(at, max(0, len(data) - 2 * width))
    return data[:at] + data[at + width : at + 2 * width] + data[at : at + width] + data[at + 2 * width :]


#: (kind, target) -> the state in which it may end the run, and why. The run is then recovered and must come to its
#: right end. A run whose supervisor was killed says nothing: that is no state.
MAY_END = {
    ("term", "supervisor"): ("preempted", "SIGTERM is the notice of a machine that goes away: save, and end"),
    ("term", "keeper"): ("preempted", "the same, of a host, with none to replace it"),
    ("term", "agent"): ("preempted", "the same: an agent passes on what its host is told"),
    ("verbs", "stop and recover"): ("stopped", "stop was typed"),
    ("power", "host log"): ("failed", "nothing of it lives, and nobody wrote how it ended"),
    ("verbs", "stop twice"): ("stopped", "stop was typed"),
    ("verbs", "stop and submit"): ("stopped", "stop was typed"),
}

#: (kind, target) -> what a run says where it may wait for somebody's help, and why. What it says is then done.
MAY_WAIT = {
    ("file limit", "supervisor"): (
        "and this process may not raise it",
        "a lowered hard limit is raised with CAP_SYS_RESOURCE alone: none is left to start a lost host with",
    ),
}

#: What a run says that is done while its disk takes nothing. It has failed to keep its result, which memory holds;
#: once the disk is back, ``recover`` writes it.
NOT_WRITTEN = "only in memory and was not written"


def may_end(trial: Trial, state: str, reason: str) -> bool:
    """Whether the trial's run may be found in this state other than success, for this reason."""
    if state == "failed" and NOT_WRITTEN in reason:
        return any(strike.kind in OF_THE_DISK for strike in trial.strikes)
    ends = [MAY_END.get((strike.kind, strike.target)) for strike in trial.strikes]
    return state in {end[0] for end in ends if end is not None}


def may_wait(trial: Trial, said: str) -> bool:
    """Whether a run that said this may wait for somebody to type what it names."""
    words = [MAY_WAIT.get((strike.kind, strike.target)) for strike in trial.strikes]
    return any(word is not None and word[0] in said for word in words)
