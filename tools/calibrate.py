"""CPU seconds of a fixed piece of arithmetic, by which durations that two machines measured compare.

    python3 tools/calibrate.py

Needs Python alone: CI runs it before anything else.
"""

import platform
import time

#: Under CPython 3.11.7 on the two-core virtual machine where the durations of this repository are measured, 2026-11-29.
REFERENCE_S = 0.126
ROUNDS = 5


def calibrate() -> float:
    """The best of ``ROUNDS``: what else runs on the machine only adds to it."""
    return min(_arithmetic() for _ in range(ROUNDS))


def _arithmetic() -> float:
    began, value = time.process_time(), 1
    for _ in range(2_000_000):
        value = (value * 1_103_515_245 + 12_345) & 0x7FFFFFFF
    return time.process_time() - began


if __name__ == "__main__":
    found = calibrate()
    print(
        f"calibration: {found:.3f} CPU s (Python {platform.python_version()}), reference {REFERENCE_S:.3f} s: "
        f"this machine takes {found / REFERENCE_S:.2f} times as long"
    )
