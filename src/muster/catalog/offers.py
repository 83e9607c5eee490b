"""What a plan chooses from: every machine x mode x region, with its price, fabric and failure rate.

An ``Offer`` of the core is what a back end can provide; ``Option`` adds what planning needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median

from muster.catalog import rows
from muster.catalog.rows import Accelerator, Machine, Mode, Price
from muster.core.types import Offer

#: Machines of one type that a plan may take at most: beyond it neither prices nor failure rates are known to hold.
MAX_NODES = 128
UNKNOWN_REGION = "any region"
THIS_MACHINE = "this machine"


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """Bandwidths that collectives see, bytes a second, one direction."""

    intra: float | None
    """Bus bandwidth between the GPUs of a machine."""
    inter: float | None
    """Bus bandwidth of a machine's data network; None: unknown."""
    measured: bool
    """``inter`` was published, not modelled from the line rate."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """An offer with everything that a plan computes from. Compared by value: a plan is a function of these."""

    offer: Offer
    accelerator: Accelerator
    mode: Mode
    fabric: Fabric
    ceiling_flops: float | None
    """bf16 matmul ceiling."""
    ceiling_measured: bool
    price: Price | None
    """None: unknown."""
    slices: tuple[tuple[int, str], ...] = ()
    """Of a TPU: (hosts, topology) of each slice that is sold."""
    start_s: float | None = None
    """Seconds from the request to the first step; None: those of a machine that must be got first."""

    @property
    def title(self) -> str:
        """``a4-highgpu-8g Spot us-central1``."""
        if self.offer.machine == THIS_MACHINE:
            return THIS_MACHINE
        return f"{self.offer.machine} {self.mode.title} {self.offer.location}"

    @property
    def is_tpu(self) -> bool:
        return self.accelerator.kind == "tpu"

    @property
    def unit(self) -> str:
        """What it counts: GPUs, or the chips of a TPU."""
        return "chip" if self.is_tpu else "GPU"

    def topology(self, num_nodes: int) -> str | None:
        """The slice of so many hosts; None: none is sold."""
        return dict(self.slices).get(num_nodes)


def catalogue(overrides: Iterable[Price] = ()) -> list[Option]:
    """Every machine in every mode and region that has a price, and once without where it has none.

    ``overrides``: a user's own prices; they replace a list price of the same machine, mode and region.
    """
    everything = (*rows.shipped_prices(), *overrides)
    prices = {(price.machine, price.mode, price.region): price for price in everything}
    result = []
    for machine in rows.machines().values():
        for name in machine.modes:
            mode = rows.modes()[name]
            priced = [price for key, price in prices.items() if key[:2] == (machine.name, name)]
            result += [option(machine, mode, price.region, price) for price in priced]
            if not priced:
                result.append(option(machine, mode, UNKNOWN_REGION, None))
    owned = [price for price in prices.values() if price.mode == "owned"]
    result += [option(rows.machines()[price.machine], rows.modes()["owned"], price.region, price) for price in owned]
    return result


def option(machine: Machine, mode: Mode, region: str, price: Price | None) -> Option:
    """One row of the catalogue as something to choose."""
    chip = rows.accelerators()[machine.accelerator]
    ceiling, measured = chip.ceiling(1.0 if chip.kind == "tpu" else matmul_share())
    return Option(
        offer=Offer(
            backend="gke",
            machine=machine.name,
            location=region,
            accelerator=machine.accelerator,
            gpus_per_node=machine.count,
            gpu_memory_bytes=chip.memory_bytes,
            usd_per_node_hour=None if price is None else price.usd_per_gpu_hour * machine.count,
            peak_flops_per_gpu=chip.peak_flops.get("bf16"),
            max_nodes=MAX_NODES,
            mode=mode.name,
        ),
        accelerator=chip,
        mode=mode,
        fabric=fabric(machine, mode),
        ceiling_flops=ceiling,
        ceiling_measured=measured,
        price=price,
        slices=tuple((hosts, name) for name, hosts in (machine.topologies or {}).items()),
    )


#: Collectives between processes of one machine without NVLink: shared memory and loopback. From memory, unchecked.
LOOPBACK_BYTES_PER_S = 1e9
#: Imports and the first steps, where nothing has to be got.
START_HERE_S = 30.0


def this_machine(
    chip: Accelerator, *, gpus: int, memory_bytes: int, usd_per_hour: float, hosts: int = 1, source: str = ""
) -> Option:
    """The machine that runs ``muster``, with ``gpus`` ranks of ``chip`` a host; ``hosts`` are processes on it.

    ``usd_per_hour``: of a host; ``source`` says where that comes from.
    """
    ceiling, measured = chip.ceiling(matmul_share())
    alike = (row.intra_bytes_per_s for row in rows.machines().values() if row.accelerator == chip.name)
    link = max((rate * NVLINK_SHARE for rate in alike if rate), default=LOOPBACK_BYTES_PER_S)
    return Option(
        offer=Offer(
            backend="local", machine=THIS_MACHINE, location="here", accelerator=chip.name, gpus_per_node=gpus,
            gpu_memory_bytes=memory_bytes, usd_per_node_hour=usd_per_hour,
            peak_flops_per_gpu=chip.peak_flops.get("bf16"), max_nodes=hosts, mode="owned",
        ),
        accelerator=chip, mode=rows.modes()["owned"], ceiling_flops=ceiling, ceiling_measured=measured,
        fabric=Fabric(intra=link, inter=LOOPBACK_BYTES_PER_S, measured=False), start_s=START_HERE_S,
        price=own_price(THIS_MACHINE, "owned", "here", usd_per_hour / gpus, source),
    )  # fmt: skip


def own_price(machine: str, mode: str, region: str, usd_per_gpu_hour: float, source: str) -> Price:
    """A price that the run file gives: exact, and of no date."""
    return Price(
        machine=machine, mode=mode, region=region, usd_per_gpu_hour=usd_per_gpu_hour, low=usd_per_gpu_hour,
        high=usd_per_gpu_hour, date="", reliability="user", source=source,
    )  # fmt: skip


def at_price(
    options: Sequence[Option],
    machine: Machine,
    *,
    mode: str | None,
    locations: Sequence[str],
    usd_per_host_hour: float,
    source: str,
) -> list[Option]:
    """``options`` with what the run file says a host of ``machine`` costs, in ``mode`` (None: in each).

    A mode or place without a list price becomes one that has a price: the machine is there, and paid for so.
    """
    usd = usd_per_host_hour / machine.count
    names = (mode,) if mode else machine.modes
    result = [each for each in options if each.offer.machine != machine.name or each.mode.name not in names]
    for name in names:
        rivals = [each for each in options if (each.offer.machine, each.mode.name) == (machine.name, name)]
        listed = [each.offer.location for each in rivals if each.price is not None]
        for place in listed or locations or (UNKNOWN_REGION,):
            price = own_price(machine.name, name, place, usd, source)
            result.append(option(machine, rows.modes()[name], place, price))
    return result


def fabric(machine: Machine, mode: Mode) -> Fabric:
    """What collectives get, placement considered."""
    intra = None if machine.intra_bytes_per_s is None else machine.intra_bytes_per_s * NVLINK_SHARE
    if machine.topologies is not None:  # the chips of a slice are wired to each other, across hosts and modes
        return Fabric(intra=intra, inter=None if intra is None else intra * machine.count, measured=False)
    inter, measured = machine.busbw_bytes_per_s, True
    if inter is None:
        line, measured = machine.network_bytes_per_s, False
        inter = None if line is None else line * network_share()
    return Fabric(intra=intra, inter=None if inter is None else inter * mode.network_factor, measured=measured)


#: Share of a GPU's one-way NVLink rate that NCCL's all_gather reaches inside a machine at large sizes: H100 machines
#: show 360 GB/s of 450. From memory, unchecked.
NVLINK_SHARE = 0.8


@cache
def matmul_share() -> float:
    """Median share of the vendor's peak that a measured matmul reaches, over the chips that have both."""
    return median(
        chip.matmul_flops["bf16"] / peak
        for chip in rows.accelerators().values()
        if "bf16" in chip.matmul_flops and (peak := chip.peak_flops.get("bf16"))
    )


@cache
def network_share() -> float:
    """Median share of the line rate that published bus bandwidths reach."""
    return median(
        machine.busbw_bytes_per_s / machine.network_bytes_per_s
        for machine in rows.machines().values()
        if machine.busbw_bytes_per_s and machine.network_bytes_per_s
    )
