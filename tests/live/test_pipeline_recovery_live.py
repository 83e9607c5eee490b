"""Replicas of several pipeline stages: a rank, a host with and without a spare, a host that comes back."""

import pytest
from chaos import Judged, References
from cluster import spec_of
from test_replicas_live import kept, pids_of

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return References(tmp_path_factory)


def grid(replicas, stages, **changes):
    axes = {"parallelism.dp_replicate": replicas, "parallelism.dp_shard": 1, "parallelism.pp": stages}
    return {**axes, "model.config.num_hidden_layers": stages, "training.steps": 80, **changes}


@pytest.mark.parametrize(
    "order",
    ["1f1b", *(pytest.param(order, marks=pytest.mark.soak) for order in ("interleaved", "zero_bubble", "zbv"))],
)
def test_a_killed_stage_takes_its_replica_along_and_no_other(tmp_path, reference, order):
    """dp 2 x pp 2, kill -9 of one rank: the other replica's two stages keep their processes, and the end is the same
    bit for bit."""
    changes = grid(
        2, 2, **{"parallelism.pp_schedule": order, "model.config.num_hidden_layers": 2 if order == "1f1b" else 4}
    )
    with Judged(tmp_path, spec_of(**{**changes, "resources.ranks_per_host": 4})) as run:
        run.start()
        run.wait_for_step(8)
        run.kill_rank(3)
        run.ended()
        assert run.recoveries() == ["restart"] and kept(run) == [[], [0, 1]], run.story()
        found = pids_of(run, range(4))
        assert [len(set(found[rank])) for rank in range(4)] == [1, 1, 2, 2], run.story()
        assert [event.detail["redone_steps"] <= 1 for event in run.events("incident.resolved")] == [True], run.story()
        assert (run.final_hash(), run.losses()) == reference(1, 4, **changes)[:2]


@pytest.mark.parametrize(("hosts", "per_host"), [(9, 1), (3, 3)], ids=["nine-hosts", "three-hosts"])
def test_three_replicas_of_three_stages(tmp_path, reference, hosts, per_host):
    """A rank, a host with a spare, one without (one replica is dropped), and it comes back; the batch is the same
    throughout, and so is the end: that of one process."""
    size = 3 // per_host
    exact = {"training.exact": True, "training.steps": 300, "recovery.heartbeat_timeout_s": 5.0}
    changes = grid(3, 3, **exact, **{"resources.hosts": hosts, "resources.ranks_per_host": per_host})
    changes |= {"resources.spare_hosts": 1, "resources.min_hosts": size}
    with Judged(tmp_path, spec_of(**changes)) as run:
        run.under_way(8)

        def after(blow, number):
            run.wait_for_step(run.step() + 8, 180)
            blow()
            run.wait_until(lambda: len(run.events("incident.resolved")) == number, f"recovery {number}", 180)

        after(lambda: run.kill_rank(4), 1)
        after(lambda: run.signal_host(run.ranks()[8][1]), 2)
        lost = run.ranks()[5][1]
        after(lambda: run.signal_host(lost), 3)
        assert run.recoveries() == ["restart", "swap", "shrink"], run.story()
        assert kept(run) == [[], [0, 1, 2, 6, 7, 8], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]], run.story()
        assert run.events("attempt.started")[-1].detail["layout"]["dp_replicate"] == 2, "a replica was dropped"
        run.wait_for_step(run.step() + 8, 180)
        run.start_agent(lost)
        run.ended()
        assert run.recoveries()[-1] == "grow" and run.events("attempt.started")[-1].detail["world_size"] == 9
        whole = {"training.exact": True, "training.steps": 300, "model.config.num_hidden_layers": 3}
        assert (run.final_hash(), run.losses()) == reference(1, 1, **whole)[:2]


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "float"])
def test_stages_that_are_hosts_go_on_as_two_hosts_of_another_layout(tmp_path, reference, exact):
    """pp 3 x dp_shard 3, a stage on each of three hosts: with a spare the end is the same bit for bit; then two hosts
    go on with two shards a stage, and the third one comes back: the same bits where sums are exact, else to 1e-6."""
    same = {"training.exact": exact, "training.steps": 120, "model.config.num_hidden_layers": 3}
    axes = {"parallelism.dp_shard": 3, "parallelism.pp": 3}
    hosts = {"resources.hosts": 3, "resources.ranks_per_host": 3, "resources.spare_hosts": 1, "resources.min_hosts": 2}
    with Judged(tmp_path, spec_of(**same, **axes, **hosts, **{"recovery.heartbeat_timeout_s": 5.0})) as run:
        run.under_way(4)
        run.signal_host(run.ranks()[4][1])
        run.wait_until(lambda: len(run.events("incident.resolved")) == 1, "the swap", 180)
        lost = run.ranks()[8][1]
        run.signal_host(lost)
        run.wait_until(lambda: len(run.events("incident.resolved")) == 2, "the shrink", 180)
        run.start_agent(lost)
        run.ended()
        assert run.recoveries() == ["swap", "shrink", "grow"], run.story()
        layouts = [event.detail["layout"] for event in run.events("attempt.started")]
        assert [(found["pp"], found["dp_shard"]) for found in layouts] == [(3, 3), (3, 3), (3, 2), (3, 3)], run.story()
        end, losses, _ = reference(1, 1, **same)
        if exact:
            assert (run.final_hash(), run.losses()) == (end, losses)
        else:
            wanted = {step: pytest.approx(float.fromhex(loss), rel=1e-6) for step, loss in losses.items()}
            assert {step: float.fromhex(loss) for step, loss in run.losses().items()} == wanted


@pytest.mark.soak
def test_hosts_that_hold_no_whole_replica_go_on_with_fewer_stages(tmp_path, reference):
    """dp 2 x pp 3 on three hosts of two ranks: the two that are left form dp 2 x pp 2; the same bits as one process."""
    same = {"training.exact": True, "training.steps": 300, "model.config.num_hidden_layers": 3}
    hosts = {"resources.hosts": 3, "resources.ranks_per_host": 2, "resources.min_hosts": 1}
    with Judged(tmp_path, spec_of(**grid(2, 3, **same, **hosts), **{"recovery.heartbeat_timeout_s": 5.0})) as run:
        run.under_way(4)
        lost = run.ranks()[5][1]
        run.signal_host(lost)
        run.wait_until(lambda: len(run.events("incident.resolved")) == 1, "the shrink", 180)
        run.start_agent(lost)
        run.ended()
        assert run.recoveries() == ["shrink", "grow"], run.story()
        layouts = [event.detail["layout"] for event in run.events("attempt.started")]
        assert [(found["dp_replicate"], found["pp"]) for found in layouts] == [(2, 3), (2, 2), (2, 3)], run.story()
        assert (run.final_hash(), run.losses()) == reference(1, 1, **same)[:2]
