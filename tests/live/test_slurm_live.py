"""Runs on a real Slurm of four or five nodes in network namespaces: real cuts, real power failures, real limits."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster
from slurm_runs import Run, User, needs_slurm, recovery_s, run_file

from muster.backends.slurm.commands import Slurm
from muster.core.protocols import Completed

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(600),
    needs_slurm,
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with SlurmCluster(tmp_path_factory.mktemp("slurm"), 5, gpus=0) as found:
        yield found


@pytest.fixture
def user(cluster, tmp_path):
    found = User(cluster, tmp_path / "home")
    yield found
    for name in cluster.names:
        cluster.heal(name)
        if not cluster.processes(name, "slurmd"):
            cluster.start_node(name)
    found.end_all()
    cluster.wait_until(lambda: cluster.states().count("idle") >= len(cluster.names) - 1, "idle nodes", 60)


@pytest.fixture(scope="module")
def beside(cluster, tmp_path_factory):
    """An unfailed run of one rank. Sums are exact, so every other run must have its losses."""
    user = User(cluster, tmp_path_factory.mktemp("beside"))
    yield user.submit(run_file(name="beside", resources__hosts=1, resources__ranks_per_host=1))
    user.end_all()


def same_losses(run: Run, beside: Run, *, beyond: int) -> None:
    """Step by step those of the unfailed run, bit for bit, to beyond the fault."""
    if beside.status()["state"] == "running":
        beside.wait_for_step(beyond + 1)
    mine, wanted = run.losses(), beside.losses()
    common = sorted(set(mine) & set(wanted))
    assert common[-1] > min(beyond, max(wanted) - 1), run.story()
    assert set(range(1, common[-1] + 1)) <= set(mine), "no step is missing"
    assert [mine[step] for step in common] == [wanted[step] for step in common]
    # Chains, one result a step, nothing of an older attempt after its successor began (I6), times that add up.
    checker = Path(__file__).parents[2] / "tools" / "check_invariants.py"
    judged = subprocess.run([sys.executable, str(checker), str(run.dir)], capture_output=True, text=True, check=False)
    assert judged.returncode == 0, judged.stdout


def test_a_cut_link_and_then_the_supervisors_node_while_another_run_goes_on(cluster, user, beside):
    """Two nodes of two ranks and a spare: first a link is cut, then restored, then the batch node loses power."""
    run = user.submit(run_file(resources__hosts=2, resources__spare_hosts=1, slurm__time_limit="30"))
    run.wait_for_step(8)
    run.wait_until(run.spares, "a spare")
    assert run.status()["state"] == "running"

    lost_host = next(host for _, (_, host) in sorted(run.ranks().items()) if run.nodes()[host] != run.supervisor_host())
    lost = run.nodes()[lost_host]
    began_ns = time.time_ns()
    cluster.cut(lost)
    run.wait_until(lambda: run.events("incident.resolved"), "recovery")
    first_s, first_again = recovery_s(run, began_ns)
    assert run.recoveries() == ["swap"] and first_again <= 2, run.story()
    assert cluster.states().count("down") == 0, "Slurm itself has not noticed: nothing waited for it"
    _cannot_commit(cluster, run, lost)
    run.wait_until(lambda: not cluster.processes(lost, "muster.rank.fork_server"), "the end of the cut-off ranks")
    healed_ns = time.time_ns()
    cluster.heal(lost)
    run.wait_until(lambda: _spare_again(run, lost_host, healed_ns), "the return of the healed node")

    at, batch = run.step(), run.supervisor_host()
    began_ns = time.time_ns()
    cluster.power_off(batch)
    run.wait_for_step(run.step() + 15)  # looked at afterwards: steps go on while a long log is read
    second_s, second_again = recovery_s(run, began_ns)
    assert run.supervisor_host() != batch and second_again <= 2, run.story()
    assert run.recoveries() == ["swap", "swap"], run.story()
    print(f"L: link cut {first_s:.2f} s, supervisor's and batch node lost {second_s:.2f} s")

    assert beside.status()["state"] == "running", beside.story()
    user.muster("stop", run.id)
    assert run.status()["state"] == "stopped" and run.status()["exit_code"] == 130
    same_losses(run, beside, beyond=at)
    beside.user.muster("stop", beside.id)  # its losses stand for the tests that follow
    run.wait_until(lambda: run.jobs()[0][1] != "RUNNING", "a freed allocation")
    assert user.muster("logs", run.id, "--rank", "0").stdout, "a rank's output"


def _spare_again(run: Run, host: str, since_ns: int) -> bool:
    """Whether the host is back, as a returned one or as a spare of a new supervisor."""
    later = [event for event in run.events() if event.wall_ns > since_ns and event.host == host]
    returned = [event for event in later if event.detail.get("incident") == "host_returned"]
    return bool(returned or [event for event in later if event.phase == "spare"])


def _cannot_commit(cluster: SlurmCluster, run: Run, node: str) -> None:
    """A write of the cut-off node's processes, if it reached the disk, would be refused: its attempt is fenced."""
    code = (
        "import sys; from muster.checkpoint_format import fences; from muster.storage.store import open_store\n"
        "fences.check(open_store(), sys.argv[1], run_id=sys.argv[2], attempt=1)"
    )
    space = f"/run/netns/{cluster.namespace(node)}"
    done = subprocess.run(
        ["nsenter", f"--net={space}", sys.executable, "-c", code, str(run.dir / "checkpoints"), run.id],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode and "is held by run" in done.stderr and "attempt 2" in done.stderr, done.stderr


@pytest.mark.soak  # a minute and more each; CI keeps the cut link, the lost supervisor and the time limit
def test_the_supervisor_and_host_programs_are_killed(cluster, user):
    """kill -9 in turn: the supervisor, the program of a node with ranks, the one beside the supervisor."""
    run = user.submit(run_file(resources__hosts=2, resources__ranks_per_host=1, resources__spare_hosts=1))
    run.wait_until(run.spares, "a spare")
    run.wait_for_step(8)
    _kill(cluster, run, run.supervisor_host(), "muster.app.supervisor")
    assert len(run.events("attempt.started")) == 1, "ranks went on meanwhile"
    nodes, program = [run.nodes()[host] for _, (_, host) in run.ranks().items()], "muster.backends.slurm.node"
    for node in (next(one for one in nodes if one != run.supervisor_host()), run.supervisor_host()):
        _kill(cluster, run, node, program)
        run.wait_until(lambda node=node: _programs(cluster, node, program), "its step again")
        run.wait_until(lambda node=node: len(_programs(cluster, node, "muster.agent.host_agent")) == 1, "one agent")
        run.wait_for_step(run.step() + 5)
    user.muster("stop", run.id)
    assert run.status()["state"] == "stopped", run.story()


def _programs(cluster: SlurmCluster, node: str, module: str) -> set[int]:
    """Without the srun that starts it, whose words name it too."""
    return set(cluster.processes(node, module)) - set(cluster.processes(node, "srun --overlap"))


def _kill(cluster: SlurmCluster, run: Run, node: str, module: str) -> None:
    step, pids = run.step(), _programs(cluster, node, module)
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    run.wait_for_step(step + 15)


@pytest.mark.soak  # a minute and more each; CI keeps the cut link, the lost supervisor and the time limit
def test_a_dead_node_and_a_requeue(cluster, user, beside):
    """slurmd and all processes of a node die; later an administrator requeues the job."""
    run = user.submit(run_file(resources__hosts=2, resources__ranks_per_host=1, resources__spare_hosts=1))
    run.wait_for_step(8)
    run.wait_until(run.spares, "a spare")
    lost = next(run.nodes()[host] for _, (_, host) in run.ranks().items() if run.nodes()[host] != run.supervisor_host())
    began_ns = time.time_ns()
    cluster.kill_processes(lost)
    run.wait_until(lambda: run.events("incident.resolved"), "recovery")
    seconds, again = recovery_s(run, began_ns)
    assert run.recoveries() == ["swap"] and again <= 2, run.story()
    print(f"L: slurmd and all processes of a node killed {seconds:.2f} s")
    cluster.start_node(lost)

    at = run.step()
    (job,) = [job for job, _ in run.jobs()]
    cluster.ask("scontrol", "requeue", job)
    run.wait_until(lambda: [e for e in run.events("run.finished") if e.detail["outcome"] == "preempted"], "the save")
    run.wait_until(lambda: run.status()["state"] == "waiting", "a requeued job")
    assert "waits" in run.status()["reason"]
    run.wait_for_step(at + 10)
    restored = [event.step for event in run.events("checkpoint.restored") if event.detail["tier"] in ("disk", "bucket")]
    assert restored and max(restored) >= at, "nothing before the requeue is lost: it was saved on notice"
    assert [job for job, _ in run.jobs()] == [job], "one job all along"
    user.muster("stop", run.id)
    same_losses(run, beside, beyond=at)


def seconds(text):
    """``3-00:00:00``, ``12:00:00``, ``5:00``, ``30``; None for no limit and for anything else."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(?:(\d+):)?(\d+)(?:\.\d+)?", text.strip())
    if match is None:
        return None
    days, first, second, last = (int(group) if group else None for group in match.groups())
    clock = [part for part in (first, second, last) if part is not None]
    if days is not None and len(clock) < 3:  # 2-12 and 2-12:30 count from the hours
        clock += [0] * (3 - len(clock))
    total = 0
    for part in clock:
        total = total * 60 + part
    return total + 86_400 * (days or 0)


def test_a_time_limit_is_continued_in_a_second_job(cluster, user, beside):
    """Slurm's notice before the limit: the run saves and exits, and a further job continues from there."""
    run = user.submit(
        run_file(
            resources__hosts=1, resources__ranks_per_host=1, slurm__time_limit="30", slurm__signal_before_timeout_s=60
        )
    )
    run.wait_for_step(8)
    ((first, _),) = run.jobs()
    elapsed_s = seconds(cluster.ask("squeue", "-h", "-j", first, "-o", "%M")) or 0
    minutes = (elapsed_s + 30) // 60 + 1  # between 30 and 90 s are left: the notice comes at once, or soon
    cluster.ask("scontrol", "update", f"JobId={first}", f"TimeLimit={minutes}")
    run.wait_until(lambda: len(run.jobs()) == 2, "a second job")
    (ended,) = run.events("run.finished")
    assert ended.detail["outcome"] == "preempted" and ended.detail["exit_code"] == 75, run.story()
    at = run.step()
    run.wait_until(lambda: run.step() > at + 5, "steps in the second job")
    (_, second) = sorted(job for job, _ in run.jobs())
    assert cluster.job_state(first) == "COMPLETED"
    assert f"job {second}, the 2nd of this run" in run.status()["reason"]
    assert run.events("checkpoint.restored")[-1].step == at, "it went on from where it saved"
    user.muster("down", run.id)
    assert {state for _, state in run.jobs()} <= {"COMPLETED", "CANCELLED"}
    same_losses(run, beside, beyond=at)


@pytest.mark.soak  # a minute and more each; CI keeps the cut link, the lost supervisor and the time limit
def test_the_five_minutes_of_the_documentation(cluster, user):
    """docs/how-to/slurm.md, in its order: run file, commands; a node's step is killed, a spare takes over."""
    document = (Path(__file__).parents[2] / "docs" / "how-to" / "slurm.md").read_text()
    run_yaml = re.search(r"```yaml\n(.*?)```", document, re.S)
    commands = re.findall(r"^\$ (.*?)(?: +#.*)?$", document, re.M)
    assert run_yaml and [word for word in commands if word.startswith("muster submit")]
    (user.home / "RUN.yaml").write_text(run_yaml[1])
    run, seen = None, {}
    for command in commands:
        words = command.split()
        if words[0] == "./setup.sh":
            continue
        if run is not None and run.jobs():
            words = [word.replace("JOB", run.jobs()[-1][0]) for word in words]
        if words[0] == "muster":
            words = [word for word in words[1:] if word != "-f"]  # it would follow to the end
            seen[words[0]] = user.muster(*words).stdout
        else:
            seen[words[0]] = cluster.ask(*words)
        if words[0] == "submit":
            run = Run(user, seen["submit"].strip())
            run.wait_until(run.spares, "a spare")
            run.wait_for_step(2)
        if words[0] == "scancel":
            assert run is not None
            run.wait_until(lambda run=run: run.events("incident.resolved"), "recovery")
    assert run is not None
    assert "swap" in seen["events"] and "#SBATCH --nodes=4" in seen["render"]
    assert seen["exec"].strip() in cluster.names
    assert run.events("checkpoint.committed") and all(state != "RUNNING" for _, state in run.jobs())


def test_a_faulty_machine_is_drained_while_it_trains_on(cluster, user):
    """By a user who may: Slurm's own. The fault is a stub's of NVIDIA's library, with eight GPUs."""
    pytest.importorskip("pynvml")
    stub = Path(__file__).parents[1] / "unit" / "probe" / "nvml_stub.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", user.home / "libnvidia-ml.so.1", stub], check=True)
    driver = {"LD_LIBRARY_PATH": str(user.home), "MUSTER_STUB": "narrow:6 "}
    one = {"resources__hosts": 1, "resources__ranks_per_host": 1}
    run = user.submit(run_file(**one, check__mode="passive", slurm__environment=driver))
    run.wait_for_step(2)
    node = run.nodes()["host-0"]
    try:
        run.wait_until(lambda: "DRAIN" in Slurm(shell=Within(cluster)).node_state(node), "the drain")
        shown = cluster.ask("scontrol", "show", "node", node)
        assert f"Reason=muster run {run.id}: GPU 6: PCIe link of 8 of 16 lanes" in shown, shown
        said = f"host-0: Slurm gives {node} no new jobs"
        run.wait_until(lambda: any(said in str(event.detail) for event in run.events("run.message")), "word of it")
        assert Slurm(shell=Within(cluster)).drain(node, "again").endswith("already")
        run.wait_for_step(run.events("step")[-1].step + 2)
        assert run.status()["state"] == "running", "what runs there goes on"
    finally:
        user.muster("down", run.id, code=None)
        cluster.ask("scontrol", "update", f"nodename={node}", "state=resume")


