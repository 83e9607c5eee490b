"""Manifests, commit markers, fences and pruning, on memory:// and on files."""

import dataclasses
import functools
import json
import uuid

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.checkpoint_format import fences, manifest, shards
from muster.checkpoint_format.checksum import checksum_of
from muster.checkpoint_format.manifest import Manifest, committed
from muster.checkpoint_format.shard_file import StoredFile, write_shard
from muster.core.errors import CheckpointError, ConflictError
from muster.core.types import Layout
from muster.storage import uris
from muster.storage.store import blobs, open_store

INDEX = StoredFile(name="index.json", bytes=2, checksum=checksum_of(b"{}"))
SHARD = "rank-00000.shard"


@functools.cache
def shard(step, attempt, run_id, data):
    """(the bytes of a shard file, its entry in a manifest)"""
    header = shards.ShardHeader(
        run_id=run_id, attempt=attempt, step=step, rank=0, layout=Layout(dp_shard=2), tensors=()
    )
    uri = f"memory://{uuid.uuid4().hex}/{SHARD}"
    stored = write_shard(uri, (shards.preamble(header), data))
    return blobs.read_range(uri, 0, stored.bytes), stored


def made(folder, step, *, attempt=1, run_id="run", data=b"0123456789"):
    return Manifest(
        run_id=run_id,
        attempt=attempt,
        step=step,
        layout=Layout(dp_shard=2),
        prefix=manifest.step_prefix(step, attempt),
        files=(shard(step, attempt, run_id, data)[1],),
        index=INDEX,
        bytes=len(data),
        created_ns=1,
        version="0",
        extra={"data_fingerprint": "abc"},
        directory=folder,
    )


def write(store, folder, step, *, attempt=1, run_id="run", data=b"0123456789", marker=True):
    found = made(folder, step, attempt=attempt, run_id=run_id, data=data)
    store.put(uris.join(found.uri, SHARD), shard(step, attempt, run_id, data)[0])
    store.put(uris.join(found.uri, INDEX.name), b"{}")
    if marker:
        manifest.commit(store, found)
    return found


def claim(store, folder, attempt, run_id="run"):
    manifest.claim(store, folder, run_id=run_id, attempt=attempt)


def steps(store, folder, **options):
    return [(found.step, found.attempt) for found in committed(store, folder, **options)]


def test_what_is_committed_is_listed_newest_first(store, folder):
    assert committed(store, folder) == []
    claim(store, folder, 1)
    for step in (5, 30, 7):
        write(store, folder, step)
    write(store, folder, 99, marker=False)
    assert steps(store, folder) == [(30, 1), (7, 1), (5, 1)]
    newest = committed(store, folder)[0]
    assert newest == made(folder, 30)
    assert newest.uri == uris.join(folder, "step-00000030.a1")
    assert newest.checkpoint(tier="disk").committed
    assert manifest.missing(newest) is None
    assert manifest.damage(newest) is None


def test_a_moved_folder_still_restores(store, tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    claim(store, str(old), 1)
    write(store, str(old), 3)
    old.rename(new)
    (found,) = committed(store, str(new))
    assert manifest.damage(found) is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"format": 2}',
        b'{"format": 2, "checksum": {}, "body": {}}',
    ],
)
def test_malformed_markers_are_named_and_skipped(store, folder, data):
    claim(store, folder, 1)
    write(store, folder, 1)
    bad = uris.join(folder, "commits", "step-00000002.json")
    store.put(bad, data)
    store.put(uris.join(folder, "commits", "notes.txt"), b"hello")
    skipped = []
    assert steps(store, folder, on_skip=lambda *what: skipped.append(what)) == [(1, 1)]
    assert [uri for uri, _ in skipped] == [bad]


