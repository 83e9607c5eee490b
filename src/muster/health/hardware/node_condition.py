"""What GKE's device plugin has seen of Xids on a node: ``kubectl get node NODE -o json`` (or ``nodes``).

Readable without a privilege on the node, where a pod may not read the kernel log. The condition ``XidCriticalError``
has the numbers in its reason (``{"48":true}``) and the boot that they are of in its message; a restart of the machine
clears it. By default the plugin looks for 48 alone, so that a node without the condition is not thereby sound. Source:
GoogleCloudPlatform/container-engine-accelerators, pull request 497 (2025-06).
"""

from __future__ import annotations

import re
from dataclasses import replace

from muster.core.typed_json import JsonObject, Unreadable, children, parse_object, text
from muster.health.hardware.driver_errors import finding_of, judge_bursts
from muster.health.hardware.error_table import OwnNumbers
from muster.health.hardware.kernel_log import Clock, Family, KernelFault
from muster.health.verdicts import Finding, Verdict

CONDITION = "XidCriticalError"
_SOURCE = f"GKE's device plugin, node condition {CONDITION}"


def is_nodes(captured: str) -> bool:
    return captured.lstrip()[:1] == "{" and re.search(r'"kind"\s*:\s*"Node"', captured) is not None


def judge_nodes(captured: str, own: OwnNumbers) -> list[Finding]:
    """A finding for each node, by the same table as the kernel log's lines."""
    try:
        found = parse_object(captured)
        nodes = [found] if text(found, "kind") == "Node" else children(found, "items")
        return [_judge(node, own) for node in nodes if text(node, "kind") == "Node"]
    except (Unreadable, ValueError, TypeError) as error:
        return [Finding("gpu.xid", Verdict.INCOMPLETE, f"the nodes' JSON is not whole: {error}")]


def numbers_in(reason: str) -> tuple[int, ...]:
    """The Xids of a condition's reason; none where it holds none."""
    return tuple(int(number) for number in re.findall(r'"(\d{1,4})"\s*:\s*true', reason))


def fault_of(number: int, line: str, time_s: float | None = None) -> KernelFault:
    """One of them; which GPU had it the condition does not say. ``time_s``: when it was seen, in Unix seconds."""
    return KernelFault(family=Family.XID, number=number, device="", text="", line=line, time_s=time_s, clock=Clock.WALL)


def _judge(node: JsonObject, own: OwnNumbers) -> Finding:
    name = text(node, "metadata", "name")
    row = next((one for one in children(node, "status", "conditions") if text(one, "type") == CONDITION), None)
    if row is None or text(row, "status") == "False":
        message = "the node has no condition for Xids, which GKE sets for 48 alone unless more are configured"
        return Finding(check="gpu.xid", verdict=Verdict.NOTE, host=name, message=message, source=_SOURCE)
    reason, since = text(row, "reason"), text(row, "lastTransitionTime")
    numbers = numbers_in(reason)
    if text(row, "status") != "True" or not numbers:
        message = f"the node's condition {CONDITION} cannot be read: {text(row, 'status')} {reason[:100]}"
        return Finding(check="gpu.xid", verdict=Verdict.INCOMPLETE, host=name, message=message)
    line = f"{CONDITION} {reason} since {since}"
    faults = [fault_of(one, line) for one in numbers]
    (burst,) = judge_bursts(faults, own)  # without times, all are one
    finding = finding_of(burst, host=name)
    return replace(finding, message=f"{finding.message} (since {since or 'an unknown time'}, {_SOURCE})")
