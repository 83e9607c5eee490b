"""A fence that is damaged or gone: saves go on, the bytes are kept, and older attempts still commit nothing."""

import shutil

import pytest
from test_manifest import claim, made, steps, write

from muster.checkpoint_format import fences, manifest
from muster.checkpoint_format.decoding import seal
from muster.core.errors import CheckpointError, ConflictError
from muster.storage import uris

DAMAGES = ("flipped", "emptied", "torn", "gone")


def damage(store, uri, how):
    data = store.get(uri).data
    if how == "gone":
        store.delete(uri)
        return None
    place = data.index(b'"attempt"') + 12
    broken = {"emptied": b"", "torn": data[:50], "flipped": data[:place] + b"9" + data[place + 1 :]}[how]
    assert broken != data
    store.put(uri, broken)
    return broken


def both(store, folder, how):
    damage(store, fences.copy_uri(folder), how)
    return damage(store, fences.fence_uri(folder), how)


def commit(store, folder, step, attempt=1):
    """A save; what was said of the fence."""
    said = []
    found = write(store, folder, step, attempt=attempt, marker=False)
    manifest.commit(store, found, on_rebuilt=said.append)
    return said


@pytest.mark.parametrize("how", DAMAGES)
def test_saves_go_on_and_it_is_written_again_from_its_copy(store, folder, how):
    claim(store, folder, 1)
    write(store, folder, 1)
    claim(store, folder, 2)
    before = fences.read(store, folder)
    broken = damage(store, fences.fence_uri(folder), how)
    assert fences.read(store, folder) == before and steps(store, folder) == [(1, 1)], "who only looks reads the copy"
    (said,) = commit(store, folder, 2, attempt=2)
    assert "fence.json" in said and "its copy" in said
    assert fences.Fence.decode(store.get(fences.fence_uri(folder)).data) == before
    if broken is not None:
        assert store.get(uris.join(folder, "fence.damaged.json")).data == broken
    assert commit(store, folder, 3, attempt=2) == []
    assert steps(store, folder) == [(3, 2), (2, 2), (1, 1)]


def test_who_only_looks_is_told(store, folder):
    claim(store, folder, 1)
    write(store, folder, 1)
    for name, words in ((fences.fence_uri(folder), "its copy is read"), (fences.copy_uri(folder), "every marker")):
        damage(store, name, "torn")
        skipped = []
        assert steps(store, folder, on_skip=lambda *what, seen=skipped: seen.append(what)) == [(1, 1)]
        ((uri, reason),) = skipped
        assert uri == fences.fence_uri(folder) and words in reason


@pytest.mark.parametrize("how", DAMAGES)
def test_with_its_copy_it_is_made_anew_from_whole_markers(store, folder, how):
    claim(store, folder, 1)
    for step in (1, 2):
        write(store, folder, step)
    store.put(manifest.marker_uri(folder, 2), b"{")
    both(store, folder, how)
    said = commit(store, folder, 3)
    assert steps(store, folder) == [(3, 1), (1, 1)]
    assert fences.read(store, folder).inherited == {"step-00000001.json": "run/1"}
    assert len(said) == 1 and "markers" in said[0]


@pytest.mark.parametrize("how", DAMAGES[:3])
@pytest.mark.parametrize("what", ["fence", "copy", "both"])
def test_the_next_attempt_heals_it_and_older_ones_stay_out(store, folder, how, what):
    claim(store, folder, 1)
    write(store, folder, 1)
    late = write(store, folder, 5, marker=False)
    if what in ("fence", "both"):
        damage(store, fences.fence_uri(folder), how)
    if what in ("copy", "both"):
        damage(store, fences.copy_uri(folder), how)
    claim(store, folder, 2)
    store.put_if_absent(late.marker_uri, late.encode())
    assert steps(store, folder) == [(1, 1)], "the late one does not count"
    assert fences.Fence.decode(store.get(fences.copy_uri(folder)).data) == fences.read(store, folder)
    with pytest.raises(ConflictError, match="attempt 2"):
        write(store, folder, 6)
    write(store, folder, 5, attempt=2)
    assert steps(store, folder) == [(5, 2), (1, 1)]


