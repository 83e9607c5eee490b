"""Several hosts of one machine: each has GPUs of its own, and a spare does too."""

import pytest

from muster.backends.local.launcher import LocalLauncher
from muster.config.spec import RunSpec
from muster.core.errors import RunFileError
from muster.core.protocols import Completed


def eight_gpus(argv, **_):
    lines = [f"{index}, GPU-{index}{index}, NVIDIA H100 80GB HBM3, 81559" for index in range(8)]
    return Completed(argv=tuple(argv), returncode=0, stdout="\n".join(lines), stderr="")


class Shell:
    run = staticmethod(eight_gpus)


@pytest.fixture
def launcher(monkeypatch):
    monkeypatch.setattr("muster.backends.hardware.shutil.which", lambda name: f"/usr/bin/{name}")
    return lambda **environ: LocalLauncher(shell=Shell(), environ=environ)


def spec(**resources):
    training = {"steps": 2, "sequence_length": 64, "global_batch_size": 16}
    return RunSpec.model_validate(
        {
            "name": "x",
            "model": {"config": {"model_type": "llama"}},
            "data": {"sources": [{"type": "random", "rows": 64}]},
            "training": training,
            "resources": {"device": "cuda", **resources},
        }
    )


def visible(launcher, **resources):
    resolved = launcher.resolve(spec(**resources))
    request = launcher.render(resolved, run_id="r", run_dir="/d")
    agents = [task for task in request.tasks if task.name != "supervisor"]
    return {task.name: task.env.get("CUDA_VISIBLE_DEVICES") for task in agents}, agents


def test_hosts_and_their_spare_share_no_gpu(launcher):
    found, agents = visible(launcher(), hosts=2, spare_hosts=1)
    assert found == {
        "agent-host-0": "GPU-00,GPU-11",
        "agent-host-1": "GPU-22,GPU-33",
        "agent-host-2": "GPU-44,GPU-55",
    }
    assert [task.argv[task.argv.index("--host") + 1] for task in agents] == ["host-0", "host-1", "host-2"]
    assert {task.count for task in agents} == {1}


def test_they_share_what_the_user_lets_them_see(launcher):
    found, _ = visible(launcher(CUDA_VISIBLE_DEVICES="7,GPU-2,5,4"), hosts=2)
    assert list(found.values()) == ["GPU-77,GPU-22", "GPU-55,GPU-44"]


def test_one_host_sees_all(launcher):
    found, agents = visible(launcher(), hosts=1)
    assert found == {"agent": None} and agents[0].count == 1


def test_a_spare_that_gets_no_gpus_is_refused(launcher):
    with pytest.raises(RunFileError, match=r"3 hosts \(spares: 1\) x 4 ranks need as many GPUs; this machine has 8"):
        launcher().resolve(spec(hosts=2, spare_hosts=1, ranks_per_host=4))
