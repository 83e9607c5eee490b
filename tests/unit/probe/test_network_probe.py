"""How hosts of ``muster check --network`` are named and reached, and what a program there says before it measures."""

import subprocess
import sys
import time
import types

import pytest

from muster.app.inspect import network_hosts
from muster.app.inspect.network import NetworkTest, check_network
from muster.app.inspect.network_hosts import Place, places, reaching
from muster.cli.main import run
from muster.core.errors import UsageError
from muster.core.typed_json import decode
from muster.health.network.figures import HostLine
from muster.health.verdicts import Verdict
from muster.probe import network, stuck
from muster.protocol.client import HostStatus, SupervisorStatus


def test_a_program_that_is_not_there():
    two = [Place(name="a"), Place(name="b")]
    result = check_network(two, lambda place: ["/no/such/program"], NetworkTest())
    assert [one.verdict for one in result.findings] == [Verdict.INCOMPLETE] * 2
    assert "/no/such/program cannot be started: No such file" in result.findings[0].message


def test_a_name_that_leads_to_loopback_is_refused(monkeypatch, capfd):
    monkeypatch.setattr(network.socket, "gethostbyname", lambda name: "127.0.1.1")
    with pytest.raises(SystemExit):
        network.main([])
    said = decode(HostLine, capfd.readouterr().out.encode())
    assert "leads to 127.0.1.1" in said.failed and "--host NAME=ADDRESS" in said.failed


def test_gpus_that_cuda_does_not_see_are_not_passed_over_for_gloo(tmp_path, monkeypatch):
    device, cuda = tmp_path / "nvidia0", types.SimpleNamespace(is_available=lambda: False)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    assert network._gpus([]) == []
    with pytest.raises(RuntimeError, match="nvidia0 is there, and CUDA sees no GPU"):
        network._gpus([device])
    cuda.is_available, cuda.device_count, cuda.get_device_name = lambda: True, lambda: 2, lambda gpu: f"H100 {gpu}"
    assert network._gpus([device]) == ["H100 0", "H100 1"]
    monkeypatch.setattr(network, "_CUDA_S", 0.2)
    cuda.is_available = lambda: time.sleep(60)
    with pytest.raises(RuntimeError, match="CUDA does not answer within"):
        network._gpus([device])


def test_how_a_rank_ended_is_said():
    for argv, words in (
        (["sh", "-c", "exit 3"], "ended with exit code 3"),
        (["sh", "-c", "kill -9 $$"], "was ended by SIGKILL (out of memory?)"),
    ):
        child = subprocess.Popen(argv)
        assert network._end_of(child.pid) == words
        child.returncode = 0  # waited for


