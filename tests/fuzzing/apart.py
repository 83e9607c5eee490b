"""Cases in a process of their own: one that it does not survive is a finding like any other, and the next ones go on.

Libraries in C end a process (pyarrow follows offsets of a broken file unchecked), memory does, and a loop has no end.
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import resource
import select
import signal
import sys
from collections.abc import Iterator

from fuzzing.running import Finding, Target, case, run

#: A case that takes longer, in seconds of the clock, is ended.
PATIENCE_S = 120.0
#: Bytes that reading may allocate beyond what is there already.
MEMORY_BYTES = 8 << 30


def run_apart(
    target: Target, numbers: range, seed: int, *, patience_s: float = PATIENCE_S, memory_bytes: int = MEMORY_BYTES
) -> Iterator[Finding]:
    """As ``run``; also what ended the process, and what did not end in ``patience_s``.

    Call it where no other thread runs: it forks.
    """
    at = mmap.mmap(-1, 8)  # the number under way, which outlives the child
    left = numbers
    while left:
        at[:] = left.start.to_bytes(8, "little")
        reading, writing = os.pipe()
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os.close(reading)
            _read_all(target, left, seed, at, writing, memory_bytes)
        os.close(writing)
        yield from _told(target, seed, child, reading, at, patience_s)
        os.close(reading)
        _, status = os.waitpid(child, 0)
        if status == 0:
            return
        number = int.from_bytes(at[:], "little")
        code = os.waitstatus_to_exitcode(status)
        reason = f"the process ended with {signal.Signals(-code).name if code < 0 else code}"
        yield Finding(target=target.name, number=number, reason=reason, data=case(target, number, seed))
        left = range(number + 1, numbers.stop)


def _read_all(target: Target, numbers: range, seed: int, at: mmap.mmap, writing: int, memory_bytes: int) -> None:
    """The child's whole life."""
    code = 1
    faulthandler.disable()
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for number in numbers:
            at[:] = number.to_bytes(8, "little")
            for finding in run(target, range(number, number + 1), seed):
                os.write(writing, json.dumps([number, finding.reason[:300]]).encode() + b"\n")
        code = 0
    finally:
        os._exit(code)


def _told(target: Target, seed: int, child: int, reading: int, at: mmap.mmap, patience_s: float) -> Iterator[Finding]:
    """What the child says until it ends; it is ended where a single case takes too long."""
    rest = b""
    while True:
        before = at[:]
        if not select.select([reading], [], [], patience_s)[0]:
            if at[:] == before:
                os.kill(child, signal.SIGKILL)
                return
            continue
        said = os.read(reading, 1 << 16)
        if not said:
            return
        *lines, rest = (rest + said).split(b"\n")
        for line in lines:
            number, reason = json.loads(line)
            yield Finding(target=target.name, number=number, reason=reason, data=case(target, number, seed))
