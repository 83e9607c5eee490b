"""A rank on the CPU keeps the memory that it frees: a step touches no page that the one before has touched."""

import subprocess
import sys

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
