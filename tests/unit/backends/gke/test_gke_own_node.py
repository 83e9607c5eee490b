"""A host's pod learns from its node's labels where it stands, and no API server holds it up."""

import threading

import pytest

from muster.backends.gke.pod.main import place_of_node
from muster.core.errors import AccessError

TOPOLOGY = {"cloud.google.com/gce-topology-block": "b7", "cloud.google.com/gce-topology-subblock": "s3"}


class Answers:
    def __init__(self, answer):
        self.answer = answer

    def get(self, manifest):
        assert manifest == {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}}
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("node", "place"),
    [
        ({"metadata": {"labels": {**TOPOLOGY, "x": "y"}}}, {"MUSTER_BLOCK": "b7", "MUSTER_RACK": "s3"}),
        ({"metadata": {"labels": {"x": "y"}}}, {}),
        ({"metadata": {}}, {}),
        (None, {}),
    ],
)
def test_labels_become_block_and_rack(node, place, capsys):
    assert place_of_node("n1", lambda: Answers(node), 5.0) == place
    assert capsys.readouterr().err == ""


def test_an_account_that_may_not_read_nodes_is_said(capsys):
    assert place_of_node("n1", lambda: Answers(AccessError("nodes: forbidden")), 5.0) == {}
    assert "copies may stay in its rack: nodes: forbidden" in capsys.readouterr().err


def test_an_api_server_that_does_not_answer_holds_up_no_host(capsys):
    silent = threading.Event()

    def never():
        silent.wait(60)
        raise AccessError("too late")

    assert place_of_node("n1", never, 0.05) == {}
    assert "no answer within 0.05 s" in capsys.readouterr().err
    silent.set()
