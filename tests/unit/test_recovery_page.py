"""docs/recovery.md is true: its policy file runs, its drill table is the menu."""

import re
from pathlib import Path

from muster.chaos.catalog import MENU
from muster.config.spec import RunSpec
from muster.policy.load import load_policy
from muster.simulate.cluster import Cluster
from muster.supervise.recovery.inputs import Settings
from muster.supervise.recovery.state_machine import RecoveryStateMachine

PAGE = (Path(__file__).parents[2] / "docs" / "recovery.md").read_text()


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
