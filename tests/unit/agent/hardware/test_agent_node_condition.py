"""The node's condition, where a host may not read its kernel log: what is judged, and what is only noted."""

from datetime import UTC, datetime

import pytest
from test_agent_kernel_log import Host

from muster.agent.hardware.kernel_lines import NODE, WATCHER
from muster.agent.values.events import KernelLogLost, ProgramEnded, ProgramLine
from muster.protocol.codec import encode
from muster.protocol.pipes import NodeCondition
from muster.protocol.to_supervisor import StartFailed


def host_of(**more):
    host = Host(environ={"MUSTER_NODE": "gke-1"}, **more)
    host.refused["dmesg"] = StartFailed(reason="No such file or directory")
    host.give(KernelLogLost("/dev/kmsg: Operation not permitted"))
    (program,) = host.started(NODE)
    assert program.argv == (WATCHER, "gke-1")
    assert "kernel log not readable" in host.notes[0] and "of node gke-1" in host.notes[0]
    return host


def stamp(host, ago_s):
    at_s = host.now_s + 1e9 - ago_s
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def condition(host, *numbers, ago_s=-5.0):
    inside = ",".join(f'"{number}":true' for number in numbers)
    return NodeCondition(status="True", reason=f"{{{inside}}}", since=stamp(host, ago_s))


def says(host, *words):
    for word in words:
        host.give(ProgramLine(NODE, word if isinstance(word, bytes) else encode(word)))
    return host


def test_a_number_that_appears_is_a_fault_of_the_host():
    host = host_of()
    says(host, NodeCondition(), condition(host, 48))
    (fault,) = host.faults
    assert (fault.verdict, fault.resettable) == ("reset", ()), "which GPU it was nobody says"
    assert "Xid 48" in fault.evidence and host.standing == fault
    assert host.since(0, host.now_s - 60)[0].verdict.value == "reset", "in a hang's evidence, too"


def test_what_stood_there_before_is_not_judged_and_a_graver_one_beside_it_is():
    host = host_of()
    says(host, condition(host, 48, ago_s=10_000), condition(host, 48, 79, ago_s=10_000))
    (fault,) = host.faults
    assert fault.verdict == "replace" and "Xid 79" in fault.evidence
    assert any("from before this agent, not judged" in note for note in host.notes)


def test_after_another_boot_the_same_number_is_new():
    host = host_of()
    says(host, condition(host, 48), NodeCondition(status="False"), condition(host, 48))
    assert host.state.hardware.node_xids == {48} and len(host.faults) >= 1


def test_a_programs_own_error_costs_no_host():
    host = host_of()
    says(host, condition(host, 31))
    assert not host.faults and "the program's own" in host.notes[1]


def test_a_refusal_and_a_torn_reason_are_said_and_nobody_is_called_faulty():
    host, refused = host_of(), NodeCondition(problem='nodes "gke-1" is forbidden')
    says(host, refused, NodeCondition(status="True", reason="torn {"), b"no message", condition(host, 79))
    assert "not seen: nodes" in host.notes[1] and "needs get on nodes" in host.notes[1]
    assert "cannot be read" in host.notes[2] and "a line of" in host.notes[3] and len(host.faults) == 1


@pytest.mark.parametrize("event", [ProgramEnded(NODE, 1), ProgramEnded(NODE, None)])
def test_a_watcher_that_ends_is_said_once(event):
    host = host_of().give(event)
    assert len(host.notes) == 2 and "ended, so an Xid of a GPU is not seen" in host.notes[1]


def test_of_gpus_that_others_use_too_no_fault_is_ours():
    host = host_of(own=frozenset({"0000:19:00.0"}))
    says(host, condition(host, 48))
    assert not host.faults and "a GPU that is not named, of which this run uses some" in host.notes[1]