@pytest.mark.parametrize("how", DAMAGES)
def test_an_older_attempt_does_not_mend_it_for_itself(store, folder, how):
    claim(store, folder, 1)
    claim(store, folder, 2)
    write(store, folder, 1, attempt=2)
    damage(store, fences.fence_uri(folder), how)
    with pytest.raises(ConflictError, match="attempt 2"):
        write(store, folder, 6)
    damage(store, fences.copy_uri(folder), how)
    with pytest.raises(ConflictError, match="attempt 2"):
        claim(store, folder, 1)
    assert steps(store, folder) == [(1, 2)]


@pytest.mark.parametrize("how", DAMAGES)
def test_an_attempt_that_has_committed_nothing_yet_keeps_older_ones_out_without_a_fence(store, folder, how):
    claim(store, folder, 1)
    write(store, folder, 1)
    claim(store, folder, 2)
    both(store, folder, how)
    for work in (lambda: write(store, folder, 6), lambda: claim(store, folder, 1)):
        with pytest.raises(ConflictError, match="attempt 2 has begun"):
            work()
    assert len(commit(store, folder, 2, attempt=2)) == 1, "the rightful one mends it, and says so"
    assert steps(store, folder) == [(2, 2), (1, 1)]


def test_of_the_names_of_begun_attempts_the_newest_of_each_run_stays(store, folder):
    claim(store, folder, 7, run_id="another")
    for attempt in (1, 2, 3):
        claim(store, folder, attempt)
    names = [uris.name(uri) for uri in store.list(uris.join(folder, "commits"))]
    assert names == ["begun-another.a7", "begun-run.a3"]
    both(store, folder, "gone")
    with pytest.raises(ConflictError, match="attempt 3 has begun"):
        claim(store, folder, 2)


def test_a_superseded_attempt_removes_no_newer_name(store, folder):
    claim(store, folder, 2)
    with pytest.raises(ConflictError):
        claim(store, folder, 1)
    assert manifest.begun_uri(folder, "run", 2) in store.list(uris.join(folder, "commits"))


def test_markers_of_other_runs_count_only_where_this_run_has_none(store, folder):
    claim(store, folder, 3, run_id="first")
    write(store, folder, 1, attempt=3, run_id="first")
    both(store, folder, "flipped")
    claim(store, folder, 1, run_id="second")
    assert [found.run_id for found in manifest.committed(store, folder)] == ["first"], "it goes on from there"
    write(store, folder, 2, run_id="second")
    both(store, folder, "flipped")
    claim(store, folder, 2, run_id="second")
    assert [found.run_id for found in manifest.committed(store, folder)] == ["second"]


@pytest.mark.parametrize("calls", range(19))
def test_a_claim_that_is_killed_anywhere_leaves_one_that_the_next_can_take(store, folder, calls):
    claim(store, folder, 1)
    write(store, folder, 1)
    damage(store, fences.fence_uri(folder), "flipped")

    class Killed(Exception):
        pass

    class Limited:
        left = calls

        def __getattr__(self, name):
            def call(*arguments):
                self.left -= 1
                if self.left < 0:
                    raise Killed
                return getattr(store, name)(*arguments)

            return call

    try:
        manifest.claim(Limited(), folder, run_id="run", attempt=2)
    except Killed:
        pass
    assert steps(store, folder) == [(1, 1)]
    claim(store, folder, 3)
    write(store, folder, 2, attempt=3)
    assert steps(store, folder) == [(2, 3), (1, 1)]


def test_a_fence_of_another_format_is_no_damage(store, folder):
    claim(store, folder, 1)
    data = store.get(fences.fence_uri(folder)).data.replace(b'"format": 3', b'"format": 4')
    store.put(fences.fence_uri(folder), data)
    store.put(fences.copy_uri(folder), data)
    for work in (lambda: claim(store, folder, 2), lambda: manifest.committed(store, folder)):
        with pytest.raises(CheckpointError, match="of format 4") as caught:
            work()
        assert "fence.previous.json" in caught.value.hint
    assert made(folder, 1).directory == folder


