"""The rank itself finds the peak of its GPU: on every back end, from the driver's name of the device."""

import pytest
import torch

from muster.config.spec import RunSpec
from muster.train.measurement.profiling import peak_flops


def peak(device="cuda", **output):
    spec = RunSpec.model_validate({
        "name": "x", "backend": "slurm", "output": output, "training": {"steps": 1},
        "model": {"config": {"model_type": "llama"}}, "data": {"sources": [{"type": "random"}]},
    })  # fmt: skip
    return peak_flops(spec, torch.device(device))


@pytest.mark.parametrize(
    ("name", "flops", "words"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12, "data sheet of NVIDIA H100 80GB HBM3"),
        ("NVIDIA H100 PCIe", 756e12, "data sheet of NVIDIA H100 PCIe"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, "set output.peak_tflops"),
        ("NVIDIA GB300", None, "set output.peak_tflops"),
    ],
)
def test_by_the_devices_name(monkeypatch, name, flops, words):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
    found, source = peak()
    assert found == flops and words in source


def test_the_run_file_wins(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H100 PCIe")
    assert peak(peak_tflops=700.0) == (700e12, "output.peak_tflops of the run file")


def test_a_cpu_has_none_but_that_of_the_run_file():
    assert peak("cpu") == (None, "no peak is known for a CPU: set output.peak_tflops")
    assert peak("cpu", peak_tflops=0.1)[0] == 1e11
