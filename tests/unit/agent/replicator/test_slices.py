"""A world of another layout fetches from other hosts' memory the parts that it needs, verified, and no whole shard."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from fakes.host import spec_of  # noqa: E402
from fakes.replicators import Served  # noqa: E402
from fakes.small_model import process_group  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import Shard, distribute_tensor  # noqa: E402
from waiting import eventually  # noqa: E402

from muster.agent.edge.snapshots import SnapshotStore  # noqa: E402
from muster.checkpoint import peer_slices  # noqa: E402
from muster.checkpoint_format.snapshot_ring import Ring, file_name  # noqa: E402
from muster.core.errors import BackendError, CheckpointError  # noqa: E402
from muster.core.snapshots import SnapshotNotIntact  # noqa: E402
from muster.core.types import Layout  # noqa: E402
from muster.protocol.held_snapshots import needed_shards, newest_complete  # noqa: E402
from muster.protocol.ranks import RankContext, Restore  # noqa: E402
from muster.protocol.to_agent import FetchShard, StartAttempt  # noqa: E402
from muster.train.distributed.reduce import local  # noqa: E402
from muster.train.state.snapshot import Snapshots  # noqa: E402
from muster.train.state.snapshot_restore import restored  # noqa: E402

TOKEN = "t" * 64
STEP = 9
#: 12 MB: a shard's part of each large tensor is several blocks. Two sizes that neither 2 nor 3 divides, a small one.
SHAPES = {"model.a": (1501, 512), "model.b": (2000, 512), "optimizer.m.a": (1501, 512), "model.norm": (7,)}


def whole():
    draw = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


def parts(tensors, world):
    """On the fake world of ``world`` ranks, as the trainer lays them out."""
    mesh = init_device_mesh("cpu", (world,))
    return {name: distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None) for name, tensor in tensors.items()}


class Hosts:
    """A world of one rank on each host took a snapshot; each host holds its own and the copy of the one before it."""

    def __init__(self, folder, world):
        self.folder, self.world = folder, world
        self._served = {}
        self.layout = Layout(dp_shard=world)
        for rank in range(world):
            self.add(f"host-{rank}")
            with process_group(world=world, rank=rank):
                state = parts(whole(), world)
                context = self.context(f"host-{rank}", rank, self.layout)
                taken = Snapshots(context, state)
                taken.save(STEP, {name: local(tensor) for name, tensor in state.items()})
                taken.settle()
        for rank in range(world):
            own = folder / f"host-{rank}" / file_name("own", self.layout.key, rank)
            peer = folder / f"host-{(rank + 1) % world}" / file_name("peer", self.layout.key, rank)
            peer.write_bytes(own.read_bytes())

    def add(self, name):
        (self.folder / name).mkdir()
        self.serve(name)

    def serve(self, name, port=0):
        self._served[name] = Served(self.folder / name, TOKEN.encode(), port=port)

    def stop(self, name):
        self._served[name].close()

    def close(self):
        for served in self._served.values():
            served.close()

    @property
    def addresses(self):
        return {name: served.replicator.address for name, served in self._served.items()}

    def context(self, name, rank, layout, **changes):
        return RankContext(
            run_id="r", run_dir=str(self.folder), attempt=1, host=name, rank=rank, local_rank=0,
            world_size=layout.world_size, local_world_size=1, layout=layout, master_addr="", master_port=1,
            snapshot_dir=str(self.folder / name), **changes,
        )  # fmt: skip

    def store(self, name):
        return SnapshotStore(memory=SimpleNamespace(folder=self.folder / name), host=name)

    def begun(self, names):
        """The contexts of the next attempt's ranks, one on each of these hosts, as supervisor and agents make them."""
        held = [copy for name in names for copy in self.store(name).held()]
        choice = newest_complete(held)
        assert choice.step == STEP
        layout, result = Layout(dp_shard=len(names)), []
        for rank, name in enumerate(names):
            nearest = {needed: choice.nearest(needed, name) for needed in needed_shards(choice, name)}
            address = {copy: None if copy.host == name else self.addresses[copy.host]
                       for copy in nearest.values()}  # fmt: skip
            restore = Restore(step=choice.step, attempt=choice.attempt, layout=choice.layout)
            context = replace(self.context(name, rank, layout, restore=restore), attempt=2)
            order = StartAttempt(
                attempt=2,
                contexts=(context,),
                fetch=tuple(FetchShard(rank=r, copy=copy, address=address[copy]) for r, copy in nearest.items()),
            )
            prepared = self.store(name).prepare(order, spec_of())
            assert not prepared.fetches, "a whole shard"
            result += prepared.contexts
        return result

    def restored(self, context):
        """(what the rank has of the whole, what it should have; bytes that it fetched)."""
        world = context.world_size
        with process_group(world=world, rank=context.rank):
            state = parts({name: torch.zeros(shape) for name, shape in SHAPES.items()}, world)
            found, fetched = restored(context, context.restore, lambda: state)
            return found, {name: local(tensor) for name, tensor in parts(whole(), world).items()}, fetched

    def ring(self, source):
        """The ring that a source names."""
        (name,) = [name for name, address in self.addresses.items() if address == source.address]
        return Ring.open(self.folder / name / source.path, writable=True)


