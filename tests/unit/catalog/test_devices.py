"""A driver's device name finds the catalogue's row, or nothing."""

import pytest

from muster.catalog.devices import accelerator_of


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("", None),
    ],
)
def test_device_names(name, row):
    found = accelerator_of(name)
    assert (found.name if found else None) == row
