"""A start that fails on this host is said: the supervisor would wait for the attempt's first step otherwise."""

from types import SimpleNamespace

from fakes.host import RecordingHost

from muster.agent.ranks.pool_calls import Snapshots
from muster.core.types import Layout
from muster.protocol.ranks import RankContext
from muster.protocol.to_agent import StartAttempt
from muster.protocol.to_supervisor import StartFailed


def order(attempt):
    context = RankContext(
        run_id="r", run_dir=".", attempt=attempt, host="host-0", rank=0, local_rank=0, world_size=1,
        local_world_size=1, layout=Layout(), master_addr="", master_port=1,
    )  # fmt: skip
    return StartAttempt(attempt=attempt, contexts=(context,), fetch=(), peer=None)


def test_it_is_told_and_the_next_attempt_starts():
    host, full = RecordingHost(spec=SimpleNamespace(resources=SimpleNamespace(ranks_per_host=1))), [True]

    def begin(given):
        if full[0]:
            raise OSError(28, "No space left on device")
        return given.contexts

    snapshots = Snapshots(begin=begin, held=tuple, drop=lambda _: None, on_ready=lambda: None, on_step=lambda _: None)
    pool = host.rank_pool(snapshots=snapshots)
    pool.start(order(2))
    (failure,) = host.sent
    assert isinstance(failure, StartFailed) and pool.queue.waiting == []
    assert "host-0 cannot start attempt 2" in failure.reason and "No space left" in failure.reason
    full[0] = False
    pool.start(order(3))
    assert [context.attempt for context in pool.queue.waiting] == [3] and len(host.sent) == 1
