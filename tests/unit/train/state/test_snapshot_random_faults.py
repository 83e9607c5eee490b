"""Random runs over real rings: which faults cost what, whatever copies are doing.

Hosts of one rank each, a peer's copy at the next host. Copies are slow by chance. A rank is lost at any point of a
snapshot; a whole host with everything in its memory. Real: the rings, which version is copied, spared, chosen.
"""

import random
import shutil
from dataclasses import dataclass, field

import pytest
import torch

from muster.checkpoint_format.snapshot_ring import Ring, file_name, list_snapshots
from muster.core.snapshots import PEER_SLOTS, SnapshotCopy
from muster.core.types import Layout
from muster.protocol.held_snapshots import newest_complete
from muster.protocol.ranks import RankContext, Restore
from muster.train.state import snapshot
from muster.train.state.snapshot import Snapshots


class Killed(Exception):
    pass


@dataclass
class World:
    folder: object
    dice: random.Random
    hosts: int
    attempt: int = 0
    step: int = 0
    ranks: list = field(default_factory=list)
    flying: dict = field(default_factory=dict)
    pushed: dict = field(default_factory=dict)
    protected: bool = False

    def __post_init__(self):
        self.layout = Layout(dp_shard=self.hosts)
        for rank in range(self.hosts):
            self.memory(rank).mkdir()
        self.begin(None)

    def memory(self, rank):
        return self.folder / f"host-{rank}"

    def own(self, rank):
        return Ring.open(self.memory(rank) / file_name("own", self.layout.key, rank), writable=True)

    def peer_path(self, rank):
        return self.memory((rank + 1) % self.hosts) / file_name("peer", self.layout.key, rank)

    # ------------------------------------------------------------ attempts

    def begin(self, choice):
        self.attempt += 1
        restore = choice and Restore(step=choice.step, attempt=choice.attempt, layout=self.layout)
        self.ranks = [
            Snapshots(
                RankContext(
                    run_id="r", run_dir=".", attempt=self.attempt, host=f"host-{rank}", rank=rank, local_rank=0,
                    world_size=self.hosts, local_world_size=1, layout=self.layout, master_addr="", master_port=0,
                    snapshot_dir=str(self.memory(rank)), replicate_snapshots=True, restore=restore,
                ),
                {"w": torch.zeros(4)},
            )
            for rank in range(self.hosts)
        ]  # fmt: skip
        known = [made.replicated_step for made in self.ranks if made.replicated_step >= 0]
        for made in self.ranks:
            made.start(copies=True, replicated_step=min(known, default=-1))
        self.flying, self.pushed = {}, {}
        self.step = choice.step if choice else 0

    def chosen(self, *, without=None):
        found = [
            SnapshotCopy(step=held.step, attempt=held.attempt, rank=held.rank, layout=held.layout, host=f"host-{host}",
                     tier=held.tier)
            for host in range(self.hosts)
            if host != without
            for held in list_snapshots(self.memory(host))
        ]  # fmt: skip
        return newest_complete(found)

    # ------------------------------------------------------------ steps and copies

    def take_step(self, *, fates=None):
        """All ranks snapshot the next step; ``fates``: how far each comes, where one is lost meanwhile."""
        self.step += 1
        agreed = not any([made.copy_is_pending() for made in self.ranks])
        self.protected = self.protected or (agreed and all(made._ordered is not None for made in self.ranks))
        for rank, made in enumerate(self.ranks):
            fate = fates[rank] if fates else "done"
            if fate == "not begun":
                made.settle()  # a step is longer than a checksum
                continue
            whole = made._ring.commit
            if fate == "torn":
                made._ring.commit = killed
            try:
                made.save(self.step, {"w": torch.full((4,), float(self.step))}, copies_arrived=agreed)
            except Killed:
                pass
            made._ring.commit = whole
            if fate == "torn":
                made._pending = None  # the thread that computes the checksum is killed with its rank
            elif fates:
                made.settle()

    def copy_on(self, rank):
        """The replicator's next move for one rank: it begins to send, or the copy arrives."""
        ring = self.own(rank)
        version = ring.find(*ring.requested_copy())
        if rank in self.flying:
            sent, slot = self.flying.pop(rank)
            assert ring.find(sent.step, sent.attempt) == sent, "what is being copied is never written over"
            there = Ring.open(self.peer_path(rank), writable=True)
            there.slot(slot)[:] = bytes(ring.slot(sent.slot))
            there.commit(slot, step=sent.step, attempt=sent.attempt, rank=sent.rank, expected=ring.checksum(sent))
            self.note(ring, rank, sent)
        elif version is not None and self.pushed.get(rank) != version:
            there = Ring.create(self.peer_path(rank), header=ring.header, slot_bytes=ring.slot_bytes, slots=PEER_SLOTS)
            there.forget_after(version.step, attempt=version.attempt)
            if there.find(version.step, version.attempt) is not None:
                self.note(ring, rank, version)
            else:
                self.flying[rank] = version, there.begin(spare=(ring.agreed(),))

    def note(self, ring, rank, version):
        ring.note_copied(version, world=self.attempt)
        self.pushed[rank] = version

    # ------------------------------------------------------------ losses

    def lose_a_rank(self):
        before = self.step
        fates = [self.dice.choice(["not begun", "torn", "done"]) for _ in self.ranks]
        self.take_step(fates=fates)
        choice = self.chosen()
        least = before + all(fate == "done" for fate in fates)
        if least > 0:
            assert choice is not None and choice.step >= least, (choice, least, fates)
        self.restart(choice)

    def lose_a_host(self):
        lost = self.dice.randrange(self.hosts)
        for made in self.ranks:
            made.settle()
        if self.dice.random() < 0.5:  # in the midst of a step
            self.take_step(fates=[self.dice.choice(["not begun", "torn", "done"]) for _ in self.ranks])
        held = min(made._agreed for made in self.ranks)
        choice = self.chosen(without=lost)
        if self.protected:
            assert choice is not None and choice.step >= held, (choice, held)
        shutil.rmtree(self.memory(lost))
        self.memory(lost).mkdir()
        self.protected = False  # the copies that it held are gone: until the first one of the next attempt is there
        self.restart(choice, lost=lost)

    def restart(self, choice, *, lost=None):
        if choice is not None and lost is not None:
            self.fetch(choice, lost)
        for rank, held in choice.shards.items() if choice else ():
            host = int(held.host.removeprefix("host-"))
            tier = "own" if held.tier == "memory" else "peer"
            ring = Ring.open(self.memory(host) / file_name(tier, self.layout.key, rank))
            slot = ring.slot(ring.find(choice.step, choice.attempt).slot)
            assert bytes(slot[:16]) == torch.full((4,), float(choice.step)).numpy().tobytes(), "versions never mix"
        self.begin(choice)

    def fetch(self, choice, rank):
        """The swapped-in host's rank begins with a version of its own."""
        held = choice.shards[rank]
        source = Ring.open(self.memory(int(held.host.removeprefix("host-"))) / file_name("peer", self.layout.key, rank))
        ring = Ring.create(
            self.memory(rank) / file_name("own", self.layout.key, rank), header=source.header,
            slot_bytes=source.slot_bytes, slots=1,
        )  # fmt: skip
        ring.slot(ring.begin())[:] = bytes(source.slot(source.find(choice.step, choice.attempt).slot))
        ring.commit(0, step=choice.step, attempt=choice.attempt, rank=rank)


def killed(*_, **__):
    raise Killed


@pytest.mark.parametrize("seed", range(40))
def test_a_lost_rank_costs_no_step_and_a_lost_host_never_all_of_them(tmp_path, monkeypatch, seed):
    if seed % 2:  # checksums come from threads, which are killed with their ranks
        monkeypatch.setattr(snapshot, "INLINE_BYTES", 0)
    dice = random.Random(seed)
    world = World(tmp_path, dice, hosts=dice.choice([2, 2, 3, 4]))
    slow = dice.choice([0.3, 1.0, 4.0])  # copies' moves a step
    for _ in range(120):
        what = dice.random()
        if what < 0.05:
            world.lose_a_rank()
        elif what < 0.09:
            world.lose_a_host()
        elif what < 0.09 + 0.91 / (1 + slow):
            world.take_step()
        else:
            world.copy_on(dice.randrange(world.hosts))
