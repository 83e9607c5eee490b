"""The place of this pod's node: its topology labels, as the API server has them. The downward API gives no node's."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from muster.backends.gke.kubernetes.api import Cluster
from muster.core.errors import MusterError
from muster.core.typed_json import JsonObject, child, text

#: A sub-block is a group of hosts with their switches within one rack (Compute Engine, "VM topology").
LABELS = {
    "MUSTER_BLOCK": "cloud.google.com/gce-topology-block",
    "MUSTER_RACK": "cloud.google.com/gce-topology-subblock",
}


def place_of_node(node: str, connect: Callable[[], Cluster], timeout_s: float) -> dict[str, str]:
    """``MUSTER_BLOCK`` and ``MUSTER_RACK``, as far as the node has such labels and its account may read them; waits no
    longer than ``timeout_s``, and says on stderr why there is no answer."""
    found: dict[str, str] = {}
    failed = [f"no answer within {timeout_s:g} s"]

    def ask() -> None:
        try:
            held = connect().get({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}})
            labels: JsonObject = child(held or {}, "metadata", "labels")
            found.update({name: value for name, label in LABELS.items() if (value := text(labels, label))})
            failed.clear()
        except (MusterError, OSError) as error:
            failed[:] = [str(error)]

    thread = threading.Thread(target=ask, name="own-node", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if failed:
        print(f"the labels of node {node} are not known, so copies may stay in its rack: {failed[0]}", file=sys.stderr)
        return {}
    return dict(found)