@pytest.mark.parametrize(
    "change",
    [
        {"prefix": "../../etc"},
        {"prefix": "step-00000004.a1/../x"},
        {"files": ()},
        {"files": (dataclasses.replace(INDEX, name="../secret"),)},
        {"files": (dataclasses.replace(INDEX, name="a/b"),)},
        {"files": (dataclasses.replace(INDEX, bytes=-1),)},
        {"index": dataclasses.replace(INDEX, name="../secret")},
        {"step": -1},
    ],
)
def test_markers_that_lead_astray_are_refused(change):
    with pytest.raises(CheckpointError, match="not a commit marker"):
        Manifest.decode(dataclasses.replace(made("d", 4), **change).encode(), directory="d")


def test_markers_and_fences_of_format_1_are_refused_by_number(store, folder):
    claim(store, folder, 1)
    old = {**json.loads(made(folder, 4).encode())["body"], "format": 1}
    store.put(manifest.marker_uri(folder, 4), json.dumps(old).encode())
    skipped = []
    assert steps(store, folder, on_skip=lambda *what: skipped.append(what)) == []
    assert skipped[0][1] == "a commit marker of format 1, this version reads 2"
    store.delete(fences.copy_uri(folder))
    store.put(fences.fence_uri(folder), b'{"format": 1, "run_id": "run", "attempt": 1, "inherited": {}}')
    with pytest.raises(CheckpointError, match="a fence of format 1, this version reads 3"):
        committed(store, folder)


@pytest.mark.parametrize("data, word", [(b"[]", "checksum"), (b"{", "checksum"), (None, "missing")])
def test_a_damaged_index_is_found_by_whoever_reads_the_first_part(store, folder, data, word):
    claim(store, folder, 1)
    found = write(store, folder, 1)
    uri = uris.join(found.uri, INDEX.name)
    if data is None:
        store.delete(uri)
    else:
        store.put(uri, data)
    assert word in manifest.damage(found) and word in manifest.damage(found, part=0, parts=2)
    assert manifest.damage(found, part=1, parts=2) is None


def test_a_shard_of_another_step_is_no_part_of_this_one(store, folder):
    """Even where a manifest names its checksum."""
    claim(store, folder, 1)
    other = dataclasses.replace(made(folder, 5), files=made(folder, 4).files)
    store.put(uris.join(other.uri, SHARD), shard(4, 1, "run", b"0123456789")[0])
    store.put(uris.join(other.uri, INDEX.name), b"{}")
    assert manifest.damage(other) == f"{SHARD} is of step 4 of attempt 1 of run run"


def test_a_marker_under_another_steps_name_is_skipped(store, folder):
    claim(store, folder, 1)
    store.put(manifest.marker_uri(folder, 9), made(folder, 4).encode())
    assert steps(store, folder) == []


@settings(max_examples=60, deadline=None)
@given(
    data=st.binary(min_size=1, max_size=400),
    place=st.integers(min_value=0),
    bit=st.integers(min_value=0, max_value=7),
)
def test_any_flipped_bit_is_found(data, place, bit):
    store, folder = open_store(), f"memory://{uuid.uuid4().hex}"
    claim(store, folder, 1)
    found = write(store, folder, 1, data=data)
    whole, _ = shard(1, 1, "run", data)
    broken = bytearray(whole)
    broken[place % len(whole)] ^= 1 << bit
    store.put(uris.join(found.uri, SHARD), bytes(broken))
    assert manifest.missing(found) is None
    assert "damaged" in manifest.damage(found)
    store.put(uris.join(found.uri, SHARD), whole[:-1])
    assert "truncated" in manifest.missing(found)
    blobs.remove_tree(found.uri)
    assert "missing" in manifest.missing(found)


def test_older_attempts_commit_nothing(store, folder):
    claim(store, folder, 1)
    write(store, folder, 1)
    claim(store, folder, 2)
    with pytest.raises(ConflictError, match="attempt 2"):
        write(store, folder, 2)
    with pytest.raises(ConflictError, match="attempt 2"):
        claim(store, folder, 1)
    claim(store, folder, 2)
    write(store, folder, 2, attempt=2)
    assert steps(store, folder) == [(2, 2), (1, 1)]


