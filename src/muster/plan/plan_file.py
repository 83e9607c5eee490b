"""The plan as a file: what was chosen, what the run file was then, and what else was looked at.

A plan belongs to one version of one run file. ``settings`` are the overrides that turn that file into the planned
run, so a planned run is checked like any other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from muster.core.errors import UsageError
from muster.plan.host_memory import host_memory
from muster.plan.search import Candidate, Outcome
from muster.plan.step_time import achieved_tflops, tokens_per_second_per_gpu
from muster.plan.workload import Workload

FORMAT = "muster-plan-2"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A chosen way of running a run file."""

    run_file: str
    run_text: str
    overrides: tuple[str, ...]
    spec: Mapping[str, Any]
    """The run file's ``RunSpec`` in JSON, before the plan's settings."""
    made: str
    """ISO 8601."""
    settings: Mapping[str, Any]
    """Dotted key of the run file -> value that the plan sets."""
    chosen: Mapping[str, Any]
    cheapest: Mapping[str, Any]
    fastest: Mapping[str, Any]
    frontier: tuple[Mapping[str, Any], ...]
    rejected: tuple[Mapping[str, Any], ...]
    assumptions: tuple[str, ...]
    why: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Everything, for ``--json`` and ``--out``."""
        last = {name: getattr(self, name) for name in ("run_text", "spec")}
        shown = {name: value for name, value in vars(self).items() if name not in (*last, "extra")}
        return {"format": FORMAT, "spec_digest": digest(self.spec), **shown, **self.extra, **last}


def read(text: str, *, source: str) -> dict[str, Any]:
    """A plan file's content.

    Raises:
        UsageError: it is none, or its own digest does not match what it holds.
    """
    try:
        result = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{source} is not a plan: {error}", hint="muster plan RUN.yaml --out PLAN.json") from error
    if not isinstance(result, dict) or result.get("format") != FORMAT:
        raise UsageError(f"{source} is not a plan of this version", hint="muster plan RUN.yaml --out PLAN.json")
    if result["spec_digest"] != digest(result["spec"]):
        raise UsageError(f"{source} was edited: its digest does not match its run file", hint="make the plan again")
    return result


def check_fresh(plan: Mapping[str, Any], spec: Mapping[str, Any], *, source: str) -> None:
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


def settings_as_overrides(settings: Mapping[str, Any]) -> list[str]:
    """``key=value`` texts that a run file's loader takes."""
    return [f"{key}={json.dumps(value)}" for key, value in settings.items()]


def digest(spec: Mapping[str, Any]) -> str:
    """Of a spec's JSON, whatever the order of its keys."""
    text = json.dumps(spec, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def differences(old: Any, new: Any, key: str = "") -> Iterator[str]:
    """``training.steps was 100, is 200`` for each leaf that differs."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in sorted({*old, *new}):
            yield from differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif old != new:
        yield f"{key} was {json.dumps(old)}, is {json.dumps(new)}"


def settings_of(candidate: Candidate, *, every_steps: int | None) -> dict[str, Any]:
    """What the plan sets in the run file. ``every_steps``: where the plan chose the checkpoint interval."""
    setting, offer = candidate.setting, candidate.option.offer
    result: dict[str, Any] = {
        "training.micro_batch_size": setting.micro_batch_size,
        "training.activation_checkpointing": setting.activation_checkpointing,
        **{f"parallelism.{axis}": size for axis, size in setting.layout.sizes.items()},
        "resources.hosts": candidate.num_nodes,
        "resources.ranks_per_host": offer.gpus_per_node,
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


def candidate_json(work: Workload, candidate: Candidate) -> dict[str, Any]:
    """Everything that is predicted about one candidate, units in the names."""
    option, setting, good, cost = candidate.option, candidate.setting, candidate.goodput, candidate.cost
    offer, price = option.offer, option.price
    priced = ("usd_per_gpu_hour", "low", "high", "date", "reliability", "source")
    host = host_memory(
        work, setting, machine=offer.machine, gpus_per_node=offer.gpus_per_node, num_nodes=candidate.num_nodes
    )
    return {
        "title": candidate.title,
        "machine": offer.machine,
        "accelerator": offer.accelerator,
        "mode": offer.mode,
        "location": offer.location,
        "num_nodes": candidate.num_nodes,
        "gpus": candidate.gpus,
        "layout": setting.layout.sizes,
        "micro_batch_size": setting.micro_batch_size,
        "rounds": setting.rounds(work),
        "padding_share": setting.padding(work),
        "activation_checkpointing": setting.activation_checkpointing,
        "memory_bytes_per_gpu": candidate.memory.total_bytes,
        "gpu_memory_bytes": offer.gpu_memory_bytes,
        "memory_bytes_by_item": dict(candidate.memory.items),
        "memory_peak_moment": candidate.memory.moment,
        "host_memory_bytes_by_item": dict(host.items),
        "host_memory_limit_bytes": host.limit_bytes,
        "host_memory_warning": host.warning,
        "step_s": candidate.time.seconds,
        "step_s_by_item": {name: value for name, value in candidate.time.parts.items() if value},
        "mfu": candidate.time.mfu,
        "tflops_per_gpu": achieved_tflops(work, candidate.time),
        "tokens_per_s": tokens_per_second_per_gpu(work, candidate.time) * candidate.gpus,
        "tokens_per_s_per_gpu": tokens_per_second_per_gpu(work, candidate.time),
        "goodput": good.share,
        "interruptions_per_day": good.interruptions_per_day,
        "checkpoint_every_steps": good.checkpoint_every_steps,
        "checkpoint_every_s": good.checkpoint_every_s,
        "surviving_tier": good.tier,
        "hours": {"p50": cost.hours_p50, "p90": cost.hours_p90},
        "usd": {"p50": cost.usd_p50, "p90": cost.usd_p90},
        "usd_per_hour": cost.usd_per_hour,
        "usd_per_step": cost.usd_per_step,
        "usd_per_million_tokens": cost.usd_per_million_tokens,
        "term_cuts": cost.cuts,
        "price": price and {name: getattr(price, name) for name in priced},
        "modelled": modelled(candidate),
        "quota": option.mode.quota,
        "rules": list(option.mode.rules),
    }


def modelled(candidate: Candidate) -> list[str]:
    """Which inputs of this candidate are no measurement of anybody's."""
    option, mode = candidate.option, candidate.option.mode
    result = []
    if not option.ceiling_measured:
        result.append(f"matmul ceiling of {option.accelerator.name}: peak x the median share of other chips")
    if candidate.num_nodes > 1 and not option.fabric.measured:
        result.append("data network: line rate x the median share of other machines")
    if mode.network_factor != 1:
        result.append(f"network without compact placement: x {mode.network_factor:g}")
    rate = mode.preemptions_per_node_day
    if rate.high:
        result.append(f"preemptions: {rate.value:g} a node-day, between {rate.low:g} and {rate.high:g}")
    return result


def outcome_json(work: Workload, outcome: Outcome) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(frontier, rejected): each candidate, and each other offer with its reason."""
    rejected = [
        {**{name: getattr(each.option.offer, name) for name in ("machine", "mode", "location")}, "reason": each.reason}
        for each in outcome.rejected
    ]
    return [candidate_json(work, each) for each in outcome.frontier], rejected


def chart(frontier: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Points of cost against finish time for a report."""
    return [{name: each[name] for name in ("title", "hours", "usd", "gpus")} for each in frontier]
