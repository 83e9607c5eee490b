"""What ``muster accept`` tries on a Slurm before it trains there: each obstacle is one sentence, and what nodes see is
seen by the real programs on played nodes (``srun`` starts them here)."""

import dataclasses
import math
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fakes.clock import VirtualClock
from fakes.slurm import LEAVING, FakeSlurm

from muster.accept.ladder import HOST_HOURS, Meter, OverBudget
from muster.backends.slurm.access import asked
from muster.backends.slurm.commands import Slurm
from muster.backends.slurm.trial import limits
from muster.backends.slurm.trial_site import SMALL_TIME_LIMIT, TIME_LIMIT, SlurmSite
from muster.config.spec import RunSpec
from muster.core import processes
from muster.core.errors import AccessError, CapacityError, MusterError, UsageError

WANT = limits.Asked(
    partition=None, nodes=2, gpus=16, time="1:00:00", account=None, qos=None, reservation=None
)  # fmt: skip
ROW = {"PartitionName": "main", "State": "UP", "MaxTime": "7-00:00:00", "MaxNodes": "UNLIMITED", "MinNodes": "0"}
MINE = {
    "default_account": "lab", "account": "lab", "partition": "", "qos": "normal,low", "default_qos": "", "max_tres": "",
    "max_wall": "",
}  # fmt: skip


def spec(resources=None, **slurm):
    found = {
        "name": "x", "backend": "slurm", "command": ["train.py"], "slurm": slurm,
        "resources": {"hosts": 2, "device": "cpu", "ranks_per_host": 1, "queue": "cpu", **(resources or {})},
    }  # fmt: skip
    return RunSpec.model_validate(found)


def want(**changes):
    return dataclasses.replace(WANT, **changes)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("30", 1800), ("5:00", 300), ("12:00:00", 43200), ("2-12", 216000), ("2-12:30", 217800),
        ("7-00:00:00", 604800), ("UNLIMITED", math.inf), ("NONE", math.inf), ("", math.inf),
    ],
)  # fmt: skip
def test_times_as_slurm_writes_them(text, found):
    assert limits.seconds(text) == found


@pytest.mark.parametrize(
    ("row", "asks", "kind", "says"),
    [
        ({"State": "DRAIN"}, {}, CapacityError, "partition main is DRAIN: it starts no job"),
        ({"RootOnly": "YES"}, {}, AccessError, "takes jobs of root alone"),
        ({"AllowGroups": "gpu,admin"}, {}, AccessError, "is for the groups admin, gpu, and you are in none of them"),
        ({"ReqResv": "YES"}, {}, UsageError, "takes jobs with a reservation alone"),
        ({"AllowAccounts": "physics"}, {"account": "lab"}, AccessError, "partition main: it is for physics"),
        ({"DenyAccounts": "lab"}, {"account": "lab"}, AccessError, "may not use partition main: it is kept out"),
        ({"AllowQos": "high"}, {"qos": "low"}, AccessError, "QOS low may not use partition main: it is for high"),
        ({"MaxNodes": "1"}, {}, CapacityError, "gives a job 1 nodes at most, and 2 are asked for"),
        ({"MinNodes": "4"}, {}, CapacityError, "gives a job 4 nodes at least, and 2 are asked for"),
        ({"MaxTime": "00:30:00"}, {}, UsageError, "ends a job after 00:30:00, and one of 1:00:00 is asked for"),
    ],
)  # fmt: skip
def test_what_a_partition_refuses_is_said_in_one_sentence(row, asks, kind, says):
    with pytest.raises(kind) as refused:
        limits.check_partition({**ROW, **row}, want(**asks), groups=["users"])
    assert says in str(refused.value) and "\n" not in str(refused.value)
    limits.check_partition(ROW, want(**asks), groups=["users"])  # and it alone was in the way


def test_no_group_and_no_rule_for_root_keeps_an_administrator_out():
    limits.check_partition({**ROW, "RootOnly": "YES", "AllowGroups": "gpu"}, WANT, groups=None)


