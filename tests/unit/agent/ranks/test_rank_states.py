"""The rank's state machine against its table: random orders of all that can happen to one rank.

The table is written here a second time, from the design, and shares no code with the agent.
"""

import random

import pytest
from fakes.host import FORK_SERVER, VirtualHost, spec_of

from muster.agent.values.events import (
    ForkServerMessage,
    PeerLost,
    ProcessGone,
    RankExiting,
    RankThreadsEnded,
    SupervisorMessage,
)
from muster.core.layout import Layout
from muster.protocol.fork_server import ChildExited
from muster.protocol.rank_agent import Paused
from muster.protocol.ranks import RankContext
from muster.protocol.to_agent import EndAttempt, StartAttempt
from muster.protocol.to_supervisor import RankExit, RanksEnded
from muster.protocol.values import LastWords


def context(rank, attempt=1, kept_rank=None, **more):
    return RankContext(
        run_id="run", run_dir="run", attempt=attempt, host="host-0", rank=rank, local_rank=rank, world_size=2,
        local_world_size=2, layout=Layout(dp_shard=2), master_addr="127.0.0.1", master_port=1, kept_rank=kept_rank,
        **more,
    )  # fmt: skip


class Table:
    """One rank, 0 of attempt 1; ``out``: what its supervisor and its log get."""

    def __init__(self):
        self.state, self.killed, self.code, self.guess = "RUNNING", False, None, False
        self.words = self.paused = self.ending = None
        self.peer, self.parent_lives, self.exiting_now, self.current, self.out = True, True, False, True, []

    @property
    def living(self):
        return self.state in ("RUNNING", "PAUSING", "PAUSED", "EXITING")

    @property
    def unended(self):
        return self.state in ("RUNNING", "PAUSING", "PAUSED")

    def drained(self):
        blocks = self.state not in ("PAUSED", "MEMORY_ONLY", "REPORTED") and self.paused is None
        if self.ending is not None and not blocks:
            self.out.append(("ended", {0: self.paused} if self.state == "PAUSED" else {}))
            self.ending = None

    def report(self):
        if self.words is not None and (self.killed or self.guess):
            self.code, self.killed = 1 if self.words.left is None else self.words.left, False
        self.out.append(("log", self.code))
        if not self.killed:
            self.out.append(("exit", self.code, self.words))

    def end(self):
        if self.state not in ("EXITING", "MEMORY_ONLY"):
            self.report()
        self.state = "REPORTED"
        self.drained()

    def assume(self):
        if self.code is None:
            self.code, self.guess = -9, True

    def kill(self):
        if self.unended:
            self.state = "RUNNING"
        self.paused = None
        self.killed = self.killed or not self.exiting_now

    def do(self, name, value=None):  # noqa: C901 (a table)
        match name:
            case "words" if self.living or self.state in ("GONE", "REAPED", "MEMORY_ONLY"):
                self.words = value
            case "signal" if self.state == "RUNNING" and not self.killed and value is not None:
                self.state, self.code = "EXITING", -value
                self.report()
            case "threads":
                if self.state == "EXITING":
                    self.state = "MEMORY_ONLY"
                elif self.unended and self.killed:
                    self.assume()
                    self.report()
                    self.state = "MEMORY_ONLY"
                self.drained()
            case "gone" if self.unended:
                if self.killed or not self.parent_lives:
                    self.assume()
                    self.end()
                else:
                    self.state = "GONE"
            case "gone" if self.state != "REPORTED":
                self.end()
            case "code" if self.unended:
                self.state, self.code = "REAPED", value
            case "code" if self.state == "GONE":
                self.code = value
                self.end()
            case "fork server lost":
                self.parent_lives = False
                if self.state == "GONE":
                    self.assume()
                    self.end()
            case "end" | "keep":
                self.ending = 1
                may = self.unended and self.peer and not self.killed
                if self.living and name == "keep" and may:
                    self.state, self.paused = "PAUSING", None
                elif self.living:
                    self.kill()
                self.drained()
            case "start":
                self.ending, self.current = None, False
                if self.living:
                    self.kill()
            case "paused" if self.state == "PAUSING":
                self.state, self.paused = "PAUSED", 5
                self.drained()
            case "overdue" if self.state == "PAUSING":
                self.kill()
            case "peer lost":
                self.peer = False


