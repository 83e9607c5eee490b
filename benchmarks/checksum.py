"""Checksums that protect checkpoints: how fast libraries compute them, and what they add to a snapshot's stall.

    python benchmarks/checksum.py [--rounds 5] [--stall-mib 0.25 8 256] [--step-s 0.3]

The first table: GB/s of one core, by processor time (what a busy machine's clock on the wall cannot tell) and by the
wall clock (the best round). The second: how long ``Snapshots.save`` holds a step, for states of these sizes, and its
share of the step. Run the second at an older commit for the figures before.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import torch

from muster.core.layout import Layout
from muster.protocol.ranks import RankContext
from muster.train.state.snapshot import Snapshots

MIB = 1 << 20


def candidates() -> Iterator[tuple[str, Callable[[bytes], object]]]:
    """(name, call) of each that is installed."""
    yield "zlib.crc32", zlib.crc32
    calls = (
        ("numpy", "numpy int64 sum", lambda m: lambda data: m.frombuffer(data, dtype=m.int64).sum()),
        ("xxhash", "xxhash XXH3-64", lambda m: m.xxh3_64_intdigest),
        ("xxhash", "xxhash XXH3-128", lambda m: m.xxh3_128_intdigest),
        ("google_crc32c", "google-crc32c", lambda m: m.value),
        ("zlib_ng.zlib_ng", "zlib-ng crc32", lambda m: m.crc32),
        ("isal.isal_zlib", "isal crc32", lambda m: m.crc32),
    )
    for module, name, call in calls:
        try:
            yield name, call(importlib.import_module(module))
        except ImportError:
            print(f"  {name}: not installed")


def speeds(rounds: int) -> None:
    data = os.urandom(MIB) * 64
    print(f"checksums of {len(data) // MIB} MiB, GB/s of one core, load {os.getloadavg()[0]:.1f}")
    for name, call in candidates():
        call(data)
        by_cpu, by_wall = [], []
        for _ in range(rounds):
            cpu, wall = time.process_time(), time.perf_counter()
            call(data)
            by_cpu.append(len(data) / (time.process_time() - cpu) / 1e9)
            by_wall.append(len(data) / (time.perf_counter() - wall) / 1e9)
        print(f"  {name:18} {max(by_cpu):6.1f} by processor time, {max(by_wall):6.1f} by the clock on the wall")


def stall(mib: float, step_s: float, steps: int) -> None:
    """Steps that compute on one thread, each with a snapshot after it."""
    torch.set_num_threads(1)
    state = {"model.w": torch.randn(int(mib * MIB) // 4)}
    matrix = torch.randn(256, 256)
    root = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="muster-checksum-", dir=root) as folder:
        context = RankContext(
            run_id="r", run_dir=folder, attempt=1, host="h", rank=0, local_rank=0, world_size=1, local_world_size=1,
            layout=Layout(), master_addr="", master_port=1, snapshot_dir=folder,
        )  # fmt: skip
        taken, held = Snapshots(context, state), []
        for step in range(1, steps + 1):
            until = time.perf_counter() + step_s
            while time.perf_counter() < until:
                matrix @ matrix
            began = time.perf_counter()
            taken.save(step, state)
            held.append(time.perf_counter() - began)
        middle = statistics.median(held[3:])
        print(f"  {mib:7.2f} MiB: held for {1e3 * middle:8.2f} ms, {middle / step_s:.2%} of a step of {step_s} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stall-mib", type=float, nargs="*", default=[0.25, 8, 256])
    parser.add_argument("--step-s", type=float, default=0.3)
    given = parser.parse_args()
    speeds(given.rounds)
    print(f"stall of a snapshot, load {os.getloadavg()[0]:.1f}")
    for mib in given.stall_mib:
        stall(mib, given.step_s, 20)


if __name__ == "__main__":
    main()
