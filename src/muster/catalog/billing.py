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
from typing import Any

from muster.catalog import rows
from muster.catalog.rows import Price


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
    result = {}
    for name, row in rows.table("billing.yaml")["machines"].items():
        names = {kind: tuple(row.get(kind, ())) for kind in ("gpu", "core", "ram")}
        result[name] = Parts(**names, vcpus=row.get("vcpus", 0), ram_gb=row.get("ram_gb", 0))
    return result


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


def prices_of(skus: Iterable[Mapping[str, Any]], *, date: str) -> tuple[list[Price], list[str]]:
    """(prices, what was looked for and not found) from the Cloud Billing Catalog's ``skus``."""
    rates: dict[tuple[str, str, str], float] = {}
    for sku in skus:
        mode, name = parse_description(str(sku.get("description", "")))
        usd = hourly_usd(sku)
        if mode is None or usd is None or usd <= 0:
            continue
        for region in sku.get("serviceRegions", []):
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
    text = " ".join(description.split())
    mode = next((mode for mode, mark in _MARKS if mark.search(text)), "on_demand")
    name = _WAYS.sub("", _PLACE.sub("", text)).strip()
    return mode or None, name


def hourly_usd(sku: Mapping[str, Any]) -> float | None:
    """Dollars an hour (or GiB-hour) of an SKU's newest price; money may carry ``nanos`` and no ``units``."""
    try:
        expression = sku["pricingInfo"][-1]["pricingExpression"]
        if expression.get("usageUnit") not in ("h", "GiBy.h"):
            return None
        price = expression["tieredRates"][-1]["unitPrice"]
        return float(price.get("units") or 0) + float(price.get("nanos") or 0) / 1e9
    except (KeyError, IndexError, TypeError, ValueError):
        return None


def as_csv(prices: Iterable[Price]) -> str:
    """A price file as ``rows.prices_from`` reads it."""
    out = StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(column.name for column in fields(Price))
    for each in prices:
        writer.writerow(f"{value:.6f}" if isinstance(value, float) else value for value in vars(each).values())
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
            each = rate(names)
            if each is None:
                return None
            total += each * amount
    return total
