"""Stored bytes that are damaged at random: never a wrong weight, always a clear word, the next whole version taken.

``tools/damage.py`` does the work; ``python tools/damage.py --cases 10000 --seed N`` runs more of it.
"""

import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

import damage


def test_three_hundred_random_damages():
    counts, problems = Counter(), []
    for kind, words, problem in damage.run(300, seed=20):
        counts[kind] += 1
        problems += [f"{kind}, {words}: {problem}"] if problem else []
    assert problems == []
    assert min(counts[kind] for kind in damage.CASES) > 30, counts


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return damage.Templates(tmp_path_factory.mktemp("templates"))


def outcome(folder, data):
    (folder / damage.RING).write_bytes(data)
    return [(step, bool(word)) for step, word in damage.take_snapshots(folder)]


def patched(data, at, patch):
    return data[:at] + patch + data[at + len(patch) :]


def test_whole_snapshots_are_taken(made, tmp_path):
    assert outcome(tmp_path, made.ring) == [(7, False)]


def test_one_digit_of_the_headers_byte_offset(made, tmp_path):
    """The bytes are intact, their places are not: another tensor's values would come back under the right name."""
    at = made.ring.index(b",12352]")  # where the optimizer's part begins
    assert outcome(tmp_path, patched(made.ring, at, b",12288]")) == [(7, True), (6, True)]


def test_two_flips_that_cancel_in_a_sum(made, tmp_path):
    slot = made.data_at + made.slots[7] * made.slot_bytes
    words = [slot + 8 * number for number in range(100)]
    one = next(at for at in words if made.ring[at] & 1)
    none = next(at for at in words if not made.ring[at] & 1)
    data = patched(made.ring, one, bytes([made.ring[one] ^ 1]))
    data = patched(data, none, bytes([made.ring[none] ^ 1]))
    assert outcome(tmp_path, data) == [(7, True), (6, False)]


def test_two_swapped_pages(made, tmp_path):
    slot = made.data_at + made.slots[7] * made.slot_bytes
    first, second = made.ring[slot : slot + damage.PAGE], made.ring[slot + damage.PAGE : slot + 2 * damage.PAGE]
    assert outcome(tmp_path, patched(made.ring, slot, second + first)) == [(7, True), (6, False)]


@pytest.mark.parametrize("cleared", ["checksum", "step"])
def test_a_version_without_a_checksum_is_not_taken(made, tmp_path, cleared):
    stamp = 24 + 32 * (3 + made.slots[7])  # of four numbers: step, attempt, rank, checksum
    step, checksum = slice(stamp, stamp + 8), slice(stamp + 24, stamp + 32)
    assert made.ring[step] == (7).to_bytes(8, "little") and any(made.ring[checksum])
    if cleared == "checksum":
        assert outcome(tmp_path, patched(made.ring, checksum.start, bytes(8))) == [(7, True), (6, False)]
    else:
        assert outcome(tmp_path, patched(made.ring, step.start, b"\xff" * 8)) == [(6, False)]


def test_a_harness_that_sees_nothing_would_fail(made, tmp_path):
    with pytest.raises(damage.Wrong, match="WRONG WEIGHTS"):
        damage.check({name: tensor + 1 for name, tensor in damage.state_of(7).items()}, 7, "step")