def test_the_partition_is_the_one_named_or_the_default_one():
    rows = [{"PartitionName": "main", "Default": "YES"}, {"PartitionName": "short", "Default": "NO"}]
    assert limits.partition_of(rows, WANT)["PartitionName"] == "main"
    assert limits.partition_of(rows, want(partition="short"))["PartitionName"] == "short"
    with pytest.raises(UsageError, match=r"there is no partition gpu \(there are main, short\)"):
        limits.partition_of(rows, want(partition="gpu"))
    with pytest.raises(UsageError, match="no partition is the default one"):
        limits.partition_of(rows[1:], WANT)


@pytest.mark.parametrize(
    ("rows", "asks", "says"),
    [
        ([], {}, "the accounting knows no account of ada"),
        ([MINE], {"account": "physics"}, "ada has no account physics (there are lab)"),
        ([{**MINE, "partition": "short"}], {}, "account lab may use the partitions short alone, and not main"),
        ([MINE], {"qos": "high"}, "account lab may use the QOS normal,low, and not high"),
    ],
)
def test_what_the_accounting_refuses_is_said_in_one_sentence(rows, asks, says):
    with pytest.raises(AccessError) as refused:
        limits.account_of(rows, want(**asks), "main", user="ada", qos_enforced=True)
    assert says in str(refused.value)


def test_a_qos_that_is_not_enforced_is_not_held_against_the_account():
    assert limits.account_of([MINE], want(qos="high"), "main", user="ada", qos_enforced=False) == MINE


def test_an_account_of_this_partition_goes_before_one_of_all():
    rows = [MINE, {**MINE, "partition": "main", "max_wall": "00:10:00"}]
    found = limits.account_of(rows, WANT, "main", user="ada", qos_enforced=True)
    assert found == rows[1]
    with pytest.raises(UsageError, match="account lab ends a job after 00:10:00"):
        limits.check_limits([("account lab", found)], WANT)


@pytest.mark.parametrize(
    ("tres", "says"),
    [
        ("cpu=100,node=1", "QOS low gives a job 1 nodes at most, and 2 are asked for"),
        ("gres/gpu=8", "QOS low gives a job 8 GPUs at most, and 16 are asked for"),
    ],
)
def test_a_jobs_share_is_held_against_what_is_asked(tres, says):
    with pytest.raises(CapacityError, match=says):
        limits.check_limits([("QOS low", {"max_tres": tres, "max_wall": ""})], WANT)
    limits.check_limits([("QOS low", {"max_tres": "node=2,gres/gpu=16", "max_wall": "1-00:00:00"})], WANT)


def test_of_several_limits_the_first_one_that_is_set_holds():
    """A QOS's goes before the association's (man sacctmgr), each limit for itself."""
    wide, narrow = {"max_tres": "node=8", "max_wall": ""}, {"max_tres": "node=1", "max_wall": "00:10:00"}
    with pytest.raises(UsageError, match="account lab ends a job after 00:10:00"):
        limits.check_limits([("QOS big", wide), ("account lab", narrow)], WANT)
    limits.check_limits([("QOS big", {**wide, "max_wall": "2-00:00:00"}), ("account lab", narrow)], WANT)


def test_a_qos_may_let_its_jobs_pass_the_partitions_limits():
    row = {**ROW, "MaxNodes": "1", "MinNodes": "4", "MaxTime": "00:30:00"}
    flags = {"PartitionMaxNodes", "PartitionMinNodes", "PartitionTimeLimit"}
    limits.check_partition(row, WANT, groups=[], flags=flags)
    for one in flags:
        with pytest.raises(MusterError, match="partition main"):
            limits.check_partition(row, WANT, groups=[], flags=flags - {one})


@pytest.mark.parametrize(
    ("asks", "row", "found"),
    [
        ({"qos": "low"}, {}, "low"),
        ({}, {"default_qos": "normal"}, "normal"),
        ({}, {"qos": "only"}, "only"),
        ({}, {}, ""),
    ],
)
def test_the_jobs_qos_is_the_one_named_the_default_or_the_only_one(asks, row, found):
    assert limits.qos_of({**MINE, **row}, want(**asks)) == found