def test_a_marker_that_slipped_past_the_check_does_not_count(store, folder):
    """The old attempt checked the fence, stalled, and wrote after the new one had taken over."""
    claim(store, folder, 1)
    write(store, folder, 1)
    late = write(store, folder, 5, marker=False)
    claim(store, folder, 2)
    store.put_if_absent(late.marker_uri, late.encode())
    skipped = []
    assert steps(store, folder, on_skip=lambda *what: skipped.append(what)) == [(1, 1)]
    assert "after attempt 2 began" in skipped[0][1]
    claim(store, folder, 3)
    assert steps(store, folder) == [(1, 1)]  # and never will
    write(store, folder, 5, attempt=3)  # its place is free for who may commit
    assert steps(store, folder) == [(5, 3), (1, 1)]


def test_a_claim_that_died_half_way_loses_nothing(store, folder):
    claim(store, folder, 1)
    write(store, folder, 1)
    late = write(store, folder, 5, marker=False)
    claim(store, folder, 2)
    store.put_if_absent(late.marker_uri, late.encode())
    held = store.get(fences.fence_uri(folder))
    before = fences.Fence.decode(held.data)
    half = fences.Fence(run_id="run", attempt=3, before=before)
    store.put_if(fences.fence_uri(folder), half.encode(), held.generation)
    assert steps(store, folder) == [(1, 1)]
    with pytest.raises(ConflictError):
        write(store, folder, 6, attempt=3)  # not before the claim is whole
    claim(store, folder, 4)
    assert steps(store, folder) == [(1, 1)]
    assert fences.read(store, folder).inherited == {"step-00000001.json": "run/1"}


def test_another_run_goes_on_in_the_folder(store, folder):
    claim(store, folder, 7, run_id="first")
    write(store, folder, 1, attempt=7, run_id="first")
    claim(store, folder, 1, run_id="second")
    write(store, folder, 2, attempt=1, run_id="second")
    with pytest.raises(ConflictError, match="second"):
        write(store, folder, 3, attempt=7, run_id="first")
    assert [(found.run_id, found.step) for found in committed(store, folder)] == [("second", 2), ("first", 1)]


def test_pruning_keeps_the_newest_by_commit_not_by_step(store, folder):
    claim(store, folder, 1)
    write(store, folder, 150)
    claim(store, folder, 2)
    for step in (110, 120, 130):
        write(store, folder, step, attempt=2)
    removed = manifest.prune(store, folder, keep_last=2, run_id="run", attempt=2)
    assert steps(store, folder) == [(130, 2), (120, 2)]
    assert sorted(map(uris.name, removed)) == ["step-00000110.a2", "step-00000150.a1"]
    assert blobs.folders(folder) == ["commits", "step-00000120.a2", "step-00000130.a2"]


def test_pruning_never_removes_the_last_whole_one(store, folder):
    claim(store, folder, 1)
    for step in (1, 2, 3):
        write(store, folder, step)
    for step in (2, 3):
        store.delete(uris.join(folder, f"step-{step:08d}.a1", "rank-00000.shard"))
    manifest.prune(store, folder, keep_last=1, run_id="run", attempt=1)
    assert (1, 1) in steps(store, folder)
    with pytest.raises(ValueError):
        manifest.prune(store, folder, keep_last=0, run_id="run", attempt=1)


class Dies(Exception):
    pass


@pytest.mark.parametrize("calls", range(1, 12))
def test_a_kill_while_pruning_leaves_no_marker_without_data(store, calls, monkeypatch):
    """Cut off after every number of calls: whatever is still listed is whole."""
    folder = f"memory://{uuid.uuid4().hex}"
    claim(store, folder, 1)
    for step in (1, 2, 3, 4):
        write(store, folder, step)
    left = [calls]

    def limited(call):
        def run(*arguments):
            left[0] -= 1
            if left[0] < 0:
                raise Dies
            return call(*arguments)

        return run

    monkeypatch.setattr(blobs, "remove_tree", limited(blobs.remove_tree))
    monkeypatch.setattr(store, "delete", limited(store.delete), raising=False)
    try:
        manifest.prune(store, folder, keep_last=1, run_id="run", attempt=1)
    except Dies:
        pass
    found = committed(store, folder)
    assert (4, 1) in steps(store, folder)
    assert all(manifest.damage(one) is None for one in found)


