"""The plan as a file: what was chosen, what the run file was then, and what else was looked at.

A plan belongs to one version of one run file. ``settings`` are the overrides that turn that file into the planned
run, so a planned run is checked like any other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Generic, TypeVar

from muster.catalog import gke
from muster.catalog.rows import Price
from muster.core.errors import UsageError
from muster.core.snapshots import COPIED_SLOTS, OWN_SLOTS, PEER_SLOTS
from muster.core.typed_json import Json, JsonObject
from muster.plan.bucket import Requests
from muster.plan.search import Candidate, Outcome
from muster.plan.step_time import achieved_tflops, local_state_bytes, tokens_per_second_per_gpu
from muster.plan.workload import Setting, Workload

FORMAT = "muster-plan-2"
Figure = TypeVar("Figure")


@dataclass(frozen=True, kw_only=True)
class Spread(Generic[Figure]):
    """A figure in the middle and at the 90th percentile."""

    p50: Figure
    p90: Figure


@dataclass(frozen=True, kw_only=True)
class PlannedWay:
    """Everything that is predicted about one candidate, units in the names."""

    title: str
    machine: str
    accelerator: str
    mode: str
    location: str
    num_nodes: int
    topology: str | None
    """Of a TPU's slice."""
    gpus: int
    layout: Mapping[str, int]
    micro_batch_size: int
    rounds: int
    padding_share: float
    activation_checkpointing: str
    memory_bytes_per_gpu: int
    gpu_memory_bytes: int
    memory_bytes_by_item: Mapping[str, int]
    memory_peak_moment: str
    host_memory_bytes_by_item: Mapping[str, int]
    host_memory_limit_bytes: int | None
    host_memory_warning: str | None
    step_s: float
    step_s_by_item: Mapping[str, float]
    mfu: float | None
    tflops_per_gpu: float
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    goodput: float
    interruptions_per_day: float
    checkpoint_every_steps: int
    checkpoint_every_s: float
    surviving_tier: str
    snapshot_every_steps: int
    """In the host's memory; 0: none."""
    snapshot_s: float
    """Of each."""
    snapshot_every_steps_by_cost: int
    """What ``checkpoint.snapshot_every_steps: auto`` takes, at these figures."""
    hours: Spread[float]
    usd: Spread[float | None]
    usd_per_hour: float | None
    usd_per_step: float | None
    usd_per_million_tokens: float | None
    term_cuts: int
    price: Price | None
    modelled: list[str]
    quota: str
    rules: list[str]


@dataclass(frozen=True, kw_only=True)
class NotTaken:
    """Another offer, and why in one phrase."""

    machine: str
    mode: str
    location: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A chosen way of running a run file."""

    run_file: str
    run_text: str
    overrides: tuple[str, ...]
    spec: JsonObject
    """The run file's ``RunSpec`` in JSON, before the plan's settings."""
    made: str
    """ISO 8601."""
    settings: JsonObject
    """Dotted key of the run file -> value that the plan sets."""
    chosen: PlannedWay
    chances: Mapping[str, float]
    """``chance_in_time`` and ``chance_within_max_usd`` of the chosen one, where there is such a limit."""
    cheapest: PlannedWay
    fastest: PlannedWay
    frontier: tuple[PlannedWay, ...]
    rejected: tuple[NotTaken, ...]
    assumptions: tuple[str, ...]
    bucket: Requests | None = None
    """What the run's home costs in requests, where it is in a bucket."""
    storage: tuple[str, ...] = ()
    """Advice about where weights and checkpoints lie, where they can lie in a bucket."""
    why: tuple[str, ...] = ()
    evaluated_settings: int
    job: str

    def to_json(self) -> JsonObject:
        """Everything, for ``--json`` and ``--out``."""
        shown = asdict(self)
        chances = shown.pop("chances")
        last = {name: shown.pop(name) for name in ("run_text", "spec")}
        for way in (shown["chosen"], shown["cheapest"], shown["fastest"], *shown["frontier"]):
            for named_above in ("machine", "mode", "region") if way["price"] else ():
                del way["price"][named_above]
        shown["chosen"] |= chances
        # Points of cost against finish time for a report.
        chart = [{name: way[name] for name in ("title", "hours", "usd", "gpus")} for way in shown["frontier"]]
        return {"format": FORMAT, "spec_digest": digest(self.spec), **shown, "chart": chart, **last}


def read(content: str, *, source: str) -> JsonObject:
    """A plan file's content.

    Raises:
        UsageError: it is none, or its own digest does not match what it holds.
    """
    try:
        result = json.loads(content)
        edited = isinstance(result, dict) and result.get("spec_digest") != digest(result.get("spec", {}))
    except (ValueError, TypeError, RecursionError) as error:
        raise UsageError(f"{source} is not a plan: {error}", hint="muster plan RUN.yaml --out PLAN.json") from error
    if not isinstance(result, dict) or result.get("format") != FORMAT or not isinstance(result.get("spec"), dict):
        raise UsageError(f"{source} is not a plan of this version", hint="muster plan RUN.yaml --out PLAN.json")
    if edited:
        raise UsageError(f"{source} was edited: its digest does not match its run file", hint="make the plan again")
    return result


