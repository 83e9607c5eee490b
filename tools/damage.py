"""Damage every kind of stored bytes at random and recover: ``python tools/damage.py --cases 10000 --seed 1``.

Each case takes whole bytes (a snapshot ring, a shard, an index, a manifest or a fence on the disk, a copy on its way to
another host), flips bits, zeroes, swaps pages, truncates, or splices in what belongs to another version, run or rank,
and recovers as a restarted rank does. It passes where

* the tensors that come back are those of the version that was asked for, or
* a CheckpointError says in known words what is wrong, and the newest version that was not touched is taken next.

Exit code 1 and one line for each case that fails.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import re
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from muster.agent.replicator.replication import decode_peer
from muster.agent.replicator.transfer import answer_read, receive_version
from muster.checkpoint.load import load_into, newest_valid
from muster.checkpoint.saver import Saver
from muster.checkpoint_format.manifest import committed
from muster.checkpoint_format.snapshot_ring import Ring, file_name, list_snapshots
from muster.core.errors import CheckpointError, MusterError
from muster.core.layout import Layout
from muster.core.snapshots import MAX_SLOTS, SnapshotCopy, SnapshotNotIntact
from muster.protocol.ranks import RankContext, Restore, ShardSource
from muster.protocol.replicator_peers import ReadVersion, VersionFollows
from muster.storage.store import open_store
from muster.train.state.snapshot import Snapshots
from muster.train.state.snapshot_restore import restored
from muster.transport.stream import Stream

LAYOUT = Layout(dp_shard=2)
RING = file_name("own", LAYOUT.key, 0)
COPY = file_name("peer", LAYOUT.key, 0)
STEPS = (6, 7)
SAVED = (4, 8)
PAGE = 4096
#: What a user may be told; anything else is no clear word.
CLEAR = re.compile(
    r"does not match its checksum|not a snapshot ring|no snapshot ring|is truncated|truncated$|is missing"
    r"|of format \d+, this version reads|of an unknown format|not a commit marker|not a fence|does not hold step"
    r"|the marker is of step|committed by attempt|is another snapshot|no index|on arrival"
    r"|names .* which the manifest does not"
)
State = dict[str, torch.Tensor]


class Wrong(Exception):
    """A case that failed: what came back, or was said."""


# ---------------------------------------------------------------- what is damaged


@dataclass(frozen=True)
class Damage:
    """How bytes were damaged, and which of them may differ now."""

    data: bytes
    words: str
    changed: range


Operation = Callable[[bytes, range, random.Random, Sequence[bytes]], Damage]


def flip_bit(data: bytes, where: range, dice: random.Random, others: Sequence[bytes]) -> Damage:
    at, bit = dice.choice(where), dice.randrange(8)
    return _patched(data, at, bytes([data[at] ^ 1 << bit]), f"bit {bit} of byte {at} flipped")


def flip_cancelling(data: bytes, where: range, dice: random.Random, others: Sequence[bytes]) -> Damage:
    """The same bit of two 64-bit words, set in one and cleared in the other: an unweighted sum does not see it."""
    words = [where.start + 8 * number for number in range(len(where) // 8)]
    dice.shuffle(words)
    for bit in dice.sample(range(8), 8):
        at = {(data[word] >> bit) & 1: word for word in words[:50]}
        if len(at) == 2:
            first, last = sorted(at.values())
            changed = bytearray(data)
            for word in (first, last):
                changed[word] ^= 1 << bit
            return Damage(bytes(changed), f"bit {bit} flipped in bytes {first} and {last}", range(first, last + 1))
    return flip_bit(data, where, dice, others)


def flip_digit(data: bytes, where: range, dice: random.Random, others: Sequence[bytes]) -> Damage:
    """One digit of a number in a text becomes another."""
    digits = [at for at in where if 48 <= data[at] <= 57]
    if not digits:
        return flip_bit(data, where, dice, others)
    at = dice.choice(digits)
    digit = dice.choice([d for d in range(48, 58) if d != data[at]])
    return _patched(data, at, bytes([digit]), f"byte {at} is {chr(digit)}, not {chr(data[at])}")


def zero_bytes(data: bytes, where: range, dice: random.Random, others: Sequence[bytes]) -> Damage:
    at = dice.choice(where)
    count = min(dice.choice([1, 8, 64, PAGE]), where.stop - at)
    return _patched(data, at, bytes(count), f"{count} bytes from {at} on zeroed")


def swap_pages(data: bytes, where: range, dice: random.Random, others: Sequence[bytes]) -> Damage:
    pages = [at for at in range(-(-where.start // PAGE) * PAGE, where.stop - PAGE + 1, PAGE)]
    if len(pages) < 2:
        return flip_bit(data, where, dice, others)
    first, last = sorted(dice.sample(pages, 2))
    changed = bytearray(data)
    changed[first : first + PAGE], changed[last : last + PAGE] = data[last : last + PAGE], data[first : first + PAGE]
    return Damage(bytes(changed), f"pages at {first} and {last} swapped", range(first, last + PAGE))


def truncate(data: bytes, where: range, dice: random.Random, others: Sequence[bytes]) -> Damage:
    at = dice.choice(where)
    return Damage(data[:at], f"truncated to {at} bytes", range(len(data)))


def splice(data: bytes, where: range, dice: random.Random, others: Sequence[bytes]) -> Damage:
    """A part, or all, of what belongs to another version, run or rank."""
    other = dice.choice(others)
    if dice.random() < 0.3:
        return Damage(other, "another one in its place", range(max(len(data), len(other))))
    start = min(dice.choice(where), len(other) - 1)
    count = min(dice.choice([8, 64, PAGE, len(data)]), where.stop - start, len(other) - start)
    return _patched(data, start, other[start : start + max(count, 0)], f"{count} bytes from {start} on of another one")


OPERATIONS: tuple[Operation, ...] = (
    flip_bit, flip_cancelling, flip_digit, zero_bytes, swap_pages, truncate, splice
)  # fmt: skip


def _patched(data: bytes, at: int, patch: bytes, words: str) -> Damage:
    return Damage(data[:at] + patch + data[at + len(patch) :], words, range(at, at + len(patch)))


# ---------------------------------------------------------------- what is recovered


def state_of(seed: int) -> State:
    """Like a rank's: two large tensors, a small one, a number."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "model.w": torch.randn(48, 64, generator=draw),
        "model.b": torch.randn(7, generator=draw).bfloat16(),
        "optimizer.m.w": torch.randn(48, 64, generator=draw),
        "optimizer.step": torch.tensor(float(seed)),
    }


