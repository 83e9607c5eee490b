"""What is asked of Slurm before a run is tried there: limits, its verdict on the script; and the small rehearsal."""

import contextlib
import dataclasses

import pytest
from fakes.slurm import NODES, PARTITION, FakeSlurm
from slurm_cases import RUN_DIR, RUN_ID, spec

from muster.backends.slurm import access
from muster.backends.slurm.commands import Slurm
from muster.backends.slurm.launcher import SlurmLauncher
from muster.backends.slurm.script import SCRIPT, script
from muster.config import validation
from muster.core.errors import AccessError, BackendError, BusyError, CapacityError, UsageError

SPEC = spec()
PLAIN = "SLURM_VERSION           = 22.05.8\nAccountingStorageType   = accounting_storage/none\n"
ACCOUNTED = "SLURM_VERSION = 22.05.8\nClusterName = deep\nAccountingStorageType = accounting_storage/slurmdbd\n"
ENFORCED = ACCOUNTED + "AccountingStorageEnforce = associations,limits,qos\n"
FAILED = "sbatch: error: Batch job submission failed: "


def request(of=SPEC):
    return SlurmLauncher().render(of, run_id=RUN_ID, run_dir=RUN_DIR)


def test_it_says_what_there_is_and_where_the_job_would_start_and_submits_nothing():
    shell = FakeSlurm(configuration=PLAIN)
    found = access.look(SPEC, request(), Slurm(shell=shell))
    assert found == [
        "Slurm 22.05.8",
        "partition main: 2 usable nodes of the kind, jobs of UNLIMITED nodes and 7-00:00:00 at most",
        "no accounting, so no account",
        "the job would start at 2026-11-27T09:00:00 on n[1-2] of main (sbatch --test-only)",
    ]
    assert not shell.jobs and ("sbatch", "--test-only") in shell.asked


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (FAILED + "Invalid account or account/partition combination specified", AccessError),
        (FAILED + "Requested time limit is invalid (missing or exceeds some limit)", UsageError),
        ("allocation failure: Requested node configuration is not available", CapacityError),
        (FAILED + "Unable to contact slurm controller (connect failure)", BusyError),
    ],
)
def test_slurms_refusal_is_the_answer(said, kind):
    shell = FakeSlurm(trouble={"sbatch": (False, said)})
    with pytest.raises(kind) as raised:
        access.look(SPEC, request(), Slurm(shell=shell))
    assert type(raised.value) is kind and len(str(raised.value).splitlines()) == 1


def test_a_partition_without_usable_nodes_is_said_before_slurm_is_asked():
    shell = FakeSlurm(nodes=[row for row in NODES if row[1] == "cpu"])
    with pytest.raises(CapacityError, match="no usable node in partition main"):
        access.look(spec(queue="main"), request(), Slurm(shell=shell))
    assert ("sbatch", "--test-only") not in shell.asked


@pytest.mark.parametrize(
    ("of", "kind", "says"),
    [
        ({"queue": "nope"}, UsageError, "there is no partition nope (there are main, cpu)"),
        ({"slurm": {"time_limit": "8-00"}}, UsageError, "ends a job after 7-00:00:00, and one of 8-00 is asked for"),
    ],
)
def test_a_partition_that_would_not_do_is_said_before_slurm_is_asked(of, kind, says):
    shell = FakeSlurm()
    found = spec(of.pop("slurm", {}), **of)
    with pytest.raises(kind) as raised:
        access.look(found, request(found), Slurm(shell=shell))
    assert says in str(raised.value) and ("sbatch", "--test-only") not in shell.asked


def test_the_account_is_looked_up_where_the_accounting_enforces_it():
    """Rows as a real sacctmgr 22.05 prints them."""
    users = "lab|lab||low,normal||node=40|2-00:00:00\nlab|root||normal|normal||\n"
    shell = FakeSlurm(configuration=ENFORCED, users=users, qualities="low|node=1|00:10:00|\n")
    slurm, account = Slurm(shell=shell), lambda found: [one for one in found if one.startswith("account")]
    assert account(access.look(SPEC, request(), slurm)) == ["account lab, QOS low,normal"]
    with pytest.raises(CapacityError, match="QOS low gives a job 1 nodes at most"):
        access.look(spec({"qos": "low"}), request(), slurm)
    with pytest.raises(AccessError, match="no account physics"):
        access.look(spec({"account": "physics"}), request(), slurm)
    (asked,) = {argv for argv in shell.asked if argv[0] == "sacctmgr" and "qos" not in argv}
    assert "cluster=deep" in asked, "a database may have several clusters"


def test_a_partitions_own_qos_goes_before_the_jobs_unless_that_one_says_otherwise():
    row = PARTITION.format(name="main", default="YES", most="UNLIMITED", limit="7-00:00:00", nodes="n[1-3]", count=3)
    for flags, refused in (("", True), ("DenyOnLimit,OverPartQOS", False)):
        shell = FakeSlurm(
            configuration=ENFORCED, users="lab|lab||low|low||\n", partitions=[row.replace("QoS=N/A", "QoS=part")],
            qualities=f"low|node=9||{flags}\npart|node=1||\n",
        )  # fmt: skip
        with pytest.raises(CapacityError, match="QOS part gives") if refused else contextlib.nullcontext():
            access.look(SPEC, request(), Slurm(shell=shell))


def test_an_accounting_that_cannot_be_asked_is_said_and_one_that_enforces_nothing_is_not_asked():
    shell = FakeSlurm(configuration=ENFORCED)
    with pytest.raises(BackendError, match="sacctmgr: You are not running a supported accounting_storage plugin"):
        access.look(SPEC, request(), Slurm(shell=shell))
    shell = FakeSlurm(configuration=ACCOUNTED + "AccountingStorageEnforce = none\n")
    assert "the accounting enforces nothing" in access.look(SPEC, request(), Slurm(shell=shell))
    assert not [argv for argv in shell.asked if argv[0] == "sacctmgr"]


def test_words_that_are_not_known_are_passed_on():
    class Odd(FakeSlurm):
        def _sbatch(self, words):
            return "sbatch: Job 7 may start some day"

    assert access.look(SPEC, request(), Slurm(shell=Odd()))[-1] == "sbatch --test-only: Job 7 may start some day"


def test_the_rehearsal_is_one_cpu_node_of_the_same_account_and_software():
    full = spec({"account": "team", "exclusive": True, "cpus_per_host": 96, "time_limit": "2-00:00:00"}, queue="main")
    small = access.rehearse(full)
    text = script(small, run_id=RUN_ID, run_dir=RUN_DIR)
    assert (
        "--nodes=1\n" in text and "--time=30\n" in text and "--partition=main\n" in text and "--account=team\n" in text
    )
    assert "gres" not in text and "exclusive" not in text and "cpus-per-task" not in text
    assert small.slurm.venv == full.slurm.venv and small.training.steps == 2 and small.slurm.resubmit == "no"
    assert access.rehearse(full, machine="cpu").resources.queue == "cpu"
    assert [one for one in validation.problems(small) if one.key.startswith(("slurm", "resources"))] == []


def test_what_it_asks_is_the_script_that_would_be_sent():
    told = []

    class Shell(FakeSlurm):
        def run(self, argv, *, stdin=None, **more):
            told.append(stdin)
            return super().run(argv, stdin=stdin, **more)

    asked = request()
    access.look(SPEC, dataclasses.replace(asked), Slurm(shell=Shell()))
    assert asked.files[SCRIPT] in told
