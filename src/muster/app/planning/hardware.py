"""What a plan chooses from: the catalogue, at the prices of the user and the run file, and this machine where the run
file's back end runs on it."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from muster import backends
from muster.app.planning.calibrate import cpu
from muster.app.planning.prices import own_prices
from muster.catalog import offers, rows
from muster.catalog.devices import accelerator_of
from muster.catalog.offers import Option
from muster.config.spec import RunSpec
from muster.core.errors import MusterError
from muster.core.processes import processor_ticks
from muster.core.typed_json import Record, Unreadable, decode, encode
from muster.core.types import Offer
from muster.plan.memory import CUDA, DeviceOverhead
from muster.storage import run_registry

KEY = "resources.usd_per_host_hour"
#: Memory of a CPU rank without its tensors, measured on real ranks (docs/explanation/plan.md): threads, logs, kernels'
#: caches; freed tensors go back to the system, and a save is staged in the same memory.
CPU = DeviceOverhead(
    context_bytes=40 << 20, communicator_bytes=0, fragmentation=0.0, expanded_kv=True, stages_here=True, streams=False
)
MATMUL_SIZE, MATMUL_S, MATMUL_FILE = 768, 0.15, "matmul.json"
#: A matmul measured while others use more of the cores than this says too little of them, and is
#: kept only so that commands typed one after the other agree.
BUSY, BUSY_KEPT = 0.15, timedelta(minutes=10)


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What is on offer, and what a reader of the plan must know of it."""

    options: list[Option]
    notes: tuple[str, ...] = ()
    overhead: DeviceOverhead = CUDA


@dataclass(frozen=True, kw_only=True)
class Matmul(Record):
    """What this machine's cores can do, as ``matmul.json`` keeps it."""

    flops: float
    cores: int
    made: str
    others: float = 0.0
    """The share of the cores that other programs used meanwhile."""


def hardware(spec: RunSpec, home: Path | None) -> Hardware:
    """Everything that ``spec`` could run on.

    A run on the CPU of this machine has no choice: it alone is on offer. A run on TPUs is planned for the catalogue's,
    not for this machine. GPUs of this machine are one offer besides the catalogue's.
    """
    here = backends.get(spec.backend).capabilities.uses_this_machine
    tpu = spec.resources.device == "tpu"
    if here and spec.resources.device == "cpu":
        return _this_cpu(spec, home or run_registry.home())
    options = list(backends.get(spec.backend).market.rents(offers.catalogue(own_prices(home))))
    notes: list[str] = []
    look = backends.get(spec.backend).market.look
    if look is not None and spec.resources.machine is None and not tpu:
        options, learned = _of_cluster(spec, look, options)
        notes.append(learned)
    usd, machine = spec.resources.usd_per_host_hour, rows.machines().get(spec.resources.machine or "")
    if usd is not None and machine is not None:
        mode = spec.resources.provisioning_model
        options = offers.at_price(
            options, machine, mode=mode and mode.removesuffix("_queued"), locations=spec.resources.locations,
            usd_per_host_hour=usd, source=KEY,
        )  # fmt: skip
    elif usd is not None and (tpu or not here):
        notes.append(f"list prices: {KEY} is of the host that resources.machine names, and it names none")
    if (rate := spec.resources.network_gb_s) is not None and not tpu:
        inter = rate * rows.GIGA * offers.network_share()
        options = [replace(each, fabric=replace(each.fabric, inter=inter, measured=False)) for each in options]
        reached = f"{inter / rows.GIGA:.0f}"
        notes.append(f"hosts' network: resources.network_gb_s {rate:g}, of which collectives get {reached}")
    if tpu:
        notes.append("one slice, mesh data 1 x fsdp x tp over all its chips, with the run file's tp, else the fastest")
        notes.append("TPUs of the catalogue, not this machine; backend gke starts slices of several hosts")
    elif here:
        option, note = _these_gpus(spec)
        options = [option, *options] if option is not None else options
        notes += [note] if note else []
    return Hardware(options=options, notes=tuple(notes))


def _of_cluster(
    spec: RunSpec, look: Callable[[RunSpec], Sequence[Offer]], catalogue: list[Option]
) -> tuple[list[Option], str]:
    """(The cluster's machines, each as the catalogue's with its GPUs; what was learned), else the catalogue's."""
    try:
        offered = look(spec)
    except MusterError as error:
        return catalogue, f"the cluster was not asked ({error}): the machine of this plan is an assumption"
    usd, source = _price_here(spec)
    result, names = [], []
    for offer in offered:
        alike = (row for row in rows.machines().values() if row.accelerator == offer.accelerator)
        machine = next((row for row in alike if row.count == offer.gpus_per_node), None)
        if machine is not None:
            price = offers.own_price(machine.name, "owned", offer.location, usd / machine.count, source)
            option = offers.option(machine, rows.modes()["owned"], offer.location, price)
            result.append(replace(option, offer=replace(option.offer, max_nodes=offer.max_nodes)))
            names.append(f"{offer.gpus_per_node} {offer.accelerator} in {offer.location} as {machine.name}")
    if not result:
        seen = ", ".join(sorted({f"{each.gpus_per_node} {each.accelerator}" for each in offered})) or "no usable node"
        return catalogue, f"the cluster has {seen}, which is not planned: the machine of this plan is an assumption"
    return result, f"the cluster has {', '.join(sorted(set(names)))}; its network: resources.network_gb_s"


