"""When nothing fits: the nearest wish that would, and what it gives up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches

from muster.plan.format import dollars, duration
from muster.plan.layouts import Pins
from muster.plan.search import Candidate, Limits, Outcome, Problem, Rejection, search
from muster.plan.workload import with_lora


@dataclass(frozen=True, kw_only=True)
class Nearest:
    """A plan that would work, and the change of the wish that it takes."""

    candidate: Candidate
    change: str


def nearest(problem: Problem) -> Nearest | None:
    """The cheapest plan after the smallest change in this order: number of machines, place, mode, machine, limits,
    adapters instead of all parameters, and everything at once."""
    for change, other in _changes(problem):
        outcome = search(other)
        if outcome.cheapest is not None:
            return Nearest(candidate=outcome.cheapest, change=change)
    return None


def explain(problem: Problem, outcome: Outcome) -> tuple[str, str | None]:
    """(why nothing fits, what would): the message and hint of the error.

    The reason is that of the offer which came furthest: limits before memory before rules.
    """
    reason = _unknown(problem) or _limit(problem) or _telling(outcome.rejected)
    message = f"no plan fits {problem.work.title}: {reason}"
    result = nearest(problem)
    if result is None:
        return message, "no machine in the catalogue runs this model; try a smaller one or LoRA"
    usd = result.candidate.cost.usd_p50
    price = f" for {dollars(usd)} (p90 {dollars(result.candidate.cost.usd_p90 or usd)})" if usd is not None else ""
    return message, (
        f"the nearest plan that works: {result.change}: {result.candidate.title}, "
        f"{duration(result.candidate.cost.hours_p50)}{price}"
    )


def _unknown(problem: Problem) -> str | None:
    """A machine or accelerator that the catalogue does not hold, or not together."""
    pins, offers = problem.pins, [option.offer for option in problem.options]
    for key, asked, held in (
        ("resources.machine", pins.machine, {offer.machine for offer in offers}),
        ("resources.accelerator", pins.accelerator, {offer.accelerator for offer in offers}),
    ):
        if asked is not None and asked.lower() not in {name.lower() for name in held}:
            close = get_close_matches(asked, sorted(held), n=1)
            meant = f"; did you mean {close[0]}?" if close else f"; it holds {', '.join(sorted(held))}"
            return f"{key} {asked} is not in the catalogue{meant}"
    if pins.machine and pins.accelerator:
        chips = {offer.accelerator for offer in offers if offer.machine == pins.machine}
        if pins.accelerator.lower() not in {chip.lower() for chip in chips}:
            have = ", ".join(sorted(chips))
            return f"{pins.machine} has {have}, and resources.accelerator asks for {pins.accelerator}"
    return None


def _limit(problem: Problem) -> str | None:
    """Where limits alone are in the way: by how much the best plan misses them."""
    limits = problem.limits
    without = search(replace(problem, limits=Limits()))
    if without.cheapest is None or without.fastest is None or limits == Limits():
        return None
    hours, usd = without.fastest.cost.hours_p90, without.cheapest.cost.usd_p90
    if limits.max_hours is not None and hours > limits.max_hours:
        left = duration(max(0.0, limits.max_hours))
        return f"the fastest takes {duration(hours)} (p90), {limits.hours_name} leaves {left}"
    if limits.max_usd is not None and usd is not None and usd > limits.max_usd:
        return f"the cheapest costs {dollars(usd)} (p90), limits.max_usd is {dollars(limits.max_usd)}"
    return f"each of {limits.hours_name} and limits.max_usd can be kept, but not both"


def _telling(rejected: tuple[Rejection, ...]) -> str:
    # Of a TPU's machines the one with the largest slices came furthest.
    rejected = tuple(sorted(rejected, key=lambda one: -len(one.option.slices)))
    order = (
        "needs ",
        " attention; known",
        "no layout",
        "not known in",
        "peak",
        "unknown",
        "price",
        "asks for",
        "a TPU",
    )
    for word in order:
        for rejection in rejected:
            if word in rejection.reason and not rejection.reason.startswith(("needs a ", "resources.")):
                return f"{rejection.reason} ({rejection.option.title})"
    return rejected[0].reason if rejected else "the catalogue is empty"


def _changes(problem: Problem) -> Iterator[tuple[str, Problem]]:
    pins, free = problem.pins, Limits()
    if pins.num_nodes is not None:
        yield "another number of machines", replace(problem, pins=replace(pins, num_nodes=None))
    settings = replace(pins, axes={}, micro_batch_size=None, activation_checkpointing=None)
    if settings != pins:
        yield "another layout, micro-batch or recomputation", replace(problem, pins=settings)
        yield "another layout and number of machines", replace(problem, pins=replace(settings, num_nodes=None))
    if pins.locations:
        yield "elsewhere", replace(problem, pins=replace(settings, locations=(), num_nodes=None))
    if pins.mode:
        yield "another mode", replace(problem, pins=replace(settings, mode=None, num_nodes=None))
    if pins.machine or pins.accelerator or pins.gpus_per_node:
        other = replace(settings, machine=None, accelerator=None, gpus_per_node=None, num_nodes=None)
        yield "another machine", replace(problem, pins=other)
    if not problem.work.lora_rank:
        yield "LoRA instead of all parameters", replace(problem, work=with_lora(problem.work))
    if problem.limits != free:
        if problem.limits.max_hours is not None:
            without = replace(problem.limits, max_hours=None)
            yield f"without {problem.limits.hours_name}", replace(problem, limits=without)
        if problem.limits.max_usd is not None:
            yield "without limits.max_usd", replace(problem, limits=replace(problem.limits, max_usd=None))
        yield "without limits", replace(problem, limits=free)
    anything = replace(problem, pins=Pins(), limits=free)
    yield "any machine, mode and place, without limits", anything
    if not problem.work.lora_rank:
        yield "LoRA on any machine, without limits", replace(anything, work=with_lora(problem.work))
