"""A driver's device name finds the catalogue's row, or nothing."""

import pytest

from muster.catalog.devices import accelerator_of, bf16_peak


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


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GB300", None),  # the catalogue's own row has no peak
        ("NVIDIA GeForce RTX 4090", None),
        ("", None),
    ],
)
def test_the_peak_that_mfu_divides_by(name, tflops):
    peak = bf16_peak(name)
    assert (peak and peak / 1e12) == tflops
