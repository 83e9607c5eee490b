"""The rank itself finds the peak of its GPU: on every back end, from the driver's name of the device."""

import pytest
import torch

from muster.config.spec import RunSpec
from muster.train.measurement.profiling import peak_flops


def peak(tmp_path, **output):
    spec = RunSpec.model_validate({
        "name": "x", "backend": "slurm", "output": output, "training": {"steps": 1},
        "model": {"config": {"model_type": "llama"}}, "data": {"sources": [{"type": "random"}]},
    })  # fmt: skip
    return peak_flops(spec, device=torch.device("cuda"), run_dir=tmp_path, probe=True, keep=True)


@pytest.mark.parametrize(
    ("name", "flops", "words"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12, "data sheet of NVIDIA H100 80GB HBM3"),
        ("NVIDIA H100 PCIe", 756e12, "data sheet of NVIDIA H100 PCIe"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, "set output.peak_tflops"),
        ("NVIDIA GB300", None, "set output.peak_tflops"),
    ],
)
def test_by_the_devices_name(tmp_path, monkeypatch, name, flops, words):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
    found, source = peak(tmp_path)
    assert found == flops and words in source
    assert not list(tmp_path.iterdir()), "nothing was measured"


def test_the_run_file_wins(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H100 PCIe")
    assert peak(tmp_path, peak_tflops=700.0) == (700e12, "output.peak_tflops of the run file")
