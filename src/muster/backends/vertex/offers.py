"""The catalogue's options as Vertex AI rents them: without what it has not, with its fee in the price."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from muster.catalog import vertex
from muster.catalog.offers import UNKNOWN_REGION, Option
from muster.catalog.rows import Price


def rents(options: Sequence[Option]) -> list[Option]:
    """Of ``options`` those that can be asked for here; the price is the machine's and the fee, None where the fee is
    not known."""
    found = []
    for option in options:
        machine, offer = vertex.machines().get(option.offer.machine), option.offer
        if machine is None or machine.accelerator is None or offer.mode not in machine.modes:
            continue
        regions = machine.accelerator.regions
        if regions is not None and offer.location not in (*regions, UNKNOWN_REGION):
            continue
        price = _with_fee(option.price) if option.price is not None else None
        usd = None if price is None else price.usd_per_gpu_hour * machine.gpus
        found.append(replace(option, price=price, offer=replace(offer, backend="vertex", usd_per_node_hour=usd)))
    return found


def _with_fee(price: Price) -> Price | None:
    fee = vertex.fee(price.machine, price.region)
    if fee is None:
        return None
    kind = "as billed" if fee.billed else "assumed"
    return replace(
        price,
        usd_per_gpu_hour=price.usd_per_gpu_hour + fee.usd_per_gpu_hour,
        low=price.low + fee.usd_per_gpu_hour,
        high=price.high + fee.usd_per_gpu_hour,
        source=f"{price.source}; and Vertex AI's fee of {fee.usd_per_gpu_hour:.4f} ({kind})",
    )
