"""Types of the arrays that data is kept in."""

from __future__ import annotations

import mmap
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Int32s: TypeAlias = NDArray[np.int32]
Int64s: TypeAlias = NDArray[np.int64]
Bytes: TypeAlias = NDArray[np.uint8]
Float32s: TypeAlias = NDArray[np.float32]


def release(array: NDArray[Any]) -> None:
    """Give back the memory that pages of a mapped array take here; they are read again when they are asked for."""
    mapped = getattr(array, "_mmap", None)
    if mapped is not None:
        mapped.madvise(mmap.MADV_DONTNEED)