def check(found: Mapping[str, torch.Tensor], step: int, what: str) -> None:
    """Raise Wrong unless ``found`` is, bit for bit, the state after ``step``."""
    for name, tensor in state_of(step).items():
        if name not in found or not torch.equal(found[name], tensor):
            raise Wrong(f"WRONG WEIGHTS: {name} of {what} {step} came back changed")


def check_words(error: MusterError) -> str:
    if CLEAR.search(str(error)) is None:
        raise Wrong(f"no clear word: {error}")
    return str(error)


def context(folder: Path, *, run_id: str = "run-a", rank: int = 0) -> RankContext:
    return RankContext(
        run_id=run_id, run_dir=str(folder), attempt=3, host="h", rank=rank, local_rank=rank, world_size=2,
        local_world_size=2, layout=LAYOUT, master_addr="", master_port=1, snapshot_dir=str(folder),
    )  # fmt: skip


def snapshot(folder: Path, *, run_id: str = "run-a", rank: int = 0, offset: int = 0) -> bytes:
    """The ring of a rank that has taken snapshots after ``STEPS`` (their states: of step + ``offset``)."""
    folder.mkdir(parents=True)
    taken = Snapshots(context(folder, run_id=run_id, rank=rank), state_of(0))
    for step in STEPS:
        taken.save(step, state_of(step + offset))
    taken.settle()
    return (folder / file_name("own", LAYOUT.key, rank)).read_bytes()


def asked(path: Path, step: int, attempt: int) -> Restore:
    """What an attempt is told to restore."""
    copy = SnapshotCopy(step=step, attempt=attempt, rank=0, layout=LAYOUT.key, host="h", tier="memory")
    return Restore(step=step, attempt=attempt, layout=LAYOUT, sources={0: ShardSource(path=str(path), copy=copy)})


