"""Names that say whose they are, on a disk: each rank gets its own back, in worlds of any size."""

import uuid

import pytest

torch = pytest.importorskip("torch")

from muster.checkpoint import staging  # noqa: E402
from muster.checkpoint.load import load_into, newest_valid  # noqa: E402
from muster.checkpoint.saver import Saver  # noqa: E402
from muster.checkpoint_format.shards import owner_of  # noqa: E402
from muster.core.errors import CheckpointError  # noqa: E402
from muster.core.types import Layout  # noqa: E402
from muster.storage.store import open_store  # noqa: E402


@pytest.fixture
def saved():
    """A checkpoint of two ranks: what they share, and what is each one's own."""
    folder = f"memory://{uuid.uuid4().hex}"
    saver = Saver(
        folder, run_id="run", attempt=1, layout=Layout(dp_shard=2), keep_last=2, asynchronous=False, group=None,
        store=open_store(), on_event=lambda *_, **__: None,
    )  # fmt: skip
    own = {f"rank{rank}.{name}": torch.full((2,), 10.0 * rank + 1) for rank in (0, 1) for name in ("a", "b")}
    saver.save(5, {"w": torch.full((3,), 7.0), **own}, {})
    return newest_valid(open_store(), folder)


def state(rank, *names):
    own = {f"rank{rank}.{name}": torch.full((2,), -1.0) for name in names}
    return {"w": torch.zeros(3), **own}


def test_names():
    names = ["rank3.loader", "rank12", "rank.x", "ranks.0", "model.rank3.x", "rank3x.y"]
    assert [owner_of(name) for name in names] == [3, 12, None, None, None, None]


@pytest.mark.parametrize(("rank", "value"), [(0, 1.0), (1, 11.0)])
def test_each_rank_gets_its_own_back(saved, rank, value):
    found = state(rank, "a", "b")
    load_into(saved, found)
    assert found["w"].eq(7).all() and found[f"rank{rank}.a"].eq(value).all() and found[f"rank{rank}.b"].eq(value).all()


def test_a_rank_that_was_not_there_keeps_what_it_has(saved):
    found = state(2, "a")
    load_into(saved, found)
    assert found["w"].eq(7).all() and found["rank2.a"].eq(-1).all()


def test_a_state_without_own_things_takes_the_rest(saved):
    found = {"w": torch.zeros(3)}
    load_into(saved, found)
    assert found["w"].eq(7).all()


@pytest.mark.parametrize(
    ("names", "words"), [(("a",), "'rank1.b', which this run does not"), (("a", "b", "c"), "no tensor 'rank1.c'")]
)
def test_of_a_rank_that_was_there_all_or_nothing_fits(saved, names, words):
    with pytest.raises(CheckpointError, match=words):
        load_into(saved, state(1, *names))


def test_a_ranks_own_is_written_by_that_rank():
    own = [("rank0.a", "float32", (2,), (0,), (2,)), ("rank1.a", "float32", (2,), (0,), (2,))]
    shared = ("w", "float32", (3,), (0,), (3,))
    written = staging.shares([[shared, own[0]], [shared, own[1]]])
    assert own[0] in written[0] and own[1] in written[1]
    assert sum(shared in each for each in written) == 1
