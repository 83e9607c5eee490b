"""A slot's pages are mapped at once: a rank's first snapshots cost no page fault for each 4 KB."""

from __future__ import annotations

import mmap
import platform
import resource

import pytest

from muster.train.state.snapshot import populate

SIZE = 8 << 20
KERNEL = tuple(int(number) for number in platform.release().split("-")[0].split(".")[:2])


def faults_of_writing(memory: memoryview) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for at in range(0, len(memory), mmap.PAGESIZE):
        memory[at] = 1
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(KERNEL < (5, 14), reason="this kernel cannot populate")
def test_what_is_populated_is_written_without_a_fault() -> None:
    with mmap.mmap(-1, 2 * SIZE) as mapped:
        with memoryview(mapped) as whole, whole[:SIZE] as populated, whole[SIZE:] as other:
            populate(populated)
            assert faults_of_writing(populated) < 100
            assert faults_of_writing(other) > 1000, "that one was left as it was"
