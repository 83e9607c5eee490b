"""Billing SKUs to machine prices: the traps that a naive match falls into. Names as Google writes them."""

import pytest

from muster.catalog import billing, rows


def sku(description, units, nanos=0, usage="OnDemand", unit="h", regions=("us-central1",)):
    price = {"currencyCode": "USD", "nanos": nanos}
    if units:  # money below a dollar comes without units
        price["units"] = str(units)
    return {
        "description": description,
        "category": {"usageType": usage},
        "serviceRegions": list(regions),
        "pricingInfo": [{"pricingExpression": {"usageUnit": unit, "tieredRates": [{"unitPrice": price}]}}],
    }


A3_FLEX = [
    sku("Nvidia H100 80GB GPU attached to DWS Defined Duration VMs running in Americas", 4, 200761000),
    sku("DWS Defined Duration A3 Core running in Americas", 0, 10934000),
    sku("DWS Defined Duration A3 Ram running in Americas", 0, 951000, unit="GiBy.h"),
]


@pytest.mark.parametrize(
    ("description", "mode", "name"),
    [
        ("Nvidia H100 80GB GPU running in Americas", "on_demand", "Nvidia H100 80GB GPU"),
        ("Nvidia H100 80GB Plus GPU running in Americas", "on_demand", "Nvidia H100 80GB Plus GPU"),
        ("Nvidia Tesla A100 GPU attached to Spot Preemptible VMs running in Americas", "spot", "Nvidia Tesla A100 GPU"),
        ("Spot Preemptible A4 Nvidia B200 (1 gpu slice) running in Americas", "spot", "A4 Nvidia B200 (1 gpu slice)"),
        ("A4 Nvidia B200 (1 gpu slice) running in Americas", "on_demand", "A4 Nvidia B200 (1 gpu slice)"),
        ("DWS Defined Duration A3 Core running in Americas", "flex_start", "A3 Core"),
        ("Reserved Nvidia H100 80GB Mega GPU in Americas in Calendar Mode", "calendar", "Nvidia H100 80GB Mega GPU"),
        ("Reserved Nvidia Tesla A100 GPU in Americas", None, None),
        ("Commitment v1: Nvidia H100 80GB GPU running in Americas for 1 Year", None, None),
        ("Nvidia L4 Sole Tenancy Premium in Iowa", None, None),
    ],
)
def test_a_description_is_taken_apart(description, mode, name):
    found_mode, found_name = billing.parse_description(description)
    assert found_mode == mode
    if mode:
        assert found_name == name


def test_flex_start_is_not_taken_for_on_demand():
    found, missing = billing.prices_of(A3_FLEX, date="2026-11-21")
    assert [(p.machine, p.mode) for p in found] == [("a3-highgpu-8g", "flex_start")]
    assert found[0].usd_per_gpu_hour == pytest.approx(4.200761 + (208 * 0.010934 + 1872 * 0.000951) / 8)
    assert "a3-highgpu-8g on_demand" in missing


def test_a_machine_with_a_missing_part_has_no_price():
    found, _ = billing.prices_of(A3_FLEX[:2], date="2026-11-21")
    assert found == []


def test_b200_is_all_inclusive():
    skus = [
        sku("Spot Preemptible A4 Nvidia B200 (1 gpu slice) running in Americas", 4, 954200000),
        sku("A4 Nvidia B200 (1 gpu slice) running in Americas", 16, 110000000),
    ]
    found, _ = billing.prices_of(skus, date="2026-11-21")
    by_mode = {price.mode: price.usd_per_gpu_hour for price in found}
    assert by_mode["spot"] == pytest.approx(4.9542)
    assert by_mode["on_demand"] == pytest.approx(16.11)


def test_the_80_gb_part_is_not_the_40_gb_one():
    skus = [
        sku("Nvidia Tesla A100 80GB GPU running in Americas", 4, 424200000),
        sku("A2 Instance Core running in Americas", 0, 31611000),
        sku("A2 Instance Ram running in Americas", 0, 4237000, unit="GiBy.h"),
    ]
    found, _ = billing.prices_of(skus, date="2026-11-21")
    assert {price.machine for price in found} == {"a2-ultragpu-8g"}


def test_a_month_is_no_hour_and_nonsense_is_left_out():
    assert billing.hourly_usd(sku("x", 1, unit="GiBy.mo")) is None
    assert billing.hourly_usd({}) is None
    assert billing.hourly_usd(sku("x", 0, 500000000)) == 0.5


def test_fetched_prices_are_written_as_they_are_read():
    found, _ = billing.prices_of(A3_FLEX, date="2026-11-21")
    again = list(rows.prices_from(billing.as_csv(found), source="prices-google.csv"))
    assert [(p.machine, p.mode, p.region, p.date) for p in again] == [
        ("a3-highgpu-8g", "flex_start", "us-central1", "2026-11-21")
    ]
    assert again[0].usd_per_gpu_hour == pytest.approx(found[0].usd_per_gpu_hour, abs=1e-6)
