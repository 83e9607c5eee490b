"""Planning who writes what, and reading tensors back from shards of any cut. No ranks, no files."""

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from muster.checkpoint import shards, staging  # noqa: E402
from muster.checkpoint_format import reader  # noqa: E402
from muster.checkpoint_format import shards as wire  # noqa: E402
from muster.core.errors import CheckpointError  # noqa: E402
from muster.core.types import Layout  # noqa: E402


def shard_of(tensors, rank=0):
    """(name, whole tensor, offsets, shape) -> an opened shard in memory."""
    chunks = wire.pack(
        [(name, str(t.dtype).removeprefix("torch."), t.shape, offsets, shape) for name, t, offsets, shape in tensors]
    )
    header = wire.ShardHeader(rank=rank, layout=Layout(), tensors=chunks)
    data = bytearray(max(chunk.byte_offset + chunk.bytes for chunk in chunks))
    for chunk, (_, tensor, offsets, shape) in zip(chunks, tensors, strict=True):
        part = tensor
        for axis, (offset, length) in enumerate(zip(offsets, shape, strict=True)):
            part = part.narrow(axis, offset, length)
        raw = part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        data[chunk.byte_offset : chunk.byte_offset + len(raw)] = raw
    return reader.Shard(header.tensors, lambda start, stop: bytes(data)[start:stop], f"rank-{rank}")


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 7),
    row_cuts=st.sets(st.integers(1, 8), max_size=3),
    column_cuts=st.sets(st.integers(1, 6), max_size=2),
    dtype=st.sampled_from(["float32", "bfloat16", "int64", "uint8"]),
    piece=st.sampled_from([1, 40, 1 << 20]),
)
def test_any_grid_of_boxes_is_put_together(rows, columns, row_cuts, column_cuts, dtype, piece):
    whole = torch.arange(rows * columns).view(rows, columns).to(getattr(torch, dtype))
    edges = [sorted({0, size} | {cut for cut in cuts if cut < size})
             for size, cuts in ((rows, row_cuts), (columns, column_cuts))]  # fmt: skip
    opened = [
        shard_of([("w", whole, (top, left), (bottom - top, right - left))])
        for top, bottom in zip(edges[0], edges[0][1:], strict=False)
        for left, right in zip(edges[1], edges[1][1:], strict=False)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "_PIECE_BYTES", piece)
        target = torch.zeros_like(whole)
        assert shards.restore(opened, {"w": target}) >= whole.nbytes
        assert torch.equal(target, whole)
        assert torch.equal(shards.read_tensor(shards.ShardReader(opened), "w"), whole)


def test_scalars_and_replicas():
    scalar, vector = torch.tensor(2.5), torch.arange(4.0)
    opened = [shard_of([("s", scalar, (), ()), ("v", vector, (0,), (4,))], rank) for rank in range(2)]
    state = {"s": torch.zeros(()), "v": torch.zeros(4)}
    shards.restore(opened, state)
    assert torch.equal(state["s"], scalar) and torch.equal(state["v"], vector)


def test_what_does_not_fit_is_named_before_anything_changes():
    whole = torch.arange(8.0).view(4, 2)
    half = [shard_of([("w", whole, (0, 0), (2, 2))])]
    full = [shard_of([("w", whole, (0, 0), (4, 2))])]
    for opened, state, words in (
        (half, {"w": torch.full((4, 2), -1.0)}, "incomplete"),
        (full, {"w": torch.full((4, 3), -1.0)}, "shape"),
        (full, {"v": torch.full((4, 2), -1.0)}, "no tensor 'v'"),
        (full, {}, "'w'"),
    ):
        with pytest.raises(CheckpointError, match=words):
            shards.restore(opened, state)
        assert all(bool((tensor == -1).all()) for tensor in state.values())


def test_shards_that_disagree_are_refused():
    whole = torch.zeros(4, 2)
    for other in (
        shard_of([("w", torch.zeros(5, 2), (4, 0), (1, 2))]),
        shard_of([("w", whole.double(), (2, 0), (2, 2))]),
        shard_of([("w", whole, (0, 0), (3, 2))]),
    ):
        with pytest.raises(CheckpointError, match="w"):
            shards.ShardReader([shard_of([("w", whole, (0, 0), (2, 2))]), other])


# ---------------------------------------------------------------- who writes what

F = "float32"


def test_each_box_is_written_once_and_the_load_is_even():
    sharded = [[("w", F, (8, 2), (4 * rank, 0), (4, 2)), ("a", F, (6,), (0,), (6,)), ("b", F, (6,), (0,), (6,))]
               for rank in range(2)]  # fmt: skip
    written = staging.shares(sharded)
    assert sorted(box[0] for rank in written for box in rank) == ["a", "b", "w", "w"]
    assert [len(rank) for rank in written] == [2, 2]
    assert staging.shares(sharded) == written


def test_boxes_that_do_not_make_up_the_tensor_are_refused():
    with pytest.raises(CheckpointError, match="8 of its 16"):
        staging.shares([[("w", F, (8, 2), (0, 0), (4, 2))]])
    with pytest.raises(CheckpointError, match="disagree"):
        staging.shares([[("w", F, (8,), (0,), (8,))], [("w", F, (8,), (0,), (4,))]])
    empty = staging.shares([[("w", F, (1,), (0,), (1,))], [("w", F, (1,), (1,), (0,))]])
    assert [len(rank) for rank in empty] == [1, 0]
