"""A rank on the CPU keeps the memory that it frees: a step touches no page that the one before has touched."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from muster.core import processes
from muster.rank import heap

PROGRAM = """
import resource
import threading
import torch
from muster.rank import heap

def faults(work):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    work()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def allocate():
    blocks = [torch.ones(6 << 20, dtype=torch.uint8) for _ in range(10)]
    del blocks

def step():
    allocate()
    thread = threading.Thread(target=allocate)
    thread.start()
    thread.join()

if {keep}:
    assert heap.keep_freed()
if {reserve}:
    heap.STANDBY_SHARE = 1.0
    heap.reserve()
print(faults(step), faults(step))
"""
PAGES = (60 << 20) // 4096


def faults(**settings):
    """Page faults of the first and the second step of a new process."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(**settings)], capture_output=True, text=True, timeout=60, check=True
    )
    return [int(number) for number in done.stdout.split()]


def test_a_heap_that_is_kept_and_was_touched_in_advance_costs_no_step_anything():
    assert max(faults(keep=True, reserve=True)) < PAGES / 5


def test_without_it_each_step_touches_new_pages():
    """What the setting is for: glibc's own gives them back."""
    assert min(faults(keep=False, reserve=False)) > PAGES / 4


def test_who_has_set_glibcs_heap_keeps_that_setting(monkeypatch):
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(128 << 10))
    assert not heap.keep_freed()


MIB = 1 << 20
TWO = "memory.max", "memory.current", "inactive_file"
ONE = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
GROUPS = {
    "version 2": ("0::/jobs/mine\n", {"jobs/mine": (TWO, 92 * MIB, 88 * MIB, 8 * MIB)}, 3),
    "version 2, of a group above": (
        "0::/jobs/mine\n",
        {"jobs/mine": (TWO, "max", 88 * MIB, 0), "jobs": (TWO, 100 * MIB, 92 * MIB, 0)},
        2,
    ),
    "version 1": ("4:memory:/jobs\n0::/\n", {"memory/jobs": (ONE, 92 * MIB, 88 * MIB, 8 * MIB)}, 3),
    "version 1, of a container": ("4:cpu,memory:/docker/a\n", {"memory": (ONE, 92 * MIB, 80 * MIB, 0)}, 3),
    "over its limit": ("0::/jobs\n", {"jobs": (TWO, 80 * MIB, 88 * MIB, 0)}, 0),
    "no limit": ("0::/jobs\n", {"jobs": (TWO, "max", 88 * MIB, 0)}, 5),
    "not told": ("0::/jobs\n", {}, 5),
}


@pytest.mark.parametrize(("told", "groups", "blocks"), GROUPS.values(), ids=list(GROUPS))
def test_no_more_is_reserved_than_the_container_has(monkeypatch, tmp_path, told, groups, blocks):
    (tmp_path / "cgroup").write_text(told)
    for folder, (names, limit, usage, unused) in groups.items():
        at = tmp_path / "fs" / folder
        at.mkdir(parents=True, exist_ok=True)
        for name, value in zip(names, (limit, usage), strict=False):
            (at / name).write_text(f"{value}\n")
        (at / "memory.stat").write_text(f"anon 7\n{names[2]} {unused}\n")
    made = []
    monkeypatch.setattr(heap, "torch", SimpleNamespace(ones=lambda size, dtype: made.append(size), uint8=None))
    monkeypatch.setattr(processes, "_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(processes, "_CGROUPS", tmp_path / "fs")
    monkeypatch.setattr(heap, "STANDBY_SHARE", 1.0)
    monkeypatch.setattr(heap, "STANDBY_BYTES", 20 * MIB)
    heap.reserve()
    assert made == [4 * MIB] * blocks
