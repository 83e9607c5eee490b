"""Break what the product reads, a million times: ``python tools/fuzz.py [--cases N] [--seed S] [--only WORD]``.

Readers run in a process of their own: what ends it, or does not end, is a finding too, and the next case goes on.
Prints one line a target (cases, seconds, findings) and every finding with the number that makes it again:
``--only TARGET --number N``. Exits with 1 where there is one. ``tests/fuzzing`` says what is read and how it is broken.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

from fuzzing.apart import run_apart  # noqa: E402
from fuzzing.running import counts  # noqa: E402
from fuzzing.targets import targets  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=1_000_000, help="in all, shared out over the targets")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="targets whose name holds this")
    parser.add_argument("--number", type=int, help="this case alone")
    arguments = parser.parse_args()
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    total = findings = 0
    with tempfile.TemporaryDirectory(prefix="muster-fuzz-", dir=memory) as folder:
        found = targets(Path(folder))
        shares = counts(found, arguments.cases)
        for target in found:
            if arguments.only not in target.name:
                continue
            one = arguments.number
            numbers = range(shares[target.name]) if one is None else range(one, one + 1)
            began, wrong = time.monotonic(), 0
            for finding in run_apart(target, numbers, arguments.seed):
                wrong += 1
                if wrong <= 10:
                    print(finding, flush=True)
            total, findings = total + len(numbers), findings + wrong
            took_s = time.monotonic() - began
            print(f"{target.name}: {len(numbers):,} cases, {took_s:.1f} s, {wrong} findings", flush=True)
    print(f"{total:,} cases, seed {arguments.seed}: {findings} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
