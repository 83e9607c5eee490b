"""The index of a checkpoint, and whether shards make up the whole state."""

import pytest

from muster.checkpoint_format import tensor_index
from muster.checkpoint_format.shards import pack
from muster.core.errors import CheckpointError


def chunks(*boxes):
    return pack((name, "float32", (4, 2), offsets, shape) for name, offsets, shape in boxes)


TOP, BOTTOM = ("w", (0, 0), (3, 2)), ("w", (3, 0), (1, 2))


def test_there_and_back():
    files = [("rank-00000.shard", 128, chunks(TOP)), ("rank-00001.shard", 192, chunks(BOTTOM))]
    assert tensor_index.decode_index(tensor_index.encode_index(files)) == files


@pytest.mark.parametrize("data", [b"", b"[]", b'{"format":2}', b'{"format":2,"files":[{"name":"x"}]}'])
def test_what_is_no_index_is_said_to_be_none(data):
    with pytest.raises(CheckpointError, match="no index"):
        tensor_index.decode_index(data)


def test_gaps_are_named_and_copies_count_once():
    assert tensor_index.incomplete([chunks(TOP), chunks(BOTTOM), chunks(BOTTOM)]) is None
    assert tensor_index.incomplete([chunks(TOP), chunks(TOP)]) == "w: 6 of its 8 elements"
    assert tensor_index.incomplete([]) == "no tensors"


def test_another_format_is_refused_by_number():
    with pytest.raises(CheckpointError, match="an index of format 1, this version reads 2"):
        tensor_index.decode_index(b'{"format":1,"files":[]}')
