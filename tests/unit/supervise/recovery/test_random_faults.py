"""Random sequences of everything that can happen, in virtual time: a run ends, once, and takes nothing with it."""

import re

from fakes.virtual_run import check_invariants, cluster, events_of, kinds, machine, spec
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.policy.builtin import SHIPPED
from muster.protocol.held_snapshots import newest_complete
from muster.protocol.to_supervisor import HostNotice
from muster.protocol.values import LastWords
from muster.simulate import fault_schedule as broken
from muster.simulate.stage_arithmetic import Stages
from muster.supervise.recovery.inputs import StopRequest
from muster.supervise.recovery.phases import Ended
from muster.supervise.replay.rebuild_state import rebuild_state

WORDS = {
    "own": LastWords(exception="ValueError", message="bad row 17"),
    "device": LastWords(exception="RuntimeError", message="CUDA error: uncorrectable ECC error encountered"),
    "nan": LastWords(exception="NotFinite", message="step 20: loss is nan", not_finite=True),
}
DEEDS = ["rank", "host", "silent", "return", "notice", "everybody", "stop", "supervisor", "gap", "midway", "agent"]
DEEDS += ["hang", "flap", *WORDS]
#: Who may end a run before it is done, and who cannot.
ASKED = {"stop", "notice", "everybody"}
FAULTS = st.lists(
    st.tuples(st.sampled_from(DEEDS), st.one_of(st.floats(0, 70), st.floats(9, 12)), st.integers(0, 4)), max_size=10
)


def replace(found, of, policy, apart_s=0.0):
    if not isinstance(found.machine.state.phase, Ended):
        found.replace_supervisor(machine(of, SHIPPED[policy], rebuild_state(events_of(found))), apart_s=apart_s)


def restart_agent(cluster, name):
    """A host's agent is killed and restarted: its own state is lost, live ranks reconnect to it."""
    host = cluster.hosts[name]
    if not host.up or not host.joined:
        return
    host.boots += 1
    host.exits = {}
    if set(host.ranks) <= host.dead:
        host.begin(0, [])
    cluster.join(name)


def do(found, of, policy, deed, index):
    names = list(found.hosts)
    if not names or isinstance(found.machine.state.phase, Ended):
        return
    name = names[index % len(names)]
    notice = HostNotice(notice="preemption", source="test", grace_s=30.0)

    def notify(*hosts):
        for host in hosts:
            found.receive_from(host, notice)

    def replace_later(lose):
        lose()
        found.after(index * 0.7 + 0.05, lambda: replace(found, of, policy, apart_s=index * 0.3))

    def flap():
        found.kill_host(name, silent=True)
        found.after(5.0, lambda: found.return_host(name))

    faults = {
        "rank": lambda: found.kill_rank(index),
        "host": lambda: found.kill_host(name),
        "silent": lambda: found.kill_host(name, silent=True),
        "return": lambda: found.return_host(name),
        "notice": lambda: notify(found.hosts[name]),
        "everybody": lambda: notify(*list(found.hosts.values())),
        "stop": lambda: found.give(StopRequest(source="SIGTERM", exit_code=75)),
        "supervisor": lambda: replace(found, of, policy),
        "gap": lambda: replace_later(lambda: found.lose_supervisor()),
        "midway": lambda: replace_later(lambda: setattr(found, "dies_at_send", True)),
        "agent": lambda: restart_agent(found, name),
        "hang": lambda: broken.hang_rank(found, index, detect_s=0.5),
        "flap": flap,
        **{word: lambda word=word: found.kill_rank(index, code=1, last=WORDS[word]) for word in WORDS},
    }
    faults[deed]()


@settings(max_examples=400, deadline=None)
@given(
    faults=FAULTS,
    hosts=st.integers(1, 4),
    spares=st.integers(0, 1),
    policy=st.sampled_from(["default", "conservative", "none"]),
    keep_hosts_after_failure_s=st.sampled_from([0.0, 20.0]),
    every=st.sampled_from([1, 7]),
    end_ranks_s=st.sampled_from([0.03, 1.5]),
    steps=st.sampled_from([20, 200]),
)
def test_a_run_ends_once_and_takes_nothing_with_it(
    faults, hosts, spares, policy, keep_hosts_after_failure_s, every, end_ranks_s, steps
):
    of = spec(
        hosts=hosts,
        spare_hosts=spares,
        min_hosts=1,
        recovery={"keep_hosts_after_failure_s": keep_hosts_after_failure_s, "on_nonfinite_step": "skip"},
    )
    found = cluster(of, steps=steps, policy=SHIPPED[policy], stages=Stages(end_ranks_s=end_ranks_s))
    found.snapshot_every_steps = every
    for deed, at, index in faults:
        found.at(at, lambda deed=deed, index=index: do(found, of, policy, deed, index))
    end = found.run(until_s=30_000)
    assert end is not None, found.machine.state
    check_invariants(found)
    deeds = {deed for deed, _, _ in faults}
    evidence = [log.detail["evidence"] for _, log in kinds(found, "incident.detected")]
    if not ASKED & deeds:
        assert not re.search("left after|left, but", end.reason), "nobody asked for that"
    if deeds <= {"supervisor", "gap"}:
        assert end.outcome == "succeeded" and not evidence and len(kinds(found, "attempt.started")) == 1
    assert not [text for text in evidence if "no step within" in text], "every fault has somebody who tells of it"
    state = found.machine.state
    stops = sum(deed == "stop" for deed, _, _ in faults)
    if end.outcome == "succeeded" or "saved and left" in end.reason or stops > 1 or "was not written" in end.reason:
        return
    held = newest_complete(
        [
            item
            for host in found.hosts.values()
            if host.up and host.joined and host.name in state.hosts and state.hosts[host.name].connected
            for item in host.list_snapshots()
            if item not in state.saves.rejected
        ]
    )
    assert held is None or held.step <= state.saves.committed_step, (
        end,
        held,
        [log.kind for _, log in found.log[-20:]],
    )
    assert len(kinds(found, "run.finished")) == 1