# ------------------------------------------------------------ by a job


def test_a_trials_jobs_are_short_unless_the_run_file_says_otherwise():
    site = SlurmSite(Slurm(shell=FakeSlurm()))
    assert asked(site.trial(spec())).time == TIME_LIMIT
    assert asked(site.trial(spec(time_limit="20"))).time == "20"
    assert asked(spec({"device": "cuda", "ranks_per_host": 8, "spare_hosts": 1})).gpus == 24


SRUN = """#!{bash}
for word; do case $word in
  --nodelist=*) export SLURMD_NODENAME=${{word#--nodelist=}}; shift;;
  --*) shift;;
  *) break;;
esac; done
{trouble}
"$@" || exit
{after}
"""


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    """Puts an ``srun`` on the path that starts programs here, one node after another; and a home for the folder."""

    def put(trouble="", *, machines=True):
        place = tmp_path / "bin"
        place.mkdir(exist_ok=True)
        # Another kernel on every node, as on a real cluster.
        after = (
            'sed -i "s/\\"boot_id\\": \\"/&$SLURMD_NODENAME/" "${@: -1}/seen-$SLURMD_NODENAME.json"' if machines else ""
        )
        scontrol = "#!/bin/sh\nprintf 'c1\\nc2\\n'\n"
        for name, content in (
            ("srun", SRUN.format(bash="/bin/bash", trouble=trouble, after=after)),
            ("scontrol", scontrol),
        ):
            (place / name).write_text(content)
            (place / name).chmod(stat.S_IRWXU)
        monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")

    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SLURM_JOB_NODELIST", "c[1-2]")
    put()
    return put


class Look:
    """A preflight on a played Slurm, whose jobs' programs run here."""

    def __init__(self, tmp_path, budget=50.0, **slurm):
        self.fake = FakeSlurm(hostnames="c1\nc2\n")
        self.slurm = Slurm(shell=self.fake)
        self.site = SlurmSite(self.slurm)
        self.clock = RealClock()
        self.meter = Meter(budget=budget, clock=self.clock, unit=HOST_HOURS, per_hour=2.0)
        self.spec = self.site.trial(spec(**slurm))
        self.home = tmp_path / "home" / "runs"

    def nothing_starts(self):
        self.fake.held, self.clock.moment_s = True, 0.0

    def __call__(self):
        return self.site.look(self.spec, self.meter.wait)

    def left(self):
        return [*self.site.left(), *(path.name for path in self.home.glob(".*"))]


class RealClock(VirtualClock):
    """Hours pass while one waits; programs get a moment."""

    moment_s = 0.1

    def sleep(self, seconds):
        super().sleep(seconds)
        time.sleep(self.moment_s)


def test_two_nodes_import_muster_and_share_the_folder(tmp_path, nodes):
    look = Look(tmp_path)
    found = look()
    assert found.said == "c1, c2 import Muster and share the folder"
    assert len(set(found.kernels)) == 2 and look.left() == []


def test_nodes_of_one_machine_show_its_kernel(tmp_path, nodes):
    nodes(machines=False)
    assert Look(tmp_path)().kernels == (processes.boot_id(),) * 2


@pytest.mark.parametrize(
    ("trouble", "says"),
    [
        (
            '[ $SLURMD_NODENAME = c2 ] && { echo "/opt/venv/bin/python: No module named muster" >&2; exit 1; }',
            "c2 cannot start a run's programs: /opt/venv/bin/python: No module named muster",
        ),
        (
            '[ $SLURMD_NODENAME = c1 ] && rm "${@: -1}/word"',
            "c1 cannot start a run's programs: FileNotFoundError: [Errno 2] No such file or directory",
        ),
        ('[ $SLURMD_NODENAME = c1 ] && echo other > "${@: -1}/word"', "c1 sees another folder than this machine"),
        ('[ $SLURMD_NODENAME = c2 ] && exit 1', "nothing of c2 is in"),
    ],
)  # fmt: skip
def test_what_a_node_lacks_is_said_in_one_sentence(tmp_path, nodes, trouble, says):
    nodes(trouble)
    look = Look(tmp_path)
    with pytest.raises(MusterError) as failed:
        look()
    assert says in str(failed.value) and "\n" not in str(failed.value), failed.value
    assert look.left() == []