def copies(tmp_path, *attempts):
    """The nonces of a run that has begun ``attempts``, and of a copy of its folder that was made then."""
    ours = fences.nonces_of(tmp_path / "run")
    for attempt in attempts:
        ours(attempt)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    return ours, fences.nonces_of(tmp_path / "copy")


def test_of_two_copies_of_a_run_the_second_is_refused_for_good(store, folder, tmp_path):
    ours, other = copies(tmp_path, 1)
    assert ours(1) == other(1) and ours(2) != other(2) and ours(2) == fences.nonces_of(tmp_path / "run")(2)
    manifest.claim(store, folder, run_id="run", attempt=1, nonce_of=ours)
    write(store, folder, 1)
    manifest.claim(store, folder, run_id="run", attempt=2, nonce_of=ours)
    write(store, folder, 2, attempt=2)
    before = store.get(fences.fence_uri(folder)).data
    for attempt in (2, 3):
        with pytest.raises(ConflictError, match=f"{folder} is held by attempt 2 of another copy of run run$"):
            manifest.claim(store, folder, run_id="run", attempt=attempt, nonce_of=other)
    with pytest.raises(ConflictError, match="another copy"):
        fences.check(store, folder, run_id="run", attempt=2, nonce_of=other)
    begun = [uris.name(uri) for uri in store.list(uris.join(folder, "commits")) if "begun" in uri]
    assert begun == ["begun-run.a2"], "a copy that is refused leaves no number"
    assert store.get(fences.fence_uri(folder)).data == before and steps(store, folder) == [(2, 2), (1, 1)]
    for _ in range(2):
        manifest.claim(store, folder, run_id="run", attempt=3, nonce_of=ours)


def test_the_copy_that_comes_first_takes_over(store, folder, tmp_path):
    ours, other = copies(tmp_path, 1)
    manifest.claim(store, folder, run_id="run", attempt=1, nonce_of=ours)
    found = write(store, folder, 1)
    manifest.claim(store, folder, run_id="run", attempt=2, nonce_of=other)
    for refused in (lambda: manifest.commit(store, found, nonce_of=ours),
                    lambda: manifest.claim(store, folder, run_id="run", attempt=3, nonce_of=ours)):  # fmt: skip
        with pytest.raises(ConflictError, match="attempt 2 of another copy"):
            refused()
    manifest.claim(store, folder, run_id="another", attempt=1, nonce_of=ours)


def test_a_home_that_does_not_answer_refuses_no_writer(store, folder, tmp_path):
    """A host that is alone saves its snapshots to another place than the home that was lost."""
    ours, _ = copies(tmp_path, 1)
    manifest.claim(store, folder, run_id="run", attempt=1, nonce_of=ours)
    (tmp_path / "lost").write_text("no folder")
    lost = fences.nonces_of(tmp_path / "lost")
    manifest.claim(store, folder, run_id="run", attempt=1, nonce_of=lost)
    (tmp_path / "lost").unlink()
    assert lost(2) == lost(2) != "", "asked again once it answers"


@pytest.mark.parametrize("how", ["emptied", "torn"])
def test_a_damaged_nonce_refuses_nobody(store, folder, tmp_path, how):
    ours, _ = copies(tmp_path, 1)
    manifest.claim(store, folder, run_id="run", attempt=1, nonce_of=ours)
    path = tmp_path / "run" / "nonces" / "1"
    path.write_bytes(b"" if how == "emptied" else path.read_bytes()[:40])
    manifest.claim(store, folder, run_id="run", attempt=2, nonce_of=fences.nonces_of(tmp_path / "run"))


def test_a_fence_of_the_format_before_is_taken_over(store, folder, tmp_path):
    ours, _ = copies(tmp_path, 1)
    old = {"run_id": "run", "attempt": 1, "inherited": {}, "before": None}
    store.put(fences.fence_uri(folder), seal(old, format=2, kind="fence"))
    write(store, folder, 1)
    manifest.claim(store, folder, run_id="run", attempt=2, nonce_of=ours)
    assert steps(store, folder) == [(1, 1)] and fences.read(store, folder).nonce == ours(2)
