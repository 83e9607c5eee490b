"""Snapshots of a GPU's state are copied beside the next step: none counts before its copy has ended.

No GPU is here: ``torch.cuda`` is a stand-in that keeps the order of what it is asked for.
"""

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch

from muster.checkpoint_format.snapshot_ring import Ring, file_name
from muster.core.types import Layout
from muster.protocol.ranks import RankContext
from muster.train import loop
from muster.train.state import snapshot
from muster.train.state.snapshot import Snapshots

GPU = torch.device("cuda", 0)


class OnGpu(torch.Tensor):
    is_cuda = True
    device = GPU


class Cuda:
    """Copies happen where they are enqueued; an event has happened once ``finish`` says so."""

    def __init__(self):
        self.log = []
        self.finished = threading.Event()
        self.now = "compute"

    def Stream(self, device):
        assert device == GPU
        return SimpleNamespace(wait_stream=lambda other: self.log.append(f"side waits for {other.name}"), name="side")

    def Event(self):
        return SimpleNamespace(
            record=lambda stream: self.log.append(f"event on {stream.name}"), synchronize=self._synchronize
        )

    def _synchronize(self):
        self.log.append("host waits")
        assert self.finished.wait(30)

    def current_stream(self, device):
        return SimpleNamespace(
            name=self.now,
            wait_event=lambda event: self.log.append(f"{self.now} waits for the event"),
            synchronize=self._synchronize,
        )

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.now = self.now, stream.name
        yield
        self.now = before


@pytest.fixture
def cuda(monkeypatch):
    found = Cuda()
    for name in ("Stream", "Event", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(found, name))
    monkeypatch.setattr(snapshot, "pin_soon", lambda *_, **__: None)
    true = snapshot.compact.copy

    def copy(to, source):
        found.log.append(f"copied on {found.now}")
        true(to, source.as_subclass(torch.Tensor))

    monkeypatch.setattr(snapshot.compact, "copy", copy)
    return found


@pytest.fixture
def taken(tmp_path):
    place = RankContext(
        run_id="r", run_dir=str(tmp_path), attempt=1, host="host-0", rank=0, local_rank=0, world_size=1,
        local_world_size=1, layout=Layout(), master_addr="", master_port=0, snapshot_dir=str(tmp_path),
    )  # fmt: skip
    return Snapshots(place, {"w": torch.zeros(8)})


def held(tmp_path):
    ring = Ring.open(tmp_path / file_name("own", Layout().key, 0))
    found = {version.step: list(memoryview(ring.slot(version.slot)).cast("f")[:8]) for version in ring.versions()}
    for version in ring.versions():
        ring.verify(version)
    ring.close()
    return found


def state(value):
    return {"w": torch.full((8,), float(value)).as_subclass(OnGpu)}


BEGIN = ["side waits for compute", "copied on side", "event on side"]


def test_a_snapshot_counts_once_its_copy_has_ended_and_the_one_before_counts_until_then(cuda, taken, tmp_path):
    cuda.finished.set()
    taken.save(1, state(1), overlap=True)
    taken.settle()
    assert held(tmp_path) == {1: [1.0] * 8}
    cuda.log.clear()
    cuda.finished.clear()
    taken.save(2, state(2), overlap=True)
    assert cuda.log[:3] == BEGIN, "behind the update, on a stream of its own; the host went on"
    assert held(tmp_path) == {1: [1.0] * 8} and taken.newest_steps() == {"snapshot_step": 1}
    taken.before_change()
    assert cuda.log[-1] == "compute waits for the event"
    taken.before_change()
    assert cuda.log.count("compute waits for the event") == 1
    cuda.finished.set()
    taken.settle()
    assert held(tmp_path) == {1: [1.0] * 8, 2: [2.0] * 8} and taken.newest_steps() == {"snapshot_step": 2}