def test_a_python_that_the_nodes_do_not_have_is_named(tmp_path, nodes):
    look = Look(tmp_path, venv="/nowhere/venv")
    with pytest.raises(MusterError, match=r"job 1 is FAILED: .*/nowhere/venv/bin/python"):
        look()
    assert look.left() == []


def test_a_refusal_leaves_nothing(tmp_path, nodes):
    look = Look(tmp_path)
    look.fake.partitions = look.fake.partitions[:1]  # cpu is gone since
    with pytest.raises(UsageError, match="Invalid partition name specified"):
        look()
    assert not look.fake.jobs and look.left() == []


def test_the_small_job_asks_for_no_gpus_and_a_short_time(tmp_path, nodes):
    look = Look(tmp_path, gres="gpu:8", exclusive=True, time_limit="2-00")
    texts = []
    submit = look.fake._sbatch
    look.fake._sbatch = lambda words: texts.append(Path(words[-1]).read_text()) or submit(words)
    look()
    (small,) = texts
    assert "gres" not in small and "--exclusive" not in small and f"--time={SMALL_TIME_LIMIT}" in small


def test_a_job_that_waits_for_ever_is_ended_by_the_budget_and_one_that_waits_long_says_why(tmp_path, nodes):
    """Broken on purpose: no node ever becomes free."""
    look = Look(tmp_path, budget=1.2)
    look.nothing_starts()
    with pytest.raises(OverBudget, match=r"1\.20 host-hours"):
        look()
    assert look.meter.read() < 1.2 and look.left() == []
    assert [job.state for job in look.fake.jobs.values()] == ["CANCELLED"]
    look = Look(tmp_path)
    look.nothing_starts()
    with pytest.raises(
        MusterError, match="no end of job 1 within 1800 s: job 1 waits: it is next, and waits for nodes"
    ):
        look()
    assert look.left() == []


def test_a_job_whose_end_cannot_be_had_is_among_what_is_left(tmp_path, nodes):
    look = Look(tmp_path)
    look.nothing_starts()
    look.fake.immortal = True
    with pytest.raises(MusterError, match="no end of job 1"):
        look()
    assert look.site.left() == ["job 1 (PENDING)"]


# ------------------------------------------------------------ hosts that are held


def test_hosts_are_held_and_given_back(tmp_path, nodes):
    look = Look(tmp_path, environment={"NCCL_DEBUG": "INFO"})
    with look.site.held(look.spec, look.meter.wait) as hosts:
        assert list(hosts) == ["c1", "c2"] and look.fake.jobs["1"].state == "RUNNING"
        one = hosts["c1"]
        assert one.words[:2] == ("srun", "--jobid=1") and one.python == sys.executable
        assert (one.peer, hosts["c2"].peer) == ("10.0.0.2", "10.0.0.1")
        code = "import os; print(os.environ['SLURMD_NODENAME'], os.environ['NCCL_DEBUG'])"
        done = subprocess.run([*one.words, one.python, "-c", code], capture_output=True, text=True, check=False)
        assert done.stdout == "c1 INFO\n", done.stderr
    assert look.fake.jobs["1"].state in LEAVING and look.left() == []


def test_a_job_that_ends_before_it_is_used_is_said(tmp_path, nodes):
    look = Look(tmp_path)
    look.nothing_starts()

    def cancelled(condition, awaited, limit_s, why=lambda: ""):
        look.fake.jobs["1"].state = "CANCELLED"
        look.meter.wait(condition, awaited, limit_s, why)

    with pytest.raises(MusterError, match="job 1 ended as CANCELLED before it could be used"):
        with look.site.held(look.spec, cancelled):
            pass
    assert look.left() == []
