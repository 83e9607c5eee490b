"""Tells the agent of the Xids that GKE's device plugin has seen on this pod's node, by the node's condition.

A program of its own (``python -m muster.backends.gke.pod.node_watcher NODE``), started where the pod may not follow the
kernel log: it asks the API server as the pod's account, which needs ``get`` on nodes, and prints one message
(``NodeCondition``) at first and for each change. It ends when its standard input does, so never later than the agent.
"""

from __future__ import annotations

import argparse
import select
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

from muster.backends.gke.kubernetes.api import Cluster
from muster.backends.gke.kubernetes.config import ACCOUNT, own_cluster
from muster.core import environment
from muster.core.clock import SystemClock
from muster.core.errors import MusterError
from muster.core.typed_json import JsonObject, children, text
from muster.protocol.codec import encode
from muster.protocol.pipes import NodeCondition

#: As ``health.hardware.node_condition`` has it.
CONDITION = "XidCriticalError"
#: Between two looks. The plugin itself writes the condition some seconds after the error; a thousand hosts ask 33 times
#: a second.
EVERY_S = 30.0


def condition_of(node: JsonObject) -> NodeCondition:
    """What the node's own row says."""
    rows = children(node, "status", "conditions")
    row = next((one for one in rows if text(one, "type") == CONDITION), None)
    if row is None:
        return NodeCondition()
    return NodeCondition(status=text(row, "status"), reason=text(row, "reason"), since=text(row, "lastTransitionTime"))


def look(node: str, connect: Callable[[], Cluster]) -> NodeCondition:
    """One look; ``problem``: why it failed."""
    try:
        found = connect().get({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}})
    except (MusterError, OSError) as error:
        return NodeCondition(problem=str(error))
    return condition_of(found) if found is not None else NodeCondition(problem=f"the API server has no node {node}")


def watch(look: Callable[[], NodeCondition], tell: Callable[[NodeCondition], None], pause: Callable[[], bool]) -> None:
    """Look until ``pause`` returns False (no listener is left). An error is reported once, and retried: a control plane
    that is being upgraded is away for minutes, and a right may be granted while the run goes on."""
    before = None
    while True:
        now = look()
        if before is None or (now != before and not (now.problem and before.problem)):
            tell(now)
        before = now
        if not pause():
            return


def main() -> None:
    parser = argparse.ArgumentParser(description="tell of Xids on this pod's node (started by the agent)")
    parser.add_argument("node")
    parser.add_argument("--account", type=Path, default=ACCOUNT, help="folder of the service account")
    parser.add_argument("--every-s", type=float, default=EVERY_S)
    given = parser.parse_args()

    def tell(message: NodeCondition) -> None:
        sys.stdout.write(encode(message).decode() + "\n")
        sys.stdout.flush()

    def pause() -> bool:
        return not select.select([sys.stdin], [], [], given.every_s)[0]

    connect = cache(lambda: own_cluster(SystemClock(), environment.inherited(), given.account))
    watch(lambda: look(given.node, connect), tell, pause)


if __name__ == "__main__":
    main()
