"""The host program's answers: the table docs/reference/host-program.md (``MUSTER_REGENERATE=1`` writes it); its laws.

Each row is played on the pure function alone for 150 virtual seconds, in which lease and home stay as the row says.
"""

import itertools
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from signal import Signals

from hypothesis import given, settings
from hypothesis import strategies as st

from muster.backends.gce.host import rules as gce
from muster.backends.gke.pod.main import HOST, supervisor_rules
from muster.backends.host import state as host
from muster.backends.host.decide import decide
from muster.backends.host.state import AGENT, SUPERVISOR, Child, Lease, Looked, State
from muster.backends.slurm import batch, node
from muster.backends.ssh.host import rules as ssh
from muster.backends.vertex.host import rules as vertex

PAGE = Path(__file__).resolve().parents[4] / "docs/reference/host-program.md"
STEP = "step"
"""Slurm's batch program has one for each node."""
PLACES = {
    "Vertex AI, first host": (vertex(0, whole_job_goes=False), (AGENT, SUPERVISOR)),
    "Vertex AI, first host, Spot": (vertex(0, whole_job_goes=True), (AGENT, SUPERVISOR)),
    "Vertex AI, third host": (vertex(2, whole_job_goes=False), (AGENT,)),
    "GKE, host": (HOST, (AGENT,)),
    "GKE, supervisor": (supervisor_rules(reads_end=True, grace_s=60.0), (SUPERVISOR,)),
    "Slurm, first node": (node.rules(0), (AGENT, SUPERVISOR)),
    "Slurm, third node": (node.rules(2), (AGENT,)),
    "Slurm, batch program": (batch.RULES, (STEP,)),
    "SSH, first host": (ssh(0), (AGENT, SUPERVISOR)),
    "SSH, other host": (ssh(None), (AGENT,)),
    "Compute Engine, host": (gce("host"), (AGENT,)),
    "Compute Engine, supervisor": (gce(SUPERVISOR), (SUPERVISOR,)),
}
LEASES = {
    "free": Lease(kind="free"),
    "held": Lease(kind="held", left_s=8.0),
    "no answer": Lease(kind="unknown"),
    "out, holder silent": Lease(kind="held", left_s=-60.0),
    "taken from a silent holder": Lease(kind="vacated"),
}
SILENT = ("out, holder silent", "taken from a silent holder")
AXES = {
    "place": tuple(PLACES),
    "agent or step ends": (None, 0, 1, 2, 75, 76, 130, 137),
    "supervisor ends": (None, 0, 1, 2, 3, 6, 75, 130, 137),
    "after": (1, 45, 700),
    "lease": tuple(LEASES),
    "end in the home": (None, 0, 1, 75, 130, "unreadable"),
    "notice": (None, "the run goes", "this host goes", "not known"),
}


def fits(row):
    """Whether the place has the programs of which the row speaks, and sees the lease so; an end is read where the lease
    is free alone."""
    programs = PLACES[row["place"]][1]
    first, last = (programs[0] != SUPERVISOR, SUPERVISOR in programs)
    has = (first or row["agent or step ends"] is None) and (last or row["supervisor ends"] is None)
    sees = row["lease"] == "free" or (
        row["end in the home"] is None
        and row["place"] != "Slurm, batch program"
        and (row["lease"] not in SILENT or row["place"].startswith("Slurm"))
    )
    return has and sees


def covering():
    """Rows in which each pair of values that can be together is."""
    rows = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]
    rows = [row for row in rows if fits(row)]
    having = {}
    for index, row in enumerate(rows):
        for pair in itertools.combinations(row.items(), 2):
            having.setdefault(pair, []).append(index)
    rng, missing, chosen = Random(0), dict.fromkeys(having), []
    while missing:
        indices = having[next(iter(missing))]
        pairs_of = {
            index: set(itertools.combinations(rows[index].items(), 2)) & missing.keys()
            for index in rng.sample(indices, min(60, len(indices)))
        }
        best = max(pairs_of, key=lambda index: (len(pairs_of[index]), index))
        chosen.append(rows[best])
        for pair in pairs_of[best]:
            del missing[pair]
    order = {name: {value: index for index, value in enumerate(values)} for name, values in AXES.items()}
    return sorted(chosen, key=lambda row: [order[name][value] for name, value in row.items()])


