"""Twenty thousand broken inputs, a seed that stays: what reads them answers with a value or with its own errors."""

import os
import signal
import tempfile
import time
from pathlib import Path
from random import Random

import pytest
from fuzzing.apart import run_apart
from fuzzing.running import Target, attempt, case, counts, run
from fuzzing.targets import targets

CASES = 20_000
SEED = 20_261_123


@pytest.fixture(scope="module")
def all_targets():
    with tempfile.TemporaryDirectory(prefix="muster-fuzz-", dir="/dev/shm") as folder:
        yield targets(Path(folder))


def test_no_reader_ends_in_an_error_of_its_own(all_targets):
    shares = counts(all_targets, CASES)
    assert sum(shares.values()) >= CASES * 0.99 and min(shares.values()) >= 1
    found = [finding for target in all_targets for finding in run(target, range(shares[target.name]), SEED)]
    assert not found, "\n".join(map(str, found[:20]))


def test_every_sample_is_right_before_it_is_broken(all_targets):
    """Else a reader that refuses everything would pass."""
    for target in all_targets:
        for sample in target.samples:
            if not target.name.startswith(("the end of an exec", "a log under audit", "data: dataset_dict.json")):
                target.read(sample)


def test_the_driver_finds_what_is_wrong():
    """A reader that trusts its input, and one that is slow, are found; a case is the same whenever it is made."""
    trusting = Target(name="t", samples=(b'{"a": 1}',), read=lambda data: data.decode(), raises=(KeyError,))
    findings = list(run(trusting, range(500), SEED))
    assert findings and all("UnicodeDecodeError" in finding.reason for finding in findings)
    again = findings[0]
    assert case(trusting, again.number, SEED) == again.data and attempt(trusting, again.data) == again.reason
    assert attempt(trusting, b"{}") is None


def test_the_driver_outlives_a_reader_that_ends_the_process():
    """By a signal, by an exit, by memory, by having no end: each is named with its case, and the others are read."""

    def read(data: bytes) -> object:
        number = int(data)
        if number == 3:
            os.kill(os.getpid(), signal.SIGSEGV)
        if number == 5:
            os._exit(7)
        if number == 6:
            return bytearray(2 << 30)
        if number == 8:
            time.sleep(60)
        return Path(folder, str(number)).touch()

    numbered = Target(name="n", samples=(b"",), read=read, raises=())
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("fuzzing.running.mutated", lambda _, random: str(numbers[random.random()]).encode())
        numbers = {Random(f"1/n/{number}").random(): number for number in range(10)}
        findings = list(run_apart(numbered, range(10), 1, patience_s=1.0, memory_bytes=1 << 30))
        assert sorted(int(path.name) for path in Path(folder).iterdir()) == [0, 1, 2, 4, 7, 9]
    assert [(each.number, each.reason.split(":")[0]) for each in findings] == [
        (3, "the process ended with SIGSEGV"), (5, "the process ended with 7"), (6, "MemoryError"),
        (8, "the process ended with SIGKILL"),
    ]  # fmt: skip
    assert findings[0].data == b"3"