def test_without_py_spy_the_kernel_still_says_that_a_rank_is_stopped(monkeypatch):
    monkeypatch.setattr(stuck, "program", lambda name: None)
    child = subprocess.Popen([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"])
    try:
        while True:
            (one,) = stuck.evidence({7: child.pid})
            if one.process.stopped:
                break
        assert one.rank == 7 and "not installed" in one.missing[0]
    finally:
        child.kill()
        child.wait()
    assert stuck.evidence({7: child.pid})[0].process.dead


def test_hosts_by_name_and_address():
    assert places(["a", "b=10.0.0.2", "c=fd00::1"])[1:] == [
        Place(name="b", address="10.0.0.2"),
        Place(name="c", address="fd00::1"),
    ]
    with pytest.raises(UsageError, match="two hosts or more"):
        places(["a"])
    with pytest.raises(UsageError, match="named twice"):
        places(["a", "b", "a"])


@pytest.mark.parametrize("name", ["-oProxyCommand=x", "", "a;reboot", "a b", "b=10.0.0.2;reboot", "b=-x", "b=$(x)"])
def test_what_a_shell_or_ssh_would_take_for_more_than_a_name_is_refused(name):
    with pytest.raises(UsageError, match="no name or address of a host"):
        places(["a", name])


def test_how_hosts_are_reached():
    words = ["-P", "-m", "muster.probe.network", "--address", "10.0.0.2"]
    place = Place(name="node-2", address="10.0.0.2")
    assert reaching("", "ssh {host}")(place) == ["ssh", "node-2", sys.executable, *words]
    assert reaching("slurm")(place)[:5] == ["srun", "--overlap", "--nodes=1", "--ntasks=1", "--nodelist=node-2"]
    assert reaching("gke")(place) == ["kubectl", "exec", "-i", "node-2", "--", "python", *words]
    with pytest.raises(UsageError, match="how are the hosts reached"):
        reaching("local")


@pytest.fixture
def run_of(monkeypatch, tmp_path):
    """A live run as the back end and the supervisor know it."""

    def given(backend, steps, **hosts):
        status = SupervisorStatus(phase="running", reason="", attempt=1, step=3, hosts=hosts)
        (tmp_path / "lease.json").write_bytes(b"")
        run_dir = types.SimpleNamespace(run_id="run-1", lease=tmp_path / "lease.json")
        lease = types.SimpleNamespace(address=("10.0.0.9", 4000))
        monkeypatch.setattr(network_hosts, "read_lease", lambda data, me: lease)
        monkeypatch.setattr(network_hosts.run_registry, "find", lambda name: run_dir)
        monkeypatch.setattr(network_hosts, "spec_of", lambda run: types.SimpleNamespace(backend=backend))
        monkeypatch.setattr(network_hosts, "request", lambda run, message: status)
        monkeypatch.setattr(network_hosts.backends, "load", lambda name: types.SimpleNamespace(steps=steps))

    return given


def host(*, connected=True, active=True):
    return HostStatus(connected=connected, ready=True, active=active, ranks=())


def test_nodes_of_a_run_are_reached_by_steps_of_its_job(run_of):
    step = ["srun", "--jobid=7", "--nodelist=n1"]
    run_of("slurm", lambda run_id: {"n1": step, "n2": ["srun"], "n3": ["srun"]}, **{"host-0": host()})
    found, argv, busy = network_hosts.of_run("last", [])
    assert [place.name for place in found] == ["n1", "n2", "n3"] and busy == "run-1 is running"
    assert argv(found[0]) == [*step, sys.executable, "-P", "-m", "muster.probe.network", "--peer", "10.0.0.9"]
    assert [place.name for place in network_hosts.of_run("last", ["n3", "n1"])[0]] == ["n1", "n3"]
    with pytest.raises(UsageError, match="run-1 has no host n9"):
        network_hosts.of_run("last", ["n1", "n9"])


def test_hosts_of_a_run_on_this_machine_are_processes_here(run_of):
    idle = {"host-0": host(active=False), "host-1": host(active=False), "host-2": host(connected=False, active=False)}
    run_of("local", None, **idle)
    found, argv, busy = network_hosts.of_run("last", [])
    assert [(place.name, place.address) for place in found] == [("host-0", "127.0.0.1"), ("host-1", "127.0.0.1")]
    assert argv(found[0])[0] == sys.executable and not busy


def test_a_run_whose_hosts_cannot_be_measured(run_of):
    run_of("local", None, **{"host-0": host()})
    with pytest.raises(UsageError, match="has 1 host to be measured"):
        network_hosts.of_run("last", [])
    run_of("gke", None, **{"host-0": host(), "host-1": host()})
    with pytest.raises(UsageError, match="does not tell a run's hosts"):
        network_hosts.of_run("last", [])


def test_gpus_that_a_run_trains_on_are_left_alone():
    hello = (
        b'{"hello":{"address":"10.0.0.1","port":1,"ranks":8,"device":"NVIDIA H100 80GB HBM3","torch":"2","nccl":"2"}}'
    )
    argv = ["sh", "-c", f"echo '{hello.decode()}'; cat > /dev/null"]
    two = [Place(name="a"), Place(name="b")]
    with pytest.raises(UsageError, match="run-1 is running: its GPUs are in use"):
        check_network(two, lambda place: argv, NetworkTest(busy="run-1 is running"))


def test_options_that_do_not_go_together(capsys):
    assert run(["check", "--network", "--passive"]) == 2 and run(["check", "--reach", "ssh {host}"]) == 2
    capsys.readouterr()
