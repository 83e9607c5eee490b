"""The saver with one rank and memory:// (no group, no files): order, failures, retention, foreign checkpoints."""

import threading
import uuid

import pytest

torch = pytest.importorskip("torch")

from muster.checkpoint.load import load_into, newest_valid  # noqa: E402
from muster.checkpoint.saver import Saver  # noqa: E402
from muster.checkpoint_format.manifest import committed  # noqa: E402
from muster.core.errors import BackendError, CheckpointError, ConflictError  # noqa: E402
from muster.core.event_details.kinds import KINDS  # noqa: E402
from muster.core.types import Layout  # noqa: E402
from muster.storage import uris  # noqa: E402
from muster.storage.store import blobs, open_store  # noqa: E402


@pytest.fixture
def folder():
    return f"memory://{uuid.uuid4().hex}"


class Seen:
    """Events as the loop would get them, checked against the schema and for the thread they come from."""

    def __init__(self):
        self.events = []
        self.thread = threading.get_ident()

    def __call__(self, kind, *, step, **detail):
        assert threading.get_ident() == self.thread
        known = KINDS[kind]
        assert set(known.required()) <= set(detail)
        assert known.open or set(detail) <= set(known.required()) | set(known.optional())
        self.events.append((kind.removeprefix("checkpoint."), step))
        self.last = detail


def saver(folder, seen=None, *, attempt=1, asynchronous=True, keep_last=2):
    return Saver(
        folder,
        run_id="run",
        attempt=attempt,
        layout=Layout(),
        keep_last=keep_last,
        asynchronous=asynchronous,
        group=None,
        store=open_store(),
        on_event=seen if seen is not None else Seen(),
    )


def state(value):
    return {"model.w": torch.full((5, 3), float(value)), "optimizer.exp_avg.w": torch.full((5, 3), -float(value))}


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_is_saved_is_the_state_at_the_call(folder, asynchronous):
    seen = Seen()
    saves = saver(folder, seen, asynchronous=asynchronous)
    training = state(0)
    for step in (1, 2, 3):
        for tensor in training.values():
            tensor.fill_(step)
        saves.save(step, training, {"data_fingerprint": "x"})
        for tensor in training.values():
            tensor.fill_(-99)
    saves.finish()
    assert not saves.busy
    assert [manifest.step for manifest in committed(open_store(), folder)] == [3, 2]
    assert seen.events.count(("committed", 3)) == 1
    assert ("removed", 3) in seen.events
    found = newest_valid(open_store(), folder)
    assert found.extra == {"data_fingerprint": "x"}
    restored = state(0)
    assert load_into(found, restored) == 2 * 5 * 3 * 4
    assert all(bool((tensor == 3).all()) for tensor in restored.values())


def test_the_same_step_twice_is_one_save(folder):
    seen = Seen()
    saves = saver(folder, seen)
    saves.save(1, state(1), {})
    saves.save(1, state(1), {})
    saves.finish()
    assert seen.events == [("begun", 1), ("committed", 1)]
    assert saves.finish() is None and saves.poll() is None


def test_a_failed_save_is_an_event_and_the_next_one_works(folder, monkeypatch):
    seen = Seen()
    saves = saver(folder, seen)
    saves.save(1, state(1), {})
    saves.finish()
    real = blobs.writing

    def full(uri):
        raise BackendError(f"{uri}: No space left on device")

    monkeypatch.setattr(blobs, "writing", full)
    saves.save(2, state(2), {})
    assert saves.finish().committed is False
    assert seen.events[-1] == ("failed", 2) and "No space" in seen.last["reason"]
    monkeypatch.setattr(blobs, "writing", real)
    saves.save(2, state(2), {})
    assert saves.finish().committed is True
    assert newest_valid(open_store(), folder).step == 2


def test_a_surprise_in_the_thread_is_an_event_too(folder, monkeypatch):
    from torch.distributed.checkpoint import CheckpointException

    seen = Seen()
    saves = saver(folder, seen)

    def broken(*_):
        raise CheckpointException("not even an Exception", {})

    monkeypatch.setattr(saves, "_write_shard", broken)
    saves.save(1, state(1), {})
    assert saves.finish().committed is False
    assert seen.events[-1] == ("failed", 1)


def test_other_tensors_than_before_fail_the_save(folder):
    seen = Seen()
    saves = saver(folder, seen)
    saves.save(1, state(1), {})
    saves.save(2, {"model.w": torch.zeros(2)}, {})
    saves.finish()
    assert seen.events[-1] == ("failed", 2)


def test_an_older_attempt_is_refused(folder):
    saver(folder, attempt=2).claimed()
    late = saver(folder, attempt=1)  # the fence is taken beside the restart: whatever it does next is refused
    with pytest.raises(ConflictError):
        late.save(1, state(1), {})
    with pytest.raises(ConflictError):
        late.poll()
    with pytest.raises(ConflictError):
        late.finish()
    assert blobs.folders(folder) == ["commits"], "where the attempts' names are: no data"


def test_a_damaged_index_is_passed_over_also_where_no_state_is_compared(folder):
    store = open_store()
    saves = saver(folder, asynchronous=False, keep_last=9)
    for step in (1, 2):
        saves.save(step, state(step), {})
    index = uris.join(folder, "step-00000002.a1", "index.json")
    data = bytearray(store.get(index).data)
    data[9] ^= 1
    store.put(index, bytes(data))
    skipped = []
    found = newest_valid(store, folder, lambda uri, reason: skipped.append((uris.name(uri), reason)))
    assert found.step == 1
    assert skipped == [("step-00000002.a1", "index.json does not match its checksum: damaged")]


def test_damaged_and_foreign_checkpoints_are_named_and_skipped(folder):
    store = open_store()
    saves = saver(folder, asynchronous=False, keep_last=9)
    for step in (1, 2, 3):
        saves.save(step, state(step), {})
    other = saver(folder, attempt=2, asynchronous=False, keep_last=9)
    other.save(4, {"model.w": torch.zeros(5, 4), "optimizer.exp_avg.w": torch.zeros(5, 4)}, {})
    more = saver(folder, attempt=3, asynchronous=False, keep_last=9)
    more.save(5, {**state(5), "model.extra": torch.zeros(1)}, {})
    shard = uris.join(folder, "step-00000003.a1", "rank-00000.shard")
    data = bytearray(store.get(shard).data)
    data[-3] ^= 16
    store.put(shard, bytes(data))
    store.delete(uris.join(folder, "step-00000002.a1", "index.json"))
    skipped = []
    found = newest_valid(store, folder, lambda uri, reason: skipped.append((uris.name(uri), reason)), state=state(0))
    assert found.step == 1
    names = [name for name, _ in skipped]
    assert names == ["step-00000005.a3", "step-00000004.a2", "step-00000003.a1", "step-00000002.a1"]
    for (_, reason), words in zip(skipped, ("foreign", "foreign", "checksum", "missing"), strict=True):
        assert words in reason
    with pytest.raises(CheckpointError, match="foreign"):
        load_into(committed(store, folder)[1], state(0))
    assert newest_valid(store, f"{folder}/nothing") is None