def take_snapshots(folder: Path) -> list[tuple[int, str]]:
    """Restore as attempts do: the newest that is listed and was not rejected, until one is taken; (step, word) each."""
    tried: dict[tuple[int, int], str] = {}
    while True:
        listed = [
            (held.step, held.attempt)
            for held in list_snapshots(folder)
            if held.rank == 0 and (held.step, held.attempt) not in tried
        ]
        if not listed:
            return [(step, word) for (step, _), word in tried.items()]
        step, attempt = max(listed)
        try:
            found, _ = restored(context(folder), asked(folder / RING, step, attempt), state_of(0))
        except SnapshotNotIntact as error:
            tried[step, attempt] = check_words(error)
            continue
        check(found, step, "step")
        return [*((step, word) for (step, _), word in tried.items()), (step, "")]


class Templates:
    """Whole bytes, made once."""

    def __init__(self, folder: Path) -> None:
        self.ring = snapshot(folder / "a")
        self.other_rings = (
            snapshot(folder / "run", run_id="run-b", offset=100),
            snapshot(folder / "rank", rank=1, offset=1),
        )
        self.disk = folder / "disk"
        self.other_disk = folder / "other-disk"
        save(self.disk, "run-a", offset=0)
        save(self.other_disk, "run-b", offset=100)
        whole = Ring.open(folder / "a" / RING)
        self.data_at, self.slot_bytes = len(self.ring) - MAX_SLOTS * whole.slot_bytes, whole.slot_bytes
        self.slots = {version.step: version.slot for version in whole.versions()}


def save(folder: Path, run_id: str, *, offset: int) -> None:
    """Two committed checkpoints, after ``SAVED`` steps."""
    saver = Saver(
        str(folder), run_id=run_id, attempt=1, layout=Layout(), keep_last=2, asynchronous=False, group=None,
        store=open_store(), on_event=lambda kind, **detail: None,
    )  # fmt: skip
    for step in SAVED:
        saver.save(step, state_of(step + offset), {})
    if len(committed(open_store(), str(folder))) != len(SAVED):
        raise RuntimeError("the harness could not save")


# ---------------------------------------------------------------- cases


def ring_case(made: Templates, folder: Path, dice: random.Random) -> str:
    """A rank's own ring in memory."""
    begin, size = made.data_at, made.slot_bytes
    regions = [
        range(begin),
        range(begin),
        *(range(begin + slot * size, begin + slot * size + size) for slot in made.slots.values()),
    ]
    damage = dice.choice(OPERATIONS)(made.ring, dice.choice(regions), dice, made.other_rings)
    (folder / RING).write_bytes(damage.data)
    outcome = take_snapshots(folder)
    untouched = [
        step
        for step, slot in made.slots.items()
        if damage.changed.start >= begin
        and not set(range(begin + slot * size, begin + slot * size + size)) & set(damage.changed)
    ]
    taken = [step for step, word in outcome if not word]
    if untouched and (not taken or taken[0] < max(untouched)):
        raise Wrong(f"step {max(untouched)} was whole and not taken: {outcome}")
    return damage.words


def disk_case(made: Templates, folder: Path, dice: random.Random) -> str:
    """One file of the newest checkpoint, or the fence; before it is verified or just after."""
    there = folder / "disk"
    shutil.copytree(made.disk, there)
    files = sorted(
        path.relative_to(there)
        for path in there.rglob("*")
        if path.stat().st_size
        and path.is_file()
        and "00000004" not in str(path)
        and not path.name.startswith("begun-")  # of these the name alone counts
    )
    name = dice.choice(files)
    older = Path(str(name).replace("00000008", "00000004"))
    others = [(made.other_disk / name).read_bytes(), (made.disk / older).read_bytes()]
    whole = (there / name).read_bytes()
    damage = dice.choice(OPERATIONS)(whole, range(len(whole)), dice, others)
    late = dice.random() < 0.3 and name.suffix == ".shard"
    if not late:
        (there / name).write_bytes(damage.data)
    said: list[str] = []
    words = f"{name}{' after it was verified' if late else ''}: {damage.words}"
    try:
        manifest = newest_valid(open_store(), str(there), lambda uri, reason: said.append(reason), state=state_of(0))
    except CheckpointError as error:
        check_words(error)
        if "fence" not in str(error) or name.name != "fence.json":
            raise Wrong(f"nothing was taken: {error}") from error
        return words
    for reason in said:
        check_words(CheckpointError(reason))
    if manifest is None:
        if name.name != "fence.json":
            raise Wrong(f"step 4 was whole and not taken: {said}")
        return words
    if late:
        (there / name).write_bytes(damage.data)
    found = state_of(0)
    try:
        load_into(manifest, found)
    except CheckpointError as error:
        check_words(error)
        if not late:
            raise Wrong(f"step {manifest.step} was chosen and not loaded: {error}") from error
        return words
    check(found, manifest.step, "the checkpoint of step")
    return words


