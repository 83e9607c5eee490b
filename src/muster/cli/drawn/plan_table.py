"""A plan as plain text."""

from __future__ import annotations

from collections.abc import Iterator

from muster.app.planning.memory_trace import Compared
from muster.app.planning.plan import NotTaken, Plan, Planned, PlannedWay, format

REJECTED_SHOWN = 8


def lines(result: Planned, *, every: bool = False) -> Iterator[str]:
    """The chosen plan, the frontier, and why other offers were not taken."""
    chosen = result.plan.chosen
    if result.here:
        yield here(chosen)
    yield f"{result.plan.job}: {chosen.title}"
    yield from _figures(result.plan)
    yield ""
    yield from _memory(chosen)
    if not result.here or len(result.plan.frontier) > 1:
        yield from _frontier(result)
    shown = result.plan.rejected if every else _telling(result.plan.rejected)
    if shown:
        yield ""
        yield "not taken:"
    for other in shown:
        yield f"  {other.machine:<20} {other.mode:<11} {other.location:<16} {other.reason}"
    left = len(result.plan.rejected) - len(shown)
    if left:
        yield f"  and {left} more (--all)"
    yield ""
    for assumption in (*result.plan.assumptions, *chosen.modelled):
        yield f"assumed: {assumption}"


def compared(name: str, planned: Planned) -> Iterator[str]:
    """One device of a comparison: how its plan comes about, and what that assumes."""
    chosen = planned.plan.chosen
    yield f"{name}: {planned.plan.job}: {chosen.title}"
    yield from _figures(planned.plan)
    for assumption in (*planned.plan.assumptions, *chosen.modelled):
        yield f"  assumed  {assumption}"


def here(chosen: PlannedWay) -> str:
    """What it comes to on the machine at which the plan is asked for: ``here: free, about 2 min``."""
    usd, hours = chosen.usd.p50, chosen.hours
    cost = "free" if usd == 0 else "at an unknown price" if usd is None else format.dollars(usd)
    return f"here: {cost}, about {format.duration(hours.p50)} (p90 {format.duration(hours.p90)})"


def _frontier(result: Planned) -> Iterator[str]:
    yield ""
    units = f"{unit(result.plan.chosen)}s"
    yield f"{'plan':<52} {units:>5} {'step s':>8} {'MFU':>6} {'time p50':>9} {'p90':>9} {'cost p50':>10} {'p90':>10}"
    for row in result.plan.frontier:
        yield _row(row)


def trace_lines(trace: Compared) -> Iterator[str]:
    """The closed form against the trace."""
    yield ""
    yield (
        f"memory of tensors on one rank: closed form {trace.closed_form_bytes / 2**30:.2f} GiB, "
        f"trace {trace.trace_bytes / 2**30:.2f} GiB ({trace.difference:+.1%})"
    )


def _figures(plan: Plan) -> Iterator[str]:
    chosen = plan.chosen
    layout = " x ".join(f"{name} {size}" for name, size in chosen.layout.items() if size > 1) or f"one {unit(chosen)}"
    if chosen.topology is not None:
        tp = chosen.layout.get("tp", 1)
        layout = f"slice {chosen.topology}, mesh data 1 x fsdp {chosen.gpus // tp}" + (f" x tp {tp}" if tp > 1 else "")
    usd, hours = chosen.usd, chosen.hours
    mfu = f", MFU {chosen.mfu:.1%}" if chosen.mfu is not None else ""
    yield (
        f"  layout   {layout}; micro-batch {chosen.micro_batch_size}, {chosen.rounds} round(s), "
        f"checkpointing {chosen.activation_checkpointing}"
    )
    each = f" ({chosen.tokens_per_s_per_gpu:,.0f} a chip)" if chosen.topology is not None else ""
    yield f"  step     {chosen.step_s:.3g} s, {chosen.tokens_per_s:,.0f} tokens/s{each}{mfu}"
    yield (
        f"  time     {format.duration(hours.p50)} (p90 {format.duration(hours.p90)}), "
        f"goodput {chosen.goodput:.1%}, checkpoint every {chosen.checkpoint_every_steps} steps"
    )
    if chosen.snapshot_every_steps:
        yield f"  snapshot {_snapshots(chosen)}"
    if usd.p50:
        yield (
            f"  cost     {format.dollars(usd.p50)} (p90 {format.dollars(usd.p90)}), "
            f"{format.dollars(chosen.usd_per_step)} a step, "
            f"{format.dollars(chosen.usd_per_million_tokens)} a million tokens, "
            f"{format.dollars(chosen.usd_per_hour)}/h"
        )
    price = chosen.price
    if price and price.usd_per_gpu_hour:
        origin = f"{price.reliability}{', ' if price.date else ''}{price.date}: {price.source}"
        yield f"  price    ${price.usd_per_gpu_hour:g} a {unit(chosen)}-hour ({origin})"
    elif price is None:
        yield "  price    no price known"
    if requests := plan.bucket:
        yield (
            f"  bucket   {requests.writes_per_hour:,} writes and {requests.reads_per_hour:,} reads an hour at most, "
            f"{format.dollars(requests.usd_per_hour)}/h ({requests.prices})"
        )
    for line in plan.storage:
        yield f"  storage  {line}"
    for key, label in (("chance_in_time", "in time"), ("chance_within_max_usd", "within limits.max_usd")):
        if key in plan.chances:
            yield f"  chance   {plan.chances[key]:.0%} {label}"


