"""A loop of one's own, one rank: when the replicator hears of a snapshot, when ranks agree, what is fenced."""

import uuid

import pytest

torch = pytest.importorskip("torch")

from fakes import chrome_trace  # noqa: E402

from muster import run as muster  # noqa: E402
from muster.checkpoint.saver import Saver  # noqa: E402
from muster.checkpoint_format.manifest import committed  # noqa: E402
from muster.checkpoint_format.snapshot_ring import Ring, file_name  # noqa: E402
from muster.config.spec import RunSpec  # noqa: E402
from muster.core.errors import ConflictError, UsageError  # noqa: E402
from muster.core.snapshots import SnapshotCopy  # noqa: E402
from muster.core.types import Layout  # noqa: E402
from muster.protocol.ranks import Command, RankContext, Restore, ShardSource  # noqa: E402
from muster.protocol.values import TraceSteps  # noqa: E402
from muster.storage.store import open_store  # noqa: E402


class AgentConnection:
    """The agent's end: what it heard, in order."""

    def __init__(self, ring):
        self.heard, self.ring, self.commands, self.traces = [], ring, [], []

    def emit(self, kind, *, step=None, phase=None, **detail):
        self.heard.append((kind, step))

    def beat(self, step):
        newest = Ring.open(self.ring).versions()[0].step if self.ring.exists() else None
        if ("beat", step, newest) not in self.heard:
            self.heard.append(("beat", step, newest))

    def progress(self, *, for_s=0.0):
        pass

    def next_trace(self):
        return self.traces.pop() if self.traces else None

    def next_command(self):
        return self.commands.pop() if self.commands else None


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Make this process rank 0 of a run: place(**changes of the context) -> its line."""

    def enter(every_steps=0, directory=None, **changes):
        context = RankContext(
            **{
                "run_id": "run", "run_dir": str(tmp_path), "attempt": 1, "host": "host-0", "rank": 0, "local_rank": 0,
                "world_size": 1, "local_world_size": 1, "layout": Layout(), "master_addr": "", "master_port": 0,
                "snapshot_dir": str(tmp_path), **changes,
            }
        )  # fmt: skip
        spec = RunSpec.model_validate(
            {"name": "own", "command": ["x.py"], "checkpoint": {"every_steps": every_steps, "dir": directory}}
        )
        agent = AgentConnection(tmp_path / file_name("own", Layout().key, 0))
        monkeypatch.setattr(muster, "_rank", muster._Rank(context, agent, spec))
        return agent

    return enter


def beats(line):
    return [(each[1], each[2]) for each in line.heard if each[0] == "beat"]


def test_a_snapshot_is_told_of_when_it_lies_ready(place):
    for calls in ((muster.save, muster.heartbeat), (muster.heartbeat, muster.save)):
        line = place()
        state = {"w": torch.zeros(2)}
        assert muster.restore(state) == 0
        for step in (1, 2, 3):
            for call in calls:
                call(step, state) if call is muster.save else call(step)
        told = beats(line)
        assert [step for step, _ in told] == sorted(step for step, _ in told), "it never goes back"
        assert {step: newest for step, newest in told if step > 1} == {2: 1, 3: 2, 4: 3}
        muster._rank.snapshots._ring.path.unlink()  # the other order begins anew


def test_ranks_agree_once_a_step_whichever_call_comes_first(place, monkeypatch):
    from muster.train.distributed.step_consensus import StepConsensus

    begun = []
    start = StepConsensus.start
    monkeypatch.setattr(StepConsensus, "start", lambda self, **flags: (begun.append(1), start(self, **flags))[1])
    place()
    state = {"w": torch.zeros(2)}
    assert not muster.should_stop()
    for first, second in ((muster.save, muster.heartbeat), (muster.heartbeat, muster.save)):
        for step in (1, 2, 3):
            begun.clear()
            for call in (first, second):
                call(step, state) if call is muster.save else call(step)
            assert not muster.should_stop()
            assert len(begun) == 1
        place()
    begun.clear()
    assert [muster.should_stop(), muster.should_stop()] == [False, False] and len(begun) == 2, "a loop of nothing else"


def test_an_order_that_nobody_asked_for_yet_is_not_lost(place):
    line = place()
    muster.heartbeat(1)
    line.commands.append(Command(kind="stop", exit_code=130))
    for step in (2, 3, 4):
        muster.heartbeat(step)  # a loop that asks every few steps
    assert muster.should_stop()
    with pytest.raises(SystemExit) as left:
        muster.finish(4, {"w": torch.zeros(2)})
    assert left.value.code == 130


def test_a_restore_from_disk_takes_the_folder_first(place):
    folder = f"memory://{uuid.uuid4().hex}"
    options = {"run_id": "run", "layout": Layout(), "keep_last": 2, "asynchronous": False, "group": None}
    events = {"store": open_store(), "on_event": lambda *_, **__: None}
    newer = Saver(folder, attempt=2, **options, **events)
    newer.save(4, muster.flatten({"w": torch.ones(2)}), {})
    place(directory=folder, attempt=1)
    with pytest.raises(ConflictError):
        muster.restore({"w": torch.zeros(2)})
    place(directory=folder, attempt=3)
    state = {"w": torch.zeros(2)}
    assert muster.restore(state) == 4 and state["w"].eq(1).all()
    newer.save(5, muster.flatten({"w": torch.ones(2)}), {})
    assert [manifest.step for manifest in committed(open_store(), folder)] == [4], "the older attempt's is no more"


def test_in_a_world_of_another_size_a_rank_takes_its_own_or_keeps_what_it_has(place, tmp_path):
    from muster.train.state.snapshot import Snapshots

    before, sources = Layout(dp_shard=2), {}
    for rank in (0, 1):
        place(rank=rank, world_size=2, layout=before)
        tensors = muster.flatten({"w": torch.full((2,), 7.0), f"rank{rank}.own": torch.full((2,), 1.0 + rank)})
        Snapshots(muster._rank.context, tensors).save(7, tensors)
        copy = SnapshotCopy(step=7, attempt=1, rank=rank, layout=before.key, host="host-0", tier="memory")
        sources[rank] = ShardSource(path=str(tmp_path / file_name("own", before.key, rank)), copy=copy)
    restore = Restore(step=7, attempt=1, layout=before, sources=sources)
    for rank, own in ((0, 1.0), (1, 2.0), (2, -1.0)):
        place(rank=rank, world_size=3, layout=Layout(dp_shard=3), restore=restore, attempt=2)
        state = {"w": torch.zeros(2), f"rank{rank}.own": torch.full((2,), -1.0)}
        assert muster._from_memory(muster._rank, muster._rank.context.restore, muster.flatten(state))[0] == 7
        assert state["w"].eq(7).all() and state[f"rank{rank}.own"].eq(own).all()


def test_several_ranks_need_a_process_group(place):
    place(world_size=2)
    with pytest.raises(UsageError, match="2 ranks and no process group") as raised:
        muster.restore({"w": torch.zeros(2)})
    assert "init_process_group" in raised.value.hint


def test_a_trace_is_of_what_lies_between_two_heartbeats(place, tmp_path):
    agent = place()
    agent.traces = [TraceSteps(request="a", steps=2)]
    for step in (4, 5, 6, 7):
        torch.mm(torch.ones(4, 4), torch.ones(4, 4))
        muster.heartbeat(step)
    assert [(kind, step) for kind, step, *_ in agent.heard if kind == "trace.written"] == [("trace.written", 6)]
    names = chrome_trace.read(tmp_path / "traces" / "steps-5-6.rank-0.json").names
    assert names.count("aten::mm") == 2
    agent.traces = [TraceSteps(request="b", steps=9)]
    muster.heartbeat(8)
    muster.finish(8, {})
    assert len([kind for kind, *_ in agent.heard if kind == "trace.written"]) == 2, "one that was begun is answered"
