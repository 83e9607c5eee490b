"""GKE's condition for Xids on a node, as ``kubectl get node -o json`` prints it.

The row is the one in GoogleCloudPlatform/container-engine-accelerators, pull request 497.
"""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.health.recognise import NODES, recognise
from muster.health.verdicts import Verdict


def node(name="gke-1", *, reason='{"48":true}', status="True", row=True):
    condition = {
        "type": "XidCriticalError", "status": status, "reason": reason,
        "message": "6e43a052-e544-467b-a972-63d7cd2ce80a", "lastTransitionTime": "2025-06-23T18:44:57Z",
        "lastHeartbeatTime": "2025-06-23T18:58:44Z",
    }  # fmt: skip
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "x"}
    conditions = [ready, condition] if row else [ready]
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "status": {"conditions": conditions}}


def judged(*nodes):
    whole = nodes[0] if len(nodes) == 1 else {"apiVersion": "v1", "items": list(nodes), "kind": "List"}
    found = recognise([("nodes.json", json.dumps(whole, indent=4).encode())])
    assert found.kinds == {"nodes.json": NODES.name}
    return found.findings


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        ({}, Verdict.RESET),
        ({"reason": '{"31":true}'}, Verdict.APP),
        ({"reason": '{"31":true,"79":true}'}, Verdict.REPLACE),
        ({"reason": '{"48":false}'}, Verdict.INCOMPLETE),
        ({"reason": "torn {"}, Verdict.INCOMPLETE),
        ({"status": "Unknown"}, Verdict.INCOMPLETE),
        ({"status": "False"}, Verdict.NOTE),
        ({"row": False}, Verdict.NOTE),
    ],
)
def test_by_the_table_of_the_kernel_log(changed, verdict):
    (found,) = judged(node(**changed))
    assert (found.verdict, found.host) == (verdict, "gke-1"), found.message


def test_each_node_of_a_list_by_its_own_name():
    found = judged(node("a"), node("b", row=False), node("c", reason='{"79":true}'))
    assert [(one.host, one.verdict) for one in found] == [
        ("a", Verdict.RESET), ("b", Verdict.NOTE), ("c", Verdict.REPLACE)
    ]  # fmt: skip
    assert "Xid 48" in found[0].message and "2025-06-23T18:44:57Z" in found[0].message


@settings(max_examples=200)
@given(st.integers(min_value=1, max_value=900))
def test_cut_anywhere_nobody_is_called_sound(length):
    text = json.dumps(node(), indent=1)
    found = recognise([("nodes.json", text[: min(length, len(text) - 1)].encode())])
    assert [one.verdict for one in found.findings] == [Verdict.INCOMPLETE]
