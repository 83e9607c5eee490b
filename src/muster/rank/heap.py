"""The heap of a rank that computes on the CPU: memory that it frees stays in the process, ready for the next step.

glibc returns large blocks to the kernel when they are freed, and allocates them again a moment later: each step then
touches thousands of new pages, which the kernel clears one by one. A process's first step pays that for all its
memory, and so does the first one after a failure; a standby pays for a part of it while it waits.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

import torch

from muster.core import processes
from muster.core.environment import allocator_is_set

#: Parameters of mallopt(3), from glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
#: Larger blocks still come from the kernel each time. glibc takes no larger number (half of its HEAP_MAX_SIZE).
MMAP_THRESHOLD = 32 << 20
#: So much free memory at the heap's end stays.
TRIM_THRESHOLD = 1 << 30
#: What a standby touches in advance, at most: it holds that memory while it waits.
STANDBY_BYTES = 128 << 20
#: And no more than this part of what the host has free, or its container where that is less.
STANDBY_SHARE = 1 / 64
_BLOCK_BYTES = 4 << 20


def keep_freed() -> bool:
    """What this process frees from now on stays with it; whether that could be set. Never raises.

    Not if the environment sets glibc's own variables. The price: a resident set above what the tensors need
    (docs/explanation/plan.md has a figure). Threads that are started later take from the same heap: gloo gathers
    parameters in threads of its own.
    """
    if allocator_is_set():
        return False
    wanted = {_M_MMAP_THRESHOLD: MMAP_THRESHOLD, _M_TRIM_THRESHOLD: TRIM_THRESHOLD, _M_ARENA_MAX: 1}
    with contextlib.suppress(AttributeError, OSError):  # not glibc
        mallopt = ctypes.CDLL(None).mallopt
        return all([mallopt(name, value) for name, value in wanted.items()])
    return False


def reserve() -> None:
    """Have some of the heap touched in advance. After ``keep_freed``."""
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = min([pages, *(left for _, left in processes.memory_groups())])
    size = min(STANDBY_BYTES, int(free * STANDBY_SHARE))
    blocks = [torch.ones(_BLOCK_BYTES, dtype=torch.uint8) for _ in range(size // _BLOCK_BYTES)]
    del blocks
