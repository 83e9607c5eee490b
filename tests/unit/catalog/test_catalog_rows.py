"""The tables hold together: every row typed, dated, with an origin; shapes proven by parameter counts."""

from datetime import date

import pytest

from muster.catalog import offers, rows
from muster.core.errors import UsageError


def test_every_model_has_the_parameters_the_hub_shows():
    assert len(rows.models()) >= 20
    for name, model in rows.models().items():
        assert model.shape.parameters == model.parameters, name


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("qwen/qwen2.5-7b-instruct", "Qwen/Qwen2.5-7B"),
        ("google/gemma-3-1b-it", "google/gemma-3-1b-pt"),
        ("meta-llama/Llama-3.3-70B-Instruct", "meta-llama/Llama-3.3-70B-Instruct"),
        ("somebody/else", None),
    ],
)
def test_models_are_found_by_hub_name(asked, found):
    model = rows.find_model(asked)
    assert (model.name if model else None) == found


RELIABILITY = ("measured", "cited", "first-hand", "second-hand", "third-hand", "memory", "user")


def test_every_row_says_where_it_is_from():
    for chip in rows.accelerators().values():
        assert chip.origin and chip.reliability in RELIABILITY, chip.name
    for machine in rows.machines().values():
        assert machine.origin and machine.accelerator in rows.accelerators(), machine.name
        assert set(machine.modes) <= set(rows.modes()), machine.name
    for mode in rows.modes().values():
        assert mode.origin, mode.name
    for price in rows.shipped_prices():
        assert price.source and price.date and price.reliability in RELIABILITY, price
    for kind in rows.storage().values():
        assert kind.origin and kind.reliability in RELIABILITY, kind.name
    assert date.fromisoformat(rows.table_date("storage.yaml"))


def test_what_is_not_sold_is_not_in_the_catalogue():
    for name in ("a4-highgpu-8g", "a4x-highgpu-4g", "a3-ultragpu-8g", "a3-highgpu-1g"):
        assert "on_demand" not in rows.machines()[name].modes
    for price in rows.shipped_prices():
        assert price.mode in rows.machines()[price.machine].modes, price


def test_all_families_are_listed():
    families = {machine.family for machine in rows.machines().values()}
    assert families >= {"A2", "A3 High", "A3 Mega", "A3 Ultra", "A4", "A4X", "G2", "G4"}
    assert families >= {"TPU v4", "TPU v5e", "TPU v5p", "TPU v6e"}
    assert {"T4", "TPU-v4"} <= set(rows.accelerators())


def test_tables_are_not_too_old():
    """Prices rot: after a year somebody must go over them (or `muster prices update`)."""
    for name in ("accelerators.yaml", "machines.yaml", "modes.yaml", "models.yaml"):
        gone_over = date.fromisoformat(rows.table_date(name))
        assert (date.today() - gone_over).days < 365, f"{name} is of {gone_over}"


def test_unknown_is_unknown():
    assert rows.accelerators()["GB300"].peak_flops["bf16"] is None
    assert rows.accelerators()["T4"].ceiling(0.8) == (None, False)
    unknown = [each for each in offers.catalogue() if each.price is None]
    assert unknown and all(each.offer.usd_per_node_hour is None for each in unknown)


def test_a_measured_ceiling_is_told_from_a_modelled_one():
    flops, measured = rows.accelerators()["H100"].ceiling(offers.matmul_share())
    assert measured and flops == 794.5e12
    flops, measured = rows.accelerators()["A100"].ceiling(offers.matmul_share())
    assert not measured and flops == pytest.approx(312e12 * offers.matmul_share())


def test_spot_has_a_slower_network_than_a_reservation():
    machine = rows.machines()["a4-highgpu-8g"]
    spot = offers.fabric(machine, rows.modes()["spot"])
    placed = offers.fabric(machine, rows.modes()["flex_start"])
    assert spot.inter < placed.inter == 376.6e9


def test_own_prices_override():
    text = "machine,mode,region,usd_per_gpu_hour\na4-highgpu-8g,reservation,us-central1,3.5\n"
    mine = list(rows.prices_from(text, source="prices.csv"))
    found = [
        each
        for each in offers.catalogue(mine)
        if (each.offer.machine, each.mode.name, each.offer.location) == ("a4-highgpu-8g", "reservation", "us-central1")
    ]
    assert [each.offer.usd_per_node_hour for each in found] == [28.0]
    assert found[0].price.reliability == "user"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("a4-highgpu-8g,spot,us-central1,cheap", "prices.csv:2: could not convert"),
        ("a5-highgpu-8g,spot,us-central1,1", "no machine 'a5-highgpu-8g'"),
        ("a4-highgpu-8g,spot,us-central1,-1", "needs 0 <= low"),
    ],
)
def test_a_wrong_price_row_is_named(row, message):
    with pytest.raises(UsageError, match=message):
        list(rows.prices_from(f"machine,mode,region,usd_per_gpu_hour\n{row}\n", source="prices.csv"))


def test_a_price_file_without_its_columns_is_refused():
    with pytest.raises(UsageError, match="no column usd_per_gpu_hour"):
        list(rows.prices_from("machine,mode,region\n", source="mine.csv"))
