"""How hosts of ``muster check --network`` are named and reached, and what a program there says before it measures."""

import subprocess
import sys

import pytest

from muster.app.inspect.network import NetworkTest, check_network
from muster.app.inspect.network_hosts import Place, places, reaching
from muster.cli.main import run
from muster.core.errors import UsageError
from muster.core.typed_json import decode
from muster.health.network.figures import HostLine
from muster.health.verdicts import Verdict
from muster.probe import network, stuck


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


def test_gpus_that_cuda_does_not_see_are_not_passed_over_for_gloo(tmp_path):
    assert network._gpus([]) == []
    with pytest.raises(RuntimeError, match="nvidia0 is there, and CUDA sees no GPU"):
        network._gpus([tmp_path / "nvidia0"])


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


def test_options_that_do_not_go_together(capsys):
    assert run(["check", "--network", "--passive"]) == 2 and run(["check", "--reach", "ssh {host}"]) == 2
    capsys.readouterr()