def agent():
    """The same rank in an agent whose trainer is Muster's own, on the CPU."""
    host = VirtualHost(spec=spec_of()).supervised().with_fork_server()
    host.state.spec = host.state.spec.model_copy(update={"command": None})
    host.rank(99, 0, progress_s=1e9, seen_s=1e9)
    return host


def happens(host, name, value=None):
    rank = host.state.ranks.table.get(99)
    match name:
        case "words" | "paused":
            message = value if name == "words" else Paused(attempt=1, step=5)
            if rank is not None and rank.peer is not None:
                host.says(rank, message)
        case "signal":
            host.give(RankExiting(99, value))
        case "threads":
            host.give(RankThreadsEnded(99, True))
        case "gone":
            host.give(ProcessGone(99))
        case "code":
            host.give(ForkServerMessage(ChildExited(pid=99, code=value)))
        case "fork server lost":
            if host.state.fork_server.peer is not None:
                host.give(PeerLost(FORK_SERVER))
        case "end":
            host.give(SupervisorMessage(EndAttempt(attempt=1, why="x")))
        case "keep":
            host.give(SupervisorMessage(EndAttempt(attempt=1, why="x", keep=(0,), pause_s=100.0)))
        case "start":
            host.give(SupervisorMessage(StartAttempt(attempt=2, contexts=())))
        case "overdue":
            host.state.ranks.pause_by_s = 0.0
            host.tick()
        case "peer lost":
            if rank is not None and rank.peer is not None:
                host.give(PeerLost(rank.peer))


def result_of(host):
    """In the order of the actions."""
    out = []
    for entry in host.trace:
        match entry:
            case ("rank.exited", detail):
                out.append(("log", detail["exit_code"]))
            case RankExit():
                out.append(("exit", entry.code, entry.last))
            case RanksEnded():
                out.append(("ended", dict(entry.kept)))
    return out


def traced(host):
    """What is logged and what is sent, in one list."""
    host.trace = []

    class Both(list):
        def append(self, one):
            super().append(one)
            host.trace.append(one[:2] if isinstance(one, tuple) else one)

    host.logged, host.sent = Both(), Both()
    return host


def play(seed):
    """None: the agent did what the table does."""
    rng, host, table, story = random.Random(seed), traced(agent()), Table(), []
    once, signal_of = set(), None
    for _ in range(rng.randint(2, 10)):
        names = ["end", "keep", "fork server lost", "overdue", "peer lost"]
        names += [] if once & {"gone", "code"} or not table.peer else ["paused"]
        names += [] if "start" in once else ["start"]
        if "gone" not in once:
            names += ["begins", "signal", "gone", *(["words"] if table.peer else [])]
            names += ["threads"] * 2 if table.exiting_now and "threads" not in once else []
        names += ["code"] * 2 if "code" not in once and table.parent_lives and table.exiting_now else []
        name, value = rng.choice(names), None
        if name in ("begins", "signal", "gone"):
            table.exiting_now = True
            host.exiting.add(99)
        if name == "begins":
            continue
        once.add(name)
        if name == "words":
            value = LastWords(left=rng.choice([None, 75]), exception="X")
        elif name == "signal":
            value = signal_of = rng.choice([None, 9, 11])
        elif name == "code":
            value = rng.choice([-9, 0, 1]) if signal_of is None else -signal_of
        story.append((name, value))
        table.do(name, value)
        happens(host, name, value)
        rank = host.state.ranks.table.get(99)
        state = "REPORTED" if rank is None else rank.state.name
        if result_of(host) != table.out or state != table.state:
            return story, result_of(host), table.out, state, table.state
        if table.out and not table.current:
            assert host.state.ranks.exits == {}, "of the current attempt alone"
    said = [kind for kind, *_ in table.out]
    assert said.count("log") <= 1 and said.count("exit") <= 1
    return None


@pytest.mark.parametrize("part", range(4))
def test_any_order_of_events_gives_what_the_table_says(part):
    differences = [found for seed in range(part * 1500, (part + 1) * 1500) if (found := play(seed)) is not None]
    assert not differences, min(differences, key=lambda found: len(found[0]))
