"""A rank that waits for a fetched snapshot hears at once that none will come."""

import json
import time

import pytest

pytest.importorskip("torch")

from muster.core.errors import CheckpointError
from muster.core.ranks import Restore
from muster.core.ring import Ring, forget_refusal, refusal, refuse
from muster.train.snapshot import open_shard

WANTED = Restore(step=9, attempt=1)


def test_a_refusal_ends_the_wait(tmp_path):
    path = tmp_path / "fetched.r1s2t1.1.ring"
    refuse(path, "host-2 closed the connection")
    began = time.monotonic()
    with pytest.raises(CheckpointError, match="step 9 could not be fetched: host-2 closed the connection"):
        open_shard(path, WANTED)
    assert time.monotonic() - began < 30  # it would wait for a minute
    forget_refusal(path)
    assert refusal(path) is None


def test_a_version_that_came_counts_for_more_than_a_refusal(tmp_path):
    path = tmp_path / "fetched.r1s2t1.1.ring"
    ring = Ring.create(path, header=json.dumps({"tensors": [{"name": "w"}]}).encode(), slot_bytes=64)
    slot = ring.begin()
    ring.commit(slot, step=9, attempt=1)
    refuse(path, "an earlier one failed")
    _, table, found = open_shard(path, WANTED)
    assert (table, found) == ([{"name": "w"}], slot)


def test_what_should_lie_here_and_does_not_is_an_error_at_once(tmp_path):
    with pytest.raises(CheckpointError, match="no snapshot ring"):
        open_shard(tmp_path / "own.r1s2t1.1.ring", WANTED)