def unit(chosen: PlannedWay) -> str:
    """What it counts: GPUs, or the chips of a TPU."""
    return "GPU" if chosen.topology is None else "chip"


def _snapshots(chosen: PlannedWay) -> str:
    every, auto = chosen.snapshot_every_steps, chosen.snapshot_every_steps_by_cost
    share = chosen.step_s_by_item.get("snapshots", 0.0) / chosen.step_s
    often = "each step" if every == 1 else f"every {every} steps"
    text = (
        f"a snapshot in the host's memory {often}: {chosen.snapshot_s:.2g} s each, during the steps "
        f"but for {share:.1%} of the time"
    )
    if auto == every:
        return text
    return f"{text} (checkpoint.snapshot_every_steps: auto takes one every {auto} steps)"


def _memory(chosen: PlannedWay) -> Iterator[str]:
    total, have = chosen.memory_bytes_per_gpu, chosen.gpu_memory_bytes
    moment = chosen.memory_peak_moment
    yield f"  memory   {format.gigabytes(total)} of {format.gigabytes(have)} a {unit(chosen)} at its peak ({moment})"
    for name, count in sorted(chosen.memory_bytes_by_item.items(), key=lambda item: -item[1]):
        yield f"    {name:<22} {count / 1e9:8.2f} GB"
    yield from _host_memory(chosen)


def _host_memory(chosen: PlannedWay) -> Iterator[str]:
    items, limit = chosen.host_memory_bytes_by_item, chosen.host_memory_limit_bytes
    if items:
        room = f" (/dev/shm, for snapshots: {limit / 1e9:,.0f} GB)" if limit else ""
        yield f"  host     {sum(items.values()) / 1e9:,.2f} GB of a machine's own memory{room}"
    for name, count in items.items():
        yield f"    {name:<22} {count / 1e9:8.2f} GB"
    if chosen.host_memory_warning:
        yield f"    warning: {chosen.host_memory_warning}"


def _row(row: PlannedWay) -> str:
    mfu = f"{row.mfu:.1%}" if row.mfu is not None else "-"
    usd, hours = row.usd, row.hours
    return (
        f"{row.title:<52} {row.gpus:>5} {row.step_s:>8.3g} {mfu:>6} {format.duration(hours.p50):>9} "
        f"{format.duration(hours.p90):>9} {format.dollars(usd.p50):>10} {format.dollars(usd.p90):>10}"
    )


def _telling(rejected: tuple[NotTaken, ...]) -> list[NotTaken]:
    """One example of each kind of reason, those with numbers first."""
    result: dict[str, NotTaken] = {}
    for rejection in sorted(rejected, key=lambda r: not any(c.isdigit() for c in r.reason)):
        kind = "".join(c for c in rejection.reason if not c.isdigit() and c not in ".,")[:18]
        result.setdefault(kind, rejection)
    return list(result.values())[:REJECTED_SHOWN]
