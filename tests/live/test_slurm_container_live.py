"""Runs in containers on a real Slurm whose steps see an image and what they ask for, and on a site that binds to cores.

The container runtimes are stand-ins (``slurm_container.py``): the mounts and the root are real, pyxis and apptainer are
not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster
from slurm_container import image, install
from slurm_runs import User, needs_slurm, run_file

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(600),
    needs_slurm,
]
#: What Google's image has of gIB, as far as it concerns us: the script names pods' interfaces and no library folder.
SCRIPT = "export NCCL_NET=gIB NCCL_SOCKET_IFNAME=eth0,eth1 NCCL_TUNER_CONFIG_PATH=/usr/local/gib/configs/tuner\nfalse\n"
GIB = "/usr/local/gib"
#: A user's training script, as far as it concerns us: what a rank sees.
SEES = """\
import json, os
from pathlib import Path
found = {
    "env": {name: value for name, value in os.environ.items() if name.startswith(("NCCL", "LD_", "MINE", "MUSTER_T"))},
    "plugin": [str(path) for path in Path("/usr/local/gib/lib64").glob("*")],
    "cores": len(os.sched_getaffinity(0)),
    "outside": os.path.exists(os.environ["OUTSIDE"]),
}
Path(os.environ["MUSTER_RUN_DIR"], f"sees-{os.environ['MUSTER_HOST']}.json").write_text(json.dumps(found))
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Three nodes with two GPUs (in name) and gIB; tasks are bound to a thread unless they say otherwise."""
    gib = tmp_path_factory.mktemp("gib")
    (gib / "lib64").mkdir()
    (gib / "lib64" / "libnccl-net_gib.so").touch()
    (gib / "scripts").mkdir()
    (gib / "scripts" / "set_nccl_env.sh").write_text(SCRIPT)
    site = "TaskPluginParam=autobind=threads\nJobSubmitPlugins=require_timelimit\n"
    folder = tmp_path_factory.mktemp("slurm")
    with SlurmCluster(
        folder, 3, gpus=2, cpus=os.cpu_count() or 1, task="task/affinity", more=site, shown={GIB: gib}
    ) as found:
        yield found


@pytest.fixture
def user(cluster, tmp_path):
    found = User(cluster, tmp_path / "home")
    found.env["PATH"] = f"{install(tmp_path / 'programs')}:{found.env['PATH']}"
    found.env["HOME"] = str(tmp_path / "home")
    (tmp_path / "outside").mkdir()
    found.env["OUTSIDE"] = str(tmp_path / "outside")
    yield found
    found.end_all()
    cluster.wait_until(lambda: cluster.states().count("idle") == len(cluster.names), "idle nodes", 60)


@pytest.fixture
def box(tmp_path):
    """``slurm.container`` for an image with a mind of its own."""
    made = image(tmp_path / "image.sqsh", MINE="the image's", MUSTER_TERM="the image's")
    return {"image": str(made), "python": sys.executable}


LIMIT = {"slurm__default_time_limit": "30"}


def test_a_run_in_containers_saves_swaps_and_stops(cluster, user, box, tmp_path):
    """Its checkpoints are in a folder that is not there yet; a step is killed, container and all."""
    shared = tmp_path / "shared" / "checkpoints"
    run = user.submit(
        run_file(
            **LIMIT, slurm__container=box, checkpoint__dir=str(shared), resources__hosts=2, resources__ranks_per_host=1,
            resources__spare_hosts=1,
        )
    )  # fmt: skip
    run.wait_for_step(5)
    run.wait_until(run.spares, "a spare")
    pid, host = run.ranks()[1]
    inside = Path(f"/proc/{pid}/root")
    assert (inside / str(run.dir / "run_id")[1:]).exists(), "the run's folder, at its own path"
    assert not (inside / str(user.home / f"{run_file()['name']}.yaml")[1:]).exists(), "nothing beside it"

    step = run.nodes()[host]
    steps = cluster.ask("squeue", "--steps", "-h", "-o", "%i %N").split()
    cluster.ask("scancel", "--signal=KILL", steps[steps.index(step) - 1])
    run.wait_until(lambda: run.events("incident.resolved"), "recovery")
    assert run.recoveries() == ["swap"], run.story()
    at = run.step()
    run.wait_for_step(at + 3)
    user.muster("stop", run.id)
    assert run.status()["state"] == "stopped" and run.status()["exit_code"] == 130
    assert list((user.home / ".cache" / "muster" / "data").iterdir()), (
        "prepared data is the user's, not the container's"
    )
    assert list(shared.rglob("*.json")), "saved where it was asked for, not in a container that is gone"


def what_ranks_see(user, run):
    run.wait_until(lambda: run.status()["state"] in ("succeeded", "failed"), "the end")
    assert run.status()["state"] == "succeeded", run.story()
    return [json.loads(path.read_text()) for path in sorted(run.dir.glob("sees-*.json"))]


@pytest.mark.parametrize("runtime", ["pyxis", "apptainer", pytest.param(None, marks=pytest.mark.soak)])
def test_ranks_see_googles_fabric_all_cores_and_the_runs_variables(user, box, tmp_path, runtime):
    script = tmp_path / "code" / "sees.py"
    script.parent.mkdir()
    script.write_text(SEES)
    spec = {
        "name": "sees", "backend": "slurm", "command": [str(script)],
        "resources": {"hosts": 2, "device": "cuda", "ranks_per_host": 1, "machine": "a4-highgpu-8g"},
        "slurm": {"default_time_limit": "30", "environment": {"MINE": "the run's", "NCCL_DEBUG": "WARN"}},
        "check": {"mode": "off"},  # it would find that this machine type's GPUs are missing here
    }  # fmt: skip
    if runtime is not None:
        spec["slurm"]["container"] = {**box, "runtime": runtime}
    seen = what_ranks_see(user, user.submit(spec))
    assert len(seen) == 2
    for one in seen:
        assert one["plugin"] == [f"{GIB}/lib64/libnccl-net_gib.so"]
        env = one["env"]
        assert env["NCCL_SOCKET_IFNAME"] == "enp0s19,enp192s20" and env["NCCL_NET"] == "gIB"
        assert env["NCCL_TUNER_CONFIG_PATH"].endswith("/tuner"), "the script was read too"
        assert env["LD_LIBRARY_PATH"].split(":")[0] == f"{GIB}/lib64"
        assert (env["MINE"], env["MUSTER_TERM"], env["NCCL_DEBUG"]) == ("the run's", "ignored", "WARN")
        assert one["cores"] == os.cpu_count()
        assert one["outside"] is (runtime is None), "a folder that nobody asked for"


def test_this_site_does_bind_a_task_to_a_core_and_does_demand_a_time_limit(cluster, user):
    """Else the tests above show nothing; the refusal names the key."""
    bound = subprocess.run(
        ["srun", "-t", "1", "-N1", "-n1", "nproc"], env=cluster.env, capture_output=True, text=True, check=True
    )
    assert int(bound.stdout) == 1 < (os.cpu_count() or 1)
    spec = run_file(name="unlimited", resources__hosts=1)
    path = user.home / "unlimited.yaml"
    path.write_text(json.dumps(spec))
    refused = user.muster("submit", str(path), code=2)
    assert "slurm.default_time_limit" in refused.stderr and "time" in refused.stderr.lower()


def test_a_container_without_the_fabric_is_refused_with_the_reason(user, box, tmp_path):
    """And with what a forgotten mount looks like: the plugin is on the node, the step does not see it."""
    script = tmp_path / "code" / "sees.py"
    script.parent.mkdir()
    script.write_text(SEES)
    run = user.submit(
        {
            "name": "forgotten", "backend": "slurm", "command": [str(script)],
            "resources": {"hosts": 2, "device": "cuda", "ranks_per_host": 1, "machine": "a4-highgpu-8g"},
            "slurm": {"default_time_limit": "30", "container": {**box, "mount_fabric": False}},
        }
    )  # fmt: skip
    run.wait_until(lambda: run.status()["state"] == "failed", "the end")
    ((job, _),) = run.jobs()
    said = (run.dir / "logs" / f"slurm-{job}.log").read_text()
    assert "error: no NCCL plugin for a4-highgpu-8g in the container (slurm.container.mount_fabric" in said
    assert said.count("its step ended, restarting it") == 0, "it would say the same again"


def test_the_stand_in_shows_nothing_that_was_not_asked_for(cluster, user, box, tmp_path):
    """Else a forgotten mount would pass."""
    (tmp_path / "beside.txt").write_text("here")
    (tmp_path / "asked").mkdir()
    (tmp_path / "asked" / "x.txt").write_text("here")

    def step(*options, program=("cat", str(tmp_path / "asked" / "x.txt"))):
        words = ["srun", "--time=1", "--nodes=1", f"--container-image={box['image']}", *options, *program]
        return subprocess.run(words, env=user.env, capture_output=True, text=True, check=False)

    asked = f"--container-mounts={tmp_path}/asked:{tmp_path}/asked"
    assert step(asked).stdout == "here"
    assert step(f"--container-mounts={tmp_path}/programs:/x").returncode != 0
    assert step(asked, program=("cat", str(tmp_path / "beside.txt"))).returncode != 0
    assert "failed to mount" in step("--container-mounts=/nowhere:/x").stderr
    assert "unrecognized option" in step("--container-everything=1").stderr
    assert step(asked, program=("sh", "-c", "squeue || [ $? = 127 ]")).returncode == 0, "no Slurm in an image"
