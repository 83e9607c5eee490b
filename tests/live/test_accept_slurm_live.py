"""`muster accept` on a real Slurm of five nodes on one machine: it is climbed, and says itself that it is a
rehearsal."""

import json
import shutil
import subprocess
import tarfile

import pytest
from slurm_cluster import SlurmCluster
from slurm_runs import MUSTER, User, needs_slurm, run_file
from watched import Watched

from muster.accept.record import ACCEPTANCE
from muster.core.clock import SystemShell
from muster.core.errors import UsageError
from tools import verified_page as page

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(600),
    needs_slurm,
]
PLAYED = "one machine: its hosts have one kernel"
RUN = run_file(name="accepted", resources__ranks_per_host=1, check__mode="passive")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with SlurmCluster(tmp_path_factory.mktemp("slurm"), 5, gpus=0) as found:
        yield found


@pytest.fixture
def user(cluster, tmp_path):
    found = User(cluster, tmp_path / "home")
    (found.home / "run.yaml").write_text(json.dumps(RUN))
    yield found
    found.end_all()


def accepted(user, *words, code):
    """(the record, its rungs by name)"""
    done = subprocess.run(
        [*MUSTER, "accept", "run.yaml", *words], cwd=user.home, env=user.env, capture_output=True, text=True,
        timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    record = json.loads((user.home / "acceptance" / "acceptance.json").read_text())
    print(done.stdout)
    return record, {one["name"]: one for one in record["rungs"]}


def nothing_is_left(cluster, user):
    assert cluster.ask("squeue", "-h", "-t", "pending,running", "-o", "%j") == ""
    assert not list((user.home / "runs").glob(".accept-*"))


def test_up_to_the_run_and_no_further_than_the_budget(cluster, user):
    """Access, a small job on two nodes, and their network; two hosts for the run would be too dear."""
    record, rungs = accepted(user, "--budget", "2.5", code=1)
    outcomes = {name: one["outcome"] for name, one in rungs.items()}
    assert outcomes == {
        "render": "passed", "access": "passed", "up": "skipped", "preflight": "passed", "network": "passed",
        "train": "budget", "down": "passed",
    }, record  # fmt: skip
    assert "partition main: 5 usable nodes of the kind, jobs of UNLIMITED nodes and 7-00" in rungs["access"]["said"]
    assert "the job would start at 20" in rungs["access"]["said"], "sbatch --test-only of the run's own script"
    assert "node1, node2 import Muster and share the folder; done after step 2" in rungs["preflight"]["said"]
    assert "node1 and node2: " in rungs["network"]["said"] and " GB/s" in rungs["network"]["said"]
    assert "the budget is 2.50 host-hours" in rungs["train"]["said"]
    assert record["price"].startswith("not known") and record["host_hours_at_most"] < 2.5
    assert record["rehearsal"] == PLAYED
    with tarfile.open(user.home / "acceptance" / "evidence.tar.gz") as archive:
        assert archive.getnames() == ["acceptance.json"]
    (only,) = (user.home / "runs").iterdir()
    assert "-preflight-" in only.name, "no run was begun"
    nothing_is_left(cluster, user)


def test_what_the_partition_refuses_costs_nothing(cluster, user):
    words = ("slurm.time_limit=8-00", "resources.usd_per_host_hour=2", "--budget", "50")
    record, rungs = accepted(user, *words, code=1)
    assert [*rungs] == ["render", "access", "down"]
    assert rungs["access"]["said"] == "partition main ends a job after 7-00:00:00, and one of 8-00 is asked for"
    assert record["usd_at_most"] == 0 and "price" not in record
    nothing_is_left(cluster, user)


def test_to_the_top_as_a_rehearsal_that_no_page_takes(cluster, user):
    key = user.home / "key"
    shell = SystemShell()
    assert shell.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)]).returncode == 0
    record, rungs = accepted(user, "--budget", "50", "--sign", str(key), code=0)
    assert record["accepted"] and record["rehearsal"] == PLAYED
    assert {name for name, one in rungs.items() if one["outcome"] == "skipped"} == {"up"}
    assert "2 hosts" in rungs["train"]["said"] and "incidents: " in rungs["report"]["said"]
    assert rungs["down"]["said"] == "nothing is left"
    nothing_is_left(cluster, user)
    (path,) = (user.home / "runs").glob("accepted-2*")
    assert Watched(path).events("incident.resolved")

    folder = user.home / "verified"
    folder.mkdir()
    for name in ("acceptance.json", "acceptance.json.sig"):
        shutil.copy(user.home / "acceptance" / name, folder / name)
    (folder / page.SIGNERS).write_text(f"ada@example.com {key.with_suffix('.pub').read_text()}")
    with pytest.raises(UsageError, match="does not hold for an acceptance"):
        page.table(folder, shell)
    (folder / "acceptance.json.sig").unlink()  # nor one that somebody signs as an acceptance by hand
    words = ["ssh-keygen", "-q", "-Y", "sign", "-f", str(key), "-n", ACCEPTANCE, str(folder / "acceptance.json")]
    assert shell.run(words).returncode == 0
    with pytest.raises(UsageError, match="is a rehearsal against one machine: its hosts have one kernel"):
        page.table(folder, shell)
