"""What a pod reads of its own node where it may not follow the kernel log: the played API server's answers."""

import subprocess
import sys

import pytest
from fakes.kubernetes import FakeKubernetes, in_memory

from muster.backends.gke.pod import node_watcher
from muster.core.errors import AccessError
from muster.health.hardware import node_condition
from muster.protocol.codec import reader_of
from muster.protocol.pipes import NODE_CONDITIONS, NodeCondition

NODE = "api/v1/nodes/gke-1"


def node(*conditions):
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "gke-1"}, "status": {"conditions": [*conditions]}}


def row(reason='{"48":true}', status="True"):
    return {
        "type": "XidCriticalError", "status": status, "reason": reason, "lastTransitionTime": "2026-11-24T04:00:00Z",
        "message": "6e43a052-e544-467b-a972-63d7cd2ce80a",
    }  # fmt: skip


@pytest.fixture
def server():
    found = FakeKubernetes()
    found.objects[NODE] = node({"type": "Ready", "status": "True"})
    return found


def told(server, *changes):
    """What is told where each change happens between two looks."""
    found, rest = [], iter(changes)
    cluster = in_memory(server)

    def pause():
        change = next(rest, None)
        if change is not None:
            change()
        return change is not None

    node_watcher.watch(lambda: node_watcher.look("gke-1", lambda: cluster), found.append, pause)
    return found


def test_the_names_agree():
    assert node_watcher.CONDITION == node_condition.CONDITION


def test_each_change_is_told_once(server):
    def says(*conditions):
        return lambda: server.objects.update({NODE: node(*conditions)})

    found = told(server, says(row()), says(row()), says(row('{"48":true,"79":true}')), says())
    since = "2026-11-24T04:00:00Z"
    assert found == [
        NodeCondition(),
        NodeCondition(status="True", reason='{"48":true}', since=since),
        NodeCondition(status="True", reason='{"48":true,"79":true}', since=since),
        NodeCondition(),
    ]
    assert {path for method, path in server.log if method != "GET"} == set()


def test_a_server_in_trouble_is_told_once_and_asked_again(server):
    server.objects.pop(NODE)
    found = told(server, list, list, list, lambda: server.objects.update({NODE: node(row())}))
    assert [one.problem for one in found] == ["the API server has no node gke-1", ""] and found[1].status == "True"


def test_an_account_that_may_not_read_nodes_is_told_in_the_servers_words():
    def refuse():
        raise AccessError('GET https://10.0.0.1/Node/gke-1: nodes "gke-1" is forbidden: User "x" cannot get resource')

    found = node_watcher.look("gke-1", refuse)
    assert "cannot get resource" in found.problem and found.status == ""


def test_the_program_outside_a_pod_says_so_and_ends_with_its_standard_input():
    child = subprocess.Popen(
        [sys.executable, "-m", "muster.backends.gke.pod.node_watcher", "gke-1", "--every-s", "0.05"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert "no service account" in reader_of(NODE_CONDITIONS)(child.stdout.readline().encode()).problem
    rest, _ = child.communicate(timeout=60)  # closes its input
    assert (rest, child.returncode) == ("", 0), "said once, however often it looks"