def test_orphans_of_older_attempts_go(store, folder):
    claim(store, folder, 1)
    write(store, folder, 1)
    write(store, folder, 2, marker=False)
    claim(store, folder, 2)
    write(store, folder, 3, attempt=2, marker=False)
    store.put(uris.join(folder, "mine", "notes.txt"), b"not ours")
    removed = manifest.remove_orphans(store, folder, run_id="run", attempt=2)
    assert list(map(uris.name, removed)) == ["step-00000002.a1"]
    assert set(blobs.folders(folder)) == {"commits", "mine", "step-00000001.a1", "step-00000003.a2"}
    with pytest.raises(ConflictError):
        manifest.remove_orphans(store, folder, run_id="run", attempt=1)


def test_the_data_of_a_marker_that_cannot_be_read_is_no_orphan(store, folder):
    """A later release, or a person, may read it."""
    claim(store, folder, 1)
    found = write(store, folder, 1)
    write(store, folder, 2, marker=False)
    store.put(found.marker_uri, b"{}")
    store.put(uris.join(folder, "commits", "notes.txt"), b"not ours")
    claim(store, folder, 2)
    removed = manifest.remove_orphans(store, folder, run_id="run", attempt=2)
    assert list(map(uris.name, removed)) == ["step-00000002.a1"]
    assert blobs.size(uris.join(found.uri, SHARD))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["claim", "commit", "prune", "orphans"]), st.integers(1, 6)), max_size=25))
def test_any_course_leaves_whole_versions_of_attempts_that_held_the_fence(moves):
    """The catalogue's invariants under random courses: what is listed is whole, and the newest commit stays."""
    store, folder = open_store(), f"memory://{uuid.uuid4().hex}"
    attempt, step, newest = 0, 0, None
    for move, number in moves:
        if move == "claim":
            attempt += 1
            step = max(0, step - number + 1)  # a new attempt may go back; within one, steps rise
            claim(store, folder, attempt)
        elif attempt == 0:
            continue
        elif move == "commit":
            step += number
            if (step, attempt) not in steps(store, folder):
                newest = write(store, folder, step, attempt=attempt)
        elif move == "prune":
            manifest.prune(store, folder, keep_last=number, run_id="run", attempt=attempt)
        else:
            manifest.remove_orphans(store, folder, run_id="run", attempt=attempt)
        found = committed(store, folder)
        assert all(manifest.damage(one) is None for one in found)
        if newest is not None:
            assert newest in found


def test_pruning_spares_the_best_by_held_out_loss(store, folder):
    claim(store, folder, 1)
    for step, loss in ((10, 2.5), (20, 1.5), (30, 1.75), (40, None), (50, True), (60, 3.0)):
        found = dataclasses.replace(made(folder, step), extra={} if loss is None else {manifest.HELDOUT_LOSS: loss})
        store.put(uris.join(found.uri, SHARD), shard(step, 1, "run", b"0123456789")[0])
        store.put(uris.join(found.uri, INDEX.name), b"{}")
        manifest.commit(store, found)
    assert [found.step for found in manifest.best(committed(store, folder))] == [20, 30, 10, 60]
    manifest.prune(store, folder, keep_last=1, keep_best=2, run_id="run", attempt=1)
    assert steps(store, folder) == [(60, 1), (30, 1), (20, 1)]
    store.delete(
        uris.join(committed(store, folder)[-1].uri, SHARD)
    )  # the best is damaged: the next one takes its place
    manifest.prune(store, folder, keep_last=1, keep_best=1, run_id="run", attempt=1)
    assert steps(store, folder) == [(60, 1), (30, 1)]


def test_a_whole_version_of_somebody_else_who_can_write_there_counts(store, folder):
    """SECURITY.md says so: checksums find accidents, and are no signatures."""
    claim(store, folder, 1)
    write(store, folder, 1)
    forged = write(store, folder, 2, data=b"not theirs")
    assert steps(store, folder)[0] == (2, 1) and manifest.missing(forged) is None and manifest.damage(forged) is None