def _these_gpus(spec: RunSpec) -> tuple[Option | None, str | None]:
    """(this machine, None), or why it is left out."""
    resources = spec.resources
    try:
        [offer] = backends.get(spec.backend).launcher().offers(spec)
    except MusterError as error:
        return None, f"this machine is left out: {error}"
    if not offer.gpus_per_node:
        return None, "this machine is left out: it has no GPU (resources.device: cpu plans for its cores)"
    chip = accelerator_of(offer.accelerator)
    if chip is None:
        return None, f"this machine is left out: the catalogue does not know its {offer.accelerator}"
    ranks = resources.ranks_per_host or max(1, offer.gpus_per_node // resources.hosts)
    if ranks * resources.hosts > offer.gpus_per_node:
        needed = f"{resources.hosts} x {ranks} ranks need as many GPUs"
        return None, f"this machine is left out: {needed}, and it has {offer.gpus_per_node}"
    usd, source = _price_here(spec)
    memory_bytes = offer.gpu_memory_bytes or chip.memory_bytes
    return offers.this_machine(
        chip, gpus=ranks, memory_bytes=memory_bytes, usd_per_hour=usd, hosts=resources.hosts, source=source
    ), None


def _this_cpu(spec: RunSpec, home: Path) -> Hardware:
    """This machine's cores and memory, shared by all ranks of the run."""
    resources = spec.resources
    ranks = resources.ranks_per_host or 1
    world = ranks * resources.hosts
    flops, origin = _kept_matmul_flops(home)
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // world
    usd, source = _price_here(spec)
    notes = (f"{origin}: {flops / 1e9:,.0f} GFLOP/s for {world} rank(s)",)
    option = offers.this_machine(
        cpu(flops / world, origin=origin, memory_bytes=memory_bytes), gpus=ranks, memory_bytes=memory_bytes,
        usd_per_hour=usd, hosts=resources.hosts, source=source,
    )  # fmt: skip
    return Hardware(options=[option], notes=notes, overhead=CPU)


def _price_here(spec: RunSpec) -> tuple[float, str]:
    usd = spec.resources.usd_per_host_hour
    return (0.0, f"your own machine; {KEY} says otherwise") if usd is None else (usd, KEY)


def _kept_matmul_flops(home: Path) -> tuple[float, str]:
    """``_matmul_flops``, once a machine: two plans of one file, or a plan and a rehearsal, have one step time. What was
    measured while others used the cores is measured again after a while."""
    path, cores, now = home / MATMUL_FILE, os.cpu_count() or 0, datetime.now(UTC)
    with contextlib.suppress(OSError, Unreadable, ValueError, TypeError):  # none yet, or nothing that can be read
        kept = decode(Matmul, path.read_bytes())
        stale = kept.others > BUSY and now - datetime.fromisoformat(kept.made) > BUSY_KEPT
        if kept.cores == cores and 0 < kept.flops < math.inf and not stale:
            origin = f"a matmul of this machine's cores, measured {kept.made}, kept in {path}"
            return kept.flops, origin + _disturbed(kept.others)
    flops, others, origin = _matmul_flops()
    made = now.isoformat(timespec="seconds")
    with contextlib.suppress(OSError):
        run_registry.make_folder(home)
        measured = Matmul(flops=flops, cores=cores, made=made, others=others)
        run_registry.replace_text(path, encode(measured).decode() + "\n")
    return flops, origin + _disturbed(others)


def _disturbed(others: float) -> str:
    return f", while other programs used {others:.0%} of them: it may be much faster" if others > BUSY else ""


def _matmul_flops() -> tuple[float, float, str]:
    """(FLOP/s of all cores together, the share of them that other programs used meanwhile, where the figure is from):
    the best float32 matmul within a moment."""
    try:
        import numpy
    except ImportError:
        cores = os.cpu_count() or 1
        return cores * 30e9, 0.0, "30 GFLOP/s a core, a guess (numpy is not installed: nothing was measured)"
    left = numpy.random.default_rng(0).random((MATMUL_SIZE, MATMUL_SIZE), dtype=numpy.float32)
    best, begun, end = 0.0, _processor_s(), time.perf_counter() + MATMUL_S
    while time.perf_counter() < end:
        began = time.perf_counter()
        left @ left
        best = max(best, 2 * MATMUL_SIZE**3 / (time.perf_counter() - began))
    mine, all_busy, there = (now - then for now, then in zip(_processor_s(), begun, strict=True))
    others = max(0.0, all_busy - mine) / there if there > 0 else 0.0
    return best, others, "a matmul of this machine's cores, measured now"


def _processor_s() -> tuple[float, float, float]:
    """Seconds of processors so far: this process's, all programs', all there were; zeros for the last two where the
    system does not say."""
    busy, everything = processor_ticks()
    a_second = os.sysconf("SC_CLK_TCK")
    return time.process_time(), (busy or 0) / a_second, (everything or 0) / a_second
