"""A restore from the disk or the bucket: each rank reads what it needs, once, and damage leaves its state alone."""

import pytest

torch = pytest.importorskip("torch")

from fakes.small_model import process_group  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import Shard, distribute_tensor  # noqa: E402

from muster.checkpoint import load  # noqa: E402
from muster.checkpoint.load import load_into, load_newest, newest_valid  # noqa: E402
from muster.checkpoint.saver import Saver  # noqa: E402
from muster.checkpoint_format.manifest import committed  # noqa: E402
from muster.core.errors import BackendError  # noqa: E402
from muster.core.types import Layout  # noqa: E402
from muster.storage.store import blobs, open_store  # noqa: E402
from muster.train.distributed.reduce import local  # noqa: E402

#: 16 MB, in tensors of several blocks of 1 MiB.
SHAPES = {"model.a": (2001, 1024), "optimizer.m.a": (2001, 1024), "model.norm": (7,)}


def whole(step):
    draw = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


@pytest.fixture
def folder(tmp_path):
    """Two checkpoints, of steps 1 and 2."""
    place = tmp_path / "checkpoints"
    saver = Saver(
        str(place), run_id="r", attempt=1, layout=Layout(), keep_last=2, asynchronous=False, group=None,
        store=open_store(), on_event=lambda kind, **detail: None,
    )  # fmt: skip
    for step in (1, 2):
        saver.save(step, whole(step), {})
    return place


@pytest.fixture
def read(monkeypatch):
    """Bytes of checkpoint files that were read, one number a call."""
    counts, ranged, opened = [], blobs.read_range, blobs.reading

    def read_range(uri, start, stop):
        counts.append(stop - start)
        return ranged(uri, start, stop)

    def reading(uri):
        counts.append(blobs.size(uri))  # ``verify`` reads to the end
        return opened(uri)

    monkeypatch.setattr(blobs, "read_range", read_range)
    monkeypatch.setattr(blobs, "reading", reading)
    return counts


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_reads_its_share_once_and_no_whole_file(folder, read, world):
    size = sum(4 * tensor.numel() for tensor in whole(1).values())
    for rank in range(world):
        with process_group(world=world, rank=rank):
            mesh = init_device_mesh("cpu", (world,))
            empty = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
            state = {name: distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None) for name, t in empty.items()}
            read.clear()
            manifest, count = load_newest(open_store(), str(folder), state)
            once = sum(read)
            wanted = {name: distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None) for name, t in whole(2).items()}
            assert all(torch.equal(local(state[name]), local(wanted[name])) for name in SHAPES)
            assert manifest.step == 2 and count == sum(local(t).nbytes for t in state.values())
            read.clear()
            found = newest_valid(open_store(), str(folder), state=state)
            load_into(found, state)
            print(f"rank {rank} of {world}: {once / 1e6:.1f} MB, verified whole first {sum(read) / 1e6:.1f} MB")
            # Blocks at the edges of two tensors, header, index and sums.
            assert size / world * 0.99 < once < size / world + (5 << 20) < 0.9 * sum(read)


def test_damage_anywhere_is_passed_over_and_the_state_is_the_older_ones(folder):
    (newest,) = (folder / "step-00000002.a1").glob("*.shard")
    data = bytearray(newest.read_bytes())
    data[-100_000] ^= 4  # in the last tensors: the first ones have been read by then
    newest.write_bytes(data)
    state, said = {name: torch.zeros(shape) for name, shape in SHAPES.items()}, []
    manifest, _ = load_newest(open_store(), str(folder), state, lambda uri, reason: said.append(reason))
    assert manifest.step == 1 and len(said) == 1 and "does not match its checksum" in said[0]
    assert all(torch.equal(state[name], tensor) for name, tensor in whole(1).items())


def test_where_none_is_whole_the_state_is_as_it_was(folder):
    for path in folder.rglob("*.shard"):
        data = bytearray(path.read_bytes())
        data[-100_000] ^= 4
        path.write_bytes(data)
    state, before = whole(7), whole(7)
    assert load_newest(open_store(), str(folder), state) is None
    assert all(torch.equal(state[name], before[name]) for name in SHAPES)


@pytest.mark.parametrize("failure", [BackendError("503"), MemoryError("no memory"), RuntimeError("can't allocate")])
def test_trouble_that_is_no_damage_is_raised_and_no_older_checkpoint_taken(folder, monkeypatch, failure):
    ranged, left = blobs.read_range, [failure]

    def read_range(uri, start, stop):
        if uri.endswith(".shard") and start > 1 << 20 and left:
            raise left.pop()
        return ranged(uri, start, stop)

    monkeypatch.setattr(blobs, "read_range", read_range)
    state, before = whole(7), whole(7)
    with pytest.raises(BackendError, match=str(failure)):
        load_newest(open_store(), str(folder), state)
    assert not left and all(torch.equal(state[name], before[name]) for name in SHAPES)
    assert load_newest(open_store(), str(folder), state)[0].step == 2


def test_a_file_that_cannot_be_opened_is_no_damage_to_a_script_either(folder, monkeypatch):
    reading, left = blobs.reading, [BackendError("503")]
    monkeypatch.setattr(blobs, "reading", lambda uri: (_raise(left.pop()) if left else None) or reading(uri))
    with pytest.raises(BackendError, match="503"):
        newest_valid(open_store(), str(folder))
    assert newest_valid(open_store(), str(folder)).step == 2


def _raise(error):
    raise error


def test_every_rank_raises_where_one_could_not_read(folder, monkeypatch):
    monkeypatch.setattr(load.exchange, "gather", lambda value, group: [[None, None], [None, "503"]])
    monkeypatch.setattr(load, "_candidates", lambda store, uri, skip, group: committed(store, uri))
    state = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    with pytest.raises(BackendError, match=r"rank 1 could not read .*: 503"):
        load_newest(open_store(), str(folder), state)
    assert not any(tensor.any() for tensor in state.values())


def test_tensors_of_another_type_are_converted_and_that_is_said_once(folder):
    state = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in SHAPES.items()}
    said = []
    manifest, _ = load_newest(open_store(), str(folder), state, on_conversion=said.append)
    assert said == [f"{manifest.uri}: {len(SHAPES)} tensors were float32 and are bfloat16 here"]
    assert all(torch.equal(state[name], tensor.bfloat16()) for name, tensor in whole(2).items())
    same = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    load_newest(open_store(), str(folder), same, on_conversion=said.append)
    assert len(said) == 1
