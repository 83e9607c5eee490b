"""What a virtual host's agent does with the supervisor's messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muster.core.layout import Layout
from muster.simulate.host_time import VirtualHost
from muster.simulate.stepping_hosts import SteppingHosts


def handle_message(cluster: SteppingHosts, name: str, message: Mapping[str, Any]) -> None:
    """A message of the supervisor reaches a host, if that is up and linked."""
    host = cluster.hosts.get(name)
    if host is None or not host.up or not host.linked:
        return
    kind = message["t"]
    if kind == "start" and int(message["attempt"]) > host.attempt:
        host.begin(int(message["attempt"]), [int(context["rank"]) for context in message["contexts"]])
        cluster.maybe_begin(host.attempt, message)
    elif kind == "end":
        cluster.end_ranks(host, int(message["attempt"]), message.get("keep", ()), reset="reset" in message)
    elif kind == "order":
        handle_command(cluster, message["order"])
    elif kind == "flush":
        flush(cluster, host, message)
    elif kind == "flush_commit":
        flush_commit(cluster, host, message)


def handle_command(cluster: SteppingHosts, order: Mapping[str, Any]) -> None:
    """Save and exit (or only exit) after the current step; ranks that hang in their save do neither."""
    if not cluster.stepping:
        return
    if not cluster.ranks_obey:
        cluster.halt("detect")
        return
    cluster.leave_after_step(int(order["exit_code"]), save=bool(order["save"]))


def flush(cluster: SteppingHosts, host: VirtualHost, order: Mapping[str, Any]) -> None:
    """Write the requested shards, if this host holds them."""
    step, attempt, layout = int(order["step"]), int(order["attempt"]), str(order["layout"])
    held = all(
        host.snapshots.get((layout, int(item["held_as"]), str(item["tier"]))) == (step, attempt)
        for item in order["ranks"]
    )
    answer: dict[str, Any] = {"t": "flushed", "step": step, "attempt": attempt, "ok": held and cluster.disk_takes}
    if answer["ok"]:
        answer["files"] = [{"rank": int(item["rank"])} for item in order["ranks"]]
    else:
        answer["reason"] = "no space left on device" if held else "no longer held"
    cluster.receive_later(cluster.draw("flush", cluster.stages.flush_s), host, answer)


def flush_commit(cluster: SteppingHosts, host: VirtualHost, order: Mapping[str, Any]) -> None:
    """Put the marker, if every rank's shard was written once."""
    step, attempt = int(order["step"]), int(order["attempt"])
    whole = sorted(item["rank"] for item in order["files"]) == list(range(Layout.from_key(order["layout"]).world_size))
    answer: dict[str, Any] = {"t": "flush_committed", "step": step, "attempt": attempt, "ok": whole}
    if whole:
        answer |= {"uri": order["uri"], "bytes": 1}
        cluster.report_checkpoint(host, step, attempt, order["uri"])
    else:
        answer["reason"] = "a shard is missing"
    cluster.receive_from(host, answer)