def test_the_next_snapshot_waits_for_the_one_before(cuda, taken, tmp_path):
    taken.save(1, state(1), overlap=True)
    threading.Timer(0.2, cuda.finished.set).start()
    taken.save(2, state(2), overlap=True)
    taken.settle()
    assert held(tmp_path) == {1: [1.0] * 8, 2: [2.0] * 8}


def test_whoever_does_not_ask_for_it_may_change_the_state_at_once(cuda, taken, tmp_path):
    threading.Timer(0.2, cuda.finished.set).start()
    taken.save(1, state(1))
    assert cuda.log == ["copied on compute", "host waits"] and cuda.finished.is_set()
    assert held(tmp_path) == {1: [1.0] * 8}


def test_a_broken_gpu_is_said_by_the_rank_itself(cuda, taken, tmp_path):
    def broken():
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

    cuda._synchronize = broken
    taken.save(1, state(1), overlap=True)
    with pytest.raises(RuntimeError, match="uncorrectable ECC"):
        taken.settle()
    assert held(tmp_path) == {}


def test_on_the_cpu_little_is_copied_at_once(taken, tmp_path):
    taken.save(1, {"w": torch.ones(8)}, overlap=True)
    taken.before_change()
    assert held(tmp_path) == {1: [1.0] * 8}, "a small one counts at once"


def test_the_loop_tells_the_snapshots_before_it_changes_the_state(monkeypatch):
    order = []

    def note(name, result=None):
        return lambda *_, **__: (order.append(name), result)[1]

    monkeypatch.setattr(loop, "must_skip", note("must_skip"))
    monkeypatch.setattr(loop, "clip_scale", note("clip_scale", 1.0))
    reducer = SimpleNamespace(begin=note("begin"), finish=note("sums", (1.0, 1.0, 0.0)))
    run = SimpleNamespace(
        spec=SimpleNamespace(training=SimpleNamespace(seed=0, optimizer=SimpleNamespace(max_grad_norm=1.0))),
        reducer=reducer, start_consensus=note("consensus"), sums_ended=note("ended"), before_update=note("told"),
        optimizer=SimpleNamespace(step=note("update")), record_step=note("recorded"), pipeline=None,
        mixture=None, begin_objective=note("objective"), meet_replicas=note("met"), gradient_share=note("share", 1.0),
    )  # fmt: skip
    loop.update(run, SimpleNamespace(step=1, micro_batches=1, rounds=()), 0.1)
    assert order[-3:] == ["told", "update", "recorded"]


def test_on_the_cpu_a_thread_copies_until_the_state_changes(taken, tmp_path, monkeypatch):
    """The step goes on at once; its update waits for the copy, and the version counts only then."""
    monkeypatch.setattr(snapshot, "INLINE_BYTES", 0)
    held_back, true = threading.Event(), snapshot.compact.copy

    def copy(to, source):
        assert held_back.wait(30)
        true(to, source)

    monkeypatch.setattr(snapshot.compact, "copy", copy)
    weights = torch.ones(8)
    taken.save(1, {"w": weights}, overlap=True)
    assert held(tmp_path) == {}
    changed = threading.Thread(target=lambda: (taken.before_change(), weights.fill_(2.0)))
    changed.start()
    changed.join(0.2)
    assert changed.is_alive() and weights[0] == 1.0
    held_back.set()
    changed.join(30)
    taken.settle()
    assert held(tmp_path) == {1: [1.0] * 8} and weights[0] == 2.0
    taken.save(2, {"w": weights})
    taken.settle()
    assert held(tmp_path)[2] == [2.0] * 8
    assert taken.overlapped_s > 0


def test_a_copy_that_fails_in_the_thread_is_raised_and_lets_the_update_go_on(taken, monkeypatch):
    monkeypatch.setattr(snapshot, "INLINE_BYTES", 0)

    def broken(to, source):
        raise RuntimeError("no such memory")

    monkeypatch.setattr(snapshot.compact, "copy", broken)
    taken.save(1, {"w": torch.ones(8)}, overlap=True)
    taken.before_change()
    with pytest.raises(RuntimeError, match="no such memory"):
        taken.settle()
