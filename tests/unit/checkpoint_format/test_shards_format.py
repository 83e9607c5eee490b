"""The shard format: what is encoded is decoded, and what is damaged is refused."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.checkpoint_format import shards
from muster.checkpoint_format.shards import ShardHeader
from muster.core.errors import CheckpointError
from muster.core.types import Layout

BOXES = [
    ("model.a", "float32", (8, 4), (2, 0), (3, 4)),
    ("model.b", "bfloat16", (5,), (0,), (5,)),
    ("model.c", "float32", (), (), ()),
]


def header(**changes):
    return ShardHeader(
        **{"rank": 1, "layout": Layout(dp_shard=2), "tensors": shards.pack(BOXES), "step": 3, "attempt": 2, **changes}
    )


def data_bytes(found):
    return max(chunk.byte_offset + chunk.bytes for chunk in found.tensors)


def split(data):
    """A whole shard's bytes as header and tensors' bytes."""
    end, begin = shards.preamble_bytes(bytes(data[:16]))
    found = shards.decode_header(bytes(data[16:end]))
    if len(data) < begin + data_bytes(found):
        raise CheckpointError("truncated shard")
    return found, data[begin:]


def test_round_trip():
    made = header(run_id="r", extra={"a": 1})
    assert shards.decode_header(shards.encode_header(made)) == made
    assert [chunk.byte_offset for chunk in made.tensors] == [0, 64, 128]
    assert [chunk.bytes for chunk in made.tensors] == [48, 10, 4]
    assert data_bytes(made) == 132
    whole = shards.preamble(made) + bytes(range(132))
    assert len(shards.preamble(made)) % shards.ALIGN_BYTES == 0
    found, data = split(memoryview(whole))
    assert found == made
    assert bytes(data) == bytes(range(132))


@settings(max_examples=100, deadline=None)
@given(cut=st.integers(0, 700), flip=st.integers(0, 700), bit=st.integers(0, 7))
def test_damage_raises_our_error_or_shows(cut, flip, bit):
    """No damage to the header makes anything but CheckpointError (checksums of whole files lie in the manifest)."""
    whole = bytearray(shards.preamble(header()) + bytes(132))
    with pytest.raises(CheckpointError):
        split(memoryview(bytes(whole[: min(cut, len(whole) - 1)])))
    whole[flip % len(whole)] ^= 1 << bit
    try:
        found, _ = split(memoryview(bytes(whole)))
    except CheckpointError:
        return
    for chunk in found.tensors:
        assert all(o + n <= g for o, n, g in zip(chunk.offsets, chunk.shape, chunk.global_shape, strict=True))


@pytest.mark.parametrize(
    "entry",
    [
        ["a", "float32", [4], [2], [3], 0],
        ["a", "float32", [4], [0], [4, 1], 0],
        ["a", "float32", [4], [-1], [4], 0],
        ["a", "float32", [4], [0], [4], -64],
        ["a", "pickle", [4], [0], [4], 0],
        ["a", "float32"],
    ],
)
def test_impossible_boxes_are_refused(entry):
    found = json.loads(shards.encode_header(header()))
    found["tensors"] = [entry]
    with pytest.raises(CheckpointError):
        shards.decode_header(json.dumps(found).encode())
    with pytest.raises(CheckpointError, match="quint8"):
        shards.pack([("x", "quint8", (1,), (0,), (1,))])
