"""Twenty thousand broken inputs, a seed that stays: what reads them answers with a value or with its own errors."""

import tempfile
from pathlib import Path

import pytest
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