class Rotten:
    """A socket whose ``nth`` sent byte is changed."""

    def __init__(self, sock: socket.socket, nth: int, mask: int) -> None:
        self._sock, self._left, self._mask = sock, nth, mask

    def sendall(self, data: bytes | memoryview) -> None:
        changed = bytearray(data)
        if 0 <= self._left < len(changed):
            changed[self._left] ^= self._mask
        self._left -= len(changed)
        self._sock.sendall(changed)

    def __getattr__(self, name: str) -> object:
        return self.__dict__["_sock"].__getattribute__(name)


def wire_case(made: Templates, folder: Path, dice: random.Random) -> str:
    """A copy on its way to another host, or rotten before it is sent."""
    here, there = folder / "here", folder / "there"
    here.mkdir()
    there.mkdir()
    words, data, nth = "", made.ring, 1 << 40
    if dice.random() < 0.4:
        slot = made.data_at + made.slots[7] * made.slot_bytes
        damage = dice.choice(OPERATIONS[:5])(made.ring, range(slot, slot + made.slot_bytes), dice, made.other_rings)
        words, data = f"before it is sent: {damage.words}", damage.data
    else:
        nth = dice.randrange(200, made.slot_bytes + 2000)
        words = f"byte {nth} on the wire"
    (here / RING).write_bytes(data)
    ours, theirs = socket.socketpair()
    ours.settimeout(5)
    theirs.settimeout(5)
    mask = 1 << dice.randrange(8)

    def serve() -> None:
        with contextlib.suppress(OSError, MusterError, ValueError, KeyError), ours:
            stream = Stream(Rotten(ours, nth, mask), b"token", server=True, decode=decode_peer)  # type: ignore[arg-type]
            request = stream.receive()
            if isinstance(request, ReadVersion):
                answer_read(Ring.open(here / RING), request, stream)

    thread = threading.Thread(target=serve)
    thread.start()
    with theirs, contextlib.suppress(OSError, MusterError, ValueError):
        stream = Stream(theirs, b"token", server=False, decode=decode_peer)
        stream.send(ReadVersion(file=RING, copy=asked(here / RING, 7, 3).sources[0].copy))
        offer = stream.receive()
        if isinstance(offer, VersionFollows):
            receive_version(there / COPY, offer, stream)
    thread.join()
    for held in list_snapshots(there):
        found, _ = restored(context(there), asked(there / COPY, held.step, held.attempt), state_of(0))
        check(found, held.step, "a copy of step")
    return words


CASES: Mapping[str, Callable[[Templates, Path, random.Random], str]] = {
    "ring": ring_case, "disk": disk_case, "wire": wire_case,
}  # fmt: skip


def run(cases: int, seed: int) -> Iterator[tuple[str, str, str]]:
    """(kind, what was done, what went wrong: empty where nothing did) of each case."""
    root = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="muster-damage-", dir=root) as base:
        made = Templates(Path(base) / "templates")
        for number in range(cases):
            dice = random.Random(f"{seed} {number}")
            kind = dice.choice(["ring", "ring", "disk", "disk", "wire"])
            folder = Path(base) / str(number)
            folder.mkdir()
            try:
                words = CASES[kind](made, folder, dice)
                yield kind, words, ""
            except Wrong as wrong:
                yield kind, f"case {number}", str(wrong)
            except Exception as error:  # noqa: BLE001 (what a rank would die of)
                yield kind, f"case {number}", f"{type(error).__name__}: {error}"
            finally:
                shutil.rmtree(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    began, counts, failed = time.monotonic(), Counter[str](), Counter[str]()
    for kind, words, problem in run(given.cases, given.seed):
        counts[kind] += 1
        if problem:
            failed[kind] += 1
            print(f"{kind}, {words}: {problem[:300]}")
    seconds = time.monotonic() - began
    print(f"{dict(counts)}, failed {dict(failed)}, seed {given.seed}, {seconds:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