@pytest.fixture
def hosts(tmp_path):
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    made = []

    def make(world):
        made.append(Hosts(tmp_path, world))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_what_a_stage_with_other_layers_took_is_refused_and_kept(hosts):
    """The same layout with another ``parallelism.pp_schedule``: nothing says that the copies are damaged."""
    context = hosts(2).begun(("host-0", "host-1"))[0]
    with pytest.raises(CheckpointError, match="pp_schedule or pp_chunks was changed") as refused:
        restored(context, context.restore, dict, elsewhere=frozenset(SHAPES))
    assert not isinstance(refused.value, SnapshotNotIntact)
    assert restored(context, context.restore, dict, elsewhere=frozenset(("another",)))[0].keys() == SHAPES.keys()


@pytest.mark.parametrize(
    "before, names, needed",
    [
        # host-1 is lost; host-2 has its copy, host-0 that of host-2: the first rank lacks a sixth of the state.
        (3, ("host-0", "host-2"), [1 / 6, 0]),
        # Both that stay hold everything; the one that joins needs a third.
        (2, ("host-0", "host-1", "host-2"), [0, 0, 1 / 3]),
    ],
    ids=["3 -> 2", "2 -> 3"],
)
def test_a_rank_fetches_the_slices_that_its_host_lacks(hosts, before, names, needed):
    made = hosts(before)
    for name in names:
        if name not in made.addresses:
            made.add(name)
    size = sum(4 * tensor.numel() for tensor in whole().values())
    whole_shards = fetched_slices = 0
    for context, share in zip(made.begun(names), needed, strict=True):
        found, expected, fetched = made.restored(context)
        assert all(torch.equal(found[name], expected[name]) for name in SHAPES), "bit for bit"
        elsewhere = [source for source in context.restore.sources.values() if source.address is not None]
        would = sum(made.ring(source).slot_bytes for source in elsewhere)
        print(f"{context.host}: {fetched / 1e6:.2f} MB of {size / 1e6:.2f}; whole shards: {would / 1e6:.2f}")
        # Blocks at the edges of each tensor's slice, and what describes each shard.
        assert share * size <= fetched <= share * size + 8 * (128 << 10) + 4000 * len(elsewhere)
        whole_shards, fetched_slices = whole_shards + would, fetched_slices + fetched
        assert not list((made.folder / context.host).glob("fetched.*")), "nothing of another layout lies in memory"
    assert fetched_slices < 0.45 * whole_shards


def test_what_rots_before_it_is_asked_for_is_refused_and_dropped_there(hosts, capfd):
    made = hosts(3)
    context = made.begun(("host-0", "host-2"))[0]
    (source,) = [source for source in context.restore.sources.values() if source.address is not None]
    ring = made.ring(source)
    ring.slot(ring.find(STEP, 1).slot)[5] ^= 4
    with pytest.raises(SnapshotNotIntact, match=r"could not be fetched: .* does not match its checksum") as caught:
        made.restored(context)
    assert caught.value.copies == (source.copy,), "no other copy is blamed"
    eventually(lambda: ring.find(STEP, 1) is None)
    made.close()  # it is dropped before the agent is told
    assert '"snapshots_rejected"' in capfd.readouterr().out


def test_a_byte_of_a_slice_that_changes_after_its_host_verified_it_is_found_on_arrival(hosts):
    made = hosts(3)
    context = made.begun(("host-0", "host-2"))[0]
    (source,) = [source for source in context.restore.sources.values() if source.address is not None]
    made.restored(context)
    ring = made.ring(source)
    needed = ring.shard_header().tensors[1]  # the first rows of the lost rank's part
    ring.slot(ring.find(STEP, 1).slot)[needed.byte_offset + 1000] ^= 4
    with pytest.raises(SnapshotNotIntact, match=r"block .* does not match its checksum on arrival") as caught:
        made.restored(context)
    assert caught.value.copies == (source.copy,)


def test_a_replicator_that_is_back_in_a_moment_is_asked_again_and_one_that_is_gone_is_said(hosts):
    made = hosts(3)
    context = made.begun(("host-0", "host-2"))[0]
    (source,) = [source for source in context.restore.sources.values() if source.address is not None]
    port = source.address[1]
    made.stop("host-2")
    back = threading.Timer(0.3, made.serve, ("host-2", port))
    back.start()
    found, expected, _ = made.restored(context)
    back.join()
    assert all(torch.equal(found[name], expected[name]) for name in SHAPES)
    lost = replace(source, address=("127.0.0.1", 1))
    sources = {**context.restore.sources, source.copy.rank: lost}
    with pytest.raises(BackendError, match=r"could not be fetched: .*refused"):  # rejects no copy: it may be intact
        made.restored(replace(context, restore=replace(context.restore, sources=sources)))


def test_a_copy_that_is_gone_is_named_and_what_was_read_of_other_shards_is_let_go(hosts, monkeypatch):
    held = []
    opened = peer_slices._opened
    monkeypatch.setattr(peer_slices, "_opened", lambda *args: held.append(args[-1]) or opened(*args))
    made = hosts(4)
    made.add("host-9")
    context = made.begun(("host-0", "host-2", "host-9"))[2]
    elsewhere = [source for source in context.restore.sources.values() if source.address is not None]
    made.restored(context)
    assert len(elsewhere) > 1 and len(held) == len(elsewhere) and len({id(batch) for batch in held}) == 1
    ring = made.ring(elsewhere[0])
    ring.drop(ring.find(STEP, 1))
    with pytest.raises(SnapshotNotIntact, match="no longer there") as caught:
        made.restored(context)
    assert caught.value.copies == (elsewhere[0].copy,)
