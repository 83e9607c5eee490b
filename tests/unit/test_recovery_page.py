"""docs/explanation/recovery.md is true: its policy file runs, its drill table is the menu."""

import re
from pathlib import Path

from muster.chaos.catalog import MENU
from muster.config.spec import RunSpec
from muster.policy.load import load_policy
from muster.simulate.cluster import Cluster
from muster.supervise.recovery.inputs import Settings
from muster.supervise.recovery.state_machine import RecoveryStateMachine

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "explanation" / "recovery.md").read_text()
TPUS = (ROOT / "docs" / "how-to" / "tpu.md").read_text()
RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text()


def test_the_policy_on_the_page_runs_a_run(tmp_path):
    block, adjusting = re.findall(r"```python\n# my_policy.py\n(.*?)```", PAGE, re.DOTALL)
    path = tmp_path / "my_policy.py"
    path.write_text(block)
    policy = load_policy(str(path))
    spec = RunSpec.model_validate(
        {
            "name": "page",
            "model": {"config": {}},
            "data": {"sources": [{"type": "random"}]},
            "training": {"steps": 500},
            "resources": {"hosts": 2, "min_hosts": 1, "ranks_per_host": 1},
        }
    )

    def play(*kills):
        settings = Settings(spec=spec, run_id="r", run_dir="/r", ranks_per_host=1)
        cluster = Cluster(
            machine=RecoveryStateMachine(settings=settings, policy=policy), names=["host-0", "host-1"], total_steps=500
        )
        for second in kills:
            cluster.at(second, lambda second=second: cluster.kill_rank(int(second / 10) % 2))
        cluster.at(100.0, lambda: cluster.kill_host("host-1"))
        cluster.at(120.0, lambda: cluster.return_host("host-1"))
        return cluster, cluster.run()

    cluster, end = play(10.0)
    actions = [log.detail["action"] for _, log in cluster.log if log.kind == "incident.decided"]
    assert end.exit_code == 0 and actions == ["restart", "wait"], "it waits where the default shrinks"
    _, end = play(10.0, 20.0, 30.0, 40.0)
    assert end.exit_code == 1 and "one too many" in end.reason
    path.write_text(adjusting)
    policy = load_policy(str(path))
    cluster, end = play()
    courses = [log.detail.get("batch_schedule", []) for _, log in cluster.log if log.kind == "attempt.started"]
    batch = spec.training.global_batch_size
    assert end.exit_code == 0 and [len(batch_schedule) for batch_schedule in courses] == [0, 1, 2]
    assert courses[1][0]["global_batch_size"] == batch // 2 and courses[2][1]["global_batch_size"] == batch


def test_every_fault_of_the_menu_is_on_the_page_and_no_other():
    section = PAGE[PAGE.index("| fault | what |") : PAGE.index("## Invariants")]
    named = set(re.findall(r"`([a-z-]+)`", section))
    assert named == set(MENU)


def test_the_numbered_list_names_every_drill_under_its_numbers():
    section = PAGE[PAGE.index("## The fault list") : PAGE.index("## What is measured")]
    rows = re.findall(r"^\| ([0-9, ]+) \|[^|]+\|([^|]*)\|", section, re.MULTILINE)
    listed = {
        int(number): {name.strip() for name in names.split(",") if name.strip()}
        for numbers, names in rows
        for number in numbers.split(",")
    }
    assert sorted(listed) == list(range(1, 46))
    menu = {number: {fault.name for fault in MENU.values() if number in fault.numbers} for number in listed}
    assert listed == menu


def cells(text, first):
    """Of the one row of a table that begins with ``first``."""
    (row,) = re.findall(rf"^\| {re.escape(first)} \|(.*)\|$", text, re.MULTILINE)
    return [cell.strip() for cell in row.split("|")]


def test_what_recovery_costs_is_what_was_measured():
    """Every figure of the page's section on its goals, from the newest row by stage."""
    page = PAGE[PAGE.index("## What recovery costs") :]
    by_stage = RESULTS[RESULTS.index("### By stage") : RESULTS.index("### On Slurm")]
    names = cells(by_stage, "case")[2:-2]
    rank, spare, stopped, cut = (cells(by_stage, case) for case in ("rank_kill", "host_swap", "host_stop", "host_cut"))
    for name, ms in zip(names, rank[2:-2], strict=True):
        assert cells(page, name)[0] == ms, name
    told = dict(zip(names, spare[2:-2], strict=True))
    assert all(f"{name} {told[name]}" in page for name in names if name != "first new step")
    titles = ("a rank is killed", "a host is killed, a spare takes over", "a host is stopped", "a host's link is cut")
    for title, row in zip(titles, (rank, spare, stopped, cut), strict=True):
        seen, goal, verdict = cells(page, f"L, {title}")
        assert float(seen.removesuffix(" s")) == float(row[-2])
        assert float(goal.removesuffix(" s")) == float(row[-1].partition(":")[0])
        missed = float(row[-2]) > float(row[-1].partition(":")[0])
        assert ("missed" in verdict) == ("missed" in row[-1]) == missed
    assert f"{stopped[2]} and {cut[2]} ms are the silence" in page
    quiet = RESULTS[RESULTS.index("**quiet machine**, 2 ranks") :]
    default, tight = (cells(quiet, name)[1:] for name in ("3 s (the default)", "0.3 s"))
    assert f"{default[4].strip('*')} %" in page and f"{tight[4]} %" in page
    assert f"agent {tight[0]} %, watchdog {tight[3]}, supervisor {tight[2]}" in page and f"agent {tight[1]}." in page
    more = [round(float(a) - float(b), 3) for a, b in zip(tight[:4], default[:4], strict=True)]
    told = f"{more[3]} points more, the agent {more[0]}, the supervisor {more[2]}, the connections {more[1]}"
    assert f"the watchdog takes {told}" in " ".join(page.split())


def test_the_stages_on_the_page_on_tpus_are_those_that_were_measured():
    rows = RESULTS[RESULTS.index("### The trainer for TPUs") : RESULTS.index("## healthy.py")]
    page = TPUS[TPUS.index("### A killed process, by stage") : TPUS.index("## On GKE")]
    names, seen = cells(rows, "case")[1:-1], cells(rows, "tpu_rank_kill")
    told = dict(zip(names, seen[1:-1], strict=True))
    for name in ("notice", "collect", "place", "join", "restore", "prepare", "first new step"):
        assert cells(page, name)[0] == told[name], name
    assert f"A step takes {told['step']}, all of it {float(seen[0].partition(' ')[0]):.1f} s" in page
    first, second = (told[f"of it rank {rank} traces, compiles"].replace(", ", " and in ") for rank in (0, 1))
    own = first.replace(" and in ", " and takes its program from the cache in ")
    assert f"rank 0 traces for {own}, rank 1 for {second}" in page
    before = RESULTS[RESULTS.index("each process but the first compiled anew") :]
    assert f"took {float(before.partition('cache: ')[2].partition(' ')[0]):.1f} s" in page
    assert ("No applied step is repeated" in page) == (seen[-1] == "0")