@dataclass
class Within:
    """Slurm's programs of this cluster."""

    cluster: SlurmCluster

    def run(self, argv, *, env=None, stdin=None, timeout_s=None):
        done = subprocess.run(
            argv, env={**self.cluster.env, **(env or {})}, capture_output=True, text=True, check=False,
            timeout=timeout_s,
        )  # fmt: skip
        return Completed(argv=tuple(argv), returncode=done.returncode, stdout=done.stdout, stderr=done.stderr)


@pytest.mark.soak
def test_the_network_between_the_nodes_of_a_run(cluster, user):
    """Beside its training, which is on processors; the nodes and how they are reached are the run's."""
    run = user.submit(run_file(resources__hosts=2, resources__ranks_per_host=1))
    run.wait_for_step(3)
    checked = json.loads(user.muster("check", "--network", run.id, "--largest-mib", "1", "--json", code=None).stdout)
    assert len(checked["tables"]) == 4, checked
    assert all(f" on {node:>10s} device  0" in checked["tables"][0] for node in run.nodes().values())
    assert run.status()["state"] == "running"


@pytest.mark.soak  # a minute and more each; CI keeps the cut link, the lost supervisor and the time limit
def test_a_mistake_is_corrected_in_the_allocation_that_is_held(cluster, user):
    one = {"resources__hosts": 1, "resources__ranks_per_host": 1}
    held = {"recovery__keep_hosts_after_failure_s": 120.0}
    run = user.submit(run_file(**one, **held, model__config__head_dim=17, training__steps=5))
    run.wait_until(lambda: any(event.phase == "hold" for event in run.events("phase.changed")), "the hold")
    (job,) = run.jobs()
    wrong = user.muster("exec", run.id, "--host", "7", "--", "hostname", code=2)
    assert "no host-7" in wrong.stderr
    assert user.muster("exec", run.id, "--", "hostname").stdout.strip() == run.nodes()["host-0"]
    assert user.muster("exec", run.id, "--", "false", code=1).returncode == 1
    alone = user.muster("check", "--network", run.id, code=2)
    assert "has 1 host to be measured" in alone.stderr
    user.muster("restart", run.id, "model.config.head_dim=16")
    run.wait_until(lambda: run.status()["state"] == "succeeded", "the end")
    assert run.jobs()[0][0] == job[0] and len(run.jobs()) == 1, "the same job: nothing was queued again"
    assert len(run.events("agent.started")) == 1, "the same agent"