def check_fresh(plan: JsonObject, spec: JsonObject, *, source: str) -> None:
    """Refuse a plan that was made for another version of the run file.

    Raises:
        UsageError: what differs.
    """
    if digest(spec) == plan["spec_digest"]:
        return
    changes = list(differences(plan["spec"], spec))
    shown = "; ".join(changes[:3]) + (f"; and {len(changes) - 3} more" if len(changes) > 3 else "")
    raise UsageError(
        f"{source} was made for another version of {plan['run_file']}: {shown}",
        hint=f"muster plan {plan['run_file']} --out {source}",
    )


def settings_as_overrides(settings: JsonObject) -> list[str]:
    """``key=value`` texts that a run file's loader takes."""
    return [f"{key}={json.dumps(value)}" for key, value in settings.items()]


def digest(spec: Json) -> str:
    """Of a spec's JSON, independent of the order of its keys."""
    text = json.dumps(spec, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def differences(old: Json, new: Json, key: str = "") -> Iterator[str]:
    """``training.steps was 100, is 200`` for each leaf that differs."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in sorted({*old, *new}):
            yield from differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif old != new:
        yield f"{key} was {json.dumps(old)}, is {json.dumps(new)}"


def settings_of(candidate: Candidate, *, every_steps: int | None) -> dict[str, Json]:
    """What the plan sets in the run file. ``every_steps``: where the plan chose the checkpoint interval."""
    setting, offer = candidate.setting, candidate.option.offer
    tpu = candidate.option.is_tpu  # one rank a host, whose chips share the rows of a micro-batch
    groups = offer.gpus_per_node // setting.layout.tp if tpu else 1
    axes = setting.layout.sizes
    if tpu:  # of ranks, which are hosts, only what the run file cannot know: chips that share a row
        axes = {"tp": setting.layout.tp} if setting.layout.tp > 1 else {}
    result: dict[str, Json] = {
        "training.micro_batch_size": setting.micro_batch_size * groups,
        "training.activation_checkpointing": setting.activation_checkpointing,
        **{f"parallelism.{axis}": size for axis, size in axes.items()},
        "resources.hosts": candidate.num_nodes,
        "resources.ranks_per_host": 1 if tpu else offer.gpus_per_node,
        "resources.machine": offer.machine,
        "resources.accelerator": offer.accelerator,
        "resources.provisioning_model": offer.mode if offer.mode != "commitment" else "reservation",
        "resources.locations": [offer.location],
    }
    if candidate.option.price is not None:
        result["resources.usd_per_host_hour"] = candidate.option.price.usd_per_gpu_hour * offer.gpus_per_node
    if every_steps is not None:
        result["checkpoint.every_steps"] = every_steps
    return result


def planned_way(work: Workload, candidate: Candidate) -> PlannedWay:
    option, setting, good, cost = candidate.option, candidate.setting, candidate.goodput, candidate.cost
    offer = option.offer
    host = host_memory(
        work, setting, machine=offer.machine, gpus_per_node=offer.gpus_per_node, num_nodes=candidate.num_nodes
    )
    return PlannedWay(
        title=candidate.title,
        machine=offer.machine,
        accelerator=offer.accelerator,
        mode=offer.mode,
        location=offer.location,
        num_nodes=candidate.num_nodes,
        topology=option.topology(candidate.num_nodes),
        gpus=candidate.gpus,
        layout=setting.layout.sizes,
        micro_batch_size=setting.micro_batch_size,
        rounds=setting.rounds(work),
        padding_share=setting.padding(work),
        activation_checkpointing=setting.activation_checkpointing,
        memory_bytes_per_gpu=candidate.memory.total_bytes,
        gpu_memory_bytes=offer.gpu_memory_bytes,
        memory_bytes_by_item=dict(candidate.memory.items),
        memory_peak_moment=candidate.memory.moment,
        host_memory_bytes_by_item=dict(host.items),
        host_memory_limit_bytes=host.limit_bytes,
        host_memory_warning=host.warning,
        step_s=candidate.time.seconds,
        step_s_by_item={name: value for name, value in candidate.time.parts.items() if value},
        mfu=candidate.time.mfu,
        tflops_per_gpu=achieved_tflops(work, candidate.time),
        tokens_per_s=tokens_per_second_per_gpu(work, candidate.time) * candidate.gpus,
        tokens_per_s_per_gpu=tokens_per_second_per_gpu(work, candidate.time),
        goodput=good.share,
        interruptions_per_day=good.interruptions_per_day,
        checkpoint_every_steps=good.checkpoint_every_steps,
        checkpoint_every_s=good.checkpoint_every_s,
        surviving_tier=good.tier,
        snapshot_every_steps=candidate.time.snapshot_every,
        snapshot_s=candidate.time.snapshot_s,
        snapshot_every_steps_by_cost=candidate.time.snapshot_every_by_cost,
        hours=Spread(p50=cost.hours_p50, p90=cost.hours_p90),
        usd=Spread(p50=cost.usd_p50, p90=cost.usd_p90),
        usd_per_hour=cost.usd_per_hour,
        usd_per_step=cost.usd_per_step,
        usd_per_million_tokens=cost.usd_per_million_tokens,
        term_cuts=cost.cuts,
        price=option.price,
        modelled=modelled(candidate),
        quota=option.mode.quota,
        rules=list(option.mode.rules),
    )


def modelled(candidate: Candidate) -> list[str]:
    """Which inputs of this candidate are no measurement of anybody's."""
    option, mode = candidate.option, candidate.option.mode
    result = []
    if option.is_tpu:
        mfu = option.accelerator.mfu or 0.0
        result.append(f"{option.accelerator.name}: MFU {mfu:.0%}, of a large dense model; small ones reach less")
        result.append("memory in closed form; ICI without contention; failures as of GPU machines: no TPU was measured")
    elif not option.ceiling_measured:
        result.append(f"matmul ceiling of {option.accelerator.name}: peak x the median share of other chips")
    if candidate.num_nodes > 1 and not option.fabric.measured and not option.is_tpu:
        result.append("data network: line rate x the median share of other machines")
    if mode.network_factor != 1 and not option.is_tpu:
        result.append(f"network without compact placement: x {mode.network_factor:g}")
    rate = mode.preemptions_per_node_day
    if rate.high:
        result.append(f"preemptions: {rate.value:g} a node-day, between {rate.low:g} and {rate.high:g}")
    return result


def ways(work: Workload, outcome: Outcome) -> tuple[tuple[PlannedWay, ...], tuple[NotTaken, ...]]:
    """(frontier, rejected): each candidate, and each other offer with its reason."""
    offers = [(rejection.option.offer, rejection.reason) for rejection in outcome.rejected]
    rejected = (
        NotTaken(machine=offer.machine, mode=offer.mode, location=offer.location, reason=reason)
        for offer, reason in offers
    )
    return tuple(planned_way(work, candidate) for candidate in outcome.frontier), tuple(rejected)


# ---------------- what the snapshots of a training take of a machine's own memory, and whether it has that
# The trainer's rules (``checkpoint_format.snapshot_ring``): a rank's own ring has two slots, three where another host
# gets copies; that host holds two of each rank's. A save is staged in addition. While copies take longer than a step a
# fourth slot is reserved where there is room; it is not counted here.


GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Bytes of one machine."""

    items: Mapping[str, int]
    limit_bytes: int | None
    """Of ``/dev/shm``, which holds all but the staged save; None: the machine is not in the catalogue."""
    without_copies_bytes: int
    """In ``/dev/shm`` with ``checkpoint.replicate_snapshots: false``."""

    @property
    def snapshot_bytes(self) -> int:
        """In ``/dev/shm``."""
        return sum(count for name, count in self.items.items() if name != STAGED)

    @property
    def warning(self) -> str | None:
        """What will happen where it is too little, and which key helps."""
        if self.limit_bytes is None or self.snapshot_bytes <= self.limit_bytes:
            return None
        text = f"snapshots need {_gb(self.snapshot_bytes)} of a host's memory, /dev/shm has {_gb(self.limit_bytes)}"
        if self.without_copies_bytes <= self.limit_bytes:
            return f"{text}: no copies on other hosts (as with checkpoint.replicate_snapshots: false)"
        return f"{text}: no snapshots in memory (as with checkpoint.snapshot_every_steps: 0)"


STAGED = "staged save"


def host_memory(work: Workload, setting: Setting, *, machine: str, gpus_per_node: int, num_nodes: int) -> HostMemory:
    """Of one machine of this plan."""
    state = round(local_state_bytes(work, setting) * gpus_per_node)
    # Peers in other replicas replace copies, unless the run file requests both.
    twins = setting.layout.dp_replicate > 1 and work.replicate_snapshots is None
    copied = num_nodes > 1 and work.replicate_snapshots is not False and not twins
    items: dict[str, int] = {}
    if work.snapshot_every != 0:
        items["own snapshots"] = state * (COPIED_SLOTS if copied else OWN_SLOTS)
        if copied:
            items["another host's copies"] = state * PEER_SLOTS
    if work.asynchronous:
        items[STAGED] = round(state / setting.layout.dp_replicate)
    return HostMemory(
        items=items, limit_bytes=_limit_bytes(machine), without_copies_bytes=state * OWN_SLOTS if items else 0
    )


def _limit_bytes(name: str) -> int | None:
    result = (family.machines[name] for family in gke.families().values() if name in family.machines)
    machine = next(result, None)
    return None if machine is None else machine.shared_memory_gib * GIB


def _gb(count: int) -> str:
    return f"{count / 1e9:,.0f} GB"
