"""The saver when the disk is full or the bucket away: nothing is raised, the next save commits, nothing is left."""

import threading

import pytest

torch = pytest.importorskip("torch")

from muster.checkpoint.saver import Saver  # noqa: E402
from muster.checkpoint_format.manifest import committed  # noqa: E402
from muster.core.errors import BackendError, ConflictError  # noqa: E402
from muster.core.types import Layout  # noqa: E402
from muster.storage.store import blobs, open_store  # noqa: E402


class Troubled:
    """A store that can be away, and slow."""

    def __init__(self):
        self.inner, self.away, self.go_on = open_store(), False, threading.Event()
        self.go_on.set()

    def __getattr__(self, name):
        def call(*words):
            self.go_on.wait(30)
            if self.away:
                raise BackendError(f"{words[0]}: connection refused")
            return getattr(self.inner, name)(*words)

        return call


@pytest.fixture
def store():
    return Troubled()


def saver(folder, seen, store, *, attempt=1):
    return Saver(
        str(folder), run_id="run", attempt=attempt, layout=Layout(), keep_last=2, asynchronous=True, group=None,
        store=store, on_event=lambda kind, **detail: seen.append((kind.removeprefix("checkpoint."), detail)),
    )  # fmt: skip


def kinds(seen):
    return [(kind, detail["step"]) for kind, detail in seen]


def state(value):
    return {"w": torch.full((1000,), float(value))}


def test_a_fence_that_could_not_be_taken_costs_saves_and_is_tried_again(tmp_path, store):
    seen = []
    store.away = True
    saves = saver(tmp_path, seen, store)
    saves._claim._thread.join()
    assert saves.poll() is None and saves.finish() is None, "training goes on"
    with pytest.raises(BackendError, match="refused"):
        saves.claimed()  # who has nothing but this folder to begin from is told
    saves.save(1, state(1), {})
    assert not saves.finish().committed
    assert kinds(seen) == [("begun", 1), ("failed", 1)] and "refused" in seen[-1][1]["reason"]
    store.away = False
    saves.save(2, state(2), {})
    assert saves.finish().committed
    assert [each.step for each in committed(open_store(), str(tmp_path))] == [2]


def test_a_fence_that_does_not_come_holds_nobody_up(tmp_path, store, monkeypatch):
    seen = []
    monkeypatch.setattr("muster.checkpoint.saver.FENCE_WAIT_S", 0.01)
    store.go_on.clear()
    saves = saver(tmp_path, seen, store)
    saves.save(1, state(1), {})
    assert saves.busy and saves.poll() is None
    saves.defer(2)
    saves.defer(3)
    assert [kind for kind, _ in seen] == ["begun", "run.message"], "said once"
    assert "step 2 is deferred: that of step 1 has been under way" in seen[-1][1]["text"]
    store.go_on.set()
    assert saves.finish().committed


def test_a_newer_attempts_fence_still_ends_the_older_one(tmp_path, store):
    saver(tmp_path, [], store, attempt=2).claimed()
    store.away = True
    late = saver(tmp_path, [], store, attempt=1)
    late._claim._thread.join()
    store.away = False
    late.save(1, state(1), {})
    with pytest.raises(ConflictError):
        late.finish()
    assert committed(open_store(), str(tmp_path)) == []


@pytest.mark.parametrize("what", ["share", "index"])
def test_what_a_failed_save_has_written_gives_its_room_back(tmp_path, store, monkeypatch, what):
    seen = []
    saves = saver(tmp_path, seen, store)
    saves.save(1, state(1), {})
    saves.finish()
    if what == "share":
        real = blobs.writing

        def torn(uri):
            with real(uri) as file:
                file.write(b"half")
            raise BackendError(f"{uri}: No space left on device")

        monkeypatch.setattr(blobs, "writing", torn)
    else:
        monkeypatch.setattr(store, "put", lambda uri, data: 1 / 0 if "index" not in uri else full(uri), raising=False)
    saves.save(2, state(2), {})
    assert not saves.finish().committed and "No space" in seen[-1][1]["reason"]
    assert blobs.folders(str(tmp_path)) == ["commits", "step-00000001.a1"]
    monkeypatch.undo()
    saves.save(2, state(2), {})
    assert saves.finish().committed, "the same step again"
    assert blobs.folders(str(tmp_path)) == ["commits", "step-00000001.a1", "step-00000002.a1"]


def full(uri):
    raise BackendError(f"{uri}: No space left on device")


@pytest.mark.parametrize("copy_too", [False, True])
def test_a_damaged_fence_is_written_again_and_said_and_the_next_save_commits(tmp_path, store, copy_too):
    seen = []
    saves = saver(tmp_path, seen, store)
    saves.save(1, state(1), {})
    assert saves.finish().committed
    for name in ("fence.json", "fence.previous.json")[: 1 + copy_too]:
        data = bytearray((tmp_path / name).read_bytes())
        data[len(data) // 2] ^= 4
        (tmp_path / name).write_bytes(data)
    saves.save(2, state(2), {})
    assert saves.finish().committed
    assert [kind for kind, _ in seen] == ["begun", "committed", "begun", "fence.rebuilt", "committed"]
    assert "fence.json" in seen[3][1]["reason"] and (tmp_path / "fence.damaged.json").exists()
    assert [each.step for each in committed(open_store(), str(tmp_path))] == [2, 1]
