"""Google's Reduction Server: how many of its machines a run should have, and why not. Pure.

Its machines add up gradients for NCCL's all-reduce over TCP. A ring moves ``2 (n - 1) / n`` of the gradients over each
host's network, the reducers once: with two hosts the same, with many half. Google's page on distributed training sizes
them by bandwidth: what the reducers have together is at least what the hosts have (8 hosts of 100 Gbps: 25 machines of
32 Gbps). What that buys in time depends on how much of a step waits for the network, which no one knows before the run:
``worth`` says the most.
"""

from __future__ import annotations

import math

from muster.backends.vertex.placement import Placement
from muster.catalog import rows, vertex
from muster.catalog.vertex import FLEX_START

AUTO = "auto"
MACHINE = "n1-highcpu-16"
MACHINE_BYTES_PER_S = 32e9 / 8
"""Google's page on distributed training: N1 with 16 vCPUs or more has 32 Gbps."""
FEWEST_HOSTS = 3
"""Below, the ring moves no more than the reducers do."""


def count(placement: Placement) -> int:
    """Machines that the run's job has."""
    asked = placement.spec.vertex.reduction_servers
    if not isinstance(asked, str):
        return asked
    return 0 if why_none(placement) else _enough(placement) or 0


def impossible(placement: Placement) -> str | None:
    """Why they cannot help here, however many; None: they may."""
    chip, spec = placement.machine.accelerator, placement.spec
    if placement.mode == FLEX_START:
        return "flex-start wants the same machine for all hosts, and these are others"
    if placement.hosts == 1:
        return "one host has no network between hosts"
    if chip is None:
        return "it serves NCCL, and the hosts have no GPUs"
    if chip.network in ("configured", "script"):
        return f"{placement.machine.name} has GPUDirect, which is faster than what goes through its hosts' TCP"
    if spec.command is None and spec.parallelism.dp_replicate % spec.resources.hosts:
        return "gradients are sharded across hosts, and it serves the all-reduce of replicas alone"
    return None


def why_none(placement: Placement) -> str | None:
    """Why ``auto`` takes none; None: it takes some."""
    if reason := impossible(placement):
        return reason
    if placement.spec.command is not None:
        return "whether your program sums replicas with NCCL's all-reduce is not known: give a number"
    chip = placement.machine.accelerator
    if chip is not None and chip.network == "unknown":
        return f"whether {placement.machine.name} has GPUDirect on Vertex AI is not documented: give a number"
    if placement.spec.resources.hosts < FEWEST_HOSTS:
        return "with two hosts a ring moves no more over the network than it would"
    if _enough(placement) is None:
        return f"the network of {placement.machine.name} is not in the table: give a number"
    return None


def sentence(placement: Placement) -> str:
    """What ``auto`` has chosen, and what for; of one that takes none, why."""
    if reason := why_none(placement):
        return f"auto takes none: {reason}"
    hosts, taken = placement.spec.resources.hosts, count(placement)
    return (
        f"auto takes {taken} {MACHINE}: over each host's network go {2 * (hosts - 1) / hosts:.2f} times fewer bytes of "
        f"gradients; {taken * 16} of the quota custom_model_training_cpus, billed as machines with Vertex's fee"
    )


def worth(placement: Placement, *, step_s: float, usd_per_hour: float | None) -> str:
    """What they would save of a step of ``step_s`` seconds at most, compared with what they cost; ``usd_per_hour``: of
    the hosts. The most: all of the sums wait for the network and none is behind the computation."""
    if reason := why_none(placement):
        return f"Reduction Server: none: {reason}"
    spec, row = placement.spec, rows.machines().get(placement.machine.name)
    weights = rows.weights_bytes(spec.model.source) if spec.model is not None and spec.model.source else None
    taken, hosts = _enough(placement) or 0, spec.resources.hosts
    usd = taken * vertex.reducer_usd_per_hour()
    cost = f"{taken} {MACHINE} cost about ${usd:.2f} an hour (list price from memory, with the fee)"
    if spec.model is not None and spec.model.lora is not None:
        return f"Reduction Server: none is worth it: adapters have few gradients; {cost}"
    if weights is None or row is None or row.network_bytes_per_s is None:
        return f"Reduction Server: what it saves is not known: the model's size is not in the table; {cost}"
    saved_s = weights * (2 * (hosts - 1) / hosts - 1) / row.network_bytes_per_s
    share = min(1.0, saved_s / step_s)
    saves = f"at most {saved_s:.2f} of {step_s:.2f} s of a step ({share:.0%})"
    if usd_per_hour is None:
        return f"Reduction Server: {saves}; {cost}; the hosts' price is not known"
    pays = usd_per_hour * share > usd
    verdict = "may pay" if pays else "does not pay"
    return f"Reduction Server {verdict}: {saves}, of hosts at ${usd_per_hour:.2f} an hour; {cost}"


def _enough(placement: Placement) -> int | None:
    """None: the hosts' bandwidth is not known."""
    row = rows.machines().get(placement.machine.name)
    if row is None or row.network_bytes_per_s is None:
        return None
    return math.ceil(placement.spec.resources.hosts * row.network_bytes_per_s / MACHINE_BYTES_PER_S)
