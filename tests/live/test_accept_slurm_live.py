"""`muster accept` on a real Slurm of nodes in namespaces: every rung is climbed, and the record says that it is a
rehearsal, since the nodes have one kernel."""

import json

import pytest
from slurm_cluster import SlurmCluster, slurm_is_missing
from slurm_runs import User, run_file

MISSING = slurm_is_missing()
pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(MISSING), reason=MISSING or "there is a Slurm"),
]


def test_to_the_top_and_never_taken_for_a_cluster(tmp_path_factory, tmp_path):
    with SlurmCluster(tmp_path_factory.mktemp("slurm"), 3, gpus=0) as cluster:
        user = User(cluster, tmp_path / "home")
        spec = run_file(name="tried", resources__provisioning_model="owned", resources__ranks_per_host=1)
        (user.home / "run.yaml").write_text(json.dumps(spec))
        try:
            done = user.muster("accept", "run.yaml", "--budget", "1", code=None, limit_s=500)
        finally:
            user.end_all()
    record = json.loads((user.home / "acceptance" / "acceptance.json").read_text())
    rungs = {one["name"]: one for one in record["rungs"]}
    assert done.returncode == 0, done.stdout + done.stderr
    assert record["accepted"] and record["rehearsal"] == "one machine: its hosts have one kernel"
    assert {name for name, one in rungs.items() if one["outcome"] == "skipped"} == {"up"}
    assert (
        "the job would start at " in rungs["access"]["said"] and "partition main: 3 usable" in rungs["access"]["said"]
    )
    assert "2 hosts" in rungs["train"]["said"] and rungs["down"]["said"] == "nothing is left"