class Play:
    """One host: answers each question of ``decide`` as the row says, and notes what is done, with the second."""

    def __init__(self, row):
        self.row, self.now, self.done, self.ended = row, 0.0, [], False
        self.rules, programs = PLACES[row["place"]]
        began_s = -float(row["after"])
        self.state = State(
            programs={name: Child(running=True, began_s=began_s, starts=1) for name in programs},
            was_held=True,
            looked=True,
        )

    def take(self, event):
        self.state, actions = decide(self.state, event, self.now, self.rules)
        for action in actions:
            self.carry_out(action)

    def note(self, text):
        self.done.append(f"{self.now:.0f} s {text}" if self.now else text)

    def carry_out(self, action):
        row = self.row
        match action:
            case host.Start(name=name):
                self.note(f"start {name}")
            case host.Send(name=name, number=number):
                self.note(f"{number.name} to {name}")
                self.take(host.ChildEnded(name=name, code=128 + number if number is Signals.SIGKILL else 143))
            case host.Look():
                self.take(Looked(lease=LEASES[row["lease"]], end=row["end in the home"]))
            case host.AskScope():
                scope = {"the run goes": "run", "this host goes": "host"}.get(row["notice"])
                self.take(host.ScopeKnown(scope=scope))
            case host.AskSave(reason=reason):
                self.note("ask the supervisor to save")
                held = self.state.supervises or row["lease"] == "held" or STEP in self.state.programs
                self.take(host.Saved(reason=reason, delivered=held))
            case host.Ship(name=name):
                self.note(f"upload what {name} left")
                self.take(host.Shipped(name=name))
            case host.RequeueRest():
                self.note("queue the rest of the run")
                self.take(host.Requeued(text="queued"))
            case host.AskTime():
                self.note("ask for how long the allocation lasts")
                self.take(host.LeaveAt(at_s=host.NEVER))
            case host.WithdrawEnd():
                self.note("withdraw the end from the home")
            case host.EndHere():
                self.note("kill the run's processes here")
            case host.Exit(outcome=outcome, code=code):
                self.ended = True
                self.note(f"leave with {code}: {outcome.value}")

    def answer(self):
        row = self.row
        if row["notice"] is not None:
            self.take(host.Noticed())
        first = PLACES[row["place"]][1][0]
        for name, code in ((first, row["agent or step ends"]), (SUPERVISOR, row["supervisor ends"])):
            if code is not None and self.state.child(name).running:
                self.take(host.ChildEnded(name=name, code=code))
        while self.now < 150 and not self.ended:
            self.take(host.Tick())
            self.take(host.Tick())  # the loop decides again after each answer
            self.now += 1.0
        return "; ".join(self.done) or "nothing"


def page():
    rows = [(row, Play(row).answer()) for row in covering()]
    lines = [
        "# What a host program does",
        "",
        "One pure function, `decide(state, event, now, rules)` in `src/muster/backends/host/decide.py`, decides for a "
        "host of Vertex AI, a pod of GKE, a machine of Compute Engine and a node of Slurm what becomes of its agent "
        "and of the run's supervisor, and for Slurm's batch program what becomes of the nodes' steps. This table is "
        "played from it: the programs of the place run, then those named end with these codes (of a signal: 128 and "
        "its number), so many seconds after they were started; lease and home stay as they are. It shows what is done "
        "within 150 s. Each pair of values is in a row.",
        "",
        "| " + " | ".join([*AXES, "what is done"]) + " |",
        "|" + "---|" * (len(AXES) + 1),
    ]
    for row, answer in rows:
        values = [
            f"{value} s" if name == "after" else "" if value is None else str(value) for name, value in row.items()
        ]
        lines.append("| " + " | ".join([*values, answer]) + " |")
    return "\n".join(lines) + "\n"


def test_the_page_is_what_decide_answers():
    text = page()
    if os.environ.get("MUSTER_REGENERATE"):
        PAGE.write_text(text)
    assert PAGE.read_text() == text


NAMES = (AGENT, SUPERVISOR, STEP)
EVENTS = st.one_of(
    st.just(host.Tick()),
    st.just(host.Noticed()),
    st.builds(host.ChildEnded, name=st.sampled_from(NAMES), code=st.sampled_from([0, 1, 2, 3, 75, 76, 130, 137])),
    st.builds(
        Looked,
        lease=st.sampled_from(list(LEASES.values())),
        end=st.sampled_from(AXES["end in the home"]),
        cut_off=st.booleans(),
    ),
    st.builds(host.Shipped, name=st.sampled_from(NAMES)),
    st.builds(host.LeaveAt, at_s=st.sampled_from([0.0, 1000.0, host.NEVER])),
    st.builds(host.ScopeKnown, scope=st.sampled_from(["run", "host", None])),
    st.builds(host.Saved, reason=st.sampled_from(["notice", "time"]), delivered=st.booleans()),
    st.builds(host.Requeued, text=st.just(""), again=st.booleans()),
)


@settings(max_examples=400, deadline=None)
@given(
    place=st.sampled_from(list(PLACES)),
    events=st.lists(st.tuples(EVENTS, st.sampled_from([0.0, 1.0, 40.0, 700.0])), max_size=40),
)
def test_laws(place, events):
    """No supervisor is started unless the lease was just seen to be free, or was taken from a silent holder, nor where
    none may be; a program that runs is not started again, and one with so many starts not more often; what is cut off
    starts nothing; nothing but 75 is withdrawn; after the exit there is no action."""
    rules, programs = PLACES[place]
    state, now, ended = State(programs={name: Child() for name in programs}), 0.0, False
    running, seen, starts = set(), None, Counter()
    for event, later_s in events:
        now += later_s
        if isinstance(event, host.ChildEnded):
            if event.name not in running:
                continue  # what does not run does not end
            running.discard(event.name)
        if isinstance(event, Looked):
            if event.lease.kind != "free":
                event = replace(event, end=None)
            event = replace(event, cut_off=event.cut_off and event.lease.kind == "held")
            seen = event
        state, actions = decide(state, event, now, rules)
        assert not (ended and actions)
        for action in actions:
            match action:
                case host.Start(name=name):
                    assert name not in running
                    assert name != SUPERVISOR or (
                        rules.rank is not None
                        and event is seen
                        and seen.lease.kind in ("free", "vacated")
                        and seen.end in (None, 75)
                    )
                    assert not state.cut_off
                    starts[name] += 1
                    assert rules.most_starts is None or starts[name] <= rules.most_starts
                    running.add(name)
                case host.WithdrawEnd():
                    assert rules.continues != "ends"
                    assert event is not seen or seen.end == 75
                case host.Exit():
                    ended = True
