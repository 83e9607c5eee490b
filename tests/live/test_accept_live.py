"""`muster accept` climbed to its top on this machine: two hosts train, one is killed, the run goes on, is stopped,
continued, accounted for and removed; and a climb whose budget is too small starts no host."""

import json
import tarfile

import pytest
from verbs import RUN_FILE, Shell

pytestmark = [pytest.mark.live]


@pytest.fixture
def shell(tmp_path):
    found = Shell(tmp_path)
    text = RUN_FILE.replace("ranks_per_host: 2", "ranks_per_host: 1").replace("every_steps: 1000000", "every_steps: 20")
    (tmp_path / "run.yaml").write_text(text)
    return found


@pytest.mark.soak
def test_to_the_top_on_this_machine(shell, tmp_path):
    assert shell.start("accept", "run.yaml", "--budget", "1", "--rehearsal", "one machine").wait(timeout=280) == 0
    record = json.loads((tmp_path / "acceptance" / "acceptance.json").read_text())
    rungs = {one["name"]: one for one in record["rungs"]}
    assert record["accepted"] and record["usd_at_most"] == 0
    assert {name for name, one in rungs.items() if one["outcome"] == "skipped"} == {"up", "preflight"}
    assert ", gloo, 2 ranks: all_gather of 64 MiB between 2 hosts" in rungs["network"]["said"], rungs["network"]
    assert "2 hosts" in rungs["train"]["said"] and rungs["down"]["said"] == "nothing is left"
    assert "incidents: " in rungs["report"]["said"], rungs["report"]


def test_a_price_beyond_the_budget_starts_nothing(shell, tmp_path):
    words = ("accept", "run.yaml", "resources.usd_per_host_hour=40", "--budget", "5")
    done = shell.run(*words, code=1)
    assert "budget" in done.stdout and "$5.00" in done.stdout
    record = json.loads((tmp_path / "acceptance" / "acceptance.json").read_text())
    assert [one["name"] for one in record["rungs"]][-2:] == ["network", "down"] and record["usd_at_most"] == 0
    assert not list((tmp_path / "home" / "runs").glob("*"))
    with tarfile.open(tmp_path / "acceptance" / "evidence.tar.gz") as archive:
        assert archive.getnames() == ["acceptance.json"]
