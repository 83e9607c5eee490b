"""``--why``: what a good colleague would say, from the same numbers as the plan. Sentences, no new arithmetic rules."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from muster.catalog import rows
from muster.plan.cost import P90
from muster.plan.format import dollars, duration, gigabytes
from muster.plan.layouts import settings, tensor_groups
from muster.plan.search import Candidate, Memo, Outcome, Problem, best_settings, search
from muster.plan.step_time import step_time
from muster.plan.tpu_memory import tpu_memory
from muster.plan.workload import with_lora

#: A 90th percentile above this multiple of the median is worth a warning.
WIDE = 2.0


def why(problem: Problem, outcome: Outcome, chosen: Candidate) -> list[str]:
    """Reasons for the choice, one a sentence or two."""
    return [
        *_family(problem, outcome, chosen),
        *_mode(outcome, chosen),
        *_nodes(outcome, chosen),
        *_full_or_lora(problem, chosen),
        *_layout(problem, chosen),
        *_where_time_goes(problem, chosen),
        *_tpu(chosen),
        *_limits(problem, chosen),
    ]


def _family(problem: Problem, outcome: Outcome, chosen: Candidate) -> Iterator[str]:
    offer = chosen.option.offer
    need, have = chosen.memory.total_bytes, offer.gpu_memory_bytes
    yield (
        f"Machine: {chosen.num_nodes} x {offer.machine} ({chosen.gpus} {offer.accelerator}). {problem.work.title} "
        f"needs {gigabytes(need)} of {gigabytes(have)} a {chosen.option.unit} at its fullest moment "
        f"({chosen.memory.moment})."
    )
    best: dict[str, Candidate] = {}
    for candidate in outcome.candidates:
        name = candidate.option.offer.accelerator
        if name not in best or (candidate.cost.usd_p50 or 0) < (best[name].cost.usd_p50 or 0):
            best[name] = candidate
    least = chosen.cost.usd_p50
    others = sorted((c for n, c in best.items() if n != offer.accelerator), key=lambda c: c.cost.usd_p50 or 0)
    if others and least:
        parts = ", ".join(
            f"{other.option.offer.accelerator} {dollars(other.cost.usd_p50 or 0)} in {duration(other.cost.hours_p50)}"
            for other in others[:3]
        )
        own = f"{dollars(least)} in {duration(chosen.cost.hours_p50)}"
        yield f"Other families at their cheapest: {parts}; this one {own}."


def _mode(outcome: Outcome, chosen: Candidate) -> Iterator[str]:
    mode, machine = chosen.option.mode, chosen.option.offer.machine
    parts = []
    seen = {mode.name}
    for candidate in sorted(outcome.candidates, key=lambda c: c.cost.usd_p50 or 0):
        name = candidate.option.mode.name
        if candidate.option.offer.machine == machine and name not in seen:
            seen.add(name)
            cost = candidate.cost
            parts.append(
                f"{candidate.option.mode.title} {dollars(cost.usd_p50 or 0)} (p90 {dollars(cost.usd_p90 or 0)})"
            )
    line = (
        f"Mode: {mode.title}, {dollars(chosen.cost.usd_p50 or 0)} (p90 {dollars(chosen.cost.usd_p90 or 0)}), "
        f"{chosen.goodput.interruptions_per_day:.2g} interruptions a day expected, goodput {chosen.goodput.share:.1%}."
    )
    yield line + (f" The same machine otherwise: {', '.join(parts)}." if parts else "")
    yield from _spread(outcome, chosen)
    if mode.name == "spot":
        rate, network = mode.preemptions_per_node_day, ""
        if not chosen.option.is_tpu:
            network = (
                f"; its network is taken at {mode.network_factor:g} of the fabric, since it is not placed compactly"
            )
        yield (
            f"Spot's rate is the weak number: {rate.value:g} preemptions a node-day is assumed, {rate.low:g} to "
            f"{rate.high:g} has been seen{network}. What is lost at a preemption is what the last "
            "save to the bucket misses."
        )
    if mode.max_hours and chosen.cost.cuts:
        term, cuts = duration(mode.max_hours), chosen.cost.cuts
        yield f"{mode.title} ends after {term}: the run is cut {cuts} times and resumed."
    elif mode.max_hours:
        yield f"It ends well before {mode.title}'s {duration(mode.max_hours)}."


def _spread(outcome: Outcome, chosen: Candidate) -> Iterator[str]:
    """Where the cheapest in the middle is far from the cheapest at the end."""
    p50, p90 = chosen.cost.usd_p50 or 0.0, chosen.cost.usd_p90 or 0.0
    steady = min(outcome.candidates, key=lambda candidate: candidate.cost.usd_p90 or math.inf)
    if p90 > WIDE * p50 > 0 and (steady.cost.usd_p90 or math.inf) < p90:
        yield (
            f"Beware: its cost at the 90th percentile is {p90 / p50:.0f} times the median. The least there is "
            f"{steady.title}: {dollars(steady.cost.usd_p50 or 0)} (p90 {dollars(steady.cost.usd_p90 or 0)}). "
            "limits.max_usd chooses so."
        )


def _nodes(outcome: Outcome, chosen: Candidate) -> Iterator[str]:
    same = [
        candidate
        for candidate in outcome.candidates
        if candidate.option is chosen.option and candidate.num_nodes != chosen.num_nodes and candidate.cost.usd_p50
    ]
    for candidate in sorted(same, key=lambda c: abs(c.num_nodes - chosen.num_nodes))[:2]:
        money = (candidate.cost.usd_p50 or 0) / (chosen.cost.usd_p50 or 1) - 1
        time = candidate.cost.hours_p50 / chosen.cost.hours_p50 - 1
        nodes = f"{candidate.num_nodes} instead of {chosen.num_nodes}"
        yield f"Nodes: {nodes} would cost {money:+.0%} and take {time:+.0%}."


def _full_or_lora(problem: Problem, chosen: Candidate) -> Iterator[str]:
    if problem.work.lora_rank:
        trained = problem.work.trained_parameters / 1e6
        yield f"LoRA rank {problem.work.lora_rank}: {trained:.0f}M parameters are trained."
        return
    lora = search(replace(problem, work=with_lora(problem.work)))
    if lora.cheapest is None or not chosen.cost.usd_p50:
        return
    usd = lora.cheapest.cost.usd_p50 or 0.0
    yield (
        f"Full fine-tune or LoRA: rank-16 adapters would cost {dollars(usd)} ({usd / chosen.cost.usd_p50:.0%}) on "
        f"{lora.cheapest.title}. Choose the full run where the task is far from the base model's data, or tokens are "
        "many."
    )


def _layout(problem: Problem, chosen: Candidate) -> Iterator[str]:
    layout = chosen.setting.layout
    parts = [f"{axis} {size}" for axis, size in layout.sizes.items() if size > 1 or axis == "dp_shard"]
    kind = chosen.setting.activation_checkpointing
    yield (
        f"Layout: {' x '.join(parts)}, micro-batch {chosen.setting.micro_batch_size}, "
        f"{chosen.setting.rounds(problem.work)} round(s) a step, activation checkpointing {kind}."
    )
    if chosen.option.is_tpu:
        yield from _mesh(problem, chosen)
    if chosen.num_nodes > 1 and not chosen.option.is_tpu:
        inside = chosen.option.offer.gpus_per_node // layout.tp
        if layout.dp_replicate > 1:
            yield (
                "Replicated sharding pays here: gathers stay on NVLink and only one sum of gradients a step crosses "
                "the network; a lost machine costs one replica."
            )
        else:
            need = problem.work.shape.parameters * (4 * problem.work.master_bytes) / (inside * layout.tp)
            yield (
                f"Replicated sharding would keep {gigabytes(need)} of state on each GPU (a whole copy in every "
                "machine); it pays once that fits and gathers over the network are not hidden."
            )


def _mesh(problem: Problem, chosen: Candidate) -> Iterator[str]:
    """Of a slice: what each other size of ``tp`` would take, or need where it does not fit."""
    option, hosts, tp = chosen.option, chosen.num_nodes, chosen.setting.layout.tp
    free = replace(problem.pins, axes={axis: size for axis, size in problem.pins.axes.items() if axis != "tp"})
    parts = []
    for size in (size for size in tensor_groups(problem.work, option, free) if size != tp):
        pins = replace(free, axes={**free.axes, "tp": size})
        found = list(settings(problem.work, option, hosts, pins))
        best = best_settings(replace(problem, pins=replace(pins, num_nodes=hosts)), option, Memo())
        if best:
            parts.append(f"tp {size} takes {best[0][3].seconds:.3g} s a step")
        elif found:
            least = min(tpu_memory(problem.work, setting).total_bytes for setting in found)
            parts.append(f"tp {size} needs {gigabytes(least)} of {gigabytes(option.offer.gpu_memory_bytes)} a chip")
        else:
            parts.append(f"tp {size} does not divide a host's micro-batch")
    if parts:
        asked = " as the run file asks" if "tp" in problem.pins.axes else ""
        yield f"Mesh: tp {tp}{asked}, {chosen.time.seconds:.3g} s a step; {', '.join(parts)}."


def _where_time_goes(problem: Problem, chosen: Candidate) -> Iterator[str]:
    total = chosen.time.seconds
    parts = ", ".join(
        f"{name} {value / total:.0%}"
        for name, value in sorted(chosen.time.parts.items(), key=lambda item: -item[1])
        if value / total >= 0.01
    )
    mfu = f"MFU {chosen.time.mfu:.1%}" if chosen.time.mfu is not None else "no MFU (peak unknown)"
    yield f"A step takes {total:.2f} s ({mfu}): {parts}."
    if chosen.setting.activation_checkpointing == "full" and not chosen.option.is_tpu:
        setting = replace(chosen.setting, activation_checkpointing="selective")
        faster = step_time(problem.work, setting, chosen.option, chosen.num_nodes, problem.constants).seconds
        yield f"Recomputing everything costs {total - faster:.2f} s of it; less recomputation does not fit."
    if chosen.time.parts["snapshots"] / total > 0.03 and problem.work.snapshot_every is not None:
        yield (
            f"Snapshots to the host's memory take {chosen.time.parts['snapshots']:.2f} s a step; "
            f"checkpoint.snapshot_every_steps: auto takes one every {chosen.time.snapshot_every_by_cost} steps, 1 % of "
            "the time."
        )


def _tpu(chosen: Candidate) -> Iterator[str]:
    """Dollars for a peak PFLOP-hour: all that can be compared without running there."""
    price, peak = chosen.option.price, chosen.option.offer.peak_flops_per_gpu
    if price is None or not peak or chosen.option.is_tpu:
        return
    own = price.usd_per_gpu_hour / peak * 1e15
    parts = []
    for price in rows.shipped_prices():
        chip = rows.accelerators()[rows.machines()[price.machine].accelerator]
        tpu_peak = chip.peak_flops.get("bf16")
        if chip.kind == "tpu" and price.mode == chosen.option.mode.name and tpu_peak and price.region == "us-central1":
            parts.append(f"{chip.name} {dollars(price.usd_per_gpu_hour / tpu_peak * 1e15)}")
    if parts:
        yield (
            f"GPU or TPU: {dollars(own)} for a bf16 peak PFLOP-hour here; {', '.join(parts)} in the same mode. "
            "`--devices gpu,tpu` plans both."
        )


def _limits(problem: Problem, chosen: Candidate) -> Iterator[str]:
    limits = problem.limits
    if limits.max_hours is not None:
        chance = likelihood(chosen.cost.hours_p50, chosen.cost.hours_p90, limits.max_hours)
        yield f"{limits.hours_name} leaves {duration(limits.max_hours)}: in time with a chance of {chance:.0%}."
    if limits.max_usd is not None and chosen.cost.usd_p50 and chosen.cost.usd_p90:
        chance = likelihood(chosen.cost.usd_p50, chosen.cost.usd_p90, limits.max_usd)
        yield f"limits.max_usd is {dollars(limits.max_usd)}: within it with a chance of {chance:.0%}."


def likelihood(p50: float, p90: float, limit: float) -> float:
    """Probability that a log-normal quantity with these percentiles stays within ``limit``."""
    if limit <= 0:
        return 0.0
    sigma = math.log(p90 / p50) / P90
    if sigma <= 0:
        return 1.0 if p50 <= limit else 0.0
    return 0.5 * (1 + math.erf(math.log(limit / p50) / sigma / math.sqrt(2)))
