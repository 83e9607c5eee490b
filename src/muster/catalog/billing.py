"""Google's billing SKUs to prices of machines. Pure: the SKUs are an argument.

A naive match picks the wrong row: B200 Spot and every DWS SKU carry ``usageType: OnDemand``; "H100 80GB" is a prefix
of A3 Mega's name; "A100" of the 80 GB part's. So a description is parsed into a way of buying (by its marker) and
the rest, which must be exactly one of the names in ``tables/billing.yaml``. What does not match is left out, never
guessed.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from io import StringIO

from muster.catalog import rows
from muster.catalog.rows import Price
from muster.core.typed_json import JsonObject, at, child, text, texts


@dataclass(frozen=True, kw_only=True)
class Parts:
    """SKU names that a machine's bill is made of, without local SSD (which is billed separately)."""

    gpu: tuple[str, ...]
    core: tuple[str, ...] = ()
    ram: tuple[str, ...] = ()
    vcpus: int = 0
    ram_gb: int = 0


@cache
def machine_parts() -> Mapping[str, Parts]:
    """The parts of every machine whose SKUs are known."""
    return rows.typed(Parts, rows.table("billing.yaml")["machines"])


_PLACE = re.compile(r" (?:running )?in [^()]*$")
_WAYS = re.compile(
    r"^(Reserved|DWS Calendar Mode|DWS Defined Duration|Spot Preemptible) "
    r"| attached to (Spot Preemptible|DWS Defined Duration|DWS Calendar Mode) VMs"
)
_MARKS: Sequence[tuple[str, re.Pattern[str]]] = (
    ("", re.compile(r"^Commitment|Sole Tenancy|\bCustom\b|vGPU|no lssd", re.IGNORECASE)),
    ("calendar", re.compile(r"^Reserved (?=.*Calendar Mode)|^DWS Calendar Mode | attached to DWS Calendar Mode VMs")),
    ("", re.compile(r"^Reserved ")),
    ("flex_start", re.compile(r"^DWS Defined Duration | attached to DWS Defined Duration VMs")),
    ("spot", re.compile(r"^Spot Preemptible | attached to Spot Preemptible VMs")),
)


def prices_of(skus: Iterable[JsonObject], *, date: str) -> tuple[list[Price], list[str]]:
    """(prices, what was looked for and not found) from the Cloud Billing Catalog's ``skus``."""
    rates: dict[tuple[str, str, str], float] = {}
    for sku in skus:
        mode, name = parse_description(text(sku, "description"))
        usd = hourly_usd(sku)
        if mode is None or usd is None or usd <= 0:
            continue
        for region in texts(sku, "serviceRegions"):
            rates[mode, name, region] = usd
    result: list[Price] = []
    missing: list[str] = []
    regions = sorted({region for _, _, region in rates})
    for machine, parts in machine_parts().items():
        count = rows.machines()[machine].count
        for mode in ("on_demand", "spot", "flex_start", "calendar"):
            here = []
            for region in regions:
                usd = _machine_usd(rates, parts, mode, region, count)
                if usd is not None:
                    here.append(
                        Price(
                            machine=machine, mode=mode, region=region, usd_per_gpu_hour=usd / count,
                            low=usd / count, high=usd / count, date=date, reliability="first-hand",
                            source="Cloud Billing Catalog",
                        )
                    )  # fmt: skip
            result += here
            if not here and mode in rows.machines()[machine].modes:
                missing.append(f"{machine} {mode}")
    return result, missing


def parse_description(description: str) -> tuple[str | None, str]:
    """(way of buying, what) of an SKU; None: one that no plan uses.

    ``Nvidia H100 80GB GPU attached to DWS Defined Duration VMs running in Americas`` is flex-start of
    ``Nvidia H100 80GB GPU``.
    """
    words = " ".join(description.split())
    mode = next((mode for mode, mark in _MARKS if mark.search(words)), "on_demand")
    name = _WAYS.sub("", _PLACE.sub("", words)).strip()
    return mode or None, name


def hourly_usd(sku: JsonObject) -> float | None:
    """Dollars an hour (or GiB-hour) of an SKU's newest price; money may carry ``nanos`` and no ``units``."""
    expression = child(sku, "pricingInfo", -1, "pricingExpression")
    price = at(expression, "tieredRates", -1, "unitPrice")
    if text(expression, "usageUnit") not in ("h", "GiBy.h") or not isinstance(price, Mapping):
        return None
    try:
        return float(text(price, "units") or 0) + float(text(price, "nanos") or 0) / 1e9
    except ValueError:
        return None


def as_csv(prices: Iterable[Price]) -> str:
    """A price file as ``rows.prices_from`` reads it."""
    out = StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(column.name for column in fields(Price))
    for price in prices:
        writer.writerow(f"{value:.6f}" if isinstance(value, float) else value for value in vars(price).values())
    return out.getvalue()


def _machine_usd(
    rates: Mapping[tuple[str, str, str], float], parts: Parts, mode: str, region: str, count: int
) -> float | None:
    """Sum of a machine's parts; None where one of them has no rate."""

    def rate(names: Sequence[str]) -> float | None:
        return next((rates[mode, name, region] for name in names if (mode, name, region) in rates), None)

    gpu = rate(parts.gpu)
    if gpu is None:
        return None
    total = gpu * count
    for names, amount in ((parts.core, parts.vcpus), (parts.ram, parts.ram_gb)):
        if names:
            usd = rate(names)
            if usd is None:
                return None
            total += usd * amount
    return total
