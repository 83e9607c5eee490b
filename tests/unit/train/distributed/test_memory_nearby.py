"""A rank stays on the processors beside its GPU."""

import os
from types import SimpleNamespace

import pytest
import torch

from muster.train.distributed import memory_nearby
from muster.train.distributed.memory_nearby import processors, stay_near

GPU = torch.device("cuda", 2)
ADDRESS = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xDC, pci_device_id=0)


@pytest.fixture
def bound(monkeypatch):
    """What this process was bound to; it may use 16 processors."""
    found = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: ADDRESS)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, chosen: found.append((pid, set(chosen))))
    return found


def card(tmp_path, text):
    folder = tmp_path / "0000:dc:00.0"
    folder.mkdir()
    (folder / "local_cpulist").write_text(text)
    return tmp_path


def test_it_is_bound_to_those_of_the_gpus_node_that_it_may_use(bound, tmp_path):
    assert stay_near(GPU, sysfs=card(tmp_path, "8-11,14,32-63\n")) == {8, 9, 10, 11, 14}
    assert bound == [(0, {8, 9, 10, 11, 14})]


@pytest.mark.parametrize("text", ["0-15\n", "0-127\n", "32-63\n", "\n", "what"])
def test_nothing_happens_where_it_is_there_may_not_be_or_cannot_be_told(bound, tmp_path, text):
    assert stay_near(GPU, sysfs=card(tmp_path, text)) is None and not bound


def test_nothing_happens_without_the_systems_word_or_torchs_or_a_gpu(bound, tmp_path, monkeypatch):
    assert stay_near(GPU, sysfs=tmp_path) is None
    assert stay_near(torch.device("cpu"), sysfs=card(tmp_path, "8-11\n")) is None
    monkeypatch.setattr(memory_nearby.torch.cuda, "get_device_properties", lambda device: SimpleNamespace())
    assert stay_near(GPU, sysfs=tmp_path) is None
    assert not bound


def test_lists_of_the_kernel():
    assert processors("0-3,8,10-10\n") == {0, 1, 2, 3, 8, 10}
